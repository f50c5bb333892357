"""Passes of one rank over wires of a limited rate, beside the closed form of their schedules.

    python benchmarks/timeline.py --output results.jsonl

On an emulated ring every neighbour is this rank itself, and a wire carries its hops (`Ring.emulated(link="wire:...")`).
A case is a number of ranks, of shards per product and a route of gradients. The same passes run over a ring without
such a wire, in turns: their trace gives the seconds of every product, copy and addition. With the rate of the wire they
are the durations of `rtp_ext.timeline.Lockstep`; what a pass takes beyond its steps is added. A line has

    predicted_ms, measured_ms   of one forward and backward (medians)
    error                       measured over predicted, less 1
    free_ms, wire_ms            without the wire; of all hops of one direction, whichever takes longer
    hidden                      share of the hops that is hidden: (free + hops of both passes - measured) / hops

A ratio is the time of a product over that of the hop of its shard: 2 on 8 H100 with 4096 tokens of Llama 3 8B.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import rtp_ext
from rtp_ext.schedule import make_schedule
from rtp_ext.timeline import Lockstep

sys.path.insert(0, str(Path(__file__).resolve().parent))

from shared.card import append_line, command_line, environment_card, result_line

GRADIENTS: dict[str, dict[str, Any]] = {
    "chain": {"gradient_route": "chain", "gradient_halves": False},
    "halves": {"gradient_route": "chain", "gradient_halves": True},
    "direct lean": {"gradient_route": "direct", "gradient_halves": False, "buffers": "lean"},
    "direct": {"gradient_route": "direct", "gradient_halves": False, "buffers": "auto"},
}
LATENCY = 50e-6  # seconds of a message


class Layer:
    """One linear layer on an emulated ring."""

    def __init__(self, ranks: int, group: int, gradients: str, args: argparse.Namespace, link: str | None) -> None:
        options = GRADIENTS[gradients] | {"group": group, "route": "direct" if "direct" in gradients else "ring"}
        self.ring = rtp_ext.Ring.emulated(ranks, link=link, prefetch=False, **options)
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(args.tokens, args.inputs, generator=generator).requires_grad_()
        self.shard = torch.randn(args.rows, args.inputs, generator=generator).requires_grad_()
        self.dy = torch.randn(args.tokens, args.rows * ranks, generator=generator)

    def step(self) -> None:
        y = rtp_ext.functional.rotated_linear(self.x, self.shard, ring=self.ring)
        torch.autograd.grad(y, (self.x, self.shard), self.dy)

    def seconds(self) -> float:
        begun = time.perf_counter()
        self.step()
        return time.perf_counter() - begun


def durations(traces: Iterable[rtp_ext.ring.telemetry.Trace]) -> tuple[list[Lockstep], list[dict[str, float]], float]:
    """Returns the schedules of the passes, the median seconds of one shard of every kind of compute, copy and addition
    of each, and the seconds of all passes outside their steps."""
    steps: list[Lockstep] = []
    found: list[dict[str, list[float]]] = []
    beyond = []
    for trace in traces:
        steps = [Lockstep(make_schedule(trace.ranks, trace.rank, **each.options)) for each in trace.passes]
        found = found or [{} for _ in steps]
        taken = 0.0
        for event in trace.events:
            if event.kind != "step" or event.lane not in ("compute", "side"):
                continue
            kind, shards = steps[event.pass_].kinds[event.step], steps[event.pass_].parts[event.step]
            found[event.pass_].setdefault(kind, []).append((event.end - event.start) / shards)
            taken += event.end - event.start
        beyond.append(trace.passes[-1].end - trace.passes[0].start - taken)
    medians = [{kind: statistics.median(each) for kind, each in one.items()} for one in found]
    return steps, medians, statistics.median(beyond)


def _shards(step: Lockstep, kind: str) -> float:
    return sum(part for part, each in zip(step.parts, step.kinds, strict=True) if each == kind)


def measure(ranks: int, group: int, gradients: str, ratio: float, args: argparse.Namespace) -> dict[str, Any]:
    free = Layer(ranks, group, gradients, args, None)
    free.step()
    traces = []
    for _ in range(args.repeats):
        with free.ring.trace() as trace:
            free.step()
        traces.append(trace)
    steps, found, beyond = durations(traces)
    hop_bytes = free.shard.numel() * 4
    product = found[0]["forward"]
    rate = hop_bytes / (product / ratio - LATENCY)
    wired = Layer(ranks, group, gradients, args, f"wire:{rate:.0f}:{LATENCY}")
    hop = LATENCY + hop_bytes / rate
    wired.step()
    taken: dict[str, list[float]] = {"free": [], "wired": []}
    for _ in range(args.repeats):
        taken["free"].append(free.seconds())
        taken["wired"].append(wired.seconds())
    times = [each | {"weight": hop, "gradient": hop} for each in found]
    predicted = sum(step.makespan(each, by_host=True) for step, each in zip(steps, times, strict=True)) + beyond
    measured, alone = statistics.median(taken["wired"]), statistics.median(taken["free"])
    hops = hop * sum(max(_shards(step, "weight"), _shards(step, "gradient")) for step in steps)
    for layer in (free, wired):
        layer.ring.close()
    return {
        "predicted_ms": 1e3 * predicted,
        "measured_ms": 1e3 * measured,
        "error": measured / predicted - 1,
        "free_ms": 1e3 * alone,
        "wire_ms": 1e3 * hops,
        "hidden": (alone + hops - measured) / hops,
        "product_ms": 1e3 * product,
        "hop_ms": 1e3 * hop,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="append the results to this file")
    parser.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=[4, 8])
    parser.add_argument("--ratios", type=lambda text: [float(part) for part in text.split(",")], default=[2.0])
    parser.add_argument("--gradients", type=lambda text: text.split(","), default=list(GRADIENTS))
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rows", type=int, default=512, help="rows of a shard")
    parser.add_argument("--inputs", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the other core carries the hops
    card = environment_card(torch.device("cpu"), command_line())
    for ranks in args.ranks:
        for group in sorted({1, 2, ranks}):
            for gradients in args.gradients:
                for ratio in args.ratios:
                    row = measure(ranks, group, gradients, ratio, args)
                    told = {"ranks": ranks, "group": group, "gradients": gradients, "ratio": ratio}
                    told |= {"tokens": args.tokens, "shape": f"{args.rows}x{args.inputs}", "dtype": "float32"}
                    append_line(args.output, result_line(card, benchmark="timeline", **told, **row))
                    print(
                        f"R {ranks} g {group} {gradients:<12} ratio {ratio:<4g} predicted {row['predicted_ms']:7.1f} "
                        f"measured {row['measured_ms']:7.1f} ms ({100 * row['error']:+.1f} %), free "
                        f"{row['free_ms']:7.1f}, hops {row['wire_ms']:6.1f}, hidden {100 * row['hidden']:.0f} %",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
