"""Measures the cost of the recorder: steps of small layers, alternately with and without it.

    python benchmarks/reliability/recorder.py  # 2 ranks, over shared memory
    python benchmarks/reliability/recorder.py --width 256 --tokens 64 --pairs 400

Ranks train a stack of linear layers. In each pair of steps the recorder is on in one and off in the other, in random
order; the cost is the median of the quotients, with a bootstrap interval of 95 %. `events` are those of a step, and
`event_ns` is the time of one event in a separate loop. One JSON line is appended to
benchmarks/results/MACHINE/recorder.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rtp_ext
from rtp_ext.observe import record

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.card import add_output_options, append_line, complete_output, environment_card
from shared.launch import Place, launch


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The cost of the recorder. See the top of the file.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=200)
    add_output_options(parser, quick="append nothing to the results")
    parser.set_defaults(device="cpu", threads=1)
    args = parser.parse_args(argv)
    complete_output(args, "recorder", parser.error)
    return args


def measure(place: Place, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(args.layers)))
    rtp_ext.fully_rotate(model, mesh=place.mesh, bundle=False, route="ring")
    ring = rtp_ext.ring_of(model)
    x = torch.randn(args.tokens, args.width)

    def step(on: bool) -> float:
        ring.communicator.executor.enable_recorder(on)
        ring.all_reduce(torch.zeros(1))  # all ranks start together
        start = time.perf_counter()
        model(x).sum().backward()
        return time.perf_counter() - start

    for _ in range(10):
        step(True)
    before = record.read(ring.record()).events[-1].number
    step(True)
    events = record.read(ring.record()).events[-1].number - before
    draw, quotients, times = random.Random(0), [], []
    for _ in range(args.pairs):
        first = draw.random() < 0.5
        found = {on: step(on) for on in (first, not first)}
        quotients.append(found[True] / found[False])
        times.append(found[False])
    ring.communicator.executor.enable_recorder(True)
    count, start = 100_000, time.perf_counter()
    for _ in range(count):
        ring.communicator.executor.end_collective(ring.communicator.executor.begin_collective("exchange"))
    event = (time.perf_counter() - start) / count
    medians = sorted(statistics.median(draw.choices(quotients, k=len(quotients))) for _ in range(1000))
    step_ms = 1e3 * statistics.median(times)
    ring.close()
    return {
        "ranks": place.ranks,
        "transport": ring.transport,
        "step_ms": step_ms,
        "events": events,
        "event_ns": 1e9 * event,  # from Python, which takes most of it: an upper bound
        "bound_percent": 100 * events * event / (step_ms / 1e3),
        "cost_percent": 100 * (statistics.median(quotients) - 1),
        "cost_low_percent": 100 * (medians[25] - 1),
        "cost_high_percent": 100 * (medians[974] - 1),
    }


def main() -> int:
    args = parse_arguments()
    card = environment_card(torch.device("cpu"), args.command)
    told = launch(measure, args, args.ranks)
    shape = {name: getattr(args, name) for name in ("layers", "width", "tokens", "pairs")}
    line = {"benchmark": "recorder", **shape, **told, **card}
    append_line(args.output, line)
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
