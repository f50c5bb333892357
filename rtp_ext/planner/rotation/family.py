"""Plans of a ring's blocks: shards per product, routes of gradients, bytes of look-ahead, rows of the embedding.

What of it the engine has is in `BUILT`; plans may only use that, unless `Strategy.to_come` names more. The model of
time is that of `rtp_ext.cost`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rtp_ext._rules import SLOT_CAP
from rtp_ext.cost import Operation, block_seconds, group_sizes
from rtp_ext.embedding_rows import rows_traffic
from rtp_ext.planner.constants import TimeConstants, host_constant
from rtp_ext.planner.native import engine, travel_bytes
from rtp_ext.planner.rotation.operations import RotatedOperation
from rtp_ext.planner.rotation.seconds import (
    RotationTime,
    casts_s,
    hops_host,
    shard_values,
    step_seconds,
    two_lanes,
)
from rtp_ext.planner.specs.cluster import Cluster
from rtp_ext.planner.specs.strategy import Strategy
from rtp_ext.planner.time.links import (
    Group,
    gather_s,
    hop_bytes_per_s,
    hop_s,
    message_latency_s,
    posted_s,
    taken_s,
)
from rtp_ext.planner.time.work import traffic_s

# joined: weights with one input are one operand, where that is faster. groups: several shards a product. halves:
# gradients of every operation in two chains. ahead: hops of the next operations and blocks. direct: contributions
# straight to the owner, and one kernel that adds them, up to one block late. rows: an embedding's rows travel instead
# of its table. collective: one gather over NCCL for each operation, of groups of all shards, and one scatter of its
# gradients, as of `Ring(collective=True)`. kept: weights of a recomputed block stay for its backward, as in
# `fully_shard` (`Ring(keep_recomputed=)`). levels: groups, halves and direct on rings of two levels. head: the head's
# weights stay from forward to backward.
PIECES = ("joined", "rows", "groups", "halves", "ahead", "direct", "collective", "kept", "levels", "head")
BUILT = frozenset(PIECES[:-2])  # what the engine runs
_ALONE = frozenset({"joined", "rows"})  # what needs no plan of a whole block


def pieces_of(to_come: str) -> frozenset[str]:
    """Returns what a plan may use: BUILT, and the names in `to_come`, joined by +, or `all`.

    Raises:
        ValueError: a name that is not in PIECES.
    """
    named = PIECES if to_come == "all" else tuple(filter(None, to_come.split("+")))
    if unknown := [name for name in named if name not in PIECES]:
        raise ValueError(f"strategy: expected to_come 'all' or some of {'+'.join(PIECES)}, got {unknown[0]!r}")
    return BUILT | frozenset(named)


def pieces_on(strategy: Strategy, group: Group, hosts: int) -> frozenset[str]:
    """Returns what plans on this ring may use. hosts: of two levels, else 1. Weights in another format have no
    groups. Collectives are for groups of all shards (`Ring(collective=)`), on any number of hosts; most codes of 8 bits
    have no such groups in backward, and their gradients no halves; forward and backward have codes of their own, so
    that none are kept."""
    pieces = pieces_of(strategy.to_come)
    if hosts > 1 and "levels" not in pieces:
        pieces -= {"groups", "halves", "direct"}
    fewer = strategy.group and strategy.group < group.ranks
    if strategy.collective == "no" or fewer or strategy.buffers == "lean" or strategy.route == "two-level":
        pieces -= {"collective"}
    if strategy.recipe:
        pieces -= {"collective", "halves", "kept"}
    if strategy.ep > 1:
        pieces -= {"collective"}
    return pieces - ({"groups", "collective"} if strategy.travel else set())


def plans_blocks(strategy: Strategy, cluster: Cluster) -> bool:
    """Returns whether blocks are planned as a whole, not operation by operation: of plain training on GPUs, with routes
    of gradients that are not asked for.

    Raises:
        ValueError: several shards a product, or collectives, are asked for, and the plan has none.
    """
    pieces = pieces_of(strategy.to_come)
    asked = strategy.in_place or strategy.freezes or strategy.tp > 1 or strategy.gradient_route != "chain"
    planned = strategy.rtp > 1 and not asked and not cluster.cpus and bool(pieces - _ALONE)
    if strategy.group > 1 and not (planned and "groups" in pieces):
        raise ValueError(
            f"strategy: expected group 0 or 1, or a plain ring of GPUs (no in_place, frozen, lora_rank, tp "
            f"and gradient_route), got {strategy.group}"
        )
    if strategy.collective == "yes" and not planned:
        raise ValueError(
            "strategy: expected collective auto or no, or a plain ring of GPUs (no in_place, frozen, lora_rank, tp and "
            "gradient_route), got yes"
        )
    return planned


@dataclass(frozen=True)
class BlockPlan:
    """How the operations of a block rotate.

    Attributes:
        groups: shards per product, at most, of every operation in the order of forward. Codes of 8 bits have as many
            in a pass where they stack, else one.
        gradients: `chain`, `halves`, `direct` or `scatter` (`rtp_ext.cost.Operation`).
        ahead: blocks whose weights fit into the look-ahead; with collectives 0, one operation.
        kept: a block that is computed again keeps its weights for the backward that follows; None: none is.
        collective: one gather for each operation brings its weights, and one scatter takes its gradients home.
        late: operations whose gradients may still be on their way.
        slot_cap: with collectives: of the ring, below which the shards of a head are not, so that no slot has all.
    """

    groups: tuple[int, ...]
    gradients: str
    ahead: int
    kept: bool | None = None
    collective: bool = False
    late: int = 1
    slot_cap: int = SLOT_CAP

    def ring_options(self, group: Group, hosts: int = 1) -> dict[str, Any]:
        """Returns the options of a Ring that differ from its defaults. hosts: of two levels, else 1."""
        found: dict[str, Any] = {}
        if self.collective:
            found = {"route": "gather"} if hosts > 1 else {"group": group.ranks}
            found |= {"collective": True}
        elif self.gradients == "direct" and not group.reaches_all:
            found = {"gradient_route": "direct"}
        if hosts == 1 and group.nodes > 1 and group.local > 1:
            found = {"route": "ring", **found}
        if self.kept is not None and self.kept != group.keeps_recomputed:
            found["keep_recomputed"] = self.kept
        if self.late != 1:
            found["late_gradients"] = self.late
        if self.slot_cap != SLOT_CAP:
            found["slot_cap"] = self.slot_cap
        return found


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one block's forwards and backward, of one micro-batch on one rank, and bytes.

    Attributes:
        computes_s: of the products, and of adding what arrived.
        exposed_s: in which neither products nor casts run, since hops are not there.
        casts_s: of local shards, of float32 sums, and of packing gradients for joined operands.
        lost_s: by how much computes take longer beside hops over NCCL, beyond what is exposed.
        host_s: of the host, for hops and products; host_calls: driver calls in it.
        buffers_bytes: slots of weights and of gradients.
    """

    plan: BlockPlan
    computes_s: float
    exposed_s: float
    casts_s: float
    lost_s: float
    host_s: float
    host_calls: float
    buffers_bytes: float

    @property
    def seconds(self) -> float:
        return self.computes_s + self.exposed_s + self.casts_s + self.lost_s

    def beside(self, others_s: float, host_s: float) -> float:
        """Returns the seconds of a layer with other kernels, which the host issues in `host_s`: the slower of both."""
        return max(self.seconds + others_s, self.host_s + host_s)


def block_plans(
    operations: Sequence[RotatedOperation],
    ranks: int,
    pieces: frozenset[str],
    lean: bool,
    *,
    keeps: tuple[bool | None, ...] = (None,),
    group: int = 0,
    collective: bool = False,
    slot_cap: int = SLOT_CAP,
) -> list[BlockPlan]:
    """Returns the plans to choose from. lean: slots of one shard. Attention and MLP have groups of their own. keeps:
    what `kept` may be. group: as of `Strategy`. collective: plans with collectives alone, and slot_cap."""
    not_kept = None if keeps == (None,) else False
    if collective:
        whole, count = (ranks,) * len(operations), len(operations)
        late = sorted({1, max(1, count - 1), count})
        kept = dict.fromkeys((not_kept, *keeps))
        return [BlockPlan(whole, "scatter", 0, keep, True, each, slot_cap) for keep in kept for each in late]
    if lean:
        return [BlockPlan((1,) * len(operations), "chain", 0)]
    bundles = any(each.bundle for each in operations)
    sizes = sorted({1, max(1, ranks // 4), ranks}) if "groups" in pieces else [1]
    sizes = [min(group, ranks)] if group and "groups" in pieces else sizes
    routes = ["chain", *(name for name in ("halves", "direct") if name in pieces)]

    def ahead(shards: set[int]) -> list[tuple[int, bool | None]]:
        if "ahead" not in pieces:
            return [(0, not_kept)]
        kept = keeps if shards <= {1, ranks} else (not_kept,)  # in between, forward and backward have other groups
        return [(0, not_kept), *((1, keep) for keep in kept)]

    return [
        BlockPlan(
            tuple(mlp if each.bundle else attention for each in operations),
            *(route, *more),
            late=max(1, len(operations) - 1) if route == "direct" else 1,
        )
        for attention, mlp, route in itertools.product(sizes, sizes if bundles else [1], routes)
        for more in ahead({attention, mlp})
    ]


def has_collectives(operations: Sequence[RotatedOperation], ranks: int, sizes: Sizes, pieces: frozenset[str]) -> bool:
    """Returns whether collectives can bring the weights of a block: no shard goes in chunks (`slot_cap`)."""
    widest = max(sizes.compute_bytes, sizes.reduce_bytes)
    return "collective" in pieces and all(len(each.chunks(ranks, widest)) == 1 for each in operations)


@dataclass(frozen=True)
class Sizes:
    """Bytes of values, as in `rotation_seconds`, and routes."""

    compute_bytes: int = 2
    reduce_bytes: int = 4
    recompute: bool = False
    experts_per_token: int = 0
    travel: str | None = None
    joined: bool = True
    hosts: int = 1


@functools.lru_cache(maxsize=1 << 14)
def products_s(
    rotation: RotatedOperation,
    tokens: int,
    group: Group,
    constants: TimeConstants,
    sizes: Sizes,
    count: int,
    sums: tuple[float | None, float],
    beside: bool = False,
) -> dict[str, float]:
    """Returns the seconds of the products with `count` shards at once. sums, beside: as of `step_seconds`."""
    launches = dataclasses.replace(constants, kernel_s=constants.engine_launch_s)
    return step_seconds(
        rotation,
        tokens,
        group.ranks,
        group.cluster,
        launches,
        sizes.recompute,
        sizes.compute_bytes,
        sizes.experts_per_token,
        sums,
        beside=beside,
        shards=count,
        joined=sizes.joined,
    )


@functools.lru_cache(maxsize=1 << 12)
def fastest_block(
    operations: tuple[RotatedOperation, ...],
    between_s: tuple[tuple[float, ...], tuple[float, ...]],
    tokens: int,
    group: Group,
    constants: TimeConstants,
    sizes: Sizes,
    pieces: frozenset[str],
    lean: bool,
    budget: float,
    forwards: int,
    others: tuple[float, float] = (0.0, 0.0),
    size: int = 0,
    collective: bool = False,
    last: tuple[RotatedOperation, ...] = (),
) -> BlockTime:
    """Returns the fastest plan of `forwards` forwards and a backward whose buffers stay within `budget` bytes, else the
    smallest. others: as of `BlockTime.beside`. size: shards in a product as asked. collective: as of `block_plans`.
    last: as of `block_time`."""
    ways: dict[str, Any] = {"group": size, "collective": collective}
    if forwards > 1 and "kept" in pieces:
        ways["keeps"] = (True,) if group.keeps_recomputed else (False, True)
    if collective:
        ways["slot_cap"] = _head_cap(operations, last, group.ranks, sizes)
    plans = block_plans(operations, group.ranks, pieces, lean, **ways)

    def time(plan: BlockPlan, simulated: bool) -> BlockTime:
        ways = (operations, between_s, tokens, group, constants, sizes, plan, forwards)
        return block_time(*ways, simulated=simulated, last=last)

    least = [time(plan, False) for plan in plans]
    budget = max(budget, min(each.buffers_bytes for each in least))
    best: BlockTime | None = None
    for each in sorted(least, key=lambda each: each.beside(*others)):
        if best is not None and each.beside(*others) > best.beside(*others):
            break
        if each.buffers_bytes <= budget:
            found = time(each.plan, True)
            if best is None or (found.beside(*others), found.seconds) < (best.beside(*others), best.seconds):
                best = found
    assert best is not None, "the smallest is within the budget"
    return best


def block_time(
    operations: tuple[RotatedOperation, ...],
    between_s: tuple[tuple[float, ...], tuple[float, ...]],
    tokens: int,
    group: Group,
    constants: TimeConstants,
    sizes: Sizes,
    plan: BlockPlan,
    forwards: int = 1,
    *,
    simulated: bool = True,
    last: tuple[RotatedOperation, ...] = (),
) -> BlockTime:
    """Predicts `forwards` forwards and one backward of one block among many. between_s: seconds of other kernels before
    every operation, in the order of forward, and of backward, which is reversed. simulated: False: a lower bound, in
    which no hop is exposed. last: the head, whose slots count where the engine tells them (collectives)."""
    cluster = group.cluster
    weight_bytes = travel_bytes(sizes.travel, sizes.compute_bytes)
    direct = plan.gradients in ("direct", "scatter")  # contributions of whole groups leave
    forward, backward, rings, casts, products = [], [], [], [0.0, 0.0], [0.0, 0.0]
    pools: dict[int, _Pool] = {}  # of the rings, by parts
    for place, (rotation, size) in enumerate(zip(operations, plan.groups, strict=True)):
        own, inside, between = rings_of(rotation, group, 1 if plan.collective else sizes.hosts)
        ranks, hosts, pool = own.ranks, between.ranks, pools.setdefault(rotation.parts, _Pool())
        rings.append((inside, between))
        size = min(size, ranks)
        values, back = shard_values(rotation.weights, ranks), size
        of_weights = of_back = values * weight_bytes
        if rotation.recipe is not None:
            size, back = (size if rotation.facts.takes_groups(kind) else 1 for kind in ("forward", "backward"))
            of_weights, of_back = (
                sum(weight.travelling_bytes(ranks, weight_bytes, backward=again) for weight in rotation.weights)
                for again in (False, True)
            )
        groups, back_groups = group_sizes(ranks, size), group_sizes(ranks, back)
        alone = len(back_groups) == 1
        of_gradients = values * sizes.reduce_bytes if rotation.trains else 0.0

        streams = back == 1 and hosts == 1 and rotation.trains and two_lanes(rotation, tokens, ranks, cluster)[1]
        of_shards = functools.partial(products_s, rotation, tokens, own, constants, sizes, beside=streams)

        def of(
            count: int, first: bool, adds: bool = False, *, alone: bool = alone, of_shards: Any = of_shards
        ) -> dict[str, float]:
            """first: of its sum, which it does not read. adds: weight gradients add to what arrived."""
            of_results = (2.0 - first) * max(4, sizes.compute_bytes)
            sums = (None if alone else of_results, (2.0 if adds else 1.0) * sizes.reduce_bytes)
            return of_shards(count=count, sums=sums)

        steps = [of(count, index == 0) for index, count in enumerate(back_groups)]
        cast = casts_s(
            rotation,
            tokens,
            ranks,
            sizes.compute_bytes,
            True,
            cluster,
            constants,
            sums=not alone,
            joined=sizes.joined,
            experts_per_token=sizes.experts_per_token,
        )
        casts[0] += cast[0]
        casts[1] += cast[1]
        ahead = steps
        if size != back:
            ahead = [of(count, index == 0, alone=len(groups) == 1) for index, count in enumerate(groups)]
        of_forward, of_dgrad = tuple(step["forward"] for step in ahead), tuple(step["dgrad"] for step in steps)
        call, hop = _weights_s(inside, of_weights, constants, plan, hosts)
        outer = hop_s(between, of_weights, constants) if hosts > 1 else 0.0
        called: dict[str, Any] = {"call": call, "together": plan.collective, "hosts": hosts}
        forward.append(Operation(between_s[0][place] + cast[0], groups, of_forward, hop, of_weights, outer, **called))
        if of_back != of_weights:
            called["call"], hop = _weights_s(inside, of_back, constants, plan, hosts)
            outer = hop_s(between, of_back, constants) if hosts > 1 else 0.0
        ways: dict[str, Any] = {}
        if rotation.trains:
            route, posted, sent = plan.gradients, 0.0, hop_s(inside, of_gradients, constants)
            if plan.collective:
                sent = _called_s(inside, of_gradients, constants)
            elif direct and inside.reaches_all and hosts == 1:
                posted, sent = posted_s(inside, of_gradients, constants)
            splits = rotation.kind == "linear" and rotation.recipe is None and hosts == 1
            if route == "chain" and splits and sent > of(1, False)["dgrad"]:
                route = "halves"  # as the engine's linear layers do
            if direct:
                wgrads = tuple(step["wgrad"] for step in steps)
            elif back == 1:
                wgrads = (steps[0]["wgrad"], *[of(1, False, adds=True)["wgrad"]] * (ranks - 1))
            else:  # contributions of a group, then each is added to what arrived
                add = traffic_s(3 * of_gradients, cluster, constants)
                wgrads = tuple(
                    step["wgrad"] / count + add
                    for step, count in zip(steps, back_groups, strict=True)
                    for _ in range(count)
                )
            ways = {
                "gradients": route,
                "wgrads": wgrads,
                "gradient_hop": sent,
                "outer_gradient_hop": hop_s(between, of_gradients, constants) if hosts > 1 else 0.0,
                "gradient_call": posted,
                "late": plan.late,
            }
            if plan.collective:  # the own sum is copied home
                ways["add"] = traffic_s(2 * of_gradients, cluster, constants)
            elif direct:
                ways["add"] = _add_s(of_gradients, ranks, hosts, own, constants)
            products[1] += len(back_groups) if direct else ranks * (2 if route == "halves" else 1)
        backward.append(
            Operation(between_s[1][place] + cast[1], back_groups, of_dgrad, hop, of_back, outer, **called, **ways)
        )
        products[0] += len(groups)
        products[1] += len(back_groups)
        pool.weights = max(pool.weights, 2 * size * of_weights, 2 * back * of_back)
        pool.received += (ranks - 1) * of_weights
        if direct:  # contributions of the others, and of up to two groups that are being sent, of a block
            arriving = ranks - 1 if hosts == 1 else inside.ranks + hosts - 2
            leaving = min(len(back_groups) - (back_groups[-1] == 1), 2) * back
            pool.gradients += (arriving + leaving) * of_gradients
        else:
            pool.gradients = max(pool.gradients, 2 * of_gradients)
    received = sum(each.received for each in pools.values())
    look_ahead = plan.ahead * received
    buffers = sum(max(each.weights, plan.ahead * each.received) + each.gradients for each in pools.values())
    if plan.collective:
        buffers = _collective_bytes((*operations, *operations, *last), group.ranks, sizes, plan)
    if plan.kept:
        buffers += received
    backward.reverse()
    others = tuple(sum(between_s[index]) + casts[index] for index in (0, 1))
    passes = [(forward, rings, others[0], forwards), (backward, rings[::-1], others[1], 1)]
    if plan.kept:
        again = [dataclasses.replace(each, hop=0.0, outer_hop=0.0, call=0.0) for each in backward]
        passes = [(*passes[0][:3], forwards - 1), (forward + again, rings + rings[::-1], sum(others), 1)]
    work = exposed = lost = 0.0
    for each, places, beside, count in passes:
        computes = sum(operation.computes for operation in each)
        work += count * computes
        if not simulated:
            continue
        shown = max(0.0, block_seconds(each, look_ahead) - computes - beside)
        exposed += count * shown
        lost += count * max(0.0, _taken_s(each, places, computes, constants) - shown)
    one = one_s = 0.0  # of hops for all weights or gradients
    for inside, between in rings:
        rounds = (0.0, 1.0) if plan.collective else ((inside.ranks - 1.0) * between.ranks, between.ranks - 1.0)
        calls, seconds = hops_host(*rounds, inside, constants)
        one, one_s = one + calls, one_s + seconds
    computed = forwards * products[0] + products[1]
    moved, of_computes = forwards + (not plan.kept) + 1, computed * host_constant("compute_calls")
    return BlockTime(
        plan,
        work,
        exposed,
        forwards * casts[0] + casts[1],
        lost,
        moved * one_s + of_computes * constants.driver_call_s + computed * constants.engine_product_s,
        moved * one + of_computes,
        buffers,
    )


@dataclass
class _Pool:
    """Bytes of the slots of a ring: of weights, of gradients, and of all shards that a block receives."""

    weights: float = 0.0
    gradients: float = 0.0
    received: float = 0.0


def rings_of(rotation: RotatedOperation, group: Group, hosts: int) -> tuple[Group, Group, Group]:
    """Returns the ring of an operation, its part inside a host, and that between hosts. hosts: of the whole ring. The
    ranks of a part of divided experts are `parts` apart."""
    parts = rotation.parts
    own = dataclasses.replace(group, ranks=group.ranks // parts, stride=group.stride * parts)
    if parts > 1:
        hosts = own.nodes if hosts > 1 and own.local > 1 else 1
    inside = dataclasses.replace(own, ranks=own.ranks // hosts)
    return own, inside, dataclasses.replace(own, ranks=hosts, stride=own.stride * inside.ranks)


def _add_s(gradient_bytes: float, ranks: int, hosts: int, group: Group, constants: TimeConstants) -> float:
    """Returns the time of the kernels that add all contributions of one shard: each is read, the sum read and written.
    On two levels the sums of hosts, one for each, are added first."""
    per_host = ranks // hosts
    reads = hosts * (per_host - 1 + 2) + (hosts - 1 + 2 if hosts > 1 else 0)
    return traffic_s(reads * gradient_bytes, group.cluster, constants)


def _called_s(group: Group, shard_bytes: float, constants: TimeConstants) -> float:
    """Returns the seconds of one gather or scatter of shards, for each shard of the others. The parts of an operation
    are one launch, whose latency occurs once (NCCL user guide, aggregated operations; src/enqueue.cc adds their bytes
    and takes the latency of one as long as they are not more than the channels)."""
    return gather_s(group, group.ranks * shard_bytes, constants) / (group.ranks - 1)


def _head_cap(
    operations: tuple[RotatedOperation, ...], last: tuple[RotatedOperation, ...], ranks: int, sizes: Sizes
) -> int:
    """Returns the slot cap with which the head of a ring rotates, in chunks, while linear layers have one group."""

    def largest(found: tuple[RotatedOperation, ...]) -> int:
        values = (shard_values(each.weights, ranks) for each in found if each.kind != "bundle")
        return int(max(values, default=0.0)) * max(sizes.compute_bytes, sizes.reduce_bytes)

    head = largest(last)
    return head // 2 if largest(operations) <= head // 2 < SLOT_CAP // 2 else SLOT_CAP


def _collective_bytes(operations: tuple[RotatedOperation, ...], ranks: int, sizes: Sizes, plan: BlockPlan) -> float:
    """Returns the bytes of the slots of a ring with `collective=True` whose operations have one group each, as the
    engine has them."""
    held = engine().footprint(
        [each.facts for each in operations],
        **{"ranks": ranks, "group": ranks, "collective": True, "in_place": False, "slot_cap": plan.slot_cap},
        **{"sends_anywhere": True, "receives_anywhere": True, "cast": sizes.compute_bytes < 4},
        **{"compute_bytes": sizes.compute_bytes, "reduce_bytes": sizes.reduce_bytes, "look_ahead": None},
        late=plan.late,
    )
    return float(held.weight.peak_bytes + held.gradient.peak_bytes + held.scratch.peak_bytes)


def _weights_s(
    inside: Group, shard_bytes: float, constants: TimeConstants, plan: BlockPlan, hosts: int
) -> tuple[float, float]:
    """Returns the latency before a group's hops, and the seconds of each."""
    if plan.collective:
        return 0.0, _called_s(inside, shard_bytes, constants)
    if hosts == 1 and inside.over_ce and inside.reaches_all:
        return posted_s(inside, shard_bytes, constants)
    return 0.0, hop_s(inside, shard_bytes, constants)


def _taken_s(
    operations: Sequence[Operation], rings: Sequence[tuple[Group, Group]], work: float, constants: TimeConstants
) -> float:
    """rings: of every operation, inside hosts and between them."""
    busy: dict[Group, float] = {}
    for each, (inside, between) in zip(operations, rings, strict=True):
        inner = (inside.ranks - 1) * between.ranks * (each.hop + each.gradient_hop) * (not inside.over_ce)
        busy[inside] = busy.get(inside, 0.0) + inner
        outer = (between.ranks - 1) * (each.outer_hop + each.outer_gradient_hop)
        busy[between] = busy.get(between, 0.0) + outer
    return sum(taken_s(group, min(seconds, work), constants) for group, seconds in busy.items())


def rows_seconds(
    whole: RotationTime,
    rotation: RotatedOperation,
    tokens: int,
    group: Group,
    constants: TimeConstants,
    compute_bytes: int,
    reduce_bytes: int,
) -> RotationTime:
    """Returns the time of an embedding whose rows travel, exposed: in each pass counts, ids, and rows or gradients of
    rows, one collective of sends and receives after the other; then as many rows are added as were looked up. whole: of
    its rotation."""
    (table,) = rotation.weights
    rate, width = hop_bytes_per_s(group, constants), table.shape[1]
    trained = rotation.trains * min(compute_bytes, reduce_bytes)
    sent = rows_traffic(table.shape, table.dim, group.ranks, 0, tokens, compute_bytes, trained)
    latency = 3 * message_latency_s(group, constants)
    looked = traffic_s(2.0 * tokens * width * compute_bytes, group.cluster, constants)
    work = (looked + constants.kernel_s, 2 * looked + constants.kernel_s)
    times = (work[0] + sent.forward / rate + latency, work[1] + (sent.gradients / rate + latency) * rotation.trains)
    return dataclasses.replace(
        whole,
        computes_s=work,
        makespan_s=times,
        timeline_s=times,
        hops_s=(0.0, 0.0),
        casts_s=(0.0, 0.0),
        taken_s=(0.0, 0.0),
        simulated=(),
    )
