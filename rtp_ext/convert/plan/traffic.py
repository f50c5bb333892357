"""Bytes that one rank sends in a training step, counted from the engine's own schedules.

A training step is one forward and one backward of every rotated operation. The rules are those of csrc/schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rtp_ext import _native
from rtp_ext._native import SLOT_CAP
from rtp_ext.embedding_rows import rows_traffic
from rtp_ext.functional._operation import Operation
from rtp_ext.functional.embedding import Embedding
from rtp_ext.functional.experts import Experts
from rtp_ext.functional.linear import Linears
from rtp_ext.functional.mlp import MLP
from rtp_ext.functional.sliced import HiddenCut
from rtp_ext.options import RingOptions
from rtp_ext.ring import Ring
from rtp_ext.ring.expert_ring import part_sizes
from rtp_ext.ring.routes.gradient_routes import GradientRoutes
from rtp_ext.ring.routes.plan import expect_whole_groups

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
        gathers: whether operations that take groups gather the whole weight (route `gather`).
        hosts: the number of hosts; schedules of route two-level need it.
        gradients: their route, and the dtype in which they travel.
        travel: the dtype in which weights travel; None: the compute dtype.
        gradient_halves: whether gradients of linear layers and bundles travel in two halves.
        slot_cap: bytes; larger shards of single layers travel in chunks. 0: no cap.
        in_place: whether local shards themselves travel.
        receives_anywhere: whether hops can land outside slots, so that local shards can travel in place.
        offloaded: whether local shards lie on the host of a GPU.
        pulls: for a model that computes forwards only: the ranks whose shards this one pulls; it reads those of the
            others where they lie. None: hops move shards.
        layer_routes: (name, route, halves) of layers whose route differs from that of the ring.
        sends_rows: whether embeddings send rows as asked.
        rows: (name, tokens) of embeddings that send rows; tokens: the largest number on any rank, None: not known yet.
        group: shards in a product as asked, or 1, of operations that take groups.
        layer_groups: (name, shards in a product, predicted seconds of a forward and backward or None) of layers for
            which the route planner has chosen or predicted.
        buffers, collective: as in `rtp_ext.Ring`.
        places: for each rank, where it stands among the ranks that experts are divided over, and in their ring: see
            rtp_ext.ring.mesh.ExpertMesh.
        experts: the ring over which the experts of this rank's part rotate; None: experts are not divided.
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
    in_place: bool = False
    layer_routes: tuple[tuple[str, str, bool], ...] = ()
    sends_rows: bool = False
    rows: tuple[tuple[str, int | None], ...] = ()
    group: int = 1
    layer_groups: tuple[tuple[str, int, float | None], ...] = ()
    buffers: str | int = "auto"
    collective: bool = False
    places: tuple[tuple[int, int], ...] | None = None
    experts: RingFacts | None = None
    assumed: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, ring: Ring) -> RingFacts:
        """Returns the facts of an existing ring. No communication."""
        halves = bool(ring.gate.gradient_halves)
        usual = ("gather" if ring.gate.gathers else ring.hop_route, halves)
        routes = {name: (plan.route, plan.halves) for name, plan in ring.gate.plans.items()}
        group = min(ring.route_plan.group, ring.size)
        groups = {name: (plan.group, plan.predicted) for name, plan in ring.gate.plans.items()}
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
            gradients=GradientRoutes(ring.gradient_route, ring.gradient_travel, wide=ring.gradients.wide),
            travel=ring.options.travel,
            gradient_halves=halves,
            slot_cap=ring.slot_cap,
            receives_anywhere=_receives_anywhere(ring.transport),
            pulls=ring.pulls_from,
            offloaded=ring.host_memory is not None,
            in_place=ring.in_place,
            layer_routes=tuple((name, *taken) for name, taken in sorted(routes.items()) if taken != usual),
            sends_rows=ring.gate.embedding == "rows",
            rows=tuple((name, plan.tokens) for name, plan in sorted(ring.gate.tables.items()) if plan.by_rows),
            group=group,
            layer_groups=tuple((name, *taken) for name, taken in sorted(groups.items()) if taken != (group, None)),
            buffers=ring.options.buffers,
            collective=ring.options.collective and ring.size > 1,
            places=None if ring.experts is None else ring.experts.places,
            experts=None if ring.experts is None else cls.of(ring.experts.inner),
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
        in_place: bool = False,
        embedding: str = "auto",
        group: int | None = None,
        buffers: str | int = "auto",
        collective: bool = False,
        places: tuple[tuple[int, int], ...] | None = None,
    ) -> RingFacts:
        """Returns the facts of a new ring with these options, with all ranks on one host. No communication. `places`:
        see ExpertMesh; None: experts are not divided. Raises ValueError for collectives that no operation of such a
        ring can have."""
        options = {name: value for name, value in locals().items() if name in RingOptions.__dataclass_fields__}
        if transport == "auto":
            transport = ("c10d" if collective else "shm") if device == "cpu" else "nccl" if collective else "ce"
        everywhere = transport in ("shm", "ce") or (device == "cuda" and transport.startswith("nccl"))
        hop_route = route if route in ("ring", "direct") else "direct" if everywhere else "ring"
        reaches_all = device == "cpu" or everywhere
        if collective:
            expect_whole_groups(ranks, device, route, group, hop_route)
            gradient_route = "chain"
        if gradient_route != "auto":
            gradients = GradientRoutes(gradient_route, gradient_travel)
        elif gradient_travel is not None:
            gradients = GradientRoutes("direct", gradient_travel)
        else:
            gradients = GradientRoutes(
                "by-dtype" if reaches_all else "chain", None, wide=device == "cuda" and buffers != "lean"
            )
        experts = None
        if places is not None:
            inner = 1 + max(place for _, place in places)
            options["group"] = None if group is None else min(group, inner)
            experts = cls.expected(device, inner, places[rank][1], **options)
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
            in_place=in_place,
            sends_rows=embedding == "rows",
            group=min(group or 1, ranks),
            buffers=buffers,
            collective=collective and ranks > 1,
            places=places,
            experts=experts,
            assumed=True,
        )

    def of_operation(self, operation: type[Operation]) -> RingFacts:
        """Returns the facts of the ring over which an operation rotates."""
        return self.experts if self.experts is not None and operation is Experts else self

    def part(self, experts: int) -> int:
        """Returns how many of E experts rotate over the ring of this rank's part."""
        return experts if self.places is None else sum(part_sizes(experts, self.places, self.places[self.rank][0]))

    def slices(self, shape: Sequence[int], cut: HiddenCut) -> tuple[int, ...]:
        """Returns the shape of the slices, of a stacked parameter of that shape, that rotate over the ring of this
        rank's part; they are cut along the first dimension."""
        assert self.places is not None and self.experts is not None
        parts, ranks = self.ranks // self.experts.ranks, self.experts.ranks
        found = [-(-shape[0] // parts) * ranks, *shape[1:]]
        found[cut.dim] = cut.extent(shape[cut.dim], ranks)
        return tuple(found)

    def route_of(self, passes: Passes) -> tuple[str, bool]:
        """Returns the route of an operation, and whether its gradients travel in halves."""
        for layer, route, halves in self.layer_routes if passes.is_planned else ():
            if layer == passes.name:
                return route, halves
        return "gather" if self.gathers and passes.takes_groups else self.hop_route, self.gradient_halves

    def group_of(self, passes: Passes) -> tuple[int, float | None]:
        """Returns the shards in a product of an operation, and its predicted seconds where there is a prediction."""
        for layer, group, seconds in self.layer_groups if passes.is_planned else ():
            if layer == passes.name:
                return group, seconds
        return (self.group if passes.takes_groups else 1), None

    def by_rows(self, passes: Passes) -> bool:
        """Whether an operation is an embedding that sends rows."""
        return passes.operation is Embedding and (self.sends_rows or passes.name in dict(self.rows))


def _replica_of(ring: Ring) -> int:
    if ring.replicas == 1 or ring.parameter_mesh is None:
        return 0
    return ring.parameter_mesh.get_local_rank(0)


def _receives_anywhere(transport: str) -> bool:
    return not transport.startswith(("shm", "ce"))


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
    transposed: bool = False
    in_blocks: bool = False  # a weight is frozen in blocks

    @property
    def is_planned(self) -> bool:
        """Whether the route planner decides on it."""
        return self.operation in (Linears, MLP) and not self.transposed and not self.in_blocks

    @property
    def takes_groups(self) -> bool:
        """Whether several of its shards can be one operand."""
        return self.operation.kind.groups and not self.in_blocks


@dataclass(frozen=True)
class Traffic:
    """Bytes of one parameter that one rank sends in a step: weights forward, weights backward, gradients."""

    forward: int = 0
    backward: int = 0
    gradients: int = 0

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.gradients


def rotation_traffic(passes: Passes, parameters: Sequence[Any], facts: RingFacts) -> list[Traffic]:
    """Returns what hops send of each parameter, a ParameterFacts, of one operation. Its input requires a gradient,
    except for embeddings."""
    if facts.pulls is not None:
        return [Traffic(_pulled(each, passes, facts.pulls, facts.ranks)) for each in parameters]
    if facts.by_rows(passes):
        return [Traffic()] * len(parameters)
    operation, size = _native.OperationFacts(passes.operation.key, parameters), _step_size(passes, facts)
    return [Traffic(*each) for each in _native.traffic(operation, facts.rank, **size)]


def rotation_slots(passes: Passes, parameters: Sequence[Any], facts: RingFacts) -> int:
    """Returns the bytes of the slots that one operation takes, for weights and gradients, which the operations of a
    ring share; 0 where nothing arrives in slots."""
    if facts.pulls is not None or facts.by_rows(passes) or facts.ranks == 1:
        return 0
    operation, size = _native.OperationFacts(passes.operation.key, parameters), _step_size(passes, facts)
    size["look_ahead"] = 0
    held = _native.footprint([operation], **size, gradients_apart=size["gradient_route"] == "direct")
    if facts.buffers != "auto" and (facts.buffers == "lean" or held.gradient.peak_bytes > facts.buffers):
        held = _native.footprint([operation], **size)
    return held.weight.peak_bytes + held.gradient.peak_bytes


def by_collectives(passes: Passes, parameters: Sequence[Any], facts: RingFacts) -> bool:
    """Whether one all-gather brings all shards of an operation, and one reduce-scatter sends its gradients."""
    group = facts.ranks if facts.route_of(passes)[0] == "gather" else facts.group_of(passes)[0]
    if not facts.collective or not passes.takes_groups or group != facts.ranks:
        return False
    operation = _native.OperationFacts(passes.operation.key, parameters)
    widest = max(passes.compute_dtype.itemsize, passes.reduce_dtype.itemsize)
    return operation.chunks(facts.ranks, widest, facts.slot_cap)[0] == 1


def _step_size(passes: Passes, facts: RingFacts) -> dict[str, Any]:
    route, halves = facts.route_of(passes)
    direct = facts.gradients.direct(route, passes.reduce_dtype)
    return {
        "ranks": facts.ranks,
        "in_place": facts.in_place,
        "sends_anywhere": True,
        "receives_anywhere": facts.receives_anywhere,
        "cast": passes.compute_dtype != passes.weight_dtype,
        "compute_bytes": passes.compute_dtype.itemsize,
        "reduce_bytes": passes.reduce_dtype.itemsize,
        "sum_bytes": facts.gradients.local_dtype(route, passes.reduce_dtype).itemsize,
        "slot_cap": facts.slot_cap,
        "route": route,
        "group": facts.group_of(passes)[0],
        "collective": facts.collective,
        "hosts": facts.hosts,
        "gradient_route": "direct" if direct else "chain",
        "gradients_quantized": direct and facts.gradients.travel == "int8",
        "travel": facts.travel,
        "halves": halves,
    }


def traffic_of_rows(passes: Passes, shape: Sequence[int], dim: int, trained: bool, facts: RingFacts) -> int | None:
    """Returns the bytes that collectives send for a table that sends rows; None: not known in advance, since they
    depend on the ids, or their number is unknown yet."""
    tokens = dict(facts.rows).get(passes.name)
    if tokens is None or dim == 0:
        return None
    compute, reduce = passes.compute_dtype.itemsize, passes.reduce_dtype.itemsize
    sent = rows_traffic(shape, dim, facts.ranks, facts.rank, tokens, compute, trained * min(compute, reduce))
    return round(sent.forward + sent.gradients)


def _pulled(parameter: Any, passes: Passes, owners: Sequence[int], ranks: int) -> int:
    """Returns the bytes of the shards of some owners, as they are kept."""
    return sum(sum(parameter.pulled_bytes(ranks, owner, passes.weight_dtype.itemsize)) for owner in owners)


def slot_bytes(passes: Passes, parameters: Sequence[Any], facts: RingFacts) -> int:
    """Returns the bytes of a slot for the shards of one operation, of any owner; 0 where none is pulled."""
    itemsize, slots = passes.weight_dtype.itemsize, []
    for owner in range(facts.ranks if facts.pulls else 0):
        pulled = [each.pulled_bytes(facts.ranks, owner, itemsize) for each in parameters]
        slots.append(sum(_native.aligned(tensor) for tensors in pulled for tensor in tensors))
    return max(slots, default=0)


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
        largest = math.prod(_native.ParameterFacts(shape, dim).shard(ranks, 0))
        gathered = (ranks - 1) * (-(-largest * compute_dtype.itemsize // _ALIGNMENT) * _ALIGNMENT)
        reduced = (ranks - 1) * largest * reduce_dtype.itemsize
    return Traffic(gathered, 0, reduced if trained else 0)
