"""From the command's arguments to what the figures of the page show. Every number is one that the command prints, or a
ratio of two of them."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rtp_ext.command_line import PROGRAM
from rtp_ext.observe.timeline import Event
from rtp_ext.planner import cli
from rtp_ext.planner.app.settings import parsed
from rtp_ext.planner.constants import TimeConstants, constants
from rtp_ext.planner.display.text import no_plan_fits, why_no_ring
from rtp_ext.planner.memory.report import MemoryReport
from rtp_ext.planner.plan_text import name_of
from rtp_ext.planner.plans.differences import differences_line
from rtp_ext.planner.plans.search import Plan, search
from rtp_ext.planner.plans.when import Cell
from rtp_ext.planner.specs.cluster import Cluster
from rtp_ext.planner.specs.model import ModelSpec
from rtp_ext.planner.specs.strategy import Strategy
from rtp_ext.planner.time.report import TimeReport
from rtp_ext.planner.time.stage import StageClock

_LARGEST_DRAWN = 32  # ranks of a ring whose timeline is readable
_HEAD = "from rtp_ext.planner import Cluster, ModelSpec"


@dataclass(frozen=True)
class Row:
    """One plan: its kind in words, all its fields that differ from the defaults, those that not all plans have, its
    memory and time."""

    title: str
    name: str
    own: str
    strategy: Strategy
    memory: MemoryReport
    time: TimeReport


@dataclass(frozen=True)
class View:
    """The plans of the page, and what reproduces them.

    Attributes:
        unlike: the settings in which the plans differ other than the layout; empty where there are none.
        sizes: the arguments that name a model by its sizes, or a file of a cluster.
        command, python: print the numbers of all rows.
    """

    model: ModelSpec
    cluster: Cluster
    rows: tuple[Row, ...]
    verdict: str
    detail: str
    unlike: str
    sizes: tuple[str, ...]
    command: str
    python: str


@dataclass(frozen=True)
class Found:
    """The result of a search, and what reproduces it.

    Attributes:
        names: the fields of each plan that differ from the defaults.
        message: where the first ring stands, or why there are no plans.
        unlike: the settings in which the plans differ other than the layout.
    """

    plans: tuple[Plan, ...]
    names: tuple[str, ...]
    message: str
    unlike: str
    command: str
    python: str


@dataclass(frozen=True)
class Pass:
    """One pass of a rotated operation on one rank of a ring.

    Attributes:
        seconds: of the timeline; with `chunks` it runs that many times.
        step_seconds: of the pass in the predicted step: at least the timeline, since concurrent products share a GPU.
        unsplit_seconds: of the same products with the whole weight, without a ring.
    """

    operation: str
    pass_: str
    ranks: int
    chunks: int
    events: tuple[Event, ...]
    kinds: tuple[str, ...]
    seconds: float
    step_seconds: float
    unsplit_seconds: float


def view_of(arguments: Sequence[str]) -> View:
    """Returns the plans of the arguments.

    Raises:
        ValueError, TypeError, ImportError: what the command refuses, in its words.
    """
    options = parsed([*arguments])
    if not cli.planned(options):
        raise ValueError("expected at least one plan to show, such as rtp=8")
    model, cluster = cli.model_of(options), cli.cluster_of(options)
    strategies = cli.strategies_of(options, cluster)
    reports, times = cli.estimates(model, cluster, strategies, options.global_batch)
    names = [name_of(strategy) for strategy in strategies]
    shared = set.intersection(*(set(name.split()) for name in names)) if len(names) > 1 else set[str]()
    owns = [" ".join(word for word in name.split() if word not in shared) for name in names]
    rows = tuple(
        Row(title_of(strategy), name, own, strategy, memory, time)
        for strategy, name, own, memory, time in zip(strategies, names, owns, reports, times, strict=True)
    )
    verdict, detail = _verdict(rows)
    batch = "" if options.global_batch is None else str(options.global_batch)
    return View(
        model,
        cluster,
        rows,
        verdict,
        detail,
        differences_line(strategies),
        _sizes(options),
        command_text(arguments),
        _python(options, strategies, batch),
    )


def _verdict(rows: Sequence[Row]) -> tuple[str, str]:
    """Returns whether rotation fits and is fast, in a sentence, and the numbers behind it."""
    rings = [row for row in rows if row.strategy.rtp > 1]
    if not rings:
        return "No rotation among these plans", "Add a plan such as rtp=8 to compare it."
    fitting = [row for row in rings if row.memory.verdict == "fits"]
    ours = min(fitting or rings, key=lambda row: row.time.step_seconds)
    others = [row for row in rows if row.strategy.rtp == 1]
    safe = [row for row in others if row.memory.verdict == "fits"]
    name = "RTP" if len(rings) == 1 else ours.title
    if not fitting:
        head = f"{name} does not fit below the line" if ours.memory.verdict == "tight" else f"{name} does not fit"
        rest = f"; what fits: {' and '.join(row.title for row in safe)}" if safe else ", and no other plan does"
        return head + (rest if others else ""), _numbers(ours)
    if not others:
        return f"{name} fits", _numbers(ours)
    if not safe:
        return f"Only {name} fits", _numbers(ours)
    best = min(safe, key=lambda row: row.time.step_seconds)
    ratio = ours.time.step_seconds / best.time.step_seconds
    margin = 1 + constants()["search"]["tie_fraction"]["value"]
    if ratio * margin < 1:
        ahead = f"{100 / ratio - 100:.0f} % ahead of" if ratio > 0.5 else f"{1 / ratio:.3g} times as fast as"
        head = f"{name} is the fastest plan that fits, {ahead} {best.title}"
    elif ratio <= margin:
        head = f"{name} is as fast as {best.title}, within the error of the model"
    else:
        longer = f"{100 * ratio - 100:.0f} % longer than" if ratio < 2 else f"{ratio:.3g} times as long as"
        head = f"{name} fits, and takes {longer} {best.title}"
    share = ours.memory.peak_allocated_bytes / best.memory.peak_allocated_bytes
    than = f"{100 - 100 * share:.0f} % less" if share < 1 else f"{100 * share - 100:.0f} % more"
    return head, f"{_numbers(ours)} {_numbers(best)} {name} takes {than} memory."


def _numbers(row: Row) -> str:
    held, limit = row.memory.peak_allocated_bytes / 1e9, row.memory.limit_bytes / 1e9
    side = "below" if held <= limit else "above"
    return f"{row.title}: {row.time.step_seconds:.4g} s a step, {held:.1f} GB, {side} the line of {limit:.1f} GB."


def title_of(strategy: Strategy) -> str:
    """Returns the kind of a plan in the words of its field, such as `RTP, ring of 8`."""
    parts = []
    if strategy.rtp > 1:
        parts.append(f"RTP, ring of {strategy.rtp}")
    if strategy.tp > 1:
        parts.append(f"TP {strategy.tp}")
    if strategy.pp > 1:
        parts.append(f"pipeline of {strategy.pp}")
    if strategy.cp > 1:
        parts.append(f"context parallel {strategy.cp}")
    if strategy.zero == 3:
        parts.append("fully_shard")
    elif strategy.dp > 1:
        parts.append(f"{'DDP' if not parts and not strategy.zero else 'data parallel'} {strategy.dp}")
    return ", ".join(parts) or "one GPU"


# -- search, timeline, comparison --------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=32)
def found(arguments: tuple[str, ...]) -> Found:
    """Returns the fastest plans that fit for the arguments of a model and a cluster, as the command without a plan.

    Raises:
        ValueError, TypeError: what the command refuses, in its words.
    """
    options = parsed([*arguments])
    model, cluster = cli.model_of(options), cli.cluster_of(options)
    batch = cluster.gpus if options.global_batch is None else options.global_batch
    plans = search(model, cluster, global_batch=batch, top=options.top)
    ring = next((plan for plan in plans if plan.strategy.rtp > 1), None)
    if not plans:
        message = no_plan_fits(model, cluster, batch)
    elif ring is None:
        message = why_no_ring(model, cluster, batch, plans[0])
    elif ring is plans[0]:
        message = "The fastest plan has a ring."
    else:
        message = (
            f"The fastest plan with a ring has rank {ring.rank}: {ring.step_seconds:.4g} s, against "
            f"{plans[0].step_seconds:.4g} s of the first."
        )
    strategies = [plan.strategy for plan in plans]
    unlike = differences_line(strategies)
    python = (
        f"{_HEAD}, search\n\n{_model_and_cluster(options)}"
        f"for plan in search(model, cluster, global_batch={batch}, top={options.top}):\n"
        "    print(plan.rank, plan.step_seconds, plan.memory.peak_allocated_bytes, plan.strategy)\n"
    )
    return Found(tuple(plans), tuple(map(name_of, strategies)), message, unlike, command_text(arguments), python)


def passes_of(model: ModelSpec, cluster: Cluster, strategy: Strategy) -> list[Pass]:
    """Returns both passes of every rotated operation of a layer, and of the embedding and the head; none without a
    ring, or where it is too large to draw."""
    if not 1 < strategy.rtp <= _LARGEST_DRAWN:
        return []
    clock = StageClock(model, cluster, strategy, TimeConstants.default())
    every = [(time, "") for time in clock.rotated]
    every += [(time, name) for name, times in clock.ends.items() for time in times]
    shown = []
    for number, (time, name) in enumerate(every, 1):
        operation = name or f"{number}. {time.operation} of a layer"
        for index, (simulator, durations) in enumerate(time.simulated):
            events = tuple(simulator.events(durations))
            shown.append(
                Pass(
                    operation,
                    ("forward", "backward")[index],
                    time.ranks,
                    time.chunks,
                    events,
                    simulator.kinds,
                    simulator.makespan(durations),
                    time.makespan_s[index],
                    time.unsplit_s[index],
                )
            )
    return shown


@functools.lru_cache(maxsize=32)
def compared(arguments: tuple[str, ...]) -> tuple[list[Cell], str, str]:
    """Returns the cells of `--when` for the arguments of a model and GPUs, the command, and the same in Python.

    Raises:
        ValueError, TypeError: what the command refuses, in its words.
    """
    options = parsed([*arguments])
    options.when = True
    cells, base = cli.when_cells(options)
    model = f"model = {options.model!r}\n" if options.model else _model_line(options)
    head = "" if options.model else f"{_HEAD.rpartition(' import')[0]} import ModelSpec\n"
    python = (
        f"{head}from rtp_ext.planner.plans.when import grid\n\n{model}"
        f"for cell in grid([(model, {cells[0].gpus})], base={base!r}):\n"
        "    print(cell.link, cell.tokens, cell.winner, cell.advantage)\n"
    )
    return cells, command_text(["--when", *arguments]), python


# -- what reproduces it ------------------------------------------------------------------------------------------------


def command_text(arguments: Sequence[str]) -> str:
    """Returns a command line, with a line for every option."""
    lines, words = [f"{PROGRAM} plan"], [shlex.quote(word) for word in arguments]
    for word in words:
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return " \\\n  ".join(lines)


def _sizes(options: argparse.Namespace) -> tuple[str, ...]:
    names = [name for name in (*cli.SIZES, "cluster") if getattr(options, name) is not None]
    if options.layers is not None:
        names.append("family")
    return tuple(word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(options, name))))


def _model_line(options: argparse.Namespace) -> str:
    seq = "" if options.seq is None else f", seq={options.seq}"
    if options.model is not None:
        return f"model = ModelSpec.preset({options.model!r}{seq})\n"
    if options.hf_config is not None:
        return f"model = ModelSpec.from_hf_config({options.hf_config!r}{seq})\n"
    names = (*cli.SIZES, "seq")
    sizes = ", ".join(f"{name}={getattr(options, name)}" for name in names if getattr(options, name) is not None)
    return f"model = ModelSpec.{options.family}({sizes})\n"


def _model_and_cluster(options: argparse.Namespace) -> str:
    if options.cluster is not None:
        gpus = "" if options.gpus is None else f", gpus={options.gpus}"
        cluster = f"Cluster.from_json({options.cluster!r}{gpus})"
        if options.gpus_per_node is not None:
            cluster = f"dataclasses.replace({cluster}, gpus_per_node={options.gpus_per_node})"
            return f"import dataclasses\n\n{_model_line(options)}cluster = {cluster}\n"
    else:
        given: dict[str, Any] = {"gpus": 8 if options.gpus is None else options.gpus}
        given |= {name: getattr(options, name) for name in ("gpus_per_node", "link") if getattr(options, name)}
        words = ", ".join(f"{name}={value!r}" for name, value in given.items())
        cluster = f"Cluster.preset({options.gpu or 'h100-80gb'!r}, {words})"
    return f"{_model_line(options)}cluster = {cluster}\n"


def _python(options: argparse.Namespace, strategies: Sequence[Strategy], batch: str) -> str:
    plans = "".join(f"    {_code(strategy)},\n" for strategy in strategies)
    given = f"(model, cluster, plan{batch and f', global_batch={batch}'})"
    return (
        f"{_HEAD}, Strategy, estimate_memory, estimate_time\n\n{_model_and_cluster(options)}plans = [\n{plans}]\n"
        f"for plan in plans:\n    memory = estimate_memory{given}\n    time = estimate_time{given}\n"
        "    print(memory.peak_allocated_bytes, memory.verdict, time.step_seconds)\n"
    )


def _code(strategy: Strategy) -> str:
    fields = [field for field in dataclasses.fields(strategy) if getattr(strategy, field.name) != field.default]
    return f"Strategy({', '.join(f'{field.name}={getattr(strategy, field.name)!r}' for field in fields)})"
