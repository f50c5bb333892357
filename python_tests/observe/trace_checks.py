"""The invariants of every trace: used on CPUs, on the simulated CUDA runtime and on GPUs."""

from __future__ import annotations

from itertools import pairwise

from rtp_ext._native import hazards, make_schedule
from rtp_ext.observe.timeline import LANES
from rtp_ext.ring.telemetry import Trace, TraceEvent, TracePass

ROUNDING = 1e-9  # seconds, of times as floating-point numbers


def from_raw(raw: tuple, rank: int, ranks: int) -> Trace:
    """A trace from what `Executor.read_trace` returns."""
    zero, captured, passes, events = raw
    trace = Trace(rank, ranks, "cpu", "simulated", "here", zero, captured)
    trace.passes = [TracePass(number, *each) for number, each in enumerate(passes)]
    trace.events = [
        TraceEvent(rank, lane, label, start, end, step, pass_, operation, kind, posted)
        for pass_, operation, step, kind, lane, label, start, end, posted in events
    ]
    return trace


def steps_of(trace: Trace, number: int) -> list[TraceEvent]:
    """The steps of a pass, in the order of its schedule."""
    own = [event for event in trace.events if event.pass_ == number and event.kind == "step"]
    return sorted(own, key=lambda event: event.step)


def check_trace(trace: Trace, tolerance: float = ROUNDING, *, ahead: bool = False) -> None:
    """Every step of every pass appears once, the steps of a lane run in order without overlap, and no step starts
    before its dependencies have ended. `tolerance`: seconds, of the clock. `ahead`: shards that are ahead arrive in
    slots of their own, from several ranks at once."""
    for each in trace.passes:
        where = f"rank {trace.rank}, pass {each.number}, {each.operation}"
        schedule = make_schedule(trace.ranks, trace.rank, **each.options)
        steps = steps_of(trace, each.number)
        assert [event.label for event in steps] == [step.label for step in schedule.steps], f"{where}: other steps"
        assert [event.step for event in steps] == list(range(len(schedule.steps))), f"{where}: not every step once"
        assert all(event.operation == each.operation for event in steps), where
        for event in steps:
            assert event.start <= event.end + tolerance, f"{where}: {event}"
            after = schedule.late and (event.lane == "gradient" or event.step == len(steps) - 1)
            assert after or event.end <= each.end + tolerance, f"{where}: {event}"
        for lane in LANES:
            own = [event for event in steps if event.lane == lane and not (ahead and lane == "weight")]
            assert all(a.start <= b.start + tolerance for a, b in pairwise(own)), f"{where}, {lane}: out of order"
        for event, waits in zip(steps, hazards(schedule.steps, schedule.ranks), strict=True):
            for earlier, which in waits:  # only the receiver records the end of a send
                if which != "sent" and not (ahead and event.lane == "weight" and which == "done"):
                    late = steps[earlier]
                    assert late.end <= event.start + tolerance, f"{where}: {event} before the end of {late}"
    for lane in LANES:
        ordered = sorted((event for event in trace.events if event.lane == lane), key=lambda event: event.start)
        before = ordered[0].start if ordered else 0.0
        for event in ordered:  # one that arrived while another was under way takes no time
            both = min(before, event.end) - event.start
            assert both <= tolerance, f"rank {trace.rank}, {lane}: {event} overlaps what lasts until {before}"
            before = max(before, event.end)


def check_arrivals(traces: list[Trace]) -> int:
    """With one clock for all ranks, no hop arrives before its sender has posted it. Returns the number of compared
    hops."""
    compared = 0
    for trace in traces:
        for each in trace.passes:
            schedules = [make_schedule(trace.ranks, rank, **each.options) for rank in range(trace.ranks)]
            hops = {
                (rank, channel): [
                    i
                    for i, step in enumerate(schedules[rank].steps)
                    if step.channel == channel and step.action == "hop"
                ]
                for rank in range(trace.ranks)
                for channel in ("weight", "gradient")
            }
            for event in steps_of(trace, each.number):
                step = schedules[trace.rank].steps[event.step]
                if step.action == "hop":
                    index = hops[trace.rank, step.channel].index(event.step)
                    sender = steps_of(traces[step.from_], each.number)[hops[step.from_, step.channel][index]]
                    assert sender.posted <= event.end, f"rank {trace.rank}: {event} arrived before {sender} left"
                    compared += 1
    return compared
