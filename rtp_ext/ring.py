"""The ring: which ranks, over which transport, and the two primitives `rotate` and `collect`."""

from __future__ import annotations

import datetime
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from rtp_ext import _native, gate
from rtp_ext._connect import choose_route, connect, nccl_refusal
from rtp_ext._native import RingTimeout, RotationError

logger = logging.getLogger("rtp_ext")

__all__ = ["Ring", "as_tensor", "nccl_refusal"]

# torch 2.14 renamed it
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

SLOT_CAP = 64 << 20  # bytes

TRANSPORTS = ("auto", "shm", "c10d", "nccl")
ROUTES = ("auto", "ring", "direct", "gather")


def as_tensor(value: Any) -> torch.Tensor:
    """A tensor over the memory of `value`: a tensor, or any array that speaks DLPack (CuPy, NumPy)."""
    if isinstance(value, DTensor):
        with torch.no_grad():
            return value.to_local()
    if isinstance(value, torch.Tensor):
        return value.detach()
    if hasattr(value, "__dlpack__"):
        return torch.from_dlpack(value)
    raise TypeError(f"Ring: expected a tensor or a DLPack array, got {type(value).__name__}")


def agreements(tensor: torch.Tensor) -> dict[Any, Any]:
    """What the ranks of a ring have agreed on about a tensor; kept with it, and gone with it."""
    return tensor.__dict__.setdefault("_rtp_agreements", {})


_serials = itertools.count()
_phases = itertools.count(1)


class Ring:
    """Ranks that rotate shards among themselves.

    Args:
        mesh_or_group: a one-dimensional DeviceMesh, a process group, or None for the default process group.
        transport: `shm` (CPU ranks of one host), `c10d` (any torch.distributed backend), `nccl` (direct NCCL), or
            `auto`: `nccl` on GPUs, `shm` on CPUs, else `c10d`. What was chosen and why is logged and kept in
            `transport` and `transport_reason`.
        route: `ring` (every hop goes to the neighbour), `direct` (a shard comes straight from its owner), `gather`
            (linear layers gather the whole weight first; everything else goes as `auto` chooses), or `auto`: the gate
            decides for every linear layer, see `plans`.
        timeout: seconds (or a timedelta) after which a neighbour that does not answer is an error, RingTimeout.
        prefetch: send the first shard of the next layer while the last GEMM of this one runs; the order is learned from
            the forward or backward before. 0 turns it off.
        gradient_halves: gradients of linear layers travel in two halves; None: where a gradient hop outlasts a dgrad.
        slot_cap: bytes; linear, embedding and vocabulary-head shards that are larger travel in pieces, one pass after
            the other, so that a vocabulary does not make every slot as large as itself. 0: no cap.

    Collective: every rank of the group makes the ring at the same point. The ring owns its process groups.

    Attributes:
        rank, size: this rank's place, and the number of ranks R.
        serial: the how manieth ring of this process this is.
        device: where shards live.
        mesh: the DeviceMesh of parameters sharded over the ring; None for an emulated ring.
        hop_route: `ring` or `direct`, what the hops of a rotation take.
        link: the Link that the gate reckons with; None where it has nothing to decide.
        plans: for every linear layer by name, the Plan that the gate made when its ranks first met.
    """

    def __init__(
        self,
        mesh_or_group: DeviceMesh | dist.ProcessGroup | None = None,
        *,
        transport: str = "auto",
        route: str = "auto",
        timeout: float | datetime.timedelta = 600.0,
        slot_cap: int = SLOT_CAP,
        prefetch: int = 1,
        gradient_halves: bool | None = None,
    ) -> None:
        _check_choice("transport", transport, TRANSPORTS)
        _check_choice("route", route, ROUTES)
        self.timeout = timeout if isinstance(timeout, datetime.timedelta) else datetime.timedelta(seconds=timeout)
        if self.timeout <= datetime.timedelta(0):
            raise ValueError(f"Ring: expected a positive timeout, got {self.timeout}")
        self._settle(slot_cap, prefetch, gradient_halves)
        self.mesh: DeviceMesh | None = _resolve_mesh(mesh_or_group)
        group = self.mesh.get_group()
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.device = torch.device(self.mesh.device_type)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._world = dist.group.WORLD
        self._members = dist.get_process_group_ranks(group)
        self._groups: list[dist.ProcessGroup] = []
        self._control = self.new_group("gloo") if self.size > 1 else None
        self._collective = self._control
        if self.size > 1 and self.device.type == "cuda":
            self._collective = self.new_group("nccl")
        self.serial = next(_serials)
        self._agree_on_options(
            f"transport {transport}, route {route}, timeout {self.timeout}, slot_cap {slot_cap}, prefetch {prefetch}, "
            f"gradient_halves {gradient_halves}"
        )
        self._start(transport, route)

    @classmethod
    def emulated(
        cls,
        size: int,
        *,
        rank: int = 0,
        device: torch.device | str = "cpu",
        route: str = "ring",
        prefetch: int = 1,
        gradient_halves: bool | None = None,
    ) -> Ring:
        """A ring of `size` in one process: every neighbour is this rank itself, and hops are real copies.

        A layer on it computes what the plain layer with this rank's shard repeated `size` times would. For
        microbenchmarks of the timeline of one rank, and for memory per rank.
        """
        if size < 1 or not 0 <= rank < size:
            raise ValueError(f"Ring.emulated: expected size >= 1 and 0 <= rank < size, got size {size}, rank {rank}")
        ring = cls.__new__(cls)
        ring.timeout = datetime.timedelta(seconds=600)
        _check_choice("route", route, ROUTES[1:])
        ring._settle(SLOT_CAP, prefetch, gradient_halves)
        ring.mesh = None
        ring.rank, ring.size = rank, size
        ring.device = torch.device(device)
        if ring.device.type == "cuda" and ring.device.index is None:
            ring.device = torch.device("cuda", torch.cuda.current_device())
        ring.serial = next(_serials)
        ring._world = None
        ring._members = []
        ring._groups = []
        ring._control = ring._collective = None
        ring.route, ring.transport_reason = route, "one process stands for the ring"
        ring.hop_route = "ring" if route == "gather" else route
        ring.transport = "emulated"
        ring._executor = _native.Executor(_native.emulated_transport(ring.device), rank, size, ring.device)
        ring._executor.prefetch(bool(prefetch))
        return ring

    # -- making and ending -------------------------------------------------------------------------------------------

    def _settle(self, slot_cap: int, prefetch: int, gradient_halves: bool | None) -> None:
        """Takes the options that need no other rank."""
        if slot_cap < 0:
            raise ValueError(f"Ring: expected slot_cap >= 0, got {slot_cap}")
        if prefetch not in (0, 1):
            raise ValueError(f"Ring: expected prefetch 0 or 1, got {prefetch!r}")
        self.slot_cap, self.prefetch, self.gradient_halves = slot_cap, prefetch, gradient_halves
        self.link: gate.Link | None = None
        self.plans: dict[str, gate.Plan] = {}
        self._agreements = itertools.count(1)
        self._forward_phase = 0

    def new_group(self, backend: str) -> dist.ProcessGroup:
        group: Any = dist.new_group(
            self._members, timeout=self.timeout, backend=backend, use_local_synchronization=True
        )
        self._groups.append(group)
        return group

    def _agree_on_options(self, mine: str) -> None:
        told = self.exchange(mine)
        for rank, theirs in enumerate(told):
            if theirs != told[0]:
                raise ValueError(f"Ring: ranks disagree: expected {told[0]} (rank 0), got {theirs} on rank {rank}")

    def _start(self, transport: str, route: str) -> None:
        connection = connect(self, transport)
        self.transport: str = connection.name
        self.transport_reason: str = connection.reason
        self.hop_route: str = choose_route(self, "auto" if route == "gather" else route)
        self.route: str = "gather" if route == "gather" else self.hop_route
        if self.device.type == "cuda" and route == "auto":
            self.link = gate.link_of(self.device, peer_access=self.hop_route == "direct")
        self._executor = _native.Executor(connection.native, self.rank, self.size, self.device)
        self._executor.prefetch(self.prefetch > 0)
        logger.info(
            "ring of %d: transport %s (%s), route %s", self.size, self.transport, self.transport_reason, self.route
        )

    @property
    def alive(self) -> bool:
        """Whether the ring can still be used."""
        return self._executor.alive and self._world is dist.group.WORLD if self._world else self._executor.alive

    def close(self) -> None:
        """Ends the ring in good order. Idempotent; collective."""
        self._executor.close()
        self._drop_groups()

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, _memo: dict) -> Ring:
        return self  # a copy of a model rotates over the same ring

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise TypeError(
            "a Ring cannot be pickled: it holds live connections. Save model.state_dict() or use "
            "torch.distributed.checkpoint, and convert a new model with fully_rotate"
        )

    def __repr__(self) -> str:
        return f"Ring(rank={self.rank}, size={self.size}, transport={self.transport!r}, route={self.route!r})"

    def check_alive(self, operation: str) -> None:
        """Raises RotationError if the ring was closed, has failed, or outlived its process group."""
        self._executor.check_alive(operation)
        if self._world is not None and self._world is not dist.group.WORLD:
            self._executor.fail("its process group was destroyed")
            self._executor.check_alive(operation)

    def _drop_groups(self) -> None:
        groups, self._groups = self._groups, []
        self._control = self._collective = None
        if not dist.is_initialized() or self._world is not dist.group.WORLD:
            return
        for group in groups:
            dist.destroy_process_group(group)

    def run(
        self,
        operation: str,
        function: Callable[..., Any],
        *arguments: Any,
        serial: int = 0,
        watched: Sequence[torch.Tensor] = (),
    ) -> Any:
        """Calls a native operation with this ring's executor; a failure of the ring reaches the neighbours.

        `serial` and `watched` name the parameters to the prefetcher: a number that is the same on every rank, and the
        tensors whose version counters tell that they were written.
        """
        self.check_alive(operation)
        task = torch._C._current_graph_task_id()
        phase = task + 1 if task >= 0 else self._forward_phase
        self._executor.enter(phase, task >= 0, serial, watched)
        try:
            return function(self._executor, *arguments)
        except RotationError:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Drops the groups of a ring that has failed, so that neighbours in a collective learn of it."""
        if not self._executor.alive:
            self._drop_groups()

    # -- the gate and the prefetcher ---------------------------------------------------------------------------------

    def plan(self, name: str, tokens: int, layer: gate.Layer, dtype: torch.dtype) -> gate.Plan:
        """How the linear layer `name` travels: as asked for, else as the gate decides. Kept in `plans`."""
        if self.route == "gather":
            plan = gate.Plan("gather", False, "as asked", {})
        else:
            device = gate.device_of(self.device, dtype) if self.link else None
            plan = gate.decide(self.size, tokens, layer, hop_route=self.hop_route, link=self.link, device=device)
        if self.gradient_halves is not None and plan.route != "gather":
            plan = gate.Plan(plan.route, self.gradient_halves, plan.reason, plan.seconds)
        self.plans[name] = plan
        logger.debug("%s: route %s, gradients in halves %s (%s)", name, plan.route, plan.halves, plan.reason)
        return plan

    def new_agreement(self) -> int:
        """A number for what the ranks have just agreed on, the same on all of them."""
        return next(self._agreements)

    def begin_forward(self) -> None:
        """A forward of a model starts: its passes are expected in the order of the one before."""
        self._forward_phase = next(_phases)

    def end_forward(self) -> None:
        self._forward_phase = 0

    def measure_link(self, shard_bytes: int = 16 << 20, repeats: int = 5) -> gate.Link:
        """Times hops of this ring, and lets the gate reckon with them. Collective; for layers that come after it.

        The rate comes from shards of `shard_bytes`, the latency from shards of a few bytes; the slowest rank counts.
        """
        if self.size == 1:
            raise ValueError("Ring.measure_link: expected at least 2 ranks, got 1")
        large, small = (
            max(self.exchange(min(self._seconds_per_hop(size) for _ in range(repeats)))) for size in (shard_bytes, 64)
        )
        self.link = gate.Link(shard_bytes / max(large - small, 1e-9), small, "measured")
        return self.link

    def _seconds_per_hop(self, shard_bytes: int) -> float:
        shard = torch.zeros(shard_bytes, dtype=torch.uint8, device=self.device)
        self.exchange(None)  # start together
        start = time.perf_counter()
        for _ in self.rotate(shard):
            pass
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (time.perf_counter() - start) / (self.size - 1)

    # -- agreement and small collectives -----------------------------------------------------------------------------

    def _collectively(self, operation: str, action: Callable[[], Any]) -> Any:
        """Runs a torch.distributed collective; its failure is the ring's."""
        self.check_alive(operation)
        start = datetime.datetime.now()
        try:
            return action()
        except RuntimeError as error:
            waited = (datetime.datetime.now() - start).total_seconds()
            message = f"{operation}: a rank of the ring did not answer (waited {waited:.1f} s): {error}"
            self._executor.fail(message)
            self.abandon()
            raise RingTimeout(message) from error

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's `value` (any picklable object), in ring order. Collective."""
        if self._control is None:
            return [value] * self.size
        values: list[Any] = [None] * self.size
        if not hasattr(self, "_executor"):  # while the ring is being made
            dist.all_gather_object(values, value, group=self._control)
            return values
        self._collectively("exchange", lambda: dist.all_gather_object(values, value, group=self._control))
        return values

    def all_gather(self, shard: torch.Tensor) -> torch.Tensor:
        """Shards [n] of equal size to [R, n]. For what is too small to rotate. Collective."""
        if self.size == 1 or self._collective is None:
            return shard.unsqueeze(0).repeat(self.size, 1)
        gathered = shard.new_empty(self.size, shard.numel())
        self._collectively("all_gather", lambda: _all_gather_single(gathered.view(-1), shard, group=self._collective))
        return gathered

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Sums `values` [...] over the ranks, in place. Collective."""
        if self._collective is None:
            return values.mul_(self.size)
        self._collectively("all_reduce", lambda: dist.all_reduce(values, group=self._collective))
        return values

    # -- the primitives ----------------------------------------------------------------------------------------------

    def shapes(self, tensors: Sequence[torch.Tensor], originals: Sequence[Any]) -> list[list[list[int]]]:
        """The shape of every owner's shard of each tensor: by the chunk rule for DTensors, else by asking once."""
        if all(isinstance(o, DTensor) for o in originals):
            result = []
            for original in originals:
                dim = next(p.dim for p in original.placements if isinstance(p, Shard))
                sizes = _native.shard_sizes(original.shape[dim], self.size)
                result.append([[*original.shape[:dim], size, *original.shape[dim + 1 :]] for size in sizes])
            return result
        mine = [(tuple(t.shape), str(t.dtype)) for t in tensors]
        known = agreements(originals[0]) if isinstance(originals[0], torch.Tensor) else {}
        key = (self.serial, *mine)
        if key not in known:
            known[key] = self._agree_on_shapes(mine)
        return known[key]

    def _agree_on_shapes(self, mine: list[tuple[tuple[int, ...], str]]) -> list[list[list[int]]]:
        told = self.exchange(mine)
        for rank, theirs in enumerate(told):
            if [(len(s), d) for s, d in theirs] != [(len(s), d) for s, d in told[0]]:
                raise ValueError(
                    f"Ring: expected shards of as many dimensions and the same dtype on every rank, got {told[0]} on "
                    f"rank 0 and {theirs} on rank {rank}"
                )
        return [[list(theirs[part][0]) for theirs in told] for part in range(len(mine))]

    def _prepare(self, operation: str, shard: Any) -> tuple[list[torch.Tensor], list[list[list[int]]], bool]:
        self.check_alive(operation)
        single = not isinstance(shard, (list, tuple))
        originals = [shard] if single else list(shard)
        tensors = [as_tensor(original) for original in originals]
        for tensor in tensors:
            if tensor.device != self.device:
                raise TypeError(f"{operation}: expected a tensor on {self.device}, the ring's, got {tensor.device}")
        tensors = [tensor.contiguous() for tensor in tensors]
        return tensors, self.shapes(tensors, originals), single

    def rotate(self, shard: Any, *, reverse: bool = False) -> Iterator[tuple[int, Any]]:
        """Lets every rank's shard visit this rank while the caller computes on the one in hand.

        Args:
            shard: this rank's tensor (or list of tensors that travel together), any dtype; DTensors and DLPack
                arrays are taken too. Shards of different ranks may differ in size.
            reverse: the order r, r+1, ... of a backward instead of r, r-1, ...

        Yields `(owner, view)`, this rank's own shard first; a list of views where a list was given. A view is valid
        until the next one is asked for. Leaving the loop early is allowed: the remaining hops still run, so that
        neighbours are served. Collective. Source: RTP, arXiv 2311.01635, the rotation primitive.
        """
        tensors, shapes, single = self._prepare("rotate", shard)
        execution = self.run("rotate", _native.Execution.rotate, tensors, shapes, self.hop_route, reverse)
        return self._visits(execution, single)

    def _visits(self, execution: Any, single: bool) -> Iterator[tuple[int, Any]]:
        try:
            while (step := self._next(execution)) is not None:
                views = execution.weight()
                yield step.owner, views[0] if single else views
        finally:
            execution.finish()

    def _next(self, execution: Any) -> Any:
        try:
            return execution.next()
        except RotationError:
            self.abandon()
            raise

    def collect(self, add: Callable[[int, Any], None], like: Any) -> Any:
        """The dual of `rotate`: every owner's sum over all ranks, gathered on the way and delivered at home.

        Args:
            add: called as `add(owner, partial)` once for every owner, this rank's own last; adds this rank's
                contribution to `partial` in place.
            like: a tensor (or list) of the shape, dtype and device of this rank's own result. Not changed.

        Returns this rank's own sum (a list where a list was given). An exception of `add` is raised after the
        remaining hops have run. Collective.
        """
        tensors, shapes, single = self._prepare("collect", like)
        home = [torch.empty_like(tensor) for tensor in tensors]
        execution = self.run("collect", _native.Execution.collect, home, shapes)
        try:
            while (step := self._next(execution)) is not None:
                arrived, partial = execution.gradient_in(), execution.gradient_out()
                for index, tensor in enumerate(partial):
                    if not arrived:
                        tensor.zero_()
                    elif arrived[index].data_ptr() != tensor.data_ptr():
                        tensor.copy_(arrived[index])
                add(step.owner, partial[0] if single else partial)
        finally:
            execution.finish()
        return home[0] if single else home

    # -- counters ----------------------------------------------------------------------------------------------------

    def slot_count(self, channel: str) -> Any:
        """Slots of `weight` or `gradient`: .slots and .bytes that exist, .peak_slots leased at once, .peak_bytes,
        .allocations ever."""
        return self._executor.slots(channel)

    def reset_peak(self) -> None:
        """Starts the peaks of `slot_count` anew."""
        self._executor.reset_peak()

    def clear_slots(self) -> None:
        """Frees the slots; the next operation allocates them again."""
        self._executor.clear_slots()

    def hops(self, channel: str) -> int:
        """Hops of `weight` or `gradient` that this rank has posted."""
        return self._executor.hops(channel)

    def prefetched(self) -> tuple[int, int]:
        """First hops that were sent before their layer was called, and how many of them it could use."""
        return self._executor.prefetched()

    def bytes_sent(self, channel: str) -> int:
        """Bytes of `weight` or `gradient` that this rank has sent."""
        return self._executor.bytes_sent(channel)


def _check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"Ring: expected {what} to be one of {', '.join(choices)}, got {value!r}")


def _resolve_mesh(mesh_or_group: DeviceMesh | dist.ProcessGroup | None) -> DeviceMesh:
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
