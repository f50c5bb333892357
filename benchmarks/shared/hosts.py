"""Emulates hosts on one machine, to test and to time communication between hosts.

A host is a set of namespaces: network, hostname, processes, mounts and System V memory. It has its own /dev/shm and
/proc, and its ranks can reach those of another host only over its one link, `eth0`. A token bucket (tbf) limits the
rate at which a host sends, and netem adds a delay if there is one. A bridge connects the links.

None of this is visible outside: the bridge is in its own namespace, which, like every host, exists as long as its first
process. The kernel kills that process when the process that made the hosts ends for any reason. So two runs never
interfere, and nothing is left behind. Needs Linux, root, iproute2 and util-linux.
"""

import argparse
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtp_ext.host import cores

PORT = 29500  # every host has all ports to itself
CARD = "RTP_MADE_HOSTS"  # environment variable of all ranks: the links, as `Links.card`
TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "taskset": "util-linux"}

_PR_SET_PDEATHSIG = 1
_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit")
_DELAY = re.compile(r"\d+(?:\.\d+)?(us|ms|s)")
_SHAPE = "burst 1mb latency 100ms"
_TRIED = (
    "ip link add tried type bridge && ip link add left type veth peer name right && mount -t tmpfs tmpfs /dev/shm && "
    f"hostname tried && tc qdisc add dev left root tbf rate 1gbit {_SHAPE}"
)
_NAMESPACES = ("--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child")
# The last line: children whose parents have died leave no zombies, and the host stays up.
_HOST = """
hostname "$1" && mount -t tmpfs tmpfs /dev/shm && printf '%s' "$2" > /dev/shm/hosts &&
mount --bind /dev/shm/hosts /etc/hosts && rm /dev/shm/hosts && ip link set lo up && echo ready &&
trap '' CHLD && exec sleep infinity
"""
_SWITCH = "ip link add switch type bridge && ip link set switch up && echo ready && exec sleep infinity"


class NoHosts(RuntimeError):
    """Hosts cannot be made here; the text says why."""


def refusal() -> str | None:
    """Why hosts cannot be made on this machine, or None. Tries to make one."""
    if sys.platform != "linux":
        return f"hosts are made of Linux's namespaces, this is {sys.platform}"
    missing = [f"{tool} (Debian's {package})" for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        return f"not found: {', '.join(missing)}"
    if os.geteuid() != 0:
        return f"namespaces and links need root, this is user {os.geteuid()}"
    tried = subprocess.run(["unshare", *_NAMESPACES, "sh", "-c", _TRIED], capture_output=True, text=True)
    if tried.returncode != 0:
        said = tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"]
        return f"namespaces and links are not permitted here, as in most containers: {said[-1]}"
    return None


def bits_per_second(rate: str | None) -> float | None:
    """Converts a rate of tc, such as 2gbit or 500mbit; None: no limit. Raises ValueError for any other text."""
    if rate is None:
        return None
    found = _RATE.fullmatch(rate)
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"expected a rate such as 2gbit, 500mbit or none, got {rate!r}")
    return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]]


@dataclass(frozen=True)
class Links:
    """The number of hosts, and the links between them.

    rate: the rate at which a host sends, in tc's format; None: no limit. delay: the delay of every packet that a host
    sends, such as 1ms. pin: give every host its own share of the cores; None: if there are at least as many cores as
    ranks.
    """

    hosts: int = 2
    ranks_per_host: int = 1
    rate: str | None = None
    delay: str | None = None
    pin: bool | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= 250 or self.ranks_per_host < 1:
            raise ValueError(
                f"expected 1 to 250 hosts and at least 1 rank on each, got {self.hosts} and {self.ranks_per_host}"
            )
        bits_per_second(self.rate)
        if self.delay is not None and _DELAY.fullmatch(self.delay) is None:
            raise ValueError(f"expected a delay such as 1ms, got {self.delay!r}")
        if self.pin and cores() < self.hosts:
            raise ValueError(f"{self.hosts} hosts cannot have a core of their own each, there are {cores()}")

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    def shares(self) -> list[list[int]] | None:
        """The cores of each host, or None where hosts share them all."""
        if not (cores() >= self.ranks if self.pin is None else self.pin):
            return None
        available, share = sorted(os.sched_getaffinity(0)), cores() // self.hosts
        return [available[host * share :][:share] for host in range(self.hosts)]

    def card(self) -> dict[str, Any]:
        """Returns the fields of a result that describe the hosts. `cores`: of all hosts together."""
        shares = self.shares()
        return {
            "hosts": self.hosts,
            "ranks_per_host": self.ranks_per_host,
            "rate": self.rate or "none",
            "delay": self.delay,
            "cores": cores() if shares is None else sum(map(len, shares)),
            "cores_per_host": None if shares is None else len(shares[0]),
        }


def card() -> dict[str, Any]:
    """The `Links.card` of the hosts that this process runs on; empty where they were not made."""
    return json.loads(os.environ.get(CARD, "{}"))


def address(host: int) -> str:
    """Returns the address of a host's link."""
    return f"10.78.0.{host + 1}"


def bytes_sent(pid: int | str = "self") -> int:
    """Returns the bytes sent over `eth0` of the host of process `pid`, as the kernel counts them."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            return int(counts.split()[8])
    raise NoHosts("this host has no link eth0")


def dies_with_us() -> None:
    """To be called in a child: it is killed when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Hosts:
    """Hosts and their links, from `with` to its end; then all that ran on them is killed.

    with Hosts(Links(2, rate="2gbit")) as hosts:
        status = hosts.torchrun(["train.py"])

    To be entered in a thread that lives as long. Raises NoHosts where hosts cannot be made.
    """

    def __init__(self, links: Links) -> None:
        self.links = links
        self._shares = links.shares()
        self._holders: list[subprocess.Popen] = []
        self._pids: list[int] = []  # of the first process of each host, as seen from outside
        self._switch = 0

    def __enter__(self) -> "Hosts":
        if (why := refusal()) is not None:
            raise NoHosts(why)
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _make(self) -> None:
        names = "127.0.0.1 localhost\n" + "".join(f"{address(host)} host{host}\n" for host in range(self.links.hosts))
        self._switch = self._hold(["unshare", "--net", "sh", "-c", _SWITCH]).pid
        for host in range(self.links.hosts):
            holder = self._hold(["unshare", *_NAMESPACES, "sh", "-c", _HOST, "sh", f"host{host}", names])
            (pid,) = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
            self._pids.append(int(pid))
            link = f"ip link add port{host} type veth peer name eth0 netns {pid}"
            self._shell(self._switch, f"{link} && ip link set port{host} master switch up")
            self._shell(int(pid), f"ip addr add {address(host)}/24 dev eth0 && ip link set eth0 up")
            self._shape(int(pid))

    def _shape(self, pid: int) -> None:
        place = "root"
        if self.links.delay is not None:
            netem = f"tc qdisc add dev eth0 root handle 1: netem delay {self.links.delay} limit 100000"
            try:
                self._shell(pid, netem)
            except NoHosts as problem:
                raise NoHosts(f"--delay needs a kernel with netem: {problem}") from problem
            place = "parent 1:1"
        if self.links.rate is not None:
            self._shell(pid, f"tc qdisc add dev eth0 {place} handle 10: tbf rate {self.links.rate} {_SHAPE}")

    def _hold(self, command: list[str]) -> subprocess.Popen:
        """Starts a process that keeps namespaces alive, and waits until it has set them up."""
        holder = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for us
            preexec_fn=dies_with_us,
        )
        self._holders.append(holder)
        assert holder.stdout is not None and holder.stderr is not None
        if holder.stdout.readline().strip() != "ready":
            raise NoHosts(f"a host cannot be made: {holder.stderr.read().strip()}")
        return holder

    @staticmethod
    def _shell(pid: int, script: str) -> None:
        """Runs a shell with the network of a process."""
        command = ["nsenter", f"--net=/proc/{pid}/ns/net", "sh", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise NoHosts(f"{script}: {done.stderr.strip()}")

    # -- what runs on them -------------------------------------------------------------------------------------------

    def start(
        self, host: int, command: Sequence[str], environment: Mapping[str, str] | None = None, **more: Any
    ) -> subprocess.Popen:
        """Starts a program on a host, in our working directory. `more`: of Popen."""
        pid = self._pids[host]
        enter = ["nsenter", "--target", str(pid), "--net", "--uts", "--mount", "--ipc", "--pid", "--wd=" + os.getcwd()]
        pinned = [] if self._shares is None else ["taskset", "-c", ",".join(map(str, self._shares[host]))]
        settings = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "HOST": str(host),
            CARD: json.dumps(self.links.card()),
            "GLOO_SOCKET_IFNAME": "eth0",
            "NCCL_SOCKET_IFNAME": "eth0",
            "CUDA_VISIBLE_DEVICES": "",
            **(environment or {}),
        }
        more = {"stdin": subprocess.DEVNULL, "start_new_session": True, **more}
        return subprocess.Popen([*pinned, *enter, *command], env=settings, **more)

    def start_ranks(
        self, program: Sequence[str], environment: Mapping[str, str] | None = None, **more: Any
    ) -> list[subprocess.Popen]:
        """Starts Python with `program` once for every rank, with the environment variables of torchrun."""
        started = []
        for rank in range(self.links.ranks):
            host, local = divmod(rank, self.links.ranks_per_host)
            place = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": self.links.ranks, "MASTER_PORT": PORT}
            settings = {name: str(value) for name, value in place.items()}
            settings |= {"MASTER_ADDR": address(0), **(environment or {})}
            started.append(self.start(host, [sys.executable, *program], settings, **more))
        return started

    def torchrun(
        self, program: Sequence[str], *, max_restarts: int = 0, environment: Mapping[str, str] | None = None
    ) -> int:
        """Runs `program` (a script, or -m and a module, and its arguments) under torchrun on every host. Its status.

        Ranks are numbered host by host, unless there are restarts: then torch's rendezvous does so.
        """
        first = address(0)
        join = ["--master-addr", first, "--master-port", str(PORT)]
        if max_restarts > 0:  # all hosts have to meet again, which those with a fixed master do not
            join = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{PORT}", "--rdzv-id", "hosts"]
            join += ["--max-restarts", str(max_restarts)]
            # a store of its own for every life: the shared one still has the addresses of processes that have ended
            environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **(environment or {})}
        size = ["--nnodes", str(self.links.hosts), "--nproc-per-node", str(self.links.ranks_per_host)]
        return self.wait(
            [
                self.start(
                    host,
                    [sys.executable, "-m", "torch.distributed.run", *size, "--node-rank", str(host), *join, *program],
                    environment,
                )
                for host in range(self.links.hosts)
            ]
        )

    def wait(self, started: Sequence[subprocess.Popen], grace: float = 10.0) -> int:
        """Until all have ended; 0, or how the first one failed. The others then have `grace` seconds left."""
        failed, deadline = 0, float("inf")
        while pending := [program for program in started if program.poll() is None]:
            ended = [program.returncode for program in started if program.returncode]
            if ended and not failed:
                failed, deadline = ended[0], time.monotonic() + grace
            if time.monotonic() > deadline:
                self.close()
                for program in pending:
                    program.wait()
                break
            time.sleep(0.02)
        failed = failed or next((program.returncode for program in started if program.returncode), 0)
        return 128 - failed if failed < 0 else failed

    # -- what happens to them ----------------------------------------------------------------------------------------

    def sent(self, host: int) -> int:
        """Bytes that have left a host."""
        return bytes_sent(self._pids[host])

    def plug(self, host: int, plugged: bool) -> None:
        """Pulls the cable of a host out, or puts it in."""
        self._shell(self._switch, f"ip link set port{host} {'up' if plugged else 'down'}")

    def set_rate(self, host: int, rate: str) -> None:
        """Changes the rate of a host that has one."""
        place = "root" if self.links.delay is None else "parent 1:1"
        self._shell(self._pids[host], f"tc qdisc change dev eth0 {place} handle 10: tbf rate {rate} {_SHAPE}")

    def kill(self, host: int) -> None:
        """Ends a host as the loss of power does, with all that runs on it: not even its goodbyes arrive."""
        self.plug(host, False)
        self._end([self._holders[1 + host]], [self._pids[host]])

    def close(self) -> None:
        """Kills everything on all hosts. More than once is fine."""
        self._end(self._holders, self._pids)

    @staticmethod
    def _end(holders: Sequence[subprocess.Popen], pids: Sequence[int]) -> None:
        for holder in holders:
            holder.kill()  # takes the first process of its host along, and the kernel all others of it
        for holder in holders:
            holder.wait()
            for pipe in (holder.stdout, holder.stderr):
                if pipe is not None:
                    pipe.close()
        for pid in pids:
            while lives(pid):
                time.sleep(0.005)


def lives(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# -- `--hosts`, `--rate` and what belongs to them, for benchmarks that run on made hosts -------------------------------


def add_host_options(parser: argparse.ArgumentParser, hosts: int | None = None) -> None:
    """`hosts`: the default; None: no hosts are made."""
    add = parser.add_argument_group(
        "hosts", "made on this machine, each with one link: see shared/hosts.py"
    ).add_argument
    add("--hosts", type=int, default=hosts, metavar="N", help="how many" + (f" (default: {hosts})" if hosts else ""))
    add("--ranks-per-host", type=int, default=1, metavar="N")
    add(
        "--rate",
        dest="rates",
        type=lambda text: [None if part == "none" else part for part in text.split(",")],
        default=[None],
        help="of what a host sends, such as 2gbit or 500mbit (default: none, no limit); several: a run for each",
    )
    add("--delay", help="of every packet, such as 1ms")
    add("--pin", action=argparse.BooleanOptionalAction, help="cores of its own for every host (default: if there are)")


def asked_links(args: argparse.Namespace, error: Callable[[str], Any]) -> list[Links]:
    """Returns one network for each rate; none without hosts."""
    if args.hosts is None:
        if (args.ranks_per_host, args.rates, args.delay, args.pin) != (1, [None], None, None):
            error("--ranks-per-host, --rate, --delay and --pin are of --hosts")
        return []
    if len(set(args.rates)) < len(args.rates):
        error(f"--rate: expected each once, got {args.rates}")
    try:
        return [Links(args.hosts, args.ranks_per_host, rate, args.delay, args.pin) for rate in args.rates]
    except ValueError as problem:
        error(str(problem))
        raise


def complete_hosts(args: argparse.Namespace, error: Callable[[str], Any]) -> None:
    """Sets `networks`, and `network` to the first of them or None, for benchmarks that `launch` starts. Calls `error`
    for impossible options."""
    args.networks = asked_links(args, error)
    args.network = args.networks[0] if args.networks else None
    if args.network is None:
        return
    if args.device == "cuda":
        error("--device cuda: made hosts have CPUs alone")
    if (why := refusal()) is not None:
        error(f"--hosts: they cannot be made here: {why}")
    args.device = "cpu"
