"""`--trace FILE`: the measured timeline of a few passes, under the one that their schedules promise."""

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import rtp_ext
from rtp_ext import trace as tracing

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
