"""Figures of a trace: busy and waiting times of every pass, and the times that the schedule predicts."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rtp_ext._rules import Schedule, Step, make_schedule
from rtp_ext.observe.schedule import lane
from rtp_ext.observe.timeline import Event, timeline
from rtp_ext.ring.telemetry import Trace, TraceEvent, TracePass

HOPS = ("weight", "gradient")
COMPUTES = ("compute", "side")

Interval = tuple[float, float]

# -- intervals: sorted and disjoint ------------------------------------------------------------------------------------


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _common(first: list[Interval], second: list[Interval]) -> list[Interval]:
    both: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            both.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return both


def _length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _of(events: Iterable[TraceEvent]) -> list[Interval]:
    return _union((event.start, event.end) for event in events)


# -- figures -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """One pass on one rank, in seconds.

    Attributes:
        total: from the begin of the pass to its end.
        compute: time in which a compute stream worked on the pass.
        waiting: the cost of communication: time in which a compute stream waited for a hop, or on a CPU posted one,
            while no other stream computed.
        hops: time in which weights and gradients travelled, from posting to arrival.
        hidden: the fraction of that time without waiting; None if nothing travelled.
    """

    rank: int
    pass_: int
    operation: str
    total: float
    compute: float
    waiting: float
    hops: dict[str, float]
    hidden: float | None


def summaries(traces: Sequence[Trace]) -> list[Summary]:
    """Returns the figures of every finished pass, rank by rank."""
    made = []
    for trace in traces:
        busy = _of(event for event in trace.events if event.lane in COMPUTES and event.kind != "wait")
        waits = {
            each.number: [e for e in trace.events if e.pass_ == each.number and e.kind == "wait"]
            for each in trace.passes
        }
        waiting = {number: _of(events) for number, events in waits.items()}
        exposed = {number: _without(found, busy) for number, found in waiting.items()}
        everywhere = _union(interval for found in exposed.values() for interval in found)
        for each in trace.passes:
            if each.end != each.end:
                continue
            own = [event for event in trace.events if event.pass_ == each.number and event.kind != "wait"]
            hops = {name: _of(event for event in own if event.lane.endswith(name)) for name in HOPS}
            travelling = _union(interval for found in hops.values() for interval in found)
            under_way = _length(travelling)
            made.append(
                Summary(
                    trace.rank,
                    each.number,
                    each.operation,
                    each.end - each.start,
                    _length(_of(event for event in own if event.lane in COMPUTES)),
                    _length(exposed[each.number]),
                    {name: _length(found) for name, found in hops.items()},
                    1 - _length(_common(travelling, everywhere)) / under_way if under_way > 0 else None,
                )
            )
    return made


CAUSES = ("products", "conversions", "weights", "gradients", "slots", "posting", "ends", "collectives")


def cause_of(event: TraceEvent) -> str | None:
    """Returns the cause, one of `CAUSES`, for which a compute stream is busy or waits; None for a hop."""
    if event.lane not in COMPUTES:
        return None
    if event.kind != "wait":
        return "products" if event.kind == "step" and event.label.startswith(_PRODUCTS) else "conversions"
    if event.label.startswith(("wait: forward", "wait: dgrad")):
        return "weights"
    if event.label.startswith("wait: "):
        return "gradients"
    kinds = {"post": "posting", "end": "ends", "collective:": "collectives"}
    return kinds.get(event.label.split(" ", 1)[0], "slots")


_PRODUCTS = ("forward", "dgrad", "wgrad")


def causes(trace: Trace) -> dict[str, float]:
    """Returns the seconds that the compute streams of a rank spent on each of `CAUSES`, in passes and between them.

    `products`: GEMMs, with what an operation computes beside them. `conversions`: copies, casts, quantization,
    dequantization, additions of gradients that have arrived. The others are waits: for `weights`, pulled ones too, and
    `gradients` to arrive (for gradients also until they have left); for the earlier uses of `slots`; `posting` of hops;
    the `ends` of passes, until their last hops have left and arrived; `collectives` of torch.distributed, of parameters
    that do not rotate. The rest of a step is outside: autograd, operations that do not rotate, Python.
    """
    found = dict.fromkeys(CAUSES, 0.0)
    for event in trace.events:
        cause = cause_of(event)
        if cause is not None:
            found[cause] += event.end - event.start
    return found


def _without(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    edge = [(-float("inf"), -float("inf")), *others, (float("inf"), float("inf"))]
    gaps = [(before[1], after[0]) for before, after in itertools.pairwise(edge)]
    return _common(intervals, gaps)


# -- the prediction ----------------------------------------------------------------------------------------------------


def _schedules(trace: Trace, each: TracePass) -> list[Schedule]:
    return [make_schedule(trace.ranks, rank, **each.options) for rank in range(trace.ranks)]


def _hop_positions(schedule: Schedule) -> dict[str, list[int]]:
    positions: dict[str, list[int]] = {name: [] for name in HOPS}
    for position, step in enumerate(schedule.steps):
        if step.action == "hop":
            positions[step.channel].append(position)
    return positions


class _Durations:
    """Median durations of one pass over all ranks, by product, by channel, and by other action (copy, add)."""

    def __init__(self, traces: Sequence[Trace], number: int, schedules: Sequence[Schedule]) -> None:
        self.left: dict[tuple[int, str], float] = {}  # rank, label of a prefetched hop: its seconds within the pass
        steps = [schedule.steps for schedule in schedules]
        positions = [_hop_positions(schedule) for schedule in schedules]
        own = {
            (trace.rank, event.step): event
            for trace in traces
            for event in trace.events
            if event.pass_ == number and event.kind == "step"
        }
        one_clock = len({trace.host for trace in traces}) == 1
        taken: dict[str, list[float]] = {}
        for (rank, position), event in own.items():
            step, start = steps[rank][position], event.start
            if step.action == "hop" and one_clock:  # a hop starts when its sender has posted it
                index = positions[rank][step.channel].index(position)
                sender = own.get((step.from_, positions[step.from_][step.channel][index]))
                start = start if sender is None else min(max(start, sender.posted), event.end)
            taken.setdefault(self.key(step), []).append(event.end - start)
        self.medians = {key: statistics.median(each) for key, each in taken.items()}
        for trace in traces:
            first = positions[trace.rank]["weight"][:1]
            ahead = own.get((trace.rank, first[0])) if first else None
            begun = trace.passes[number].start
            if ahead is not None and ahead.start < begun:
                self.left[trace.rank, ahead.label] = max(0.0, ahead.end - begun)

    @staticmethod
    def key(step: Step) -> str:
        return {"compute": step.compute, "hop": lane(step)}.get(step.action, step.action)

    def __call__(self, rank: int, step: Step) -> float:
        median = self.medians.get(self.key(step), 0.0)
        if step.action == "hop":
            return min(median, self.left.get((rank, step.label), median))
        return median


def predict(traces: Sequence[Trace], number: int) -> list[Event]:
    """Returns the timeline of the schedule of pass `number` on all ranks, in seconds from its start.

    Each product, hop of a channel, and copy takes the median of those that were measured in this pass on all ranks. If
    the ranks share a clock, a hop is measured from the time when both its ends were posted. A prefetched first hop
    takes its remaining time at the begin of the pass. Ranks that were not recorded get the same durations.

    Raises ValueError for a pass that not all ranks recorded.
    """
    check_number(traces, number)
    schedules = _schedules(traces[0], traces[0].passes[number])
    durations = _Durations(traces, number, schedules)
    return timeline(schedules, compute_time=durations, hop_time=durations, copy_time=durations)


def check_number(traces: Sequence[Trace], number: int) -> None:
    if not traces or any(not 0 <= number < len(trace.passes) for trace in traces):
        counts = [len(trace.passes) for trace in traces]
        raise ValueError(f"expected the number of a pass that all ranks recorded, got {number} of {counts}")
