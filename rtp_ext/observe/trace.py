"""Measured traces of all ranks with their figures, compared with the prediction of the schedule.

    with ring.trace() as trace:
        loss = model(x).sum()
        loss.backward()
    traces = gather(ring, trace)
    if ring.rank == 0:
        print(report(traces))
        write_chrome("step.json", traces)  # for chrome://tracing and Perfetto
        plot("step.png", traces)

Source: RTP, arXiv 2311.01635; the format of the JSON file: Trace Event Format, Google.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from typing import Any

from rtp_ext._rules import make_schedule
from rtp_ext.observe.figures import CAUSES, HOPS, Summary, causes, check_number, predict, summaries
from rtp_ext.observe.timeline import LANES, draw_step, legend
from rtp_ext.ring.telemetry import Trace, TraceEvent, TracePass

__all__ = ["CAUSES", "Summary", "causes", "gather", "plot", "predict", "report", "summaries", "write_chrome"]


def gather(ring: Any, trace: Trace) -> list[Trace]:
    """Returns the traces of all ranks in ring order, with times in seconds on the clock of rank 0. Collective.

    Ranks of one host share its clock. Ranks of other hosts are aligned only by their common start after an exchange. An
    emulated ring has one rank.
    """
    if ring.mesh is None:
        return [trace]
    traces: list[Trace] = ring.exchange(trace)
    return [_shifted(each, each.zero - traces[0].zero) if each.host == traces[0].host else each for each in traces]


def _shifted(trace: Trace, seconds: float) -> Trace:
    def moved(each: Any, *times: str) -> Any:
        return dataclasses.replace(each, **{name: getattr(each, name) + seconds for name in times})

    passes = [moved(each, "start", "end") for each in trace.passes]
    events = [moved(each, "start", "end", "posted") for each in trace.events]
    return dataclasses.replace(trace, zero=trace.zero - seconds, passes=passes, events=events)


def kind_of(operation: str) -> str:
    """Returns the name of an operation with `*` for the numbers in its module's path: `blocks.*.mlp forward`."""
    return re.sub(r"(^|(?<=\.))\d+(?=[. ])", "*", operation)


def report(traces: Sequence[Trace]) -> str:
    """Returns a table of all operations: milliseconds of all their passes, averaged over the ranks.

    Layers whose names differ only in numbers share a line.
    """
    found = summaries(traces)
    columns = ("passes", "total", "compute", "waiting", "w hops", "g hops", "hidden")
    names = list(dict.fromkeys(kind_of(each.operation) for each in found))
    width = max(map(len, ["operation (ms)", *names]))
    lines = [f"{'operation (ms)':<{width}}" + "".join(f"{column:>10}" for column in columns)]
    for name in names:
        own = [each for each in found if kind_of(each.operation) == name]
        hops = [sum(each.hops[channel] for each in own) for channel in HOPS]
        hidden = sum(each.hidden * sum(each.hops.values()) for each in own if each.hidden is not None)
        sums = [sum(each.total for each in own), sum(each.compute for each in own), sum(each.waiting for each in own)]
        cells = [f"{1e3 * value / len(traces):>10.3f}" for value in (*sums, *hops)]
        share = f"{hidden / sum(hops):>10.0%}" if sum(hops) > 0 else f"{'-':>10}"
        lines.append(f"{name:<{width}}{len(own) // len(traces):>10}" + "".join(cells) + share)
    return "\n".join(lines)


# -- files -------------------------------------------------------------------------------------------------------------


def write_chrome(path: str | os.PathLike[str], traces: Sequence[Trace]) -> None:
    """Writes the traces for chrome://tracing or Perfetto: a process for each rank, a thread for each of its streams and
    one for the passes. Times are microseconds."""
    used = {event.lane for trace in traces for event in trace.events}
    threads = ("pass", *(lane for lane in LANES if lane in used or not lane.startswith("outer")))
    events: list[dict[str, Any]] = []
    for trace in traces:
        name = f"rank {trace.rank}"
        events.append({"name": "process_name", "ph": "M", "pid": trace.rank, "args": {"name": name}})
        for number, thread in enumerate(threads):
            place = {"ph": "M", "pid": trace.rank, "tid": number}
            events.append({"name": "thread_name", **place, "args": {"name": thread}})
            events.append({"name": "thread_sort_index", **place, "args": {"sort_index": number}})
        for each in trace.passes:
            if each.end == each.end:
                arguments = {"pass": each.number, **each.options}
                events.append(_complete(each.operation, "pass", each, trace.rank, 0, arguments))
        for event in trace.events:
            arguments = {"pass": event.pass_, "operation": event.operation, "step": event.step}
            events.append(_complete(event.label, event.kind, event, trace.rank, threads.index(event.lane), arguments))
    about = {"ranks": traces[0].ranks, "device": traces[0].device, "transport": traces[0].transport}
    with open(path, "w") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}, file)


def _complete(
    name: str, category: str, span: TracePass | TraceEvent, rank: int, thread: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6}
    return {"name": name, "cat": category, "ph": "X", "pid": rank, "tid": thread, **times, "args": arguments}


def most_exposed(traces: Sequence[Trace], rank: int, most: int = 6) -> list[int]:
    """Returns, for the `most` lines of `report` that waited longest for hops on `rank`, their longest waiting pass."""
    worst: dict[str, Summary] = {}
    for each in summaries([trace for trace in traces if trace.rank == rank]):
        kind = kind_of(each.operation)
        if kind not in worst or each.waiting > worst[kind].waiting:
            worst[kind] = each
    longest = sorted(worst.values(), key=lambda each: -each.waiting)[:most]
    return sorted(each.pass_ for each in longest)


MARGIN = 0.15  # largest fraction of a pass that is shown before its begin, for a prefetched hop
_WAIT: dict[str, Any] = {"facecolor": "#f6c9c4", "edgecolor": "#a01010", "hatch": "xxxx", "linewidth": 0.7}
_STAGE: dict[str, Any] = {"facecolor": "#e9e2f2", "edgecolor": "#222222", "linewidth": 0.7}
_OTHER: dict[str, Any] = {"facecolor": "#dddddd", "edgecolor": "#999999", "linewidth": 0.5}


def plot(
    path: str | os.PathLike[str],
    traces: Sequence[Trace],
    *,
    title: str = "",
    rank: int = 0,
    passes: Sequence[int] | None = None,
) -> None:
    """Draws the measured passes of one rank below the timelines of `predict` into an image file.

    Waiting for a hop is hatched in red. Hops and computes of other passes at the same time are grey. A prefetched hop
    starts before its pass, at a negative time, and is cut off if it is long.

    Args:
        title: title of the page.
        rank: the rank to draw.
        passes: numbers of the passes; default: six by `most_exposed`.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: a rank without a recording, or the number of a pass that not all ranks recorded.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install 'rtp-ext[plot]'") from error
    mine = next((trace for trace in traces if trace.rank == rank), None)
    if mine is None:
        raise ValueError(f"expected one of the ranks {[trace.rank for trace in traces]}, got {rank}")
    numbers = most_exposed(traces, rank) if passes is None else list(passes)
    if not numbers:
        raise ValueError("expected at least one pass that was recorded, got none")
    for number in numbers:
        check_number(traces, number)
    found = {each.pass_: each for each in summaries([mine])}
    lanes = [name for name in LANES if any(event.lane == name for event in mine.events)]
    width, margin, panel = 12.0, 1.35, 0.3 * (2 * len(lanes) + 0.6) + 0.8  # inches
    page, height = width + margin + 0.15, panel * len(numbers) + 0.75
    figure = Figure(figsize=(page, height), dpi=150)
    FigureCanvasAgg(figure)
    seen: set[str] = set()
    for place, number in enumerate(numbers):
        bottom = height - 0.4 - panel * (place + 1) + 0.35
        box = (margin / page, bottom / height, width / page, (panel - 0.7) / height)
        seen |= _panel(figure.add_axes(box), traces, mine, number, found.get(number), lanes, width)
    schedules = [make_schedule(mine.ranks, rank, **mine.passes[number].options) for number in numbers]
    patches = legend(seen, [step for schedule in schedules for step in schedule.steps])
    extra = {"waiting for a hop": _WAIT, "copy of home, before it travels": _STAGE, "of another pass": _OTHER}
    patches += [Patch(label=name, **look) for name, look in extra.items() if name in seen]
    figure.legend(handles=patches, loc="lower center", ncols=len(patches), fontsize=7, frameon=False)
    about = title or f"rank {rank} of {mine.ranks}, {mine.transport}, {mine.device}"
    figure.text(0.15 / page, 1 - 0.1 / height, about, fontsize=10, va="top", weight="bold")
    figure.savefig(path)


def _panel(
    axes: Any,
    traces: Sequence[Trace],
    mine: Trace,
    number: int,
    figures: Summary | None,
    lanes: list[str],
    width: float,
) -> set[str]:
    """Draws one pass; returns the names of the drawing styles that it used."""
    each = mine.passes[number]
    steps = make_schedule(mine.ranks, mine.rank, **each.options).steps
    predicted = [event for event in predict(traces, number) if event.rank == mine.rank]
    own = [event for event in mine.events if event.pass_ == number]
    expected = max((event.end for event in predicted), default=0.0)
    end = max([each.start + expected, each.start + 1e-9, *(event.end for event in own)])
    first = min([each.start, *(event.start for event in own)])
    begin = max(first, each.start - MARGIN * (end - each.start))
    scale = width / (end - begin) / 1e3  # inches a millisecond

    def ms(seconds: float) -> float:
        return (seconds - each.start) * 1e3

    rows = {(band, lane): lanes.index(lane) + band * (len(lanes) + 0.6) for band in (0, 1) for lane in lanes}
    for (band, lane), top in rows.items():
        axes.broken_barh([(ms(begin), ms(end) - ms(begin))], (top, 1), facecolor="#f4f4f4", edgecolor="none", zorder=0)
        axes.text(ms(begin) - 0.05 / scale, top + 0.5, lane, ha="right", va="center", fontsize=7, color="#444444")
        if lane == lanes[0]:
            where = {"ha": "center", "va": "center", "rotation": 90, "fontsize": 8}
            axes.text(ms(begin) - 1.05 / scale, top + len(lanes) / 2, ("predicted", "measured")[band], **where)
    seen: set[str] = set()

    def box(name: str, look: dict[str, Any], event: TraceEvent, start: float, stop: float) -> None:
        area = (ms(start), ms(stop) - ms(start))
        axes.broken_barh([area], (rows[1, event.lane] + 0.06, 0.88), zorder=1, **look)
        seen.add(name)

    for promised in predicted:
        if promised.end > promised.start and promised.lane in lanes:
            top = rows[0, promised.lane]
            seen.add(draw_step(axes, steps[promised.step], promised.start * 1e3, promised.end * 1e3, top, scale))
    for event in mine.events:
        start, stop = max(event.start, begin), min(event.end, end)
        if start >= stop:
            continue
        if event.pass_ != number:
            box("of another pass", _OTHER, event, start, stop)
        elif event.kind == "wait":
            box("waiting for a hop", _WAIT, event, start, stop)
        elif event.kind == "stage":
            box("copy of home, before it travels", _STAGE, event, start, stop)
        else:
            seen.add(draw_step(axes, steps[event.step], ms(start), ms(stop), rows[1, event.lane], scale))
    for moment in {0.0, ms(each.end) if each.end == each.end else 0.0}:
        axes.axvline(moment, ymax=len(lanes) / (2 * len(lanes) + 0.6), color="#222222", linewidth=0.8, zorder=4)
    text = f"pass {number}: {each.operation}, predicted {expected * 1e3:.3g} ms"
    if figures is not None:
        text += f", measured {figures.total * 1e3:.3g} ms; waiting for hops {figures.waiting * 1e3:.3g} ms"
        text += "" if figures.hidden is None else f"; {figures.hidden:.0%} of their time hidden"
    if first < each.start:
        text += f"; the first sent {(each.start - first) * 1e3:.3g} ms ahead"
    axes.set_title(text, fontsize=8, loc="left", pad=3)
    axes.set(xlim=(ms(begin), ms(end)), ylim=(2 * len(lanes) + 0.6, 0), yticks=[])
    axes.tick_params(labelsize=6, pad=1, length=2)
    axes.set_xlabel("ms", fontsize=6, loc="right", labelpad=0)
    axes.spines[["left", "right", "top"]].set_visible(False)
    return seen
