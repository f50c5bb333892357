"""Selection of the transport of a new ring, the same on all its ranks."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rtp_ext import _native
from rtp_ext._native import RotationError
from rtp_ext.host import CONNECTIONS
from rtp_ext.options import TransportOptions, has_collectives
from rtp_ext.ring.links.communicator import Communicator
from rtp_ext.ring.links.groups import lacks_room
from rtp_ext.ring.links.host_address import own_address

logger = logging.getLogger("rtp_ext")

# Transports of CPU rings whose hops cross a network: their hops take little time of the cores that compute.
NETWORKED = ("tcp", "c10d", "shm+tcp", "shm+c10d")
FEW_CONNECTIONS = 16  # of at most 32 connections of CUDA; streams share the existing ones
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"  # variable of NCCL 2.26 or newer
BLOCKING_SINCE = 22807  # the first NCCL that can end a call of a blocking communicator: ncclCommRevoke
MOST_CTAS = 8  # default maximum of SMs for each of the two communicators of a ring; products get the rest
REGISTERED_SINCE = 22300  # the first NCCL that moves registered memory between GPUs of a host without own copies


@dataclass(frozen=True)
class Connection:
    """A native transport, its name, and the reason for its choice."""

    name: str
    native: Any
    reason: str


@dataclass(frozen=True)
class Candidate:
    """A transport that a ring may use.

    name: the value of the option `transport`. virtue: its advantage, for the log. refusal: returns why this rank cannot
    use it, as far as one rank can find, or None. make: creates the native transport; collective, and a rank that raises
    RuntimeError has taken part in the same collectives as the others. automatic: whether `auto` considers it.
    """

    name: str
    virtue: str
    refusal: Callable[[], str | None]
    make: Callable[[Communicator], Any]
    automatic: bool = True


def candidates(ring: Communicator, options: TransportOptions) -> list[Candidate]:
    """Returns the transports for the device of `ring`, the preferred one first."""
    c10d = Candidate("c10d", "any backend of torch.distributed", lambda: lacks_room(2, ring.size), _make_c10d)
    if ring.device.type == "cpu":
        shm = Candidate("shm", "memory shared by CPU processes of one host", lambda: ring.placed.spread, _make_shm)
        tcp = Candidate("tcp", "sockets between CPUs of any hosts", lambda: None, _make_tcp)
        levels = [
            Candidate(f"shm+{outer.name}", f"shared memory inside hosts, {outer.virtue} between them", refusal, make)
            for outer, refusal, make in (
                (tcp, lambda: ring.placed.unlevel, lambda ring: _make_composite(ring, _make_tcp)),
                (c10d, lambda: ring.placed.unlevel, lambda ring: _make_composite(ring, _make_c10d)),
            )
        ]
        return [shm, *levels, tcp, c10d]
    if ring.device.type != "cuda":
        return [c10d]
    ce = Candidate("ce", "copy engines between GPUs of one host", ce_refusal, _make_ce)
    level = ring.placed.unlevel is None
    levels = [
        Candidate(
            f"{inner}+nccl",
            f"{virtue} inside hosts, direct NCCL between them",
            functools.partial(_levels_refusal, ring, refusal),
            functools.partial(_make_levels, options=options, inner=inner),
            automatic=level,
        )
        for inner, virtue, refusal in (
            ("ce", "copy engines", ce_refusal),
            ("nccl", "direct NCCL", registered_nccl_refusal if options.registered else nccl_refusal),
        )
    ]
    registered = []
    if options.registered is not False:
        virtue = "direct NCCL from registered slots"
        registered.append(
            Candidate("nccl", virtue, registered_nccl_refusal, lambda ring: _make_nccl(ring, options, True))
        )
    if options.registered is not True:
        make = functools.partial(_make_nccl, options=options, registered=False)
        registered.append(Candidate("nccl", "direct NCCL", nccl_refusal, make))
    return [ce, *levels, *registered, c10d]


def launch_order_problem() -> str | None:
    """Returns why NCCL's communicators may deadlock; None if they cannot. Two communicators, such as the two of a ring
    and torch's, wait for each other for ever where one GPU runs the kernel of the first and another that of the second.
    With the variable LAUNCH_ORDER NCCL launches in the order of the host's calls; it reads the variable once, at its
    first launch. Source: NCCL's user guide, "Using multiple NCCL communicators concurrently"."""
    set_to = os.environ.get(LAUNCH_ORDER)
    if set_to is None:
        return f"{LAUNCH_ORDER} is not set: the first ring of GPUs sets it to 1, too late where NCCL was used before"
    if set_to != "1":
        return (
            f"{LAUNCH_ORDER} is {set_to}: communicators that share a GPU may wait for each other for ever; set it to 1"
        )
    return None


def order_launches() -> None:
    """Sets the variable of `launch_order_problem`, unless the user has set it to another value; then logs that."""
    if (problem := launch_order_problem()) is None:
        return
    if LAUNCH_ORDER in os.environ:
        logger.warning("%s", problem)
        return
    os.environ[LAUNCH_ORDER] = "1"
    logger.info("%s is set to 1; set it yourself where NCCL is used before the first ring", LAUNCH_ORDER)


def connect(ring: Communicator, requested: str, options: TransportOptions, *, collective: bool = False) -> Connection:
    """Returns the transport of `ring`: the `requested` one, or for `auto` the first that all ranks can use, with
    collectives where these are asked for. The reason and the log contain the refused candidates and the causes.
    Collective."""
    if ring.size == 1:
        return Connection("emulated", _native.emulated_transport(ring.device), "a single rank sends nothing")
    known = [each for each in candidates(ring, options) if not collective or has_collectives(each.name)]
    return choose(ring, requested, known, "Ring")


def choose(ring: Communicator, requested: str, known: Sequence[Candidate], caller: str) -> Connection:
    """Returns the connection of the `requested` candidate, or for `auto` of the first that all ranks can use. `caller`
    begins the texts of errors. Collective."""
    offered = [c for c in known if (c.automatic if requested == "auto" else c.name == requested)]
    if not offered:
        raise ValueError(f"{caller}: transport {requested} does not work on device type {ring.device.type}")
    refused: list[str] = []
    for candidate in offered:
        native, problem = _try(ring, candidate)
        if native is not None:
            virtue = candidate.virtue if requested == "auto" else f"as asked; {candidate.virtue}"
            return Connection(candidate.name, native, "; ".join([virtue, *refused]))
        refused.append(f"{candidate.name} cannot be used ({candidate.virtue}): {problem}")
        logger.info("ring of %d: %s", ring.size, refused[-1])
    raise RotationError(f"{caller}: transport {'; '.join(refused)}")


def _try(ring: Communicator, candidate: Candidate) -> tuple[Any, str | None]:
    """Returns the transport if every rank can use it; else None and the first rank's problem. Collective."""
    problem = _first(ring.exchange(candidate.refusal()))
    if problem is not None:
        return None, problem
    native = None
    try:
        native = candidate.make(ring)
    except Exception as error:
        problem = str(error)
    problem = _first(ring.exchange(problem))
    return (native, None) if problem is None else (None, problem)


def _first(problems: list[str | None]) -> str | None:
    return next((problem for problem in problems if problem is not None), None)


def _make_c10d(ring: Communicator) -> Any:
    backend = "nccl" if ring.device.type == "cuda" else "gloo"
    weight, gradient = ring.new_group(backend), ring.new_group(backend)
    return _native.c10d_transport(weight, gradient, ring.device, ring.timeout)


def _make_shm(ring: Communicator) -> Any:
    """Returns a transport between the ranks of this host. Collective over the ring."""
    here = [rank for rank, host in enumerate(ring.placed.of) if host == ring.placed.of[ring.rank]]
    place = here.index(ring.rank), len(here), ring.timeout, here[0]
    native, addresses = _offer(ring, lambda: _native.ShmTransport(*place))
    problem = None
    try:
        native.connect([addresses[rank] for rank in here])
    except Exception as error:  # memory may be missing, too
        problem = str(error)
    refuse_any(ring.exchange(problem))  # no rank may free its memory before: others would report it missing
    return native


def _offer(ring: Communicator, make: Callable[[], Any]) -> tuple[Any, Sequence[Any]]:
    """Creates a native transport that other ranks connect to. Returns it, and the addresses of all ranks' transports.
    Collective."""
    native, problem, address = None, None, None
    try:
        native = make()
        address = native.address()
    except Exception as error:  # memory may be missing, too
        problem = str(error)
    addresses, problems = zip(*ring.exchange((address, problem)), strict=True)
    refuse_any(problems)
    return native, addresses


def refuse_any(problems: Sequence[str | None], caller: str | None = None) -> None:
    """Raises RotationError with the problems of all ranks, if any. `problems`: by rank. `caller` begins the text."""
    if texts := [f"on rank {rank}, {text}" for rank, text in enumerate(problems) if text is not None]:
        raise RotationError(("" if caller is None else f"{caller}: ") + "; ".join(texts))


def _make_tcp(ring: Communicator) -> Any:
    def make() -> Any:
        return _native.TcpTransport(ring.rank, ring.size, own_address(ring.exchange), ring.timeout)

    native, addresses = _offer(ring, make)
    native.connect(addresses)
    return native


def _levels_refusal(ring: Communicator, refusal: Callable[[], str | None]) -> str | None:
    return ring.placed.unlevel or refusal()


def _make_composite(ring: Communicator, make_outer: Callable[[Communicator], Any]) -> Any:
    inner = _make_shm(ring)  # first, so that a failure leaves no process groups behind
    return _native.CompositeTransport(inner, make_outer(ring), ring.rank, ring.placed.per_host)


# -- NCCL --------------------------------------------------------------------------------------------------------------


def nccl_refusal() -> str | None:
    """Returns why the transport `nccl` cannot be used in this process; None if it can."""
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
    """Returns why `nccl` cannot register its slots in this process; None if it can."""
    refusal = nccl_refusal()
    if refusal is not None:
        return refusal
    _, loaded = _native.nccl_versions()  # type: ignore[misc]  # not None: nccl_refusal has checked
    if loaded < REGISTERED_SINCE:
        oldest, found = _native.version_name(REGISTERED_SINCE), _native.version_name(loaded)
        return f"registered memory needs NCCL {oldest} or newer, and torch loaded {found}"
    return None


def ce_refusal() -> str | None:
    """Returns why the transport `ce` cannot be used in this process; None if it can, as far as one rank can find."""
    refusal = nccl_refusal() or _native.ce_refusal()
    if refusal is None and os.environ.get(CONNECTIONS) == "1":
        return "CUDA_DEVICE_MAX_CONNECTIONS is 1, so that computes would wait behind waits for a neighbour"
    return refusal


def unique_ids(ring: Communicator, count: int, per_host: int | None = None) -> list[bytes]:
    """Returns unique ids of `count` communicators of the ring or, with `per_host`, of this rank's host, created by its
    first rank. Collective over the ring."""
    first = 0 if per_host is None else ring.rank - ring.rank % per_host
    ids, problem = None, None
    try:
        if ring.rank == first:
            ids = [_native.nccl_unique_id() for _ in range(count)]
    except Exception as error:  # memory may be missing, too
        problem = str(error)
    every, problems = zip(*ring.exchange((ids, problem)), strict=True)
    refuse_any(problems)
    return every[first]


def _ring_end(ring: Communicator) -> Any:
    """Returns this rank's end of a ring, connected to the status of the other ranks. Collective."""
    news, address, problem = None, "", None
    try:
        news = _native.PeerStatus(ring.rank, ring.size)
        address = news.address()
    except Exception as error:  # memory may be missing, too
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


def _make_ce(ring: Communicator) -> Any:
    hosts = len(set(ring.exchange(_native.host_id())))
    if hosts > 1:
        raise RotationError(f"its ranks are on {hosts} hosts")
    _warn_of_few_connections()
    return _native.ce_transport(unique_ids(ring, 1)[0], _ring_end(ring))


def _warn_of_few_connections() -> None:
    connections = os.environ.get(CONNECTIONS, "8")  # CUDA's default
    if connections.isdecimal() and int(connections) < FEW_CONNECTIONS:
        logger.warning(
            "transport ce: %s is %s: streams that share a connection to the GPU wait for each other, GEMMs for "
            "neighbours among them. Set it to 32 before the first CUDA call",
            CONNECTIONS,
            connections,
        )


def _make_nccl(ring: Communicator, options: TransportOptions, registered: bool) -> Any:
    return _native.nccl_transport(unique_ids(ring, 2), _ring_end(ring), settle(ring, options), registered)


def _make_levels(ring: Communicator, options: TransportOptions, inner: str) -> Any:
    """Returns the transport `ce+nccl` or `nccl+nccl`. Collective over the ring."""
    settled, per_host = settle(ring, options), ring.placed.of.count(0)
    end, ids, native, between, problem = _ring_end(ring), unique_ids(ring, 2, per_host), None, None, None
    try:
        inside, between = _native.ring_levels(end, per_host)
        if inner == "ce":
            _warn_of_few_connections()
            native = _native.ce_transport(ids[0], inside)
        else:
            native = _native.nccl_transport(ids, inside, settled, bool(options.registered))
    except RuntimeError as error:
        problem = str(error)
    refuse_any(ring.exchange(problem))
    outer = _native.nccl_transport(unique_ids(ring, 2), between, settled, False)
    return _native.CompositeTransport(native, outer, ring.rank, per_host)


def settle(ring: Communicator, options: TransportOptions) -> TransportOptions:
    """Returns the options with values for those that are None, from the oldest NCCL of all ranks. Collective."""
    _, loaded = _native.nccl_versions()  # type: ignore[misc]  # not None: the refusals have checked
    oldest = min(ring.exchange(loaded))
    blocking = oldest >= BLOCKING_SINCE if options.blocking is None else options.blocking
    max_ctas = max(MOST_CTAS, options.min_ctas) if options.max_ctas is None else options.max_ctas
    return dataclasses.replace(options, blocking=blocking, max_ctas=max_ctas)
