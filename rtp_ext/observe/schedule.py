"""The schedule of a rotation as text: a table of all ranks side by side.

csrc/schedule makes the schedule, and the executor runs the same object. Source: RTP, arXiv 2311.01635.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rtp_ext._rules import Schedule, Step, make_schedule, operation_kind
from rtp_ext.command_line import WIDTH
from rtp_ext.words import PassGradientRoute, PassRoute

__all__ = [
    "BUNDLES",
    "HALVES",
    "LARGEST_RING",
    "OPERATIONS",
    "TRAVELS",
    "check_rank",
    "describe",
    "lane",
    "schedule_of",
    "schedules",
    "table",
    "to_dict",
]

OPERATIONS = ("linear", "embedding", "mlp", "cross_entropy", "experts")
_KINDS = {op: operation_kind("linear cross-entropy" if op == "cross_entropy" else op) for op in OPERATIONS}
BUNDLES = tuple(op for op, kind in _KINDS.items() if kind.bundle)  # wgrad needs results of the dgrad of the same shard
TRAVELS = ("hop", "gather", "scatter")  # actions that move data between ranks
HALVES = ("", "a", "b")  # suffixes of a whole gradient shard and of its halves
LARGEST_RING = 512  # limit of `schedules`: all ranks of a ring of R ranks have some R * R steps


def schedules(ranks: int, **form: Any) -> list[Schedule]:
    """Returns the schedules of one pass of one operation, one for each rank of a ring of at most LARGEST_RING ranks.

    Args:
        ranks: the size of the ring, at least 1.
        form: the keywords of `schedule_of`.

    >>> print(rtp_ext.schedule.table(rtp_ext.schedule.schedules(2)))
    step   lane      rank 0             rank 1
    ----   -------   ----------------   ----------------
       0   weight    W0 -> 1, W1 <- 1   W1 -> 0, W0 <- 0
       1   compute   forward W0         forward W1
       2   compute   forward W1         forward W0

    Raises:
        ValueError: as `schedule_of`, or a ring that is too large.
    """
    if ranks > LARGEST_RING:
        raise ValueError(
            f"expected at most {LARGEST_RING} ranks where all schedules are made, some ranks * ranks steps, got "
            f"{ranks}; schedule_of makes that of one rank"
        )
    return [schedule_of(ranks, rank, **form) for rank in range(max(ranks, 1))]


def schedule_of(
    ranks: int,
    rank: int,
    *,
    op: str = "linear",
    pass_: str = "forward",
    route: PassRoute = "ring",
    in_place: bool = False,
    dgrad: bool | None = None,
    wgrad: bool = True,
    receive_in_slots: bool = False,
    halves: bool = False,
    two_lanes: bool = False,
    late: bool = False,
    hosts: int = 1,
    gradient_route: PassGradientRoute = "chain",
    narrow: bool = False,
    apart: bool = False,
    group: int = 1,
    collective: bool = False,
) -> Schedule:
    """Returns the schedule of one pass of one operation on rank `rank` of a ring of `ranks`.

    Args:
        ranks: the size of the ring, at least 1.
        op: ``"linear"``, ``"embedding"``, or one of the bundles ``"mlp"``, ``"cross_entropy"`` and ``"experts"``.
        pass_: ``"forward"`` or ``"backward"``.
        route: ``"ring"`` (every hop goes to the neighbour), ``"direct"`` (weights travel directly from their owner),
            ``"gather"`` (the direct route with all shards in one group), or
            ``"two-level"`` (shards rotate inside each host while every rank sends one to the next host).
        in_place: the local shard itself travels; one weight slot less, one more hop.
        dgrad: whether the backward computes the input's gradient; by default if the operation has one. The backward of
            a bundle always has dgrad steps, because wgrad needs their results.
        wgrad: whether the backward computes the weight's gradient.
        receive_in_slots: gradients arrive in slots only, as shared memory requires.
        halves: the gradients of a backward travel in two halves of their rows, each as an independent chain.
        two_lanes: forwards alternate between two streams, dgrads and wgrads have one each.
        late: the last gradient that arrives in a backward is added at its end, or after it.
        hosts: number of hosts of the route two-level, with equal numbers of neighbouring ranks.
        gradient_route: ``"chain"`` (a partial sum of each gradient travels along the ring) or ``"direct"`` (each
            contribution travels directly to its owner, which adds it; not on two ranks or two levels).
        apart: for the gradient route ``"direct"``: contributions arrive in a place each, and are added at the end.
        narrow: for the gradient route ``"direct"``: contributions travel in fewer bits than their sum has, and two
            ranks take this route too.
        group: shards in one product, 1 to `ranks`; a larger number means all. Not in place and on two levels.
        collective: a group of all shards arrives by one gather, and its gradients leave by one scatter; with the
            gradient route ``"chain"`` only.

    Raises:
        ValueError: an unknown name, fewer than one rank, a rank outside the ring, hosts that do not divide the ranks,
            a group without a shard, in_place on two levels, collectives with gradients on the route direct, or an input
            gradient of an embedding.
    """
    if op not in OPERATIONS:
        raise ValueError(f"expected an operation of {', '.join(OPERATIONS[:-1])} or {OPERATIONS[-1]}, got {op}")
    kind = _KINDS[op]
    if dgrad and not kind.dgrad:
        raise ValueError("expected dgrad=False for an embedding, whose input has no gradient, got dgrad=True")
    return make_schedule(
        ranks,
        rank,
        pass_=pass_,
        route=route,
        in_place=in_place,
        dgrad=kind.dgrad if dgrad is None else dgrad,
        wgrad=wgrad,
        receive_in_slots=receive_in_slots,
        bundle=kind.bundle,
        halves=halves,
        two_lanes=two_lanes,
        late=late,
        hosts=hosts,
        gradient_route=gradient_route,
        narrow=narrow,
        apart=apart,
        group=group,
        collective=collective,
    )


def lane(step: Step) -> str:
    """Returns the timeline row (stream) of a step: ``"weight"``, ``"gradient"`` (hops; between hosts, on two levels,
    ``"outer weight"`` and ``"outer gradient"``), ``"compute"`` or ``"side"`` (computes, copies, adds).

    The side stream computes in parallel to the other if a single GEMM leaves much of a GPU idle.
    """
    if step.action in TRAVELS:
        return f"outer {step.channel}" if step.outer else step.channel
    return "side" if step.lane else "compute"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _ignored(schedule: Schedule, *, op: str, pass_: str, halves: bool, two_lanes: bool, direct: bool) -> str:
    """Returns a text with the requested options that do not apply to a pass, and the reason."""
    if direct and schedule.gradient_route == "chain":
        few = "to two ranks" if schedule.ranks == 2 else "to one rank"
        why = "to a forward" if pass_ == "forward" else "without a weight gradient"
        if pass_ == "backward" and schedule.ranks <= 2:
            why = few
        elif schedule.route == "two-level":
            why = "on two levels"
        others = _ignored(schedule, op=op, pass_=pass_, halves=halves, two_lanes=two_lanes, direct=False)
        return f" (gradient route direct does not apply {why}){others}"
    wanted = {"halves": halves and not schedule.halves, "two lanes": two_lanes and not schedule.two_lanes}
    if pass_ == "forward" and wanted["halves"]:
        why = "to a forward"
    elif schedule.route == "two-level":
        why = "on two levels"
    elif wanted["halves"] and schedule.gradient_route == "direct":
        why = "where gradients go straight home"
    elif op in BUNDLES and schedule.halves == halves:
        why = "to a bundle"
    else:
        why = "in groups" if schedule.group > 1 else "without a weight gradient"
    names = " and ".join(name for name, ignored in wanted.items() if ignored)
    return f" ({names} do not apply {why})" if names else ""


def describe(
    schedules: Sequence[Schedule],
    *,
    op: str,
    pass_: str,
    route: PassRoute,
    in_place: bool,
    halves: bool = False,
    two_lanes: bool = False,
    hosts: int = 1,
    gradient_route: PassGradientRoute = "chain",
    group: int = 1,
) -> str:
    """Returns two lines: the pass, and the computes, hops and slots of each rank.

    The arguments are those of the call of `schedules`. The text names requested options that do not apply: in place,
    every hop goes to the neighbour.
    """
    first = schedules[0]
    computes: dict[str, int] = {}
    hops = {"weight": 0, "gradient": 0}
    for step in first.steps:
        if step.action == "compute":
            computes[step.compute] = computes.get(step.compute, 0) + 1
        elif step.action in TRAVELS:
            hops[step.channel] += 1
    selected = first.route
    if selected != route and (in_place or route == "two-level"):
        one = "to one host" if hosts == 1 else "to hosts of one rank"
        why = one if route == "two-level" else "in place"
        selected += f" ({route} does not apply {why})"
    elif selected == "two-level":
        selected += f" ({hosts} hosts of {first.ranks // hosts} ranks)"
    variant = "in place" if in_place else "out of place"
    if in_place and first.ranks > 1 and hops["weight"] == 0:
        variant, selected = "out of place (no weights travel)", selected if route == "gather" else route
    direct = first.gradient_route == "direct"
    variant += ", gradients in halves" * first.halves + ", two lanes" * first.two_lanes
    variant += ", gradients straight home" * direct + f", groups of {first.group}" * (first.group > 1)
    variant += f" (groups of {group} do not apply here)" * (first.group < min(group, first.ranks))
    requested = {"halves": halves, "two_lanes": two_lanes, "direct": gradient_route == "direct"}
    variant += _ignored(first, op=op, pass_=pass_, **requested)
    what = [f"{number} {kind}" for kind, number in computes.items()]
    what += [_count(hops[channel], f"{channel} hop") for channel in hops]
    outer = sum(step.outer for step in first.steps)
    what += [f"{outer} of them between hosts"] * (outer > 0)
    slots = [_slots(shards, channel) for shards, channel in zip(first.slot_shards, hops, strict=True)]
    return (
        f"{op} {pass_}, {_count(first.ranks, 'rank')}, route {selected}, {variant}\n"
        f"each rank: {', '.join(what)}; {', '.join(slots)}"
    )


def _slots(shards: Sequence[int], channel: str) -> str:
    """Returns "2 weight slots", and the largest number of shards in one where it is not 1."""
    group = max(shards, default=1)
    large = f" ({shards.count(group)} of {group} shards)" if group > 1 else ""
    return _count(len(shards), f"{channel} slot") + large


def table(schedules: Sequence[Schedule], *, title: str = "", rank: int | None = None) -> str:
    """Returns a table of computes and hops in order: a column for each rank, a line for each step. Ranks that do not
    fit into a terminal's line make a table of their own, below.

    Args:
        schedules: the schedules of all ranks, in order, as `schedules` returns them.
        title: lines above the table, usually those of `describe`.
        rank: show only this rank, with the buffers that each step reads and writes.

    Raises:
        ValueError: a rank outside the ring.
    """
    check_rank(schedules, rank)
    shown = schedules if rank is None else [schedules[rank]]
    rows = [["step", "lane", *(f"rank {schedule.rank}" for schedule in shown)]]
    if rank is not None:
        rows[0] += ["reads", "writes"]
    every = [schedule.steps for schedule in shown]  # read once: each reading copies all steps
    for position, step in enumerate(every[0]):
        row = [f"{position:4}", lane(step), *(steps[position].label for steps in every)]
        if rank is not None:
            ranks = shown[0].ranks
            row += [", ".join(step.reads(ranks)), ", ".join(step.writes(ranks))]
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    lines = []
    for chosen in _blocks(widths) if rank is None else [range(len(widths))]:
        lines += ["", *("   ".join(row[each].ljust(widths[each]) for each in chosen).rstrip() for row in rows)]
    return "\n".join([title, *lines] if title else lines[1:])


def _blocks(widths: Sequence[int]) -> list[list[int]]:
    """Returns the columns of tables that fit a terminal: step and lane, and as many ranks as there is room for."""
    blocks: list[list[int]] = []
    room = 0
    for column in range(2, len(widths)):
        if room < widths[column] + 3 or not blocks:
            blocks.append([0, 1])
            room = WIDTH - sum(widths[:2]) - 3
        blocks[-1].append(column)
        room -= widths[column] + 3
    return blocks


def to_dict(schedules: Sequence[Schedule], *, title: str = "", rank: int | None = None) -> dict[str, Any]:
    """Returns the same as values: for each rank its slots, and for each step its label, lane, and the names of buffers
    that it reads and writes. The arguments and errors are those of `table`."""
    check_rank(schedules, rank)
    shown = schedules if rank is None else [schedules[rank]]
    return {
        "title": title,
        "ranks": [
            {
                "rank": schedule.rank,
                "weight_slots": schedule.weight_slots,
                "gradient_slots": schedule.gradient_slots,
                "steps": [
                    {
                        "label": step.label,
                        "lane": lane(step),
                        "reads": step.reads(schedule.ranks),
                        "writes": step.writes(schedule.ranks),
                    }
                    for step in schedule.steps
                ],
            }
            for schedule in shown
        ],
    }


def check_rank(schedules: Sequence[Schedule], rank: int | None) -> None:
    """Raises ValueError for a rank outside the ring."""
    if rank is not None and not 0 <= rank < len(schedules):
        raise ValueError(f"expected 0 <= rank < {len(schedules)}, got {rank}")
