"""What the host does in a step of emulated_step.py: calls of the CUDA runtime, and functions of Python.

    python benchmarks/gpu/host_calls.py --output results.jsonl --tokens 2048

The line of a case has

    host_ms                 of forward and backward, until everything is enqueued, without a profiler
    calls                   {name: [count, microseconds]} of the CUDA runtime, as torch.profiler saw one step
    functions               {name: [count, microseconds]} of Python and of extensions, without those that they call, as
                            cProfile saw one step: the SHOWN largest
    traced_ms, profiled_ms  host_ms of these two steps: what the profilers add
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.card import append_line, command_line, environment_card, result_line

from gpu.emulated_step import SIZES, Case, batch_of, build

CASES = (
    Case("plain"),
    Case("rtp sm-local", "rtp", "sm-local"),
    Case("rtp ce-local:4", "rtp", "ce-local:4"),
    Case("rtp nccl-self", "rtp", "nccl-self"),
    Case("rtp sm-local g=8", "rtp", "sm-local", group=8),
    Case("rtp-fused sm-local g=8", "rtp-fused", "sm-local", group=8),
)
WARMUP, STEPS, SHOWN = 4, 5, 24


Step = Callable[[AbstractContextManager[Any]], float]


def profiled(step: Step) -> tuple[float, dict[str, list[float]]]:
    """The milliseconds of a step, and its functions."""
    profile = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):  # a profile is of one thread
        taken = step(profile)
    found: dict[str, list[float]] = {}
    for (file, _line, name), (_, count, alone, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        place = "" if file == "~" else f"{Path(file).parent.name}/{Path(file).name}:"
        found[f"{place}{name}"] = [count, round(1e6 * alone, 1)]
    return taken, dict(sorted(found.items(), key=lambda item: -item[1][1])[:SHOWN])


def traced(step: Step) -> tuple[float, dict[str, list[float]]]:
    """The milliseconds of a step, and its calls of the CUDA runtime."""
    profile = torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    taken = step(profile)
    calls: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in profile.events():
        if event.name.startswith(("cuda", "cu")) and event.device_type == torch.autograd.DeviceType.CPU:
            calls[event.name][0] += 1
            calls[event.name][1] += event.time_range.elapsed_us()
    return taken, {name: [count, round(us, 1)] for name, (count, us) in calls.items()}


def measure(case: Case, tokens: int, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    size = SIZES[args.size]
    trainer = build(case, size, args.ranks, device)
    inputs, targets = batch_of(size, tokens, device)

    def step(around: AbstractContextManager[Any]) -> float:
        taken = 0.0

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            nonlocal taken
            if name != "forward_backward":
                yield
                return
            if device.type == "cuda":
                torch.cuda.synchronize()
            with around:
                begun = time.perf_counter()
                yield
                taken = 1e3 * (time.perf_counter() - begun)

        trainer.step(inputs, targets, keep_gradients=True, phase=phase)
        return taken

    times = [step(nullcontext()) for _ in range(WARMUP + STEPS)]
    row: dict[str, Any] = {"host_ms": sorted(times[WARMUP:])[STEPS // 2]}
    row["profiled_ms"], row["functions"] = profiled(step)
    row["traced_ms"], row["calls"] = traced(step)
    trainer.close()
    return row


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="append the results to this file")
    parser.add_argument("--size", choices=SIZES, default="block4")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds; starts no case later")
    args = parser.parse_args(argv)
    started = time.monotonic()
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    card = environment_card(device, command_line())
    for case in CASES:
        if time.monotonic() - started > args.budget:
            print("the budget is spent before", case.name)
            break
        try:
            row = measure(case, args.tokens, args, device)
        except (RuntimeError, ValueError) as error:
            row = {"refused": f"{type(error).__name__}: {str(error)[:600]}"}
        told = {"strategy": case.strategy or case.name, "link": case.link, "ranks": args.ranks, "group": case.group}
        told |= {"tokens": args.tokens, "dtype": "bfloat16", "shape": args.size}
        line = result_line(card, benchmark="host_calls", case=case.name, **told, **row)
        append_line(args.output, line)
        print(case.name, {key: value for key, value in row.items() if key != "functions"}, flush=True)
        for name, (count, us) in row.get("functions", {}).items():
            print(f"    {us:9.0f} us {count:6.0f} {name}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
