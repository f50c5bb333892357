"""What is recorded of a step.

`--trace FILE`: the measured timeline of a few passes, under the one that their schedules promise.

`--where N`: where the time of a training step goes: what the compute stream does, and what each thread uses. Every
value is a mean over `N` recorded steps and over the ranks, in milliseconds of one step. Forward and backward are
`products_ms` + `conversions_ms` + the waits + `outside_ms`: see rtp_ext.trace.causes. Of strategies without a ring only
threads and sums are known. `threads_ms` has for each kind of thread the time on a core, and the time for which it was
ready and another thread had the core (Linux, /proc/self/task/*/schedstat). `interrupts_ms` is the time for which the
kernel handled packets, of all cores of the machine together, in its own count of 10 ms.
"""

import argparse
import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rtp_ext
from rtp_ext import trace as tracing
from rtp_ext.measure.timing import Stopwatch
from shared.card import append_line
from shared.launch import Place
from shared.strategies import STRATEGIES

# -- --trace -----------------------------------------------------------------------------------------------------------

HEAD_START = 10_000_000  # cycles of a GPU, some 5 ms: its host is ahead then, and no GEMM waits for its launch


def add_trace_option(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--trace",
        type=_trace_path,
        metavar="FILE",
        help=f"record {what}: FILE.json for chrome://tracing or Perfetto and FILE.png, or what FILE's suffix says",
    )


def _trace_path(text: str) -> Path:
    """Refused here, before the run, if no file can be made in its folder, or no figure drawn."""
    path = Path(text)
    if any(file.suffix != ".json" for file in files(path)) and find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(f"a figure needs matplotlib (rtp-ext[plot]); {path}.json does without")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as problem:
        raise argparse.ArgumentTypeError(f"no file can be made in {path.parent}: {problem}") from problem


def files(path: Path, name: str = "") -> list[Path]:
    """Returns the file names of a recording for `path`; `name` distinguishes the recordings of one run."""
    suffix = path.suffix if path.suffix.lower() in (".json", ".png", ".svg", ".pdf") else ""
    stem = path.name.removesuffix(suffix) + ("-" + re.sub(r"[^\w.]+", "-", name).strip("-") if name else "")
    return [path.with_name(stem + each) for each in ([suffix] if suffix else [".json", ".png"])]


def record(ring: rtp_ext.Ring, action: Callable[[], object], path: Path, name: str = "", title: str = "") -> None:
    """Runs `action` once, recorded, and writes the files; rank 0 does. Collective."""
    with ring.trace() as trace:
        if ring.device.type == "cuda":
            torch.cuda._sleep(HEAD_START)
        action()
    traces = tracing.gather(ring, trace)
    if ring.rank > 0:
        return
    print(f"\ntrace{' of ' + name if name else ''}\n{tracing.report(traces)}")
    for file in files(path, name):
        if file.suffix == ".json":
            tracing.write_chrome(file, traces)
        else:
            tracing.plot(file, traces, title=title or name)
        print(f"trace: {file}", flush=True)


def record_steps(path: Path | None, trainers: Mapping[str, tuple[Any, Any]]) -> None:
    """Records one step of every trainer with a ring, on its batch, by name. Does nothing without a path. Collective."""
    if path is None:
        return
    rings = {name: pair for name, pair in trainers.items() if pair[0].ring is not None}
    for name, (trainer, batch) in rings.items():
        record(trainer.ring, lambda trainer=trainer, batch=batch: trainer.step(*batch), path, name)
    if not rings:
        print(f"--trace: nothing to record, {', '.join(trainers)} have no ring", file=sys.stderr)


# -- --where -----------------------------------------------------------------------------------------------------------

KINDS = {"rtp_": "transport", "gloo": "gloo", "pt_gloo": "gloo"}  # of threads, by the begin of their names
TICKS = os.sysconf("SC_CLK_TCK")


def thread_times() -> dict[str, list[float]]:
    """Returns by kind of thread the milliseconds on a core and those ready to run, since the threads began."""
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for task in Path("/proc/self/task").iterdir():
        try:
            name, counts = (task / "comm").read_text().strip(), (task / "schedstat").read_text().split()
        except OSError:  # it ended meanwhile
            continue
        main = task.name == str(os.getpid())
        kind = "main" if main else next((kind for start, kind in KINDS.items() if name.startswith(start)), "others")
        for place in range(2):
            times[kind][place] += int(counts[place]) / 1e6
    return times


def interrupt_time() -> float:
    """Returns the milliseconds that all cores spent in software interrupts since the machine started."""
    with open("/proc/stat") as file:
        return int(file.readline().split()[7]) * 1e3 / TICKS


class Steps:
    """The recorded steps of one strategy on one rank."""

    def __init__(self, trainer: Any, batch: Any) -> None:
        self._trainer, self._batch = trainer, batch
        self._sums: dict[str, float] = defaultdict(float)
        self._threads: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._watch = Stopwatch(trainer.device)
        self._count = 0

    def take(self) -> None:
        ring = self._trainer.ring
        self._watch = Stopwatch(self._trainer.device)
        dist.barrier()
        with nullcontext() if ring is None else ring.trace() as trace:
            before, interrupts = thread_times(), interrupt_time()
            self._trainer.step(*self._batch, phase=self._phase)
            after, interrupts = thread_times(), interrupt_time() - interrupts
        self._sums["interrupts"] += interrupts
        parts = {name: value / 1e3 for name, value in self._watch.totals().items()}
        self._sums["optimizer"] += parts["optimizer"]
        self._sums["forward_backward"] += parts["forward_backward"]
        if trace is not None:
            found = {name: 1e3 * seconds for name, seconds in tracing.causes(trace).items()}
            found["outside"] = parts["forward_backward"] - sum(found.values())
            for name, value in found.items():
                self._sums[name] += value
        for kind, times in after.items():
            for place in range(2):
                self._threads[kind][place] += times[place] - before[kind][place]
        self._count += 1

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._watch.start(name)
        yield
        self._watch.stop()

    def means(self) -> dict[str, Any]:
        threads = {kind: [value / self._count for value in times] for kind, times in self._threads.items()}
        return {f"{name}_ms": value / self._count for name, value in self._sums.items()} | {"threads_ms": threads}


def look_inside(
    args: argparse.Namespace, place: Place, takers: Mapping[str, tuple[Any, Any]], rows: list[dict[str, Any]]
) -> None:
    """Records `args.where` steps of every strategy, which take turns, and appends a line for each to where.jsonl beside
    `args.output`. `rows`: the strategies' results of the same run, by which they can be compared. Collective."""
    if args.where == 0:
        return
    steps = {name: Steps(*pair) for name, pair in takers.items() if not STRATEGIES[name].one_process}
    for _ in range(args.where):
        for each in steps.values():
            each.take()
    every: list[Any] = [None] * place.ranks
    dist.all_gather_object(every, {name: each.means() for name, each in steps.items()})
    if place.rank == 0:
        for row in rows:
            if row["strategy"] in steps:
                about = {key: value for key, value in row.items() if key not in ("losses", "gradients")}
                line = about | {"benchmark": "where", "recorded": args.where}
                line |= _mean([found[row["strategy"]] for found in every])
                append_line(args.output.with_name("where.jsonl"), line)


def _mean(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the means of numbers over the ranks, also within lists and dictionaries of them."""
    return {key: _merge([rank.get(key) for rank in ranks]) for key in ranks[0]}


def _merge(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return _mean(values)
    if isinstance(values[0], list):
        return [_merge(list(column)) for column in zip(*values, strict=True)]
    return sum(values) / len(values)
