"""Which transport and route a new ring uses, agreed on by all its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rtp_ext import _native
from rtp_ext._native import RotationError


@dataclass(frozen=True)
class Connection:
    """A native transport, its name, and why it was chosen."""

    name: str
    native: Any
    reason: str


def nccl_refusal() -> str | None:
    """Why the transport `nccl` cannot be used in this process; None if it can."""
    versions = _native.nccl_versions()
    if versions is None:
        return "rtp_ext was built without CUDA"
    if not torch.cuda.is_available():
        return "no GPU is available"
    compiled, loaded = versions
    if loaded < compiled:
        return (
            f"rtp_ext was compiled against NCCL {_native.version_name(compiled)}, but torch loaded the older "
            f"{_native.version_name(loaded)}: rebuild rtp_ext"
        )
    return None


def connect(ring: Any, wish: str) -> Connection:
    """The transport of `ring` for the asked `wish`; a fallback of `auto` carries its reason. Collective."""
    if ring.size == 1:
        return Connection("emulated", _native.emulated_transport(ring.device), "a single rank sends nothing")
    if wish == "c10d":
        return _c10d(ring, "as asked")
    preferred = "shm" if ring.device.type == "cpu" else "nccl"
    if wish not in ("auto", preferred):
        raise ValueError(f"Ring: transport {wish} does not work on device type {ring.device.type}")
    native, problem = _try_shm(ring) if preferred == "shm" else _try_nccl(ring)
    if native is not None:
        reason = "all ranks are CPU processes of one host" if preferred == "shm" else "direct NCCL"
        return Connection(preferred, native, reason)
    if wish == preferred:
        raise RotationError(f"Ring: transport {wish} cannot be used: {problem}")
    return _c10d(ring, f"{preferred} cannot be used: {problem}")


def _c10d(ring: Any, reason: str) -> Connection:
    backend = "nccl" if ring.device.type == "cuda" else "gloo"
    weight, gradient = ring.new_group(backend), ring.new_group(backend)
    return Connection("c10d", _native.c10d_transport(weight, gradient, ring.device, ring.timeout), reason)


def _try_shm(ring: Any) -> tuple[Any, str | None]:
    """The shm transport if every rank can reach every other one's memory; else None and the reason."""
    native, problem, address = None, None, None
    try:
        native = _native.ShmTransport(ring.rank, ring.size, ring.timeout)
        address = native.address()
    except RotationError as error:
        problem = str(error)
    addresses = ring.exchange(address)
    if native is not None and None not in addresses:
        try:
            native.connect(addresses)
        except RotationError as error:
            problem = str(error)
    problems = [p for p in ring.exchange(problem) if p is not None]
    return (None, problems[0]) if problems else (native, None)


def _try_nccl(ring: Any) -> tuple[Any, str | None]:
    """The nccl transport if every rank can use it; else None and the reason."""
    problems = [p for p in ring.exchange(nccl_refusal()) if p is not None]
    if problems:
        return None, problems[0]
    ids = [_native.nccl_unique_id(), _native.nccl_unique_id()] if ring.rank == 0 else None
    weight_id, gradient_id = ring.exchange(ids)[0]
    return _native.nccl_transport(weight_id, gradient_id, ring.rank, ring.size, ring.device, ring.timeout), None


def choose_route(ring: Any, wish: str) -> str:
    """`direct` where any rank reaches any other at the cost of a neighbour, else `ring`. Collective."""
    if wish != "auto":
        return wish
    if ring.transport == "shm":
        return "direct"
    if ring.transport == "nccl":
        gpus = range(torch.cuda.device_count())
        one_host = len(set(ring.exchange(_boot_id()))) == 1
        peers = all(torch.cuda.can_device_access_peer(a, b) for a in gpus for b in gpus if a != b)
        return "direct" if all(ring.exchange(one_host and peers)) else "ring"
    return "ring"


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
