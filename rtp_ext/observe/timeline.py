"""Timelines of a rotation: a simulator of the streams of a schedule, and plots of its events.

Source: RTP, arXiv 2311.01635.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rtp_ext._rules import Schedule, Step, hazards
from rtp_ext.observe.schedule import HALVES, TRAVELS, check_rank, lane

__all__ = ["Event", "Lockstep", "plot", "timeline"]

LANES = ("compute", "side", "weight", "gradient", "outer weight", "outer gradient")

LARGEST_RING = 128  # limit of `timeline`: all ranks of a ring of R ranks have some R * R steps

Duration = float | Callable[[int, Step], float]


@dataclass(frozen=True)
class Event:
    """One step of a timeline: rank, row (stream) of the plot, begin and end in the unit of the given durations."""

    rank: int
    lane: str
    label: str
    start: float
    end: float
    step: int


class _Simulator:
    """Simulates the schedules of all ranks. Steps of a stream run in order; a hop starts when both ends are ready."""

    def __init__(
        self,
        schedules: Sequence[Schedule],
        compute_time: Duration,
        hop_time: Duration,
        copy_time: Duration,
        outer_time: Duration,
    ):
        self.steps = [list(schedule.steps) for schedule in schedules]
        self.times = {"compute": compute_time, "hop": hop_time, "copy": copy_time, "add": copy_time}
        self.times |= {"outer hop": outer_time, "gather": hop_time, "scatter": hop_time}
        self.waits = [hazards(schedule.steps, schedule.ranks) for schedule in schedules]
        self.queues: dict[tuple[int, str], list[int]] = {
            (rank, name): [position for position, step in enumerate(steps) if lane(step) == name]
            for rank, steps in enumerate(self.steps)
            for name in LANES
        }
        self.heads = dict.fromkeys(self.queues, 0)
        self.free = dict.fromkeys(self.queues, 0.0)
        self.ready: dict[tuple[int, str, int], float] = {}  # by rank, stream, index of the hop in that stream
        self.ends: dict[tuple[int, int, str], float] = {}  # by rank, position, kind of end

    def duration(self, rank: int, step: Step) -> float:
        time = self.times["outer hop" if step.outer else step.action]
        if callable(time):
            return time(rank, step)
        return time * _shards(step, len(self.steps))

    def earliest(self, rank: int, name: str, position: int) -> float | None:
        """Returns when the first pending step of a stream may start; None while a step that it waits for is pending."""
        earliest = self.free[rank, name]
        for earlier, which in self.waits[rank][position]:
            end = self.ends.get((rank, earlier, which))
            if end is None:
                return None
            earliest = max(earliest, end)
        return earliest

    def partner(self, step: Step, rank: int, index: int, *, sends: bool) -> tuple[Step, float] | None:
        """Returns the matching step at the other end of a hop and the time when it is ready; None while it is not."""
        peer = step.to if sends else step.from_
        ready = self.ready.get((peer, lane(step), index))
        if ready is None:
            return None
        other = self.steps[peer][self.queues[peer, lane(step)][index]]
        return (other, ready) if rank == (other.from_ if sends else other.to) else None

    def place(self, rank: int, name: str) -> Event | None:
        """Returns the event of the first pending step of a stream; None while it must wait for another step."""
        index = self.heads[rank, name]
        if index == len(self.queues[rank, name]):
            return None
        position = self.queues[rank, name][index]
        step = self.steps[rank][position]
        start = self.earliest(rank, name, position)
        if start is None:
            return None
        if step.action in TRAVELS:
            self.ready[rank, name, index] = start
        if step.action in ("gather", "scatter"):
            others = [self.ready.get((peer, name, index)) for peer in range(len(self.steps))]
            if None in others:
                return None
            start = max(other for other in others if other is not None)
            end = start + self.duration(rank, step)
            self.ends |= {(rank, position, "received"): end, (rank, position, "sent"): end}
        elif step.action == "hop":
            source = self.partner(step, rank, index, sends=False)
            target = self.partner(step, rank, index, sends=True)
            if source is None or target is None:
                return None
            received = max(start, source[1]) + self.duration(rank, step)
            sent = max(start, target[1]) + self.duration(step.to, target[0])
            self.ends[rank, position, "received"] = received
            self.ends[rank, position, "sent"] = sent
            start, end = max(start, min(source[1], target[1])), max(received, sent)
        else:
            end = start + self.duration(rank, step)
            self.ends[rank, position, "done"] = end
        self.heads[rank, name] += 1
        self.free[rank, name] = end
        return Event(rank, name, step.label, start, end, position)

    def run(self) -> Iterator[Event]:
        placed = True
        while placed:
            placed = False
            for rank, name in self.queues:
                while (event := self.place(rank, name)) is not None:
                    placed = True
                    yield event
        stuck = [
            f"rank {rank} at step {queue[self.heads[rank, name]]}"
            for (rank, name), queue in self.queues.items()
            if self.heads[rank, name] < len(queue)
        ]
        if stuck:
            raise ValueError(f"expected schedules that come to an end, got a deadlock: {', '.join(stuck)}")


def timeline(
    schedules: Sequence[Schedule],
    *,
    compute_time: Duration = 1.0,
    hop_time: Duration = 0.5,
    copy_time: Duration = 0.0,
    outer_time: Duration | None = None,
) -> list[Event]:
    """Returns the begin and end of every step of every rank, if only the schedule delays them.

    Each rank has parallel streams: computes (with copies and adds), weight hops, gradient hops, on two levels both
    kinds of hops between hosts, and, with two compute streams, a side stream. The steps of a stream run in order. A hop
    starts when both ends have reached it and its buffers are free; a compute starts when its inputs have arrived. The
    simulator does not model that parallel computes share a device: for two compute streams a timeline shows the order,
    not the speed.

    >>> events = rtp_ext.timeline.timeline(rtp_ext.schedule.schedules(4), compute_time=1.0, hop_time=0.5)
    >>> max(event.end for event in events)  # the hops are hidden
    4.0

    With constant durations, where w and g are hops of weights and gradients and R ranks take part:

        forward                 compute + (R - 1) max(compute, w)
        the same in place       R max(compute, w), with the hop that returns the shard to its owner
        backward                2 R compute + (R - 1) max(0, g - compute, w - 2 compute)
        the same in halves      2 R compute + (R - 1) max(0, g - 2 compute, w - 2 compute)
        backward of a bundle    R compute + R max(compute, hop) + copy, for R > 1 and w = g = hop
        forward in one group    copy + (R - 1) w + R compute
        backward in one group   max(start + R compute, copy + R compute + g) + (R - 1) copy + (R - 2) g, for R > 1,
                                where start = copy + max(copy + R compute, (R - 1) w)

    A gather or scatter takes as long as R - 1 hops, from when the last rank has come to it:

        forward by collectives  copy + (R - 1) w + R compute
        backward by collectives 2 copy + R compute + max(R compute, (R - 1) w, (R - 1) g)

    On two levels, K hosts of G ranks, where w and g are hops inside a host, W and H hops of weights and gradients
    between hosts, and P is the time of one phase:

        forward                 P + (K - 1) max(P, W), where P = compute + (G - 1) max(compute, w)
        backward                P + (K - 1) max(P, W, H), where P = 2 G compute + (G - 1) max(0, g - compute),
                                for w <= 2 compute, and additions that take no time
        backward of a bundle    P + max(P, W) + (K - 2) max(P, W, H + compute + copy) + H + copy, where
                                P = 2 G compute + copy, for w, g <= compute

    If a hop inside a host exceeds these limits, a later phase may begin it before the previous phase ends, and take
    less time.

    Args:
        schedules: the schedules of all ranks, in order, as `schedules` returns them.
        compute_time, hop_time, copy_time, outer_time: durations in one common unit, or functions
            ``(rank, step) -> duration``. A constant is the duration of one shard: a step of half a gradient takes half
            of it, a product of a group that of its shards. The duration of a hop is that of its receiver. copy_time
            applies to copies and adds, outer_time to hops between hosts (default: hop_time).

    Returns:
        Events ordered by start, rank and row.

    Raises:
        ValueError: a negative duration, schedules that are not those of one whole ring of at most LARGEST_RING ranks,
            or schedules that deadlock.
    """
    if len(schedules) > LARGEST_RING:
        raise ValueError(
            f"expected at most {LARGEST_RING} ranks to simulate together, some ranks * ranks steps, got "
            f"{len(schedules)}; where all ranks take equally long, Lockstep simulates one of them"
        )
    if [schedule.rank for schedule in schedules] != list(range(len(schedules))) or any(
        schedule.ranks != len(schedules) for schedule in schedules
    ):
        got = [f"{schedule.rank} of {schedule.ranks}" for schedule in schedules]
        raise ValueError(f"expected the schedules of all ranks of one ring in order, got ranks {', '.join(got)}")
    outer_time = hop_time if outer_time is None else outer_time
    times = {"compute_time": compute_time, "hop_time": hop_time, "copy_time": copy_time, "outer_time": outer_time}
    for name, time in times.items():
        if not callable(time) and not 0 <= time < math.inf:
            raise ValueError(f"expected a finite {name} >= 0, got {time}")
    events = _Simulator(schedules, **times).run()
    return sorted(events, key=lambda event: (event.start, event.rank, LANES.index(event.lane), event.step))


def _shards(step: Step, ranks: int) -> float:
    """Returns how many shards a step moves or multiplies."""
    if step.action in ("gather", "scatter"):
        return ranks - 1.0
    return 0.5 if step.half else float(step.owners)


class Lockstep:
    """A timeline of a ring whose ranks have equal durations, in one pass over the steps of one rank.

    The schedules of a ring are rotations of each other: with equal durations every rank reaches step i at the same
    time, both ends of a hop are ready at once, and one rank represents all.
    """

    def __init__(self, schedule: Schedule):
        lanes = [LANES.index(lane(step)) for step in schedule.steps]
        waits = [tuple({earlier for earlier, _ in needed}) for needed in hazards(schedule.steps, schedule.ranks)]
        kinds = [_look(step) for step in schedule.steps]
        parts = [_shards(step, schedule.ranks) for step in schedule.steps]
        self._steps = tuple(zip(kinds, parts, lanes, waits, strict=True))
        self._schedule = schedule

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of every step, a key of `durations` below."""
        return tuple(kind for kind, *_ in self._steps)

    @property
    def parts(self) -> tuple[float, ...]:
        """The shards of every step: 0.5 where it moves or multiplies half of one."""
        return tuple(part for _, part, *_ in self._steps)

    def makespan(self, durations: Mapping[str, float], *, by_host: bool = False) -> float:
        """Returns the end of the last step; see `events`. by_host: the thread that computes also posts the hops, as on
        CPUs, and waits before each until what it sends is there and its slot is free."""
        return max(self._ends(durations, by_host), default=0.0)

    def events(self, durations: Mapping[str, float]) -> list[Event]:
        """Returns the begin and end of every step, in the order of the schedule.

        Args:
            durations: of `forward`, `dgrad` and `wgrad` (computes), `weight` and `gradient` (hops), `outer weight` and
                `outer gradient` (hops between hosts), `copy` and `add`, in one common unit, if the schedule has them.
                Steps on half of the rows take half as long, products of a group as many times as it has shards.

        Raises:
            KeyError: a duration is missing.
        """
        events = []
        for index, (end, row) in enumerate(zip(self._ends(durations), self._steps, strict=True)):
            kind, part, which, _ = row
            step = self._schedule.steps[index]
            start = max(0.0, end - part * durations[kind])
            events.append(Event(self._schedule.rank, LANES[which], step.label, start, end, index))
        return events

    def _ends(self, durations: Mapping[str, float], by_host: bool = False) -> list[float]:
        free = [0.0] * len(LANES)
        ends: list[float] = []
        for kind, part, which, waits in self._steps:
            start = free[0] if by_host else free[which]
            for earlier in waits:
                if ends[earlier] > start:
                    start = ends[earlier]
            if by_host:
                free[0] = start
                start = max(start, free[which])
            free[which] = start + part * durations[kind]
            ends.append(free[which])
        return ends


# The styles differ in lightness and hatching, so that they are distinct in black and white too.
LOOKS: dict[str, dict[str, Any]] = {
    "forward": {"facecolor": "#d6e6f5"},
    "dgrad": {"facecolor": "#d6e6f5"},
    "wgrad": {"facecolor": "#f2b366"},
    "copy": {"facecolor": "#ffffff"},
    "add": {"facecolor": "#7a7a7a", "color": "white"},
    "weight": {"facecolor": "#1f4e79", "color": "white"},
    "gradient": {"facecolor": "#ffffff", "hatch": "////"},
    "outer weight": {"facecolor": "#0b1d2e", "color": "white"},
    "outer gradient": {"facecolor": "#ffffff", "hatch": "xxxx"},
}


def _look(step: Step) -> str:
    if step.action in TRAVELS:
        return lane(step)
    return step.compute if step.action == "compute" else step.action


def _caption(step: Step) -> str:
    half = HALVES[step.half]
    if step.action == "compute":
        letter = "G" if step.compute == "wgrad" else "W"
        return f"{step.compute}\n{letter}{step.owner}{half}" + f"+{step.owners - 1}" * (step.owners > 1)
    if step.action in ("gather", "scatter"):
        return f"all {'W' if step.channel == 'weight' else 'G'}"
    return f"{'+' if step.action == 'add' else ''}{'W' if step.channel == 'weight' else 'G'}{step.receive_owner}{half}"


def _targets(steps: Sequence[Step], action: str) -> str:
    """Returns the destinations of the copies or additions of a schedule, for the legend."""
    buffers = [step.receive or "" for step in steps if step.action == action]
    places = {"to slot": any("slot" in buffer for buffer in buffers)}
    places["home" if action == "copy" else "to home"] = any("home" in buffer for buffer in buffers)
    return f"{action} {' and '.join(place for place, named in places.items() if named)}"


def draw_step(axes: Any, step: Step, start: float, end: float, top: float, scale: float) -> str:
    """Draws a step as a box in the row at `top`, with a caption if it fits; returns the name of its style.

    scale: inches of the page for one unit of time.
    """
    name = _look(step)
    look = dict(LOOKS[name])
    ink = look.pop("color", "black")
    axes.broken_barh([(start, end - start)], (top + 0.06, 0.88), edgecolor="#222222", linewidth=0.7, zorder=2, **look)
    caption = _caption(step)
    size = min(7.0, 72 * (end - start) * scale / (0.68 * max(map(len, caption.split("\n"))) + 0.4))
    if size >= 4:
        backing = {"facecolor": "white", "edgecolor": "none", "pad": 0.6} if "hatch" in look else None
        style = {"ha": "center", "va": "center", "linespacing": 0.95, "fontsize": size, "color": ink}
        axes.text((start + end) / 2, top + 0.5, caption, bbox=backing, zorder=3, **style)
    return name


def legend(seen: set[str], steps: Sequence[Step]) -> list[Any]:
    """Returns legend patches for the styles in `seen`, which `steps` use."""
    from matplotlib.patches import Patch

    names = {name: f"{name} hop (what arrives)" for name in LANES[2:]}
    names |= {action: _targets(steps, action) for action in ("copy", "add")}
    return [
        Patch(label=names.get(name, name), edgecolor="#222222", **{k: v for k, v in look.items() if k != "color"})
        for name, look in LOOKS.items()
        if name in seen
    ]


def plot(
    path: str | os.PathLike[str],
    schedules: Sequence[Schedule],
    *,
    title: str = "",
    compute_time: Duration = 1.0,
    hop_time: Duration = 0.5,
    copy_time: Duration = 0.0,
    outer_time: Duration | None = None,
    rank: int | None = None,
) -> None:
    """Draws `timeline` into an image file: a band for each rank with a row for each stream, a box for each step.

    A hop is drawn at its receiver and named after the shard that it carries. Besides the file, the title and `rank`,
    the rank to draw (default: all), the arguments are those of `timeline`.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: as `timeline`, or a rank outside the ring.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install 'rtp-ext[plot]'") from error

    events = timeline(
        schedules, compute_time=compute_time, hop_time=hop_time, copy_time=copy_time, outer_time=outer_time
    )
    check_rank(schedules, rank)
    ranks = [rank] if rank is not None else list(range(len(schedules)))
    lanes = [name for name in LANES if any(event.lane == name for event in events)]
    end = max(event.end for event in events) or 1.0
    shown = schedules[ranks[0]].steps
    computes = [event for event in events if event.rank == ranks[0] and shown[event.step].action == "compute"]
    busy = max(sum(event.end - event.start for event in computes if event.lane == name) for name in LANES)
    width = min(max(7.0, 0.78 * len(computes) * end / (busy or end)), 40.0)
    band = len(lanes) + 0.6  # rows are one unit high, bands are 0.6 apart
    page, height = width + 1.25, 0.34 * band * len(ranks) + 1.35  # inches; the bands and their margins
    figure = Figure(figsize=(page, height), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((1.1 / page, 0.75 / height, width / page, (height - 1.35) / height))

    rows = {(which, name): ranks.index(which) * band + lanes.index(name) for which in ranks for name in lanes}
    for (which, name), top in rows.items():
        axes.broken_barh([(0, end)], (top, 1), facecolor="#f1f1f1", edgecolor="none", zorder=0)
        axes.text(-0.06 * end / width, top + 0.5, name, ha="right", va="center", fontsize=7, color="#444444")
        if name == lanes[0]:
            middle = top + len(lanes) / 2
            axes.text(-0.85 * end / width, middle, f"rank {which}", ha="center", va="center", rotation=90, fontsize=9)
    seen: set[str] = set()
    steps = {which: schedules[which].steps for which in ranks}  # read once: each reading copies all steps
    for event in events:
        if event.rank not in ranks or event.end == event.start:
            continue
        step = steps[event.rank][event.step]
        seen.add(draw_step(axes, step, event.start, event.end, rows[event.rank, event.lane], width / end))
    axes.set(xlim=(0, 1.002 * end), ylim=(len(ranks) * band - 0.6, 0), yticks=[])
    axes.tick_params(labelsize=7)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.set_xlabel(f"time ({end:g} in all, {busy:g} without communication)", fontsize=8)
    patches = legend(seen, shown)
    figure.legend(handles=patches, loc="lower center", ncols=len(patches), fontsize=7, frameon=False, columnspacing=1.5)
    first, _, rest = title.partition("\n")
    figure.text(0.15 / page, 1 - 0.12 / height, first, fontsize=10, va="top", weight="bold")
    figure.text(0.15 / page, 1 - 0.32 / height, rest, fontsize=8, va="top", color="#444444")
    figure.savefig(path)
