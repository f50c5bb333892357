"""The largest model that fits into a byte budget of every rank: found by running, beside the prediction.

    python benchmarks/planner/capacity.py  # 1, 2, 4 and 8 ranks, 64 MiB each
    python benchmarks/planner/capacity.py --ranks 8 --budget 96

The models are Llamas: first the number of layers grows at a hidden size of 256, then the hidden size at two layers. A
model fits if the peak memory of every rank in a step (shared/memory.py) is within the budget. The search begins with
the largest model that the planner predicts and runs models in strides that double until one model fits and another
does not, then bisects between them: the result and the next larger model have both run. Every rank has its own batch;
with tensor parallelism all ranks compute with the batches of all. `rtp-recompute` is RTP with activation checkpointing
of every block and a fused loss. One rank trains alone under any strategy.

One JSON line for each strategy, number of ranks and direction of growth is appended to results/MACHINE/capacity.jsonl
as soon as it is known; the predictions in docs/predictions.md are those of the current planner.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.card import add_output_options, append_line, complete_output, environment_card, result_line
from shared.launch import Place, launch
from shared.table import Row, last_of_each

from planner.planned import Case, counted

RANKS = (1, 2, 4, 8)
STRATEGIES = ("rtp", "rtp-recompute", "fsdp2", "ddp", "tp")
LAYERS, HIDDEN, HEADS, TOKENS, STEP = 2, 256, 16, 128, 32
MOST = {"layers": 400, "hidden": 4096}


def case_of(strategy: str, ranks: int, grown: str, size: int) -> Case:
    """The model of one size. One rank trains alone, whatever the strategy; recomputation stays."""
    layers, hidden = (size, HIDDEN) if grown == "layers" else (LAYERS, size)
    name = "single" if ranks == 1 else "rtp-fused" if strategy == "rtp-recompute" else strategy
    again = strategy == "rtp-recompute"
    return Case("llama", layers, hidden, name, ranks, TOKENS, recompute=again, head_dim=hidden // HEADS)


def sizes(grown: str) -> range:
    return range(1, MOST["layers"] + 1) if grown == "layers" else range(STEP, MOST["hidden"] + 1, STEP)


def largest(count: int, fits: Callable[[int], bool], first: int) -> int:
    """The largest of `count` places that fits, -1 for none, from a first guess on. A place is asked once at most; what
    is smaller than one that fits does, too."""
    low, high = -1, count  # that fits, that does not
    place, stride = first, 1
    while high - low > 1:
        if fits(place):
            low, place = place, place + stride
        else:
            high, place = place, place - stride
        stride *= 2
        if not low < place < high or (low >= 0 and high < count):
            place = (low + high) // 2
    return low


def guess(strategy: str, ranks: int, grown: str, budget: float) -> int:
    """The largest size that is predicted to fit; 0 where none is."""
    known = sizes(grown)

    def fits(index: int) -> bool:
        return case_of(strategy, ranks, grown, known[index]).predicted()["peak"] <= budget

    found = largest(len(known), fits, 0)
    return known[found] if found >= 0 else 0


def searched_again(rows: list[Row]) -> list[Row]:
    """The last line of every search, with what the planner predicts as it is now."""
    told, keys = [], ("grown", "strategy", "ranks", "budget_bytes")
    for row in last_of_each(rows, lambda row: tuple(row[key] for key in keys)):
        grown, strategy, ranks, budget = (row[key] for key in keys)
        size = guess(strategy, ranks, grown, budget)
        parameters = case_of(strategy, ranks, grown, size).model.parameters if size else 0
        told.append({**row, "predicted_largest": size, "predicted_parameters": parameters})
    return told


def search(place: Place, args: argparse.Namespace) -> None:
    card = environment_card(place.device, args.command)
    peaks: dict[Case, float] = {}  # among the models that have run
    for grown in args.grow:
        for strategy in args.strategies:
            line = result_line(card, **_found(place, strategy, grown, args.budget * 2**20, peaks))
            if place.rank == 0:
                append_line(args.output, line)
                told = f"{line['largest']:>5} ({line['predicted_largest']} predicted, {line['tried']} tried)"
                print(f"{grown:<7}{strategy:<14}R={place.ranks}{told}", flush=True)


def _found(place: Place, strategy: str, grown: str, budget: float, peaks: dict[Case, float]) -> dict[str, Any]:
    """Returns the JSON line of one search."""
    known, predicted = sizes(grown), guess(strategy, place.ranks, grown, budget)
    asked: dict[int, float] = {}

    def fits(index: int) -> bool:
        case = case_of(strategy, place.ranks, grown, known[index])
        if case not in peaks:
            peaks[case] = counted(case, place)["peak"]
        asked[index] = peaks[case]
        return peaks[case] <= budget

    found = largest(len(known), fits, known.index(predicted) if predicted else 0)
    size = known[found] if found >= 0 else 0
    case = case_of(strategy, place.ranks, grown, size or known[0])
    return {
        **dataclasses.asdict(case),
        "benchmark": "capacity",
        "case": f"llama/{strategy}/{grown}",
        "strategy": strategy,
        "transport": "c10d",
        "direction": "step",
        "grown": grown,
        "budget_bytes": budget,
        "largest": size,
        "parameters": case.model.parameters if size else 0,
        "peak_bytes": asked.get(found),
        "next_peak_bytes": asked.get(found + 1),  # of the next larger model
        "predicted_largest": predicted,
        "tried": len(asked),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The largest model within a budget. See the top of the file.")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--strategies", choices=STRATEGIES, nargs="+", default=STRATEGIES)
    parser.add_argument("--grow", choices=tuple(MOST), nargs="+", default=tuple(MOST))
    parser.add_argument("--budget", type=float, default=64, metavar="MIB", help="of every rank")
    add_output_options(parser)
    parser.set_defaults(device="cpu", threads=1)
    args = parser.parse_args()
    complete_output(args, "capacity", parser.error)
    for ranks in args.ranks:
        launch(search, args, ranks)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
