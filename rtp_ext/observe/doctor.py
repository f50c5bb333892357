"""A report of this machine: versions, GPUs, the links between them, and the transports that work."""

from __future__ import annotations

import ipaddress
import itertools
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rtp_ext import _native
from rtp_ext._native import version_name
from rtp_ext.command_line import wrapped
from rtp_ext.ring import ring
from rtp_ext.ring.links.host_address import LOOPBACK
from rtp_ext.ring.links.places import Place
from rtp_ext.ring.links.transports import launch_order_problem

TESTED = ("2.14.1",)  # releases of torch; docs/install.md has them, too
_PROBE_SECONDS = 30
_MACHINES_OWN = "pid:[4026531836]"  # the initial namespace of process ids on Linux


def _package_version() -> str:
    try:
        return version("rtp-ext")
    except PackageNotFoundError:
        return "not installed as a package"


def _versions() -> dict[str, str]:
    """Returns versions by name, and where the loaded NCCL is a problem, that."""
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    found = {
        "rtp_ext": _package_version(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": f"{torch.__version__}, {cuda}{'' if torch.__version__.partition('+')[0] in TESTED else '; untested'}",
        "extension": f"{'with' if _native.with_cuda else 'without'} CUDA and NCCL ({_native._C.__file__})",
    }
    if (codes := _native.nccl_versions()) is not None:
        compiled, loaded = codes
        found["NCCL"] = f"compiled against {version_name(compiled)}, loaded {version_name(loaded)}"
        if loaded < compiled:
            found["NCCL"] += (
                f"; the loaded NCCL is older than {version_name(compiled)}: rebuild rtp_ext with the torch that is "
                "installed, or install an NCCL at least as new"
            )
        found["launches"] = launch_order_problem() or "of all communicators are in order"
    return found


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return ["none that torch can use"]
    lines = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        memory = f"{device.total_memory / 2**30:.1f} GiB"
        lines.append(f"{index}: {device.name}, {memory}, compute capability {device.major}.{device.minor}")
    return lines


def _links() -> list[str]:
    """Returns lines with direct access between each pair of GPUs by torch, and with the topology by nvidia-smi."""
    lines = []
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for first in range(count):
        for second in range(first + 1, count):
            both = torch.cuda.can_device_access_peer(first, second) and torch.cuda.can_device_access_peer(second, first)
            lines.append(f"{first} - {second}: {'direct access' if both else 'no direct access'}")
    if count < 2:
        lines.append(f"none: {count} {'GPU' if count == 1 else 'GPUs'}")
    program = shutil.which("nvidia-smi")
    if program is None:
        return [*lines, "nvidia-smi: not found"]
    try:
        topology = subprocess.run(
            [program, "topo", "-m"], capture_output=True, text=True, check=True, timeout=30
        ).stdout.rstrip()
    except (OSError, subprocess.SubprocessError) as error:
        return [*lines, f"nvidia-smi topo -m: {error}"]
    return [*lines, "nvidia-smi topo -m:", *(f"  {line}" for line in topology.splitlines())]


def shm_refusal() -> str | None:
    """Returns why CPU ranks of this host cannot use shared memory; None if they can.

    Opens a transport, and starts a process that opens the memory of this one, as a neighbour does.
    """
    if sys.platform != "linux":
        return f"needs Linux, this is {sys.platform}"
    try:
        transport = _native.ShmTransport(0, 1, timedelta(seconds=_PROBE_SECONDS))
        executor = _native.Executor(transport, 0, 1, torch.device("cpu"))
        try:
            address = transport.address()
            transport.connect([address])
            _, _, pid, memory, _ = address.split()
            opened = subprocess.run(
                [sys.executable, "-S", "-c", f"open('/proc/{pid}/fd/{memory}', 'r+b').close()"],
                capture_output=True,
                text=True,
                timeout=_PROBE_SECONDS,
                check=False,
            )
        finally:
            executor.close()
    except (_native.RotationError, OSError, subprocess.SubprocessError) as error:
        return str(error)
    if opened.returncode != 0:
        said = opened.stderr.strip().splitlines() or [f"exit code {opened.returncode}"]
        return f"another process cannot open this one's memory: {said[-1]}"
    return None


def tcp_refusal() -> str | None:
    """Returns why CPU ranks of this host cannot use sockets; None if they can. Connects two ranks over loopback."""
    try:
        limit = timedelta(seconds=_PROBE_SECONDS)
        ranks = [_native.TcpTransport(rank, 2, LOOPBACK, limit) for rank in range(2)]
        addresses = [transport.address() for transport in ranks]
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda transport: transport.connect(addresses), ranks))
    except _native.RotationError as error:
        return str(error)
    return None


def c10d_backends() -> list[str]:
    """Returns the backends of torch.distributed that this torch was built with and that can be loaded."""
    if not dist.is_available():
        return []
    available: dict[str, Callable[[], bool]] = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
        "ucc": dist.is_ucc_available,
        "xccl": dist.is_xccl_available,
    }
    return [name for name, test in available.items() if test()]


def _emulated_refusal() -> str | None:
    """Returns why an emulated ring does not work; None if it does. Sends one shard around a ring of two ranks."""
    device = torch.device("cpu")
    try:
        executor = _native.Executor(_native.emulated_transport(device), 0, 2, device)
        try:
            passing = _native.Execution.rotate(executor, [torch.ones(1)], [[[1], [1]]], "ring", False)
            arrived = 0.0
            while passing.next() is not None:
                arrived += passing.weight()[0].item()
        finally:
            executor.close()
    except _native.RotationError as error:
        return str(error)
    return None if arrived == 2 else f"expected two shards of 1.0, got a sum of {arrived}"


def _access_refusal() -> str | None:
    """Returns two GPUs of this host without direct access to each other's memory, as text; None if all have it."""
    gpus = range(torch.cuda.device_count())
    for first, second in itertools.permutations(gpus, 2):
        if not torch.cuda.can_device_access_peer(first, second):
            return f"GPU {first} has no direct access to GPU {second}"
    return None


def automatic(found: dict[str, tuple[bool, str]]) -> dict[str, str]:
    """Returns, from `transports()`, the transport that "auto" takes on each kind of device of this host.

    Ranks choose a transport together: other hosts may lack one, which only a ring of them shows.
    """
    orders = {"GPUs": ("ce", "nccl", "c10d"), "CPUs": ("shm", "tcp", "c10d")}
    if not torch.cuda.is_available():
        del orders["GPUs"]
    return {
        device: next((name for name in order if found[name][0]), "no transport works")
        for device, order in orders.items()
    }


def transports() -> dict[str, tuple[bool, str]]:
    """Returns for each transport whether it works here, and its use or the reason why it does not work."""
    backends, memory, sockets = c10d_backends(), shm_refusal(), tcp_refusal()
    copies = ring.ce_refusal() or _access_refusal()
    groups = None if backends else "this torch has no torch.distributed backend"
    refusals = {
        "shm": (memory, "CPU ranks of one host"),
        "shm+tcp": (memory or sockets, "CPU ranks of several hosts, equally many neighbours on each"),
        "shm+c10d": (memory or groups, "the same"),
        "tcp": (sockets, "CPU ranks of any hosts"),
        "c10d": (
            groups,
            f"any backend of torch.distributed; here {', '.join(backends)}",
        ),
        "ce": (copies, "GPUs of one host, without SMs"),
        "ce+nccl": (copies, "GPUs of several hosts, equally many neighbours on each"),
        "nccl+nccl": (ring.nccl_refusal(), "the same, without direct access between GPUs of a host"),
        "nccl": (ring.nccl_refusal(), "one GPU for each rank"),
        "emulated": (_emulated_refusal(), "one process stands for a whole ring"),
    }
    return {name: (reason is None, reason or use) for name, (reason, use) in refusals.items()}


def _host() -> list[str]:
    """Returns the place of a rank on this host: shared memory needs the same kernel and process ids, not host name."""
    place = Place.here()
    whose = "the machine's own" if place.processes == _MACHINES_OWN else "those of a container"
    return [f"{place.hostname}, boot {place.kernel}, process ids {place.processes} ({whose})", f"Gloo: {_gloo()}"]


def _gloo() -> str:
    """Returns the interface over which ranks of other hosts reach this one with Gloo, or the problem."""
    name, links = os.environ.get("GLOO_SOCKET_IFNAME"), [name for _, name in socket.if_nameindex()]
    if name:
        missing = [each for each in name.split(",") if each not in links]
        if missing:
            return f"GLOO_SOCKET_IFNAME names {', '.join(missing)}, this host has {', '.join(links)}: it cannot start"
        return f"over {name} (GLOO_SOCKET_IFNAME)"
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, proto=socket.IPPROTO_TCP)[0][4][0]
    except OSError as error:
        return f"this host's name leads nowhere ({error}), other hosts cannot reach it: set GLOO_SOCKET_IFNAME"
    if ipaddress.ip_address(str(found).partition("%")[0]).is_loopback:
        return f"this host's name leads to {found}, where other hosts cannot reach it: set GLOO_SOCKET_IFNAME"
    return f"over {found}, to which this host's name leads"


def ring_of_ranks() -> list[str]:
    """Returns lines with the places of the ranks of torchrun, and with their ring. Collective."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        with ring.Ring(init_device_mesh(device.type, (dist.get_world_size(),)), timeout=_PROBE_SECONDS) as made:
            lines = [made.placed.spread or f"all {made.size} on {socket.gethostname()}"]
            shards = sum(shard.item() for _, shard in made.rotate(torch.ones(1, device=device)))
            if shards != made.size:
                raise _native.RotationError(f"expected {made.size} shards of 1.0, got a sum of {shards}")
            return [*lines, f"{made.transport}: {made.transport_reason}"]
    except _native.RotationError as error:
        return [f"they make no ring: {error}"]
    finally:
        dist.destroy_process_group()


def facts() -> dict[str, Any] | None:
    """Returns all findings, as values for `report` and JSON. Tests the transports of one host; needs no process group
    and starts none.

    Under torchrun it is collective: the ranks exchange their places and make a ring; None on ranks other than 0.
    """
    ranks = ring_of_ranks() if "TORCHELASTIC_RUN_ID" in os.environ else []
    if ranks and os.environ["RANK"] != "0":
        return None
    found = transports()
    return {
        "versions": _versions(),
        "host": _host(),
        "gpus": _gpus(),
        "links": _links(),
        "transports": {name: {"works": works, "why": why} for name, (works, why) in found.items()},
        "auto": automatic(found),
        "ranks": ranks,
    }


def report(found: dict[str, Any] | None = None) -> str:
    """Returns the findings as text; `found`: of `facts`, which is called by default. Empty where it returns None."""
    found = facts() if found is None else found
    if found is None:
        return ""
    indent = " " * 13
    lines = []
    for name, text in found["versions"].items():
        lines += wrapped(text, f"{name:<13}", indent)
    for title, key in (("this host", "host"), ("GPUs", "gpus"), ("links between GPUs", "links")):
        lines += ["", title, *(each for line in found[key] for each in _entry(line))]
    lines += ["", "transports"]
    for name, each in found["transports"].items():
        lines += wrapped(f"{'works' if each['works'] else 'does not work'}: {each['why']}", f"  {name:<11}", indent)
    for device, name in found["auto"].items():
        lines.append(f"  auto takes {name} on {device} of this host")
    if found["ranks"]:
        lines += ["", f"the ring of these {os.environ['WORLD_SIZE']} ranks"]
        lines += [each for line in found["ranks"] for each in _entry(line)]
    return "\n".join(lines)


def _entry(line: str) -> list[str]:
    """Returns a line below a title; those of nvidia-smi, which are a table, as they are."""
    return [f"  {line}"] if line.startswith("  ") else wrapped(line, "  ", "    ")
