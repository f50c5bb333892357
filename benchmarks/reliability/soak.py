"""Runs random programs against one process for as long as asked, and one model for many random steps with delays.

    python benchmarks/reliability/soak.py --minutes 30  # make soak MINUTES=30
    python benchmarks/reliability/soak.py --programs 100 --ranks 3 --seed 5000
    python benchmarks/reliability/soak.py --wide --ranks 6 --minutes 30
    python benchmarks/reliability/soak.py --faults --programs 100
    python benchmarks/reliability/soak.py --steps 100000 --step-minutes 90 --programs 0

The first phase runs programs (python_tests/support/programs), each with its own seed, one after the other on 2, 3 and 4
ranks: by default narrow ones; with `--wide` also those with outer policies, compilers, moving averages and swapped
modules; with `--faults` those in which one rank raises or omits a backward, which the other ranks have to report in
time. The second phase runs `--steps` actions of one program in random order, or for `--step-minutes`, while hops are
delayed at random. Memory, descriptors and threads of every rank must not grow meanwhile. The last line is JSON, and is
appended to benchmarks/results/MACHINE/soak.jsonl. The exit status is 1 if a number differs or a resource grows; the
message contains the seed of a program that failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python_tests" / "support"))

import torch
from harness import RankError, run_ranks
from shared.card import add_output_options, append_line, complete_output, environment_card
from shared.memory import resources

BUNCH = 20  # programs of one start of ranks
STRETCH = 100  # steps of the long run between looks at memory and clock
GROWTH = {"resident_kib": 16 * 1024, "descriptors": 2, "threads": 1}  # the most that is no growth


def status() -> dict[str, int]:
    gc.collect()
    used = resources()
    return {"resident_kib": used.pop("resident_bytes") // 1024, **used}


def several(rank: int, ranks: int, first: int, count: int, wide: bool) -> int:
    import programs

    return sum(programs.check(rank, ranks, seed, wide=wide) for seed in range(first, first + count))


def with_faults(ranks: int, first: int, count: int) -> int:
    """Each in ranks of its own, whose rings end. Raises RankError."""
    from programs import faults

    found = []
    for seed in range(first, first + count):
        lost = faults.lost(seed, ranks)
        found += faults.problems(seed, run_ranks(faults.plant, ranks, seed, timeout=120.0, lost=lost))
    if found:
        raise RankError("\n".join(found))
    return count


def long(rank: int, ranks: int, seed: int, steps: int, minutes: float) -> tuple[int, dict[str, int]]:
    """Repeats the actions of one program, except those that make rings, for the given steps or minutes. Returns the
    number of actions and the growth of resources since a fifth of them."""
    import programs
    import torch

    program = programs.Program.draw(seed, ranks)
    for options in program.options:
        options["transport_options"] = {"delay_us": 50}
    run = programs.Run(rank, program)
    usual = ("step", "accumulate", "clip", "evaluate", "forward", "nap")
    seen, done, end = [status()], 0, time.monotonic() + 60 * minutes
    while done < steps:
        for _ in range(min(STRETCH, steps - done)):
            getattr(run, f"do_{run.draw.choice(usual)}")()
            done += 1
        seen.append(status())
        late = torch.tensor(time.monotonic() > end)
        torch.distributed.all_reduce(late, torch.distributed.ReduceOp.MAX)  # all ranks end at the same step
        if late:
            break
    early = seen[len(seen) // 5]
    added = {name: value - early[name] for name, value in status().items()}
    run.close()
    return done, added


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Random programs. See the top of the file.")
    parser.add_argument("--minutes", type=float, help="of programs; default: as many as --programs")
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--wide", action="store_true", help="programs that draw from all there is")
    parser.add_argument("--faults", action="store_true", help="wide programs in which one rank has a fault")
    parser.add_argument("--steps", type=int, default=0, help="of the long run; default: none")
    parser.add_argument("--step-minutes", type=float, default=1440.0, help="the long run ends after so many, too")
    parser.add_argument("--ranks", type=int, help="default: 2, 3 and 4 by turns")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    add_output_options(parser)
    args = parser.parse_args(argv)
    complete_output(args, "soak", parser.error)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    card = environment_card(torch.device("cpu"), args.command)
    began = time.monotonic()
    end = began + 60 * args.minutes if args.minutes is not None else float("inf")
    sizes, ran, actions, failed, seed = [args.ranks] if args.ranks else [2, 3, 4], 0, 0, [], args.seed
    while time.monotonic() < end and (args.minutes is not None or ran < args.programs):
        ranks = sizes[(ran // BUNCH) % len(sizes)]
        count = BUNCH if args.minutes is not None else min(BUNCH, args.programs - ran)
        try:
            if args.faults:
                actions += with_faults(ranks, seed, count)
            else:
                limit = 3000.0 if args.wide else 600.0
                actions += run_ranks(several, ranks, seed, count, args.wide, timeout=limit)[0]
        except RankError as error:
            failed.append(f"ranks {ranks}, seeds {seed} to {seed + count - 1}: {str(error)[-2000:]}")
            print(failed[-1], flush=True)
        ran, seed = ran + count, seed + count
        print(f"{ran} programs, {actions} actions, {time.monotonic() - began:.0f} s", flush=True)
    grown, added, steps = [], [], 0
    if args.steps > 0:
        limit = 60 * args.step_minutes + 600
        told = run_ranks(long, args.ranks or 2, args.seed + 1, args.steps, args.step_minutes, timeout=limit)
        steps, added = told[0][0], [each for _, each in told]
        grown = sorted({name for each in added for name, most in GROWTH.items() if each[name] > most})
    line = {"benchmark": "soak", "programs": ran, "actions": actions, "failed": len(failed), "first_seed": args.seed}
    line |= {"kind": "faults" if args.faults else "wide" if args.wide else "narrow"}
    line |= {"steps": steps, "added": added, "grown": grown, "seconds": round(time.monotonic() - began, 1)}
    print(json.dumps(line), flush=True)
    append_line(args.output, {**line, **card})
    return 1 if failed or grown else 0


if __name__ == "__main__":
    sys.exit(main())
