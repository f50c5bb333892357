"""The largest model that fits into a byte budget of every rank: found by running, beside the prediction.

    python benchmarks/capacity.py                          # 1, 2, 4 and 8 ranks, 96 MiB each
    python benchmarks/capacity.py --ranks 8 --budget 64

Llamas, of which first the number of layers grows at a hidden size of 256, then the hidden size at two layers. A model
fits if the most that any rank held at a moment of a step (shared/memory.py) is within the budget. The search begins
with what the planner says is largest and goes on by running: up while the next model fits, else down to one that does;
so the two neighbours of the answer have both run. Every rank has a batch of its own; with tensor parallelism all
compute with the batches of all. `rtp-recompute` is RTP with activation checkpointing of every block and a fused loss.

One JSON line a strategy, number of ranks and way to grow is appended to results/MACHINE/capacity.jsonl.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from shared.card import RESULTS, append_line, command_line, environment_card, machine_name, result_line
from shared.launch import Place, launch
from shared.planned import Case, counted

RANKS = (1, 2, 4, 8)
STRATEGIES = ("rtp", "rtp-recompute", "fsdp2", "ddp", "tp")
LAYERS, HIDDEN, HEADS, TOKENS, STEP = 2, 256, 16, 128, 64
MOST = {"layers": 400, "hidden": 4096}


def case_of(strategy: str, ranks: int, grown: str, size: int) -> Case:
    """The model of one size. One rank trains alone, whatever the strategy; recomputation stays."""
    layers, hidden = (size, HIDDEN) if grown == "layers" else (LAYERS, size)
    name = "single" if ranks == 1 else "rtp-fused" if strategy == "rtp-recompute" else strategy
    again = strategy == "rtp-recompute"
    return Case("llama", layers, hidden, name, ranks, TOKENS, recompute=again, head_dim=hidden // HEADS)


def sizes(grown: str) -> range:
    return range(1, MOST["layers"] + 1) if grown == "layers" else range(STEP, MOST["hidden"] + 1, STEP)


def largest(known: range, fits: Callable[[int], bool], first: int) -> tuple[int, int]:
    """The place of the largest size that fits (-1: none), and how many were tried, from a first guess on."""
    place, tried = first, 1
    up = fits(known[place])
    while 0 <= place + (1 if up else -1) < len(known):
        place += 1 if up else -1
        tried += 1
        if fits(known[place]) != up:
            return (place - 1 if up else place), tried
    return (place if up else -1), tried


def guess(strategy: str, ranks: int, grown: str, budget: float) -> int:
    """The place of the largest size that is predicted to fit; 0 where none is."""
    known = sizes(grown)
    low, high = 0, len(known) - 1
    while low < high:
        middle = (low + high + 1) // 2
        fits = case_of(strategy, ranks, grown, known[middle]).predicted()["peak"] <= budget
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def search(place: Place, args: argparse.Namespace) -> list[dict[str, Any]]:
    card = environment_card(place.device, args.command)
    return list(_lines(place, args, card))


def _lines(place: Place, args: argparse.Namespace, card: dict[str, Any]) -> Iterator[dict[str, Any]]:
    budget = args.budget * 2**20
    for grown in args.grow:
        for strategy in args.strategies:
            known, first = sizes(grown), guess(strategy, place.ranks, grown, budget)
            peaks: dict[int, float] = {}
            fits = functools.partial(_fits, place, strategy, grown, budget, peaks)
            found, tried = largest(known, fits, first)
            size = known[found] if found >= 0 else 0
            case = case_of(strategy, place.ranks, grown, max(size, known[0]))
            parameters = case.model.parameters if size else 0
            predicted = case_of(strategy, place.ranks, grown, known[first]).model.parameters
            if place.rank == 0:
                print(f"{grown:<7}{strategy:<14}R={place.ranks} {size:>5} ({known[first]} predicted)", flush=True)
            yield result_line(
                card,
                benchmark="capacity",
                transport="c10d",
                direction="step",
                peak_bytes=peaks.get(size),
                grown=grown,
                budget_bytes=budget,
                largest=size,
                predicted_largest=known[first],
                parameters=parameters,
                predicted_parameters=predicted,
                tried=tried,
                **{**dataclasses.asdict(case), "case": f"llama/{strategy}/{grown}", "strategy": strategy},
            )


def _fits(place: Place, strategy: str, grown: str, budget: float, peaks: dict[int, float], size: int) -> bool:
    """Runs one size, and keeps what it took."""
    peaks[size] = counted(case_of(strategy, place.ranks, grown, size), place)["peak"]
    return peaks[size] <= budget


def main() -> None:
    parser = argparse.ArgumentParser(description="The largest model within a budget. See the top of the file.")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--strategies", choices=STRATEGIES, nargs="+", default=STRATEGIES)
    parser.add_argument("--grow", choices=tuple(MOST), nargs="+", default=tuple(MOST))
    parser.add_argument("--budget", type=float, default=96, metavar="MIB", help="of every rank")
    parser.add_argument("--machine", help="folder under results/ (default: from the CPU)")
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="append the results here instead")
    args = parser.parse_args()
    args.command, args.device, args.threads = command_line(), "cpu", 1
    machine = args.machine or machine_name(torch.device("cpu"))
    output = args.output or RESULTS / machine / "capacity.jsonl"
    for ranks in args.ranks:
        for line in launch(search, args, ranks):
            append_line(output, line)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
