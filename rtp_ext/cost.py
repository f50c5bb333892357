"""Times of products and of rotations in groups: the one model of the route planner and of `rtp_ext.planner`.

A product takes the waves of its tiles and the traffic of its sums, or the bytes of its operands and its result. A
rotation in groups multiplies with g shards at once, which lie in one slot. This module needs no torch, and times
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rtp_ext._rules import GEMM_TILES, waves

__all__ = ["Operation", "Rates", "block_ends", "block_seconds", "group_sizes", "product_seconds"]

GEMM_RAMP = 64.0  # one step of CUTLASS's usual depth, to fill and drain a tile; not fitted


@dataclass(frozen=True)
class Rates:
    """What a rank computes with.

    Attributes:
        flops: FLOP/s that the main loop of a large product reaches.
        memory: bytes/s that large kernels reach.
        multiprocessors: which take the tiles of a product in waves; 0: a CPU, without waves.
        ramp_depth: cost of starting and ending a tile, in steps of the inner dimension.
        launch_s: seconds from one kernel to the next.
    """

    flops: float
    memory: float
    multiprocessors: int
    ramp_depth: float = GEMM_RAMP
    launch_s: float = 0.0


def product_seconds(
    rates: Rates,
    rows: int,
    columns: int,
    depth: int,
    *,
    batch: int = 1,
    element_bytes: float = 2,
    result_bytes: float | None = None,
    beside: bool = False,
) -> float:
    """Returns the time of `batch` products [rows, depth] x [depth, columns]: the waves of output tiles over the
    multiprocessors and the traffic of a sum, or all bytes if that is longer.

    waves * multiprocessors * 2 * tile * (depth + ramp) / rate, for the better of two tiles. result_bytes: bytes read
    and written for each number of the result; None: one write of 2 bytes, or of as many as an operand has. The bytes
    beyond these are moved before or after the main loop, or, `beside` a concurrent product, beneath the main loop of
    that one, with which it shares a wave only where both fit into one. Source: NVIDIA, Matrix Multiplication Background
    User's Guide (tile and wave quantization); roofline: Williams et al., CACM 52(4), 2009; traffic of sums: measured,
    benchmarks/results/h100-80gb-hbm3-1gpu (sums.jsonl, overlap.jsonl).
    """
    if not (rows and columns and depth):
        return 0.0
    if rates.multiprocessors:
        least = math.inf
        for tile, (tile_rows, tile_columns) in enumerate(GEMM_TILES):
            count = waves(rows, columns, rates.multiprocessors, tile, batch)
            count = 0.5 if beside and count <= 0.5 else math.ceil(count)  # two products that fit share a wave
            least = min(least, count * tile_rows * tile_columns)
        busy = least * rates.multiprocessors * 2.0 * (depth + rates.ramp_depth) / rates.flops
    else:
        busy = 2.0 * batch * rows * columns * depth / rates.flops
    plain = max(2, element_bytes)
    result = plain if result_bytes is None else result_bytes
    moved = batch * (element_bytes * (rows * depth + depth * columns) + result * rows * columns) / rates.memory
    shown = 0.0 if beside else max(0.0, result - plain) * batch * rows * columns / rates.memory
    return max(busy + shown, moved) + rates.launch_s


def group_sizes(ranks: int, group: int) -> tuple[int, ...]:
    """Returns the shards of every product of a pass: ceil(ranks / group) of them, the first with the own shard."""
    return tuple(min(group, ranks - first) for first in range(0, ranks, group))


@dataclass(frozen=True)
class Operation:
    """One rotated operation in one pass over a block. Seconds of one rank.

    Attributes:
        before: of other kernels between the operation before and this one.
        groups: shards of every product, as `group_sizes`.
        products: of every group: of the forward, or of the input gradient.
        hop, outer_hop: of a weight shard inside a host and, on two levels, between hosts; 0: none travels.
        shard_bytes: of a weight shard in a slot.
        gradients: route of the gradients: `chain`, `halves` (two independent chains), `direct` (contributions of every
            group are sent to their owners, and added late), `scatter` (one call adds up the contributions to all
            shards); empty: none.
        wgrads: of every group (direct, scatter), or of one shard in each place.
        gradient_hop, outer_gradient_hop: as `hop`.
        add: of the kernel that adds what arrived.
        call, gradient_call: before the hops of every group, where they are posted at once: the latency that they share.
        together: one call brings all shards, of one group, as soon as a slot for as many of the largest operation is
            free.
        late: operations whose gradients may still be on their way at the end of this one, on routes `direct` and
            `scatter`; None: those of a block.
        hosts: of its ring; None: those of the block.
    """

    before: float
    groups: tuple[int, ...]
    products: tuple[float, ...]
    hop: float
    shard_bytes: float
    outer_hop: float = 0.0
    gradients: str = ""
    wgrads: tuple[float, ...] = ()
    gradient_hop: float = 0.0
    outer_gradient_hop: float = 0.0
    add: float = 0.0
    call: float = 0.0
    gradient_call: float = 0.0
    together: bool = False
    late: int | None = None
    hosts: int | None = None

    @property
    def ranks(self) -> int:
        """Of its ring: experts that are divided have a smaller one."""
        return sum(self.groups)

    @property
    def calls(self) -> int:
        """Groups that are not the own shard alone."""
        return len(self.groups) - (self.groups[0] == 1)

    @property
    def computes(self) -> float:
        """Seconds of the products, and of adding."""
        return sum(self.products) + sum(self.wgrads) + self.add


def block_ends(operations: Sequence[Operation], look_ahead: float, hosts: int = 1, blocks: int = 1) -> list[float]:
    """Returns the times at which equal blocks of a pass end, in this timeline:

    Weight hops are sent in the order of use, as long as the bytes that have arrived and are not multiplied yet stay
    within `look_ahead` (at least two groups), also across operations and blocks. With a look-ahead of 0 an operation's
    hops begin with it, except the first, which begins with the operation before it. A product starts when all shards
    of its group are there. A chain adds to what arrived: its wgrads wait for each other's hops. On two levels the first
    shard of a phase comes from another host, and so do the phases' sums of gradients.
    """
    waits = look_ahead == 0
    largest = max(max(each.groups) * each.shard_bytes for each in operations)
    look_ahead = max(look_ahead, 2 * largest)
    compute = link = outer = gradient_link = gradient_outer = sent = 0.0
    used: list[tuple[float, float]] = []  # bytes sent until a group's last shard, end of its product
    place, landed, begun = 0, 0.0, 0.0
    ends: list[float] = []
    landing: list[float] = []  # ends of hops of late gradients

    def room(size: float) -> float:
        """Counts bytes as sent. Returns when there is room for them."""
        nonlocal sent, place
        sent += size
        while place < len(used) and used[place][0] < sent - look_ahead:
            place += 1
        return used[place][1] if place < len(used) and sent > look_ahead else 0.0

    for _ in range(blocks):
        for each in operations:
            ranks, per_host = each.ranks, each.ranks // (each.hosts or hosts)
            before, begun = begun, compute + each.before
            compute = begun
            ready, shard, phase = [0.0, 0.0], 0, 0.0
            for count, product, number in zip(each.groups, each.products, range(len(each.groups)), strict=True):
                arrived, call = 0.0, each.call
                if each.together and each.hop:
                    link = arrived = max(link, room(largest)) + call + (ranks - 1) * each.hop
                for index in range(shard, shard + count):
                    if index == 0 or not each.hop or each.together:
                        continue
                    free = room(each.shard_bytes)
                    if waits:
                        free = max(free, before if index == 1 else begun)
                    if index % per_host:
                        link = arrived = max(link, free, phase) + call + each.hop
                        call = 0.0
                    else:
                        outer = arrived = phase = max(outer, free) + each.outer_hop
                compute = max(compute, arrived) + product
                used.append((sent, compute))
                parts = 2 if each.gradients == "halves" else 1
                if each.gradients in ("direct", "scatter"):
                    compute += each.wgrads[number]
                    if shard + 1 < ranks:
                        gradient_link = max(gradient_link, compute) + each.gradient_call
                if each.gradients == "scatter":
                    gradient_link += (ranks - 1) * each.gradient_hop
                for index in range(shard, shard + count) if each.gradients not in ("", "scatter") else ():
                    leaves = index + 1 < ranks
                    inside = (index + 1) % per_host != 0
                    if each.gradients == "direct":
                        if leaves and inside:
                            gradient_link = max(gradient_link, compute) + each.gradient_hop
                        elif leaves:
                            gradient_outer = max(gradient_outer, compute) + each.outer_gradient_hop
                        continue
                    for part in range(parts):
                        compute = max(compute, ready[part]) + each.wgrads[index] / parts
                        if leaves and inside:
                            gradient_link = max(gradient_link, compute) + each.gradient_hop / parts
                            ready[part] = gradient_link
                        elif leaves:
                            gradient_outer = max(gradient_outer, compute) + each.outer_gradient_hop / parts
                shard += count
            if each.late is not None and each.gradients in ("direct", "scatter"):
                landing.append(max(gradient_link, gradient_outer))
                while len(landing) > each.late:
                    compute = max(compute, landing.pop(0))
            compute += each.add
        compute = max(compute, landed)  # of the block before
        landed = max(gradient_link, gradient_outer)
        ends.append(compute)
    return ends


_BLOCKS, _FIRST = 4, 1  # simulated; from the second on they are alike


def block_seconds(operations: Sequence[Operation], look_ahead: float, hosts: int = 1) -> float:
    """Returns the seconds of one of many equal blocks of a pass (`block_ends`). Both kinds of hops share a link."""
    ends = block_ends(operations, look_ahead, hosts, _BLOCKS)
    inner = sum(
        (each.ranks - (each.hosts or hosts)) * (each.hop + each.gradient_hop * bool(each.gradients))
        for each in operations
    )
    inner += sum(each.calls * (each.call + each.gradient_call) for each in operations)
    between = sum(
        ((each.hosts or hosts) - 1) * (each.outer_hop + each.outer_gradient_hop * bool(each.gradients))
        for each in operations
    )
    return max((ends[-1] - ends[_FIRST]) / (_BLOCKS - 1 - _FIRST), inner, between)
