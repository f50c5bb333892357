"""Which mesh, transport and route a new ring uses, agreed on by all its ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rtp_ext import _native
from rtp_ext._native import RotationError

logger = logging.getLogger("rtp_ext")

CE_MODES = ("auto", "push", "pull")
FEW_CONNECTIONS = 16  # of CUDA's 32 at most; streams share what there is
REGISTERED_SINCE = 22300  # the NCCL that moves registered memory between GPUs of a host without copies of its own


def resolve_mesh(mesh_or_group: DeviceMesh | dist.ProcessGroup | None) -> DeviceMesh:
    """The mesh that a Ring's `mesh_or_group` stands for."""
    if not dist.is_initialized():
        raise RotationError("Ring: torch.distributed is not initialised; call init_process_group, or use Ring.emulated")
    if isinstance(mesh_or_group, DeviceMesh):
        if mesh_or_group.ndim != 1:
            raise ValueError(
                f"Ring: expected a one-dimensional mesh, got one with dimensions {mesh_or_group.mesh_dim_names}; "
                'pass one of them, such as mesh["rtp"]'
            )
        return mesh_or_group
    if mesh_or_group is not None and not isinstance(mesh_or_group, dist.ProcessGroup):
        raise TypeError(f"Ring: expected a DeviceMesh or a process group, got {type(mesh_or_group).__name__}")
    backend = str(dist.get_backend(mesh_or_group))
    device_type = "cuda" if "nccl" in backend and torch.cuda.is_available() else "cpu"
    if mesh_or_group is None:
        return init_device_mesh(device_type, (dist.get_world_size(),))
    return DeviceMesh.from_group(mesh_or_group, device_type)


@dataclass(frozen=True)
class TransportOptions:
    """Settings of transports between GPUs; see `Ring`."""

    min_ctas: int = 0
    max_ctas: int = 0
    registered: bool | None = None
    delay_us: int = 0
    ce_mode: str = "auto"

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> TransportOptions:
        """The options of a Ring's `transport_options`, with the environment's RTP_DEBUG_DELAY_US as default delay."""
        given = dict(given or {})
        known = [field.name for field in fields(cls)]
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"Ring: expected transport_options among {', '.join(known)}, got {name!r}")
            if name == "registered":
                if value is not None and not isinstance(value, bool):
                    raise TypeError(f"Ring: expected transport option registered to be a bool or None, got {value!r}")
            elif name == "ce_mode":
                if value not in CE_MODES:
                    raise ValueError(
                        f"Ring: expected transport option ce_mode to be one of {', '.join(CE_MODES)}, got {value!r}"
                    )
            elif not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"Ring: expected transport option {name} to be an int, got {value!r}")
            elif value < 0:
                raise ValueError(f"Ring: expected transport option {name} >= 0, got {value}")
        delay = os.environ.get("RTP_DEBUG_DELAY_US", "0")
        if not delay.isdecimal():
            raise ValueError(f"Ring: expected RTP_DEBUG_DELAY_US to be a number of microseconds, got {delay!r}")
        return cls(**{"delay_us": int(delay), **given})


@dataclass(frozen=True)
class Connection:
    """A native transport, its name, and why it was chosen."""

    name: str
    native: Any
    reason: str


@dataclass(frozen=True)
class Candidate:
    """A transport that a ring may use.

    name: as a user asks for it. virtue: why it is chosen, for the log. refusal: why this rank cannot use it, as far as
    it can tell alone. make: the native transport; collective, and every rank that raises a RuntimeError has come as far
    as the others. automatic: whether `auto` takes it.
    """

    name: str
    virtue: str
    refusal: Callable[[], str | None]
    make: Callable[[Any], Any]
    automatic: bool = True


def candidates(ring: Any) -> list[Candidate]:
    """The transports for the device of `ring`, the preferred one first."""
    c10d = Candidate("c10d", "any backend of torch.distributed", lambda: None, _make_c10d)
    if ring.device.type == "cpu":
        return [Candidate("shm", "all ranks are CPU processes of one host", lambda: None, _make_shm), c10d]
    if ring.device.type != "cuda":
        return [c10d]
    ce = Candidate("ce", "copy engines between GPUs of one host", ce_refusal, _make_ce)
    registered, wish = [], ring.transport_options.registered
    if wish is not False:
        virtue = "direct NCCL from registered slots"
        registered.append(Candidate("nccl", virtue, registered_nccl_refusal, lambda ring: _make_nccl(ring, True)))
    if wish is not True:
        registered.append(Candidate("nccl", "direct NCCL", nccl_refusal, lambda ring: _make_nccl(ring, False)))
    # Last, and only where asked for: what waits for a dead rank there cannot be ended.
    put = Candidate("nccl-put", "one-sided NCCL", nccl_put_refusal, _make_nccl_put, automatic=False)
    return [ce, *registered, c10d, put]


def connect(ring: Any, wish: str) -> Connection:
    """The transport of `ring` for the asked `wish`. What was refused on the way, and why, is logged and part of the
    reason. Collective."""
    if ring.size == 1:
        return Connection("emulated", _native.emulated_transport(ring.device), "a single rank sends nothing")
    offered = [c for c in candidates(ring) if (c.automatic if wish == "auto" else c.name == wish)]
    if not offered:
        raise ValueError(f"Ring: transport {wish} does not work on device type {ring.device.type}")
    refused: list[str] = []
    for candidate in offered:
        native, problem = _try(ring, candidate)
        if native is not None:
            virtue = candidate.virtue if wish == "auto" else f"as asked; {candidate.virtue}"
            return Connection(candidate.name, native, "; ".join([virtue, *refused]))
        refused.append(f"{candidate.name} cannot be used ({candidate.virtue}): {problem}")
        logger.info("ring of %d: %s", ring.size, refused[-1])
    raise RotationError(f"Ring: transport {'; '.join(refused)}")


def _try(ring: Any, candidate: Candidate) -> tuple[Any, str | None]:
    """The transport if every rank can use it; else None and the first rank's problem. Collective."""
    problem = _first(ring.exchange(candidate.refusal()))
    if problem is not None:
        return None, problem
    native = None
    try:
        native = candidate.make(ring)
    except RuntimeError as error:
        problem = str(error)
    problem = _first(ring.exchange(problem))
    return (native, None) if problem is None else (None, problem)


def _first(problems: list[str | None]) -> str | None:
    return next((problem for problem in problems if problem is not None), None)


def _make_c10d(ring: Any) -> Any:
    backend = "nccl" if ring.device.type == "cuda" else "gloo"
    weight, gradient = ring.new_group(backend), ring.new_group(backend)
    return _native.c10d_transport(weight, gradient, ring.device, ring.timeout)


def _make_shm(ring: Any) -> Any:
    native, problem, address = None, None, None
    try:
        native = _native.ShmTransport(ring.rank, ring.size, ring.timeout)
        address = native.address()
    except RotationError as error:
        problem = str(error)
    addresses = ring.exchange(address)
    if problem is not None or native is None or None in addresses:
        raise RotationError(problem or "a rank has no shared memory to offer")
    native.connect(addresses)
    return native


# -- NCCL --------------------------------------------------------------------------------------------------------------


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


def registered_nccl_refusal() -> str | None:
    """Why `nccl` cannot register its slots in this process; None if it can."""
    refusal = nccl_refusal()
    if refusal is not None:
        return refusal
    _, loaded = _native.nccl_versions()  # type: ignore[misc]  # there are versions: nothing was refused
    if loaded < REGISTERED_SINCE:
        oldest, found = _native.version_name(REGISTERED_SINCE), _native.version_name(loaded)
        return f"registered memory needs NCCL {oldest} or newer, and torch loaded {found}"
    return None


def ce_refusal() -> str | None:
    """Why the transport `ce` cannot be used in this process; None if it can, as far as a single rank can tell."""
    refusal = nccl_refusal() or _native.ce_refusal()
    if refusal is None and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        return "CUDA_DEVICE_MAX_CONNECTIONS is 1, so that computes would wait behind waits for a neighbour"
    return refusal


def nccl_put_refusal() -> str | None:
    """Why the transport `nccl-put` cannot be used in this process; None if it can, as far as a single rank can tell."""
    return nccl_refusal() or _native.nccl_put_refusal()


def _unique_ids(ring: Any, count: int) -> list[bytes]:
    """Unique ids of `count` communicators, made by rank 0. Collective."""
    ids = [_native.nccl_unique_id() for _ in range(count)] if ring.rank == 0 else None
    return ring.exchange(ids)[0]


def _ring_end(ring: Any) -> Any:
    """This rank's end of a ring, connected to the news of the others. Collective."""
    news, address, problem = None, "", None
    try:
        news = _native.PeerNews(ring.rank, ring.size)
        address = news.address()
    except RotationError as error:
        problem = str(error)
    addresses = ring.exchange(address)
    heard = 0 if news is None else news.connect(addresses)
    if heard < ring.size - 1:
        logger.info(
            "ring of %d: failures of %d ranks will be noticed by the timeout only%s",
            ring.size,
            ring.size - 1 - heard,
            f" ({problem})" if problem else "",
        )
    return _native.ring_end(ring.rank, ring.size, ring.device, ring.timeout, news)


def _make_ce(ring: Any) -> Any:
    hosts = len(set(ring.exchange(_boot_id())))
    if hosts > 1:
        raise RotationError(f"its ranks are on {hosts} hosts")
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # CUDA's default
    if connections.isdecimal() and int(connections) < FEW_CONNECTIONS:
        logger.warning(
            "transport ce: CUDA_DEVICE_MAX_CONNECTIONS is %s: streams that share a connection to the GPU wait for each "
            "other, GEMMs for neighbours among them. Set it to 32 before the first CUDA call",
            connections,
        )
    return _native.ce_transport(_unique_ids(ring, 1)[0], _ring_end(ring))


def _make_nccl(ring: Any, registered: bool) -> Any:
    options = ring.transport_options
    return _native.nccl_transport(_unique_ids(ring, 2), _ring_end(ring), options.min_ctas, options.max_ctas, registered)


def _make_nccl_put(ring: Any) -> Any:
    options = ring.transport_options
    ids = _unique_ids(ring, _native.nccl_put_communicators())
    return _native.nccl_put_transport(ids, _ring_end(ring), options.min_ctas, options.max_ctas)


# -- routes ------------------------------------------------------------------------------------------------------------


def choose_route(ring: Any, wish: str) -> str:
    """`direct` where any rank reaches any other at the cost of a neighbour, else `ring`. Collective."""
    if wish != "auto":
        return wish
    if ring.transport in ("shm", "ce"):
        return "direct"
    if ring.transport.startswith("nccl"):
        gpus = range(torch.cuda.device_count())
        one_host = len(set(ring.exchange(_boot_id()))) == 1
        # A rank that sees its own GPU only knows nothing of the others.
        peers = len(gpus) >= ring.size and all(
            torch.cuda.can_device_access_peer(a, b) for a in gpus for b in gpus if a != b
        )
        return "direct" if all(ring.exchange(one_host and peers)) else "ring"
    return "ring"


def choose_ce_modes(ring: Any, native: Any) -> None:
    """Tells a transport `ce` how hops travel: along the ring the sender pushes; shards that come straight from their
    owner are pulled. Gradients always travel along the ring. `ring.transport_options.ce_mode` overrides both."""
    wish = ring.transport_options.ce_mode
    direct = "pull" if ring.hop_route == "direct" else "push"
    _native.set_ce_mode(native, "weight", direct if wish == "auto" else wish)
    _native.set_ce_mode(native, "gradient", "push" if wish == "auto" else wish)


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
