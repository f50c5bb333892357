"""Bytes that one rank sends in a training step, counted from the engine's own schedules.

A training step is one forward and one backward of every rotated operation. The rules are those of csrc/ops: which
parameters of an operation travel in which pass, in which dtype, and how shards above the slot cap are split.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rtp_ext import _native
from rtp_ext._native import SLOT_CAP, shard_sizes
from rtp_ext.functional._operation import Operation
from rtp_ext.functional.linear import Linears
from rtp_ext.parameters.frozen import FrozenWeight
from rtp_ext.ring import Ring
from rtp_ext.ring.routes.gradient_routes import GradientRoutes

_ALIGNMENT = 16  # bytes; alignment of a parameter in the flat buffer of a gather, see rtp_ext.parameters.gather


@dataclass(frozen=True)
class RingFacts:
    """The properties of a ring that decide routes and bytes.

    Attributes:
        ranks, rank: R, and the rank whose bytes are counted.
        replicas, replica: the number of rings that hold the same shards, and the index of this rank's ring.
        tensor_ranks: ranks of tensor parallelism; 1: there is none.
        device: type of the device.
        emulated: whether one process emulates the ring.
        hop_route: `ring`, `direct` or `two-level`.
        gathers: whether linear layers gather the whole weight (route `gather`).
        hosts: the number of hosts; schedules of route two-level need it.
        gradients: their route, and the dtype in which they travel.
        travel: the dtype in which weights travel; None: the compute dtype.
        gradient_halves: whether gradients of linear layers travel in two halves.
        slot_cap: bytes; larger shards of single layers travel in chunks. 0: no cap.
        receives_anywhere: whether hops can land outside slots, so that local shards can travel in place.
        offloaded: whether local shards lie on the host of a GPU.
        pulls: for a model that computes forwards only: the ranks whose shards this one pulls; it reads those of the
            others where they lie. None: hops move shards.
        layer_routes: (name, route, halves) of layers whose route differs from that of the ring.
        assumed: whether no ring exists yet: routes are those of ranks on one host.
    """

    ranks: int
    rank: int
    replicas: int
    replica: int
    tensor_ranks: int
    device: str
    emulated: bool
    hop_route: str
    gathers: bool
    hosts: int
    gradients: GradientRoutes
    travel: str | None
    gradient_halves: bool
    slot_cap: int
    receives_anywhere: bool
    pulls: tuple[int, ...] | None = None
    offloaded: bool = False
    layer_routes: tuple[tuple[str, str, bool], ...] = ()
    assumed: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, ring: Ring) -> RingFacts:
        """Returns the facts of an existing ring. No communication."""
        halves = bool(ring.gate.gradient_halves)
        usual = ("gather" if ring.gate.gathers else ring.hop_route, halves and not ring.gate.gathers)
        routes = {name: (plan.route, plan.halves) for name, plan in ring.gate.plans.items()}
        return cls(
            ranks=ring.size,
            rank=ring.rank,
            replicas=ring.replicas,
            replica=_replica_of(ring),
            tensor_ranks=1 if ring.tensor_mesh is None else ring.tensor_mesh.size(),
            device=ring.device.type,
            emulated=ring.mesh is None,
            hop_route=ring.hop_route,
            gathers=ring.gate.gathers,
            hosts=ring.placed.count,
            gradients=GradientRoutes(ring.gradient_route, ring.gradient_travel),
            travel=ring.options.travel,
            gradient_halves=halves,
            slot_cap=ring.slot_cap,
            receives_anywhere=_receives_anywhere(ring.transport),
            pulls=ring.pulls_from,
            offloaded=ring.host_memory is not None,
            layer_routes=tuple((name, *taken) for name, taken in sorted(routes.items()) if taken != usual),
        )

    @classmethod
    def expected(
        cls,
        device: str,
        ranks: int,
        rank: int,
        *,
        replicas: int = 1,
        replica: int = 0,
        tensor_ranks: int = 1,
        transport: str = "auto",
        route: str = "auto",
        gradient_route: str = "auto",
        gradient_travel: str | None = None,
        travel: str | None = None,
    ) -> RingFacts:
        """Returns the facts of a new ring with these options, with all ranks on one host. No communication."""
        if transport == "auto":
            transport = "shm" if device == "cpu" else "ce"
        everywhere = transport in ("shm", "ce") or (device == "cuda" and transport.startswith("nccl"))
        hop_route = route if route in ("ring", "direct") else "direct" if everywhere else "ring"
        reaches_all = device == "cpu" or everywhere
        if gradient_route != "auto":
            gradients = GradientRoutes(gradient_route, gradient_travel)
        elif gradient_travel is not None:
            gradients = GradientRoutes("direct", gradient_travel)
        else:
            gradients = GradientRoutes("by-dtype" if reaches_all else "chain", None)
        return cls(
            ranks=ranks,
            rank=rank,
            replicas=replicas,
            replica=replica,
            tensor_ranks=tensor_ranks,
            device=device,
            emulated=False,
            hop_route=hop_route,
            gathers=route == "gather",
            hosts=1,
            gradients=gradients,
            travel=travel,
            gradient_halves=False,
            slot_cap=SLOT_CAP,
            receives_anywhere=_receives_anywhere(transport),
            assumed=True,
        )

    def route_of(self, name: str, planned: bool) -> tuple[str, bool]:
        """Returns the route of an operation, and whether its gradients travel in halves. `planned`: the route planner
        decides on it."""
        if not planned:
            return self.hop_route, False
        for layer, route, halves in self.layer_routes:
            if layer == name:
                return route, halves
        return ("gather", False) if self.gathers else (self.hop_route, self.gradient_halves)


def _replica_of(ring: Ring) -> int:
    if ring.replicas == 1 or ring.parameter_mesh is None:
        return 0
    return ring.parameter_mesh.get_local_rank(0)


def _receives_anywhere(transport: str) -> bool:
    return not transport.startswith(("shm", "ce"))


@dataclass(frozen=True)
class Shards:
    """A parameter that an operation moves: its shape, which the ring shards along `dim`."""

    shape: tuple[int, ...]
    dim: int
    is_bias: bool  # a bias always travels in the compute dtype
    trained: bool
    frozen: FrozenWeight | None = None  # it travels in blocks

    def elements(self, owner: int, ranks: int, chunk: int = 0, rows: int = 0, half: int = 0) -> int:
        """Returns the count of numbers in the shard of `owner`, in a chunk of at most `rows` of its rows, or in a half
        of that (1, 2)."""
        shape = [*self.shape]
        shape[self.dim] = _sizes(shape[self.dim], ranks)[owner]
        if rows:
            shape[0] = min(max(shape[0] - chunk * rows, 0), rows)
        if half:
            first = (shape[0] + 1) // 2
            shape[0] = first if half == 1 else shape[0] - first
        return math.prod(shape)

    def blocks_of(self, owner: int, ranks: int) -> int:
        """Returns the bytes of the shard of `owner` in blocks."""
        assert self.frozen is not None, "the caller has looked"
        return self.frozen.travelling_bytes(self.frozen.shard_rows(ranks)[owner])


@dataclass(frozen=True)
class Passes:
    """The rotation of an operation.

    name: that of the layer, or of the bundle.
    """

    operation: type[Operation]
    name: str
    weight_dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    in_place: bool
    transposed: bool = False
    in_blocks: bool = False  # a weight is frozen in blocks

    @property
    def is_planned(self) -> bool:
        """Whether the route planner decides on it."""
        return self.operation is Linears and not self.transposed and not self.in_blocks


@dataclass(frozen=True)
class Traffic:
    """Bytes of one parameter that one rank sends in a step: weights forward, weights backward, gradients."""

    forward: int = 0
    backward: int = 0
    gradients: int = 0

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.gradients


def rotation_traffic(passes: Passes, shards: Sequence[Shards], facts: RingFacts) -> list[Traffic]:
    """Returns the traffic of each parameter of one operation. Its input requires a gradient, except for embeddings."""
    if facts.pulls is not None:
        return [Traffic(_pulled(each, passes, facts.pulls, facts.ranks)) for each in shards]
    route, halves = facts.route_of(passes.name, passes.is_planned)
    count, rows = _chunks(passes, shards, route, facts)
    alone = count == 1
    if not alone and route == "gather":
        route = "direct"
    direct = facts.gradients.direct(route, passes.reduce_dtype)
    compute, reduce = passes.compute_dtype.itemsize, passes.reduce_dtype.itemsize
    quantized = direct and facts.gradients.travel == "int8"
    cast = passes.compute_dtype != passes.weight_dtype or facts.travel is not None
    in_place = passes.in_place and alone and route != "gather" and not cast and facts.receives_anywhere
    bundle = passes.operation.bundle
    trains = any(each.trained for each in shards)
    common = {"route": route, "hosts": facts.hosts, "in_place": in_place}
    forward = _hops(facts.ranks, facts.rank, "weight", pass_="forward", **common)
    backward = {
        **common,
        "pass_": "backward",
        "dgrad": passes.operation.dgrad,
        "wgrad": trains,
        "bundle": bundle,
        "halves": halves and not direct,
        "gradient_route": "direct" if direct else "chain",
        "narrow": direct and (quantized or facts.gradients.local_dtype(route, passes.reduce_dtype).itemsize > reduce),
    }
    weights = _hops(facts.ranks, facts.rank, "weight", **backward)
    gradients = _hops(facts.ranks, facts.rank, "gradient", **backward)

    def sent(each: Shards, hops: Counter[tuple[int, int]], travel: str | None, itemsize: int) -> int:
        total = 0
        for (owner, half), times in hops.items():
            if each.frozen is not None:
                total += times * each.blocks_of(owner, facts.ranks)
                continue
            for chunk in range(count):
                numbers = each.elements(owner, facts.ranks, chunk, 0 if alone else rows, half)
                total += times * _native.wire_bytes(numbers, travel, itemsize)
        return total

    found = []
    for each in shards:
        travel = None if each.is_bias else facts.travel
        returns = bundle or not each.is_bias
        found.append(
            Traffic(
                sent(each, forward, travel, compute),
                sent(each, weights, travel, compute) if returns else 0,
                sent(each, gradients, "int8" if quantized else None, reduce) if each.trained else 0,
            )
        )
    return found


def _pulled(each: Shards, passes: Passes, owners: Sequence[int], ranks: int) -> int:
    """Returns the bytes of the shards of some owners, in the dtype in which they are kept."""
    if each.frozen is not None:
        return sum(each.blocks_of(owner, ranks) for owner in owners)
    return sum(each.elements(owner, ranks) for owner in owners) * passes.weight_dtype.itemsize


def slot_bytes(passes: Passes, shards: Sequence[Shards], facts: RingFacts) -> int:
    """Returns the bytes of a slot for the shards of one operation, of any owner; 0 where none is pulled."""
    owners = range(facts.ranks if facts.pulls else 0)
    return max(
        (sum(_native.aligned(_pulled(each, passes, [owner], facts.ranks)) for each in shards) for owner in owners),
        default=0,
    )


def gathered_traffic(
    shape: Sequence[int],
    dim: int | None,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    trained: bool,
    ranks: int,
) -> Traffic:
    """Returns the bytes that collectives send for a parameter that is gathered in forward and reduced in backward, with
    ring algorithms: an all-gather and a reduce-scatter of shards of equal size; an all-reduce of a replicated one."""
    gathered, reduced = 0, 2 * (ranks - 1) * -(-math.prod(shape) // ranks) * reduce_dtype.itemsize
    if dim is not None:
        largest = Shards(tuple(shape), dim, True, trained).elements(0, ranks)
        gathered = (ranks - 1) * (-(-largest * compute_dtype.itemsize // _ALIGNMENT) * _ALIGNMENT)
        reduced = (ranks - 1) * largest * reduce_dtype.itemsize
    return Traffic(gathered, 0, reduced if trained else 0)


def _chunks(passes: Passes, shards: Sequence[Shards], route: str, facts: RingFacts) -> tuple[int, int]:
    """Returns the number of chunks in which the shards travel, and the rows of the largest."""
    capped = passes.operation.in_chunks and sum(not each.is_bias for each in shards) == 1
    if not capped or passes.transposed or passes.in_blocks:
        return 1, 0
    parts = []
    for each in shards:
        shape = [*each.shape]
        shape[each.dim] = _sizes(shape[each.dim], facts.ranks)[0]
        parts.append((shape[0], math.prod(shape[1:]), True))
    size = _native.OperationSize(parts, passes.operation.bundle, True)
    home = facts.gradients.local_dtype(route, passes.reduce_dtype)
    count, rows = size.chunks(max(passes.compute_dtype.itemsize, home.itemsize), facts.slot_cap)
    return count, rows


@functools.lru_cache(maxsize=4096)
def _sizes(extent: int, ranks: int) -> list[int]:
    return shard_sizes(extent, ranks)


@functools.lru_cache(maxsize=1024)
def _hops(ranks: int, rank: int, channel: str, **options: object) -> Counter[tuple[int, int]]:
    """Counts how often one pass of this rank sends the shard of an owner: by owner, and half (0: whole, 1, 2)."""
    schedule = _native.make_schedule(ranks, rank, **options)
    return Counter(
        (step.send_owner, step.half) for step in schedule.steps if step.action == "hop" and step.channel == channel
    )
