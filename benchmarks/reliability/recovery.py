"""Runs examples/recover.py with and without ranks that die, and compares the losses and the share of useful time.

    python benchmarks/reliability/recovery.py

One of four ranks dies every `--die-every` seconds, `--deaths` times, every other time within a checkpoint; then three
ranks continue from the last checkpoint. One line is appended to benchmarks/results/MACHINE/recovery.jsonl;
docs/reliability.md has the table. The exit status is 1 if a loss differs by more than 1e-6.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "recover.py"
TOLERANCE = 1e-6


def train(ranks: int, folder: Path, steps: int, *more: str) -> dict[str, Any]:
    """Returns the final line of the example's output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", "20", "--monitor-interval", "0.1", str(EXAMPLE), "--folder", str(folder)]
    command += ["--steps", str(steps), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RTP_RECORD_DIR": str(folder)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> int:
    import torch
    from shared.card import add_output_options, append_line, complete_output, environment_card

    parser = argparse.ArgumentParser(description="Recovery of a run whose ranks die. See the top of the file.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--step-time", type=float, default=0.2, help="seconds that a step takes at least")
    parser.add_argument("--die-every", type=float, default=10.0, help="seconds")
    parser.add_argument("--deaths", type=int, default=5)
    add_output_options(parser)
    args = parser.parse_args()
    complete_output(args, "recovery", parser.error)
    card = environment_card(torch.device("cpu"), args.command)
    began, most = time.monotonic(), args.steps + args.steps // 10
    with tempfile.TemporaryDirectory(prefix="rtp_recovery_") as name:
        folder = Path(name)
        calm, further = train(1, folder / "calm", args.steps), train(1, folder / "calm", most)
        deadly = ["--step-time", str(args.step_time), "--die-every", str(args.die_every), "--deaths", str(args.deaths)]
        rough = train(4, folder / "rough", args.steps, *deadly)
        fewer = train(3, folder / "rough", most)
    differences = [abs(rough["loss"] - calm["loss"]), abs(fewer["loss"] - further["loss"])]
    row = {
        "benchmark": "recovery",
        "ranks": 4,
        "steps": args.steps,
        "die_every": args.die_every,
        "lives": rough["lives"],
    }
    row |= {"effective_time": rough["effective_time"], "loss_difference": differences[0]}
    row |= {"fewer_ranks": 3, "fewer_loss_difference": differences[1], "seconds": round(time.monotonic() - began, 1)}
    row["verdict"] = "pass" if max(differences) < TOLERANCE and fewer["first"] == args.steps else "fail"
    print(json.dumps(row))
    append_line(args.output, {**row, **card})
    return 0 if row["verdict"] == "pass" else 1


if __name__ == "__main__":
    sys.exit(main())
