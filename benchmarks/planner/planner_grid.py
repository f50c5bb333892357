"""Runs small models on CPUs and compares their counted bytes with the planner's predictions.

    python benchmarks/planner/planner_grid.py            # all of them, in pieces: a piece for every number of ranks
    python benchmarks/planner/planner_grid.py --ranks 4  # one piece
    python benchmarks/planner/planner_grid.py --missing  # the cases that have no line from a clean tree yet
    python benchmarks/planner/planner_grid.py --list     # the cases that would run, and their predictions

Small GPTs and Llamas of several sizes, two batches, one to four ranks, every way to share the work that runs here, with
and without activation checkpointing, in float32 and with a mixed-precision policy. `counted_kept_bytes` are those of
parameters, gradients and optimizer state; `counted_peak_bytes` is the peak of a rank in a step (shared/memory.py: the
kernel counts, exact to about 3 MiB). docs/predictions.md compares them with the current planner, which
may be a later version. Other load on the machine does not change bytes but would change times, so no times are
measured. One JSON line per case is appended to results/MACHINE/planner_grid.jsonl.
"""

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.card import add_output_options, append_line, complete_output, environment_card, result_line
from shared.launch import Place, launch

from planner.planned import STRATEGIES, Case, allowed, counted

SIZES = (("gpt", 4, 256), ("gpt", 2, 512), ("llama", 4, 256), ("llama", 2, 512))
TOKENS = (256, 1024)
RANKS = (1, 2, 3, 4)


def cases(ranks: int) -> list[Case]:
    found = []
    for (family, layers, hidden), tokens, strategy in itertools.product(SIZES, TOKENS, STRATEGIES):
        own = (family, layers, hidden, strategy, ranks, tokens)
        found.append(Case(*own))
        if tokens == TOKENS[-1] and layers == 4:
            found.append(Case(*own, recompute=True))
            if ranks == 2:
                found.append(Case(*own, dtype="bfloat16"))
    if ranks == 3:
        found = [case for case in found if case.strategy.startswith(("rtp", "fsdp2")) and case.layers == 4]
    return sorted(allowed(found), key=lambda case: case.tokens)


def missing(found: list[Case], output: Path) -> list[Case]:
    """Returns the cases that have no line from a clean tree."""
    lines = map(json.loads, output.read_text().splitlines()) if output.exists() else iter(())
    known = {Case.of(line) for line in lines if not str(line["commit"]).endswith("-dirty")}
    return [case for case in found if case not in known]


def measure(place: Place, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Lines of all cases of this number of ranks, each written as soon as it is known."""
    card = environment_card(place.device, args.command)
    lines = []
    for case in args.cases:
        seen, planned = counted(case, place), case.predicted()
        name = f"{case.family}/{case.strategy}" + "/recompute" * case.recompute
        line = result_line(
            card,
            benchmark="planner_grid",
            case=name,
            shape=f"{case.layers} layers, hidden {case.hidden}",
            transport="c10d",
            direction="step",
            **{key: value for key, value in case.to_dict().items() if key in ("strategy", "ranks", "tokens", "dtype")},
            **{
                key: value
                for key, value in case.to_dict().items()
                if key in ("family", "layers", "hidden", "recompute")
            },
            **{f"counted_{what}_bytes": size for what, size in seen.items()},
            **{f"predicted_{what}_bytes": size for what, size in planned.items()},
        )
        line["peak_bytes"] = seen["peak"]
        lines.append(line)
        if place.rank == 0:
            append_line(args.output, line)
            ratio = planned["peak"] / seen["peak"]
            print(f"{name:<28}{case.layers:>3}{case.hidden:>5}{case.tokens:>6}{case.ranks:>3}  {ratio:.2f}", flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Counted bytes against predicted ones. See the top of the file.")
    parser.add_argument("--ranks", type=int, choices=RANKS, nargs="+", default=RANKS)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--missing", action="store_true", help="only cases that have no line from a clean tree yet")
    add_output_options(parser)
    parser.set_defaults(device="cpu", threads=1)
    args = parser.parse_args()
    complete_output(args, "planner_grid", parser.error)
    wanted = {ranks: missing(cases(ranks), args.output) if args.missing else cases(ranks) for ranks in args.ranks}
    if args.list:
        for case in itertools.chain.from_iterable(wanted.values()):
            predicted = ", ".join(f"{what} {size / 2**20:.1f} MiB" for what, size in case.predicted().items())
            print(f"{case.family:<6}{case.layers} x {case.hidden} {case.strategy:<14} R={case.ranks} {predicted}")
        return
    ratios = []
    for ranks, args.cases in wanted.items():
        for line in launch(measure, args, ranks) if args.cases else ():
            ratios.append(line["predicted_peak_bytes"] / line["counted_peak_bytes"])
    errors = [abs(ratio - 1) for ratio in ratios]
    if not errors:
        return
    print(f"{len(ratios)} runs: peak wrong by {statistics.mean(errors):.1%} on average, {max(errors):.1%} at most")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
