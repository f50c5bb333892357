"""Measures the fixed cost of a call: forward and backward of linear layers so small that nothing else counts.

    python benchmarks/overheads/calls.py            # one process and 2 ranks, over shared memory
    python benchmarks/overheads/calls.py --quick    # appends nothing to the results

`plain` and `emulated` (a ring of two ranks in one process) run in one process, `rtp`, `fsdp2` (fully_shard of each
layer) and `ddp` on local ranks, each with one thread. For every one, a layer, of the rank with the most:

    us          median of the wall time of a step, over the layers
    cpu_us      processor time of all threads, mean
    switches    voluntary and involuntary context switches of all threads, mean (getrusage)
    calls       calls of Python functions of rtp_ext and torch: events `call` of sys.setprofile, in a step of its own

A step of `--layers` layers includes the call of the model and of backward. Calls and switches may be counted on a
machine with other work; times need a quiet one. Appends JSON lines to benchmarks/results/MACHINE/calls.jsonl.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rtp_ext

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.card import add_output_options, append_line, complete_output, environment_card, result_line
from shared.launch import Place, everyones, launch
from shared.table import NAMES, Table, console, last_command, number, told

PACKAGES = tuple(str(Path(package.__file__ or "").parent) for package in (rtp_ext, torch))
OF_ONE, OF_RANKS = ("plain", "emulated"), ("rtp", "fsdp2", "ddp")
WARMUP = 20
_NAMES = {"plain": "plain layers", "emulated": "rtp, emulated ring of two ranks", "fsdp2": "`fully_shard` per layer"}
TABLE = Table(
    "calls",
    {
        "strategy": lambda row: (NAMES | _NAMES).get(row["strategy"], row["strategy"]),
        "processes": told("ranks"),
        "us": number("us"),
        "processor time, us": number("cpu_us"),
        "context switches": number("switches", 1),
        "calls of Python": number("calls"),
    },
    lambda lines, _: last_command(lines),
    lambda rows: (
        f" {rows[0]['layers']} linear layers of {rows[0]['case'].split('/')[0].split('-')[1]} features, "
        f"{rows[0]['tokens']} tokens on each rank, forward and backward, one thread a rank. All numbers are for one "
        "layer."
    ),
)

Step = Callable[[], None]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The fixed cost of a call. See the top of the file.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    add_output_options(parser, quick="append nothing to the results")
    parser.set_defaults(device="cpu", threads=1)
    args = parser.parse_args(argv)
    complete_output(args, "calls", parser.error)
    return args


def step_of(strategy: str, place: Place, args: argparse.Namespace) -> Step:
    """Returns forward and backward of a model of linear layers."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(args.width, args.width) for _ in range(args.layers)]
    if strategy == "emulated":
        ring = rtp_ext.Ring.emulated(args.ranks)
        layers = [rtp_ext.nn.RotatedLinear.from_module(layer, ring) for layer in layers]
    model: nn.Module = nn.Sequential(*layers)
    if strategy == "rtp":
        rtp_ext.fully_rotate(model, mesh=place.mesh, bundle=False, route="ring")
    elif strategy == "fsdp2":
        for layer in layers:
            fully_shard(layer, mesh=place.mesh)
        fully_shard(model, mesh=place.mesh)
    elif strategy == "ddp":
        model = DistributedDataParallel(model, process_group=place.mesh.get_group(), gradient_as_bucket_view=True)
    x, parameters = torch.randn(args.tokens, args.width), list(model.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        model(x).sum().backward()

    return step


def python_calls(step: Step) -> int:
    """Returns the number of calls of Python functions of rtp_ext and torch in a step."""
    count = 0

    def event(frame: FrameType, kind: str, _: Any) -> None:
        nonlocal count
        count += kind == "call" and frame.f_code.co_filename.startswith(PACKAGES)

    sys.setprofile(event)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def switches() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_nvcsw + used.ru_nivcsw


def measure(place: Place, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a line for each strategy of this number of ranks."""
    lines = []
    for strategy in OF_ONE if place.ranks == 1 else OF_RANKS:
        step = step_of(strategy, place, args)
        for _ in range(WARMUP):
            step()
        calls, times = python_calls(step), []
        before, processor = switches(), time.process_time()
        for _ in range(args.steps):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        spent, switched = time.process_time() - processor, switches() - before
        steps = [statistics.median(times) * 1e6, spent * 1e6 / args.steps, switched / args.steps, float(calls)]
        most = everyones(steps, place).amax(0) / args.layers
        us, cpu_us, switched_most, calls_most = (round(value, 1) for value in most.tolist())
        lines.append(
            {
                "benchmark": "calls",
                "case": f"linear-{args.width}/{strategy}",
                "strategy": strategy,
                "ranks": place.ranks,
                "transport": "shm" if strategy == "rtp" else None,
                "tokens": args.tokens,
                "layers": args.layers,
                "dtype": "float32",
                "us": us,
                "cpu_us": cpu_us,
                "switches": switched_most,
                "calls": calls_most,
            }
        )
    return lines


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    card = environment_card(torch.device("cpu"), args.command)
    lines = [result_line(card, **line) for ranks in (1, args.ranks) for line in launch(measure, args, ranks)]
    for line in lines:
        append_line(args.output, line)
    console(TABLE.columns, lines)


if __name__ == "__main__":
    main()
