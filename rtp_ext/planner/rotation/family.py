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

from rtp_ext.cost import Operation, block_seconds, group_sizes
from rtp_ext.embedding_rows import rows_traffic
from rtp_ext.planner.constants import TimeConstants, host_constant
from rtp_ext.planner.native import travel_bytes
from rtp_ext.planner.rotation.operations import RotatedOperation
from rtp_ext.planner.rotation.seconds import (
    RotationTime,
    casts_s,
    hop_calls,
    products_of,
    shard_values,
    step_seconds,
    two_lanes,
)
from rtp_ext.planner.specs.cluster import Cluster
from rtp_ext.planner.specs.strategy import Strategy
from rtp_ext.planner.time.links import Group, called_s, hop_bytes_per_s, hop_s, message_latency_s, posted_s, taken_s
from rtp_ext.planner.time.work import traffic_s

# joined: weights with one input are one operand, where that is faster. groups: several shards a product. halves:
# gradients of every operation in two chains. ahead: hops of the next operations and blocks. direct: contributions
# straight to the owner, and one kernel that adds them, up to one block late. rows: an embedding's rows travel instead
# of its table. levels: groups, halves and direct on rings of two levels, and direct where ranks do not reach all
# others at one cost. kept: weights of a recomputed block, and of the head, stay for its backward, as in `fully_shard`.
# collective: one group call of NCCL brings all weights of a block, or one group's gradients home; a ring with
# `collective=True` makes one call for each operation, which is another plan.
PIECES = ("joined", "rows", "groups", "halves", "ahead", "direct", "levels", "kept", "collective")
BUILT = frozenset({"joined", "rows", "groups", "halves", "ahead", "direct"})  # of PIECES: what the engine runs
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
    groups."""
    pieces = pieces_of(strategy.to_come)
    if "levels" not in pieces:
        pieces -= {"groups", "halves", "direct"} if hosts > 1 else set() if group.reaches_all else {"direct"}
    return pieces - ({"groups"} if strategy.travel else set())


def plans_blocks(strategy: Strategy, cluster: Cluster) -> bool:
    """Returns whether blocks are planned as a whole, not operation by operation: of plain training on GPUs, with routes
    of gradients that are not asked for.

    Raises:
        ValueError: several shards a product are asked for, and the plan has no groups.
    """
    pieces = pieces_of(strategy.to_come)
    asked = strategy.in_place or strategy.freezes or strategy.tp > 1 or strategy.gradient_route != "chain"
    planned = strategy.rtp > 1 and not asked and not cluster.cpus and bool(pieces - _ALONE)
    if strategy.group > 1 and not (planned and "groups" in pieces):
        raise ValueError(
            f"strategy: expected group 0 or 1, or a plain ring of GPUs (no in_place, frozen, lora_rank, tp "
            f"and gradient_route), got {strategy.group}"
        )
    return planned


@dataclass(frozen=True)
class BlockPlan:
    """How the operations of a block rotate.

    Attributes:
        groups: shards per product, of every operation in the order of forward.
        gradients: `chain`, `halves` or `direct` (`rtp_ext.cost.Operation`), or `scatter`: a reduce-scatter of the whole
            gradient of each product.
        ahead: blocks whose weights fit into the look-ahead.
        kept: a block that is computed again keeps its weights for the backward that follows.
        called: all weights of a block arrive with one call, into buffers of two blocks, on one level.
    """

    groups: tuple[int, ...]
    gradients: str
    ahead: int
    kept: bool = False
    called: bool = False


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
    again: bool = False,
    group: int = 0,
) -> list[BlockPlan]:
    """Returns the plans to choose from. lean: slots of one shard. Attention and MLP have groups of their own. again:
    backward computes blocks again. group: as of `Strategy`."""
    if lean:
        return [BlockPlan((1,) * len(operations), "chain", 0)]
    sizes = sorted({1, max(1, ranks // 4), ranks}) if "groups" in pieces else [1]
    sizes = [min(group, ranks)] if group and "groups" in pieces else sizes
    routes = ["chain", *(name for name in ("halves", "direct") if name in pieces)]
    keeps = [False, *([True] if again and "kept" in pieces else [])]
    ahead = [(0, False), *((1, keep) for keep in keeps if "ahead" in pieces)]
    found = [
        BlockPlan(tuple(mlp if each.bundle else attention for each in operations), route, *more)
        for attention, mlp, route, more in itertools.product(sizes, sizes, routes, ahead)
    ]
    if {"collective", "groups", "ahead"} <= pieces and ranks in sizes:
        whole = (ranks,) * len(operations)
        found += [
            BlockPlan(whole, route, 2, keep, True) for route, keep in itertools.product([*routes, "scatter"], keeps)
        ]
    return found


@dataclass(frozen=True)
class Sizes:
    """Bytes of values, as in `rotation_seconds`, and routes."""

    compute_bytes: int = 2
    product_bytes: int = 2
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
        sizes.product_bytes,
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
) -> BlockTime:
    """Returns the fastest plan of `forwards` forwards and a backward whose buffers stay within `budget` bytes, else the
    smallest. others: as of `BlockTime.beside`. size: shards in a product as asked."""
    plans = block_plans(operations, group.ranks, pieces, lean, again=forwards > 1, group=size)

    def time(plan: BlockPlan, simulated: bool) -> BlockTime:
        ways = (operations, between_s, tokens, group, constants, sizes, plan, forwards, pieces)
        return block_time(*ways, simulated=simulated)

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
    pieces: frozenset[str] = BUILT,
    *,
    simulated: bool = True,
) -> BlockTime:
    """Predicts `forwards` forwards and one backward of one block among many. between_s: seconds of other kernels before
    every operation, in the order of forward, and of backward, which is reversed. simulated: False: a lower bound, in
    which no hop is exposed."""
    ranks, hosts, cluster = group.ranks, 1 if plan.called else sizes.hosts, group.cluster
    inside = dataclasses.replace(group, ranks=ranks // hosts)
    between = dataclasses.replace(group, ranks=hosts, stride=group.stride * inside.ranks)
    weight_bytes = travel_bytes(sizes.travel, sizes.compute_bytes)
    scatters = plan.gradients == "scatter"
    direct = scatters or plan.gradients == "direct"  # contributions of whole groups leave
    forward, backward, casts, buffers, most = [], [], [0.0, 0.0], 0.0, 0.0
    products = [0.0, 0.0]
    for place, (rotation, size) in enumerate(zip(operations, plan.groups, strict=True)):
        groups = group_sizes(ranks, size)
        alone, values = len(groups) == 1, shard_values(rotation.weights, ranks)
        of_weights = values * weight_bytes
        of_gradients = values * sizes.reduce_bytes if rotation.trains else 0.0

        streams = size == 1 and hosts == 1 and rotation.trains and two_lanes(rotation, tokens, ranks, cluster)[1]
        of_shards = functools.partial(products_s, rotation, tokens, group, constants, sizes, beside=streams)

        def of(
            count: int, first: bool, adds: bool = False, alone: bool = alone, of_shards: Any = of_shards
        ) -> dict[str, float]:
            """first: of its sum, which it does not read. adds: weight gradients add to what arrived."""
            of_results = (2.0 - first) * max(4, sizes.compute_bytes)
            sums = (None if alone else of_results, (2.0 if adds else 1.0) * sizes.reduce_bytes)
            return of_shards(count=count, sums=sums)

        steps = [of(count, index == 0) for index, count in enumerate(groups)]
        call, hop = _weights_s(inside, of_weights, constants, plan, place, hosts)
        outer = hop_s(between, of_weights, constants) if hosts > 1 else 0.0
        cast = casts_s(
            rotation, tokens, ranks, sizes.compute_bytes, True, cluster, constants, sums=not alone, joined=sizes.joined
        )
        casts[0] += cast[0]
        casts[1] += cast[1]
        of_forward, of_dgrad = (tuple(step[kind] for step in steps) for kind in ("forward", "dgrad"))
        forward.append(Operation(between_s[0][place] + cast[0], groups, of_forward, hop, of_weights, outer, call=call))
        ways: dict[str, Any] = {}
        if rotation.trains:
            route, posted, sent = plan.gradients, 0.0, hop_s(inside, of_gradients, constants)
            if scatters:
                route, (posted, sent) = "direct", called_s(inside, of_gradients, constants)
                posted *= len(products_of(rotation, sizes.joined))
            elif direct and inside.reaches_all and hosts == 1:
                posted, sent = posted_s(inside, of_gradients, constants, called="collective" in pieces)
            if route == "chain" and rotation.kind == "linear" and hosts == 1 and sent > of(1, False)["dgrad"]:
                route = "halves"  # as the engine's linear layers do
            if direct:
                wgrads = tuple(step["wgrad"] for step in steps)
            elif size == 1:
                wgrads = (steps[0]["wgrad"], *[of(1, False, adds=True)["wgrad"]] * (ranks - 1))
            else:  # contributions of a group, then each is added to what arrived
                add = traffic_s(3 * of_gradients, cluster, constants)
                wgrads = tuple(
                    step["wgrad"] / count + add for step, count in zip(steps, groups, strict=True) for _ in range(count)
                )
            ways = {
                "gradients": route,
                "wgrads": wgrads,
                "gradient_hop": sent,
                "outer_gradient_hop": hop_s(between, of_gradients, constants) if hosts > 1 else 0.0,
                "gradient_call": posted,
                "add": _add_s(of_gradients, ranks, hosts, group, constants) if direct and not scatters else 0.0,
            }
            products[1] += len(groups) if direct else ranks * (2 if route == "halves" else 1)
        backward.append(
            Operation(between_s[1][place] + cast[1], groups, of_dgrad, hop, of_weights, outer, call=call, **ways)
        )
        products[0] += len(groups)
        products[1] += len(groups)
        most = max(most, 2 * size * of_weights)
        # direct: contributions of the others, up to one block late, and one group's that is being sent; scatter: one
        # product's that is being sent, and the next one's
        largest = max(shard_values((each,), ranks) for each in products_of(rotation, sizes.joined))
        sent = size * (2 * largest * sizes.reduce_bytes if scatters else of_gradients)
        buffers = max(buffers, sent if direct else 2 * of_gradients)
    look_ahead = plan.ahead * sum(each.shard_bytes for each in forward) * (ranks - (not plan.called))
    if direct and not scatters:
        whole = [(ranks - 1) * shard_values(each.weights, ranks) * sizes.reduce_bytes for each in operations]
        buffers += sum(whole) if hosts == 1 else sum(whole) * (inside.ranks + hosts - 2) / (ranks - 1)
    if plan.kept and not plan.called:  # else they are in the buffer of their block
        buffers += sum(each.shard_bytes for each in forward) * (ranks - 1)
    backward.reverse()
    others = tuple(sum(between_s[index]) + casts[index] for index in (0, 1))
    passes = [(forward, others[0], forwards), (backward, others[1], 1)]
    if plan.kept:
        again = [dataclasses.replace(each, hop=0.0, outer_hop=0.0, call=0.0) for each in backward]
        passes = [(*passes[0][:2], forwards - 1), (forward + again, sum(others), 1)]
    work = exposed = lost = 0.0
    for each, beside, count in passes:
        computes = sum(operation.computes for operation in each)
        work += count * computes
        if not simulated:
            continue
        shown = max(0.0, block_seconds(each, look_ahead, hosts, together=plan.called) - computes - beside)
        exposed += count * shown
        lost += count * max(0.0, _taken_s(each, inside, between, hosts, computes, constants, plan) - shown)
    outward = (hosts - 1) * host_constant("nccl_hop_calls")
    one = len(operations) * ((ranks - hosts) * hop_calls(inside) + outward)  # calls for all weights or gradients
    called = len(operations) * host_constant("nccl_hop_calls")
    computed = forwards * products[0] + products[1]
    filled = forwards + (not plan.kept)
    calls = filled * (called if plan.called else one) + (called if scatters else one)
    calls += computed * host_constant("compute_calls")
    computed += len(operations) * (filled * plan.called + scatters)  # a collective takes the host as a product does
    return BlockTime(
        plan,
        work,
        exposed,
        forwards * casts[0] + casts[1],
        lost,
        calls * constants.driver_call_s + computed * constants.engine_product_s,
        calls,
        max(most, look_ahead) + buffers,
    )


def _add_s(gradient_bytes: float, ranks: int, hosts: int, group: Group, constants: TimeConstants) -> float:
    """Returns the time of the kernels that add all contributions of one shard: each is read, the sum read and written.
    On two levels the sums of hosts, one for each, are added first."""
    per_host = ranks // hosts
    reads = hosts * (per_host - 1 + 2) + (hosts - 1 + 2 if hosts > 1 else 0)
    return traffic_s(reads * gradient_bytes, group.cluster, constants)


def _weights_s(
    inside: Group, shard_bytes: float, constants: TimeConstants, plan: BlockPlan, place: int, hosts: int
) -> tuple[float, float]:
    """Returns the latency before a group's hops, and the seconds of each. The call of a block is its first operation's,
    in either pass."""
    if plan.called:
        call, hop = called_s(inside, shard_bytes, constants)
        return call * (place == 0), hop
    if hosts == 1 and inside.over_ce and inside.reaches_all:
        return posted_s(inside, shard_bytes, constants, called=False)
    return 0.0, hop_s(inside, shard_bytes, constants)


def _taken_s(
    operations: Sequence[Operation],
    inside: Group,
    between: Group,
    hosts: int,
    work: float,
    constants: TimeConstants,
    plan: BlockPlan,
) -> float:
    weights, gradients = (
        (inside.ranks - 1) * hosts * sum(getattr(each, name) for each in operations) for name in ("hop", "gradient_hop")
    )
    over_ce = (inside.over_ce and not plan.called, inside.over_ce and plan.gradients != "scatter")
    inner = sum(seconds for seconds, copied in zip((weights, gradients), over_ce, strict=True) if not copied)
    outer = sum((hosts - 1) * (each.outer_hop + each.outer_gradient_hop) for each in operations)
    taken = taken_s(inside, min(inner, work), constants)
    return taken + (taken_s(between, min(outer, work), constants) if hosts > 1 else 0.0)


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
