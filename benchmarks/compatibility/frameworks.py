"""Trains small models with third-party frameworks, on a ring and with their own sharding, and compares the results.

    python benchmarks/compatibility/frameworks.py  # transformers, peft, trl, grpo, dpo, accelerate, ...
    python benchmarks/compatibility/frameworks.py --only lightning --steps 6 --quick
    python benchmarks/compatibility/frameworks.py --only transformers,lightning --ranks 4 --replicas 2  # two rings

`make frameworks` installs the frameworks and calls this program. Every run is also resumed from its middle, and its
saved model is reloaded. One JSON line per framework is appended to results/MACHINE/frameworks.jsonl, unless --quick;
the table of docs/frameworks.md shows the last line of each (--page). The exit status is 1 if a run differs by more than
1e-4, or if a resumed or reloaded run differs at all.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import rtp_ext

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.card import (
    RESULTS,
    append_line,
    command_line,
    environment_card,
    machine_name,
    refusal_to_write,
    result_line,
)
from shared.launch import Place, launch

from compatibility.framework_runs import as_torchrun
from compatibility.framework_table import PACKAGES, RUNS, WITH_REPLICAS, missing
from compatibility.frameworks_report import page

CLOSE = 1e-4
PAGE = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"


def in_rings(place: Place, replicas: int) -> dict[str, Any]:
    """Returns the additional arguments of a run of several rings."""
    if replicas == 1:
        return {}
    mesh = init_device_mesh("cpu", (replicas, place.ranks // replicas), mesh_dim_names=("replicas", "ring"))
    return {"rotate": lambda: {"mesh": mesh, "dims": rtp_ext.RotationDims(ring="ring", replicate="replicas")}}


def work(place: Place, args: argparse.Namespace) -> dict[str, Any]:
    as_torchrun(place.rank, place.ranks)
    run = RUNS[args.framework](args.folder, args.steps, **in_rings(place, args.replicas))
    return {
        **dataclasses.asdict(run),
        "loss_spread": run.worst("losses", "reference_losses"),
        "norm_spread": run.worst("norms", "reference_norms"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare frameworks with and without a ring. See the top of the file.")
    parser.add_argument("--only", default=",".join(RUNS), help=f"of {', '.join(RUNS)}")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1, help="rings that hold the same shards")
    parser.add_argument("--quick", action="store_true", help="append nothing to the results")
    parser.add_argument("--page", action="store_true", help="run nothing: write the table of docs/frameworks.md")
    args = parser.parse_args()
    if args.page:
        PAGE.write_text(page(PAGE.read_text(), RESULTS))
        return 0
    names = args.only.split(",")
    unknown = [name for name in names if name not in RUNS]
    if unknown:
        parser.error(f"--only: expected some of {', '.join(RUNS)}, got {', '.join(unknown)}")
    if args.replicas < 1 or args.ranks % args.replicas:
        parser.error(f"--replicas: expected a divisor of {args.ranks} ranks, got {args.replicas}")
    if args.replicas > 1 and not set(names) <= set(WITH_REPLICAS):
        parser.error(f"--replicas: expected --only some of {', '.join(WITH_REPLICAS)}, got {args.only}")
    args.device, args.threads, command = "cpu", 1, command_line()
    path = RESULTS / machine_name(torch.device("cpu")) / "frameworks.jsonl"
    if not args.quick and (refusal := refusal_to_write(path)) is not None:
        parser.error(refusal)
    failed = False
    for name in names:
        if missing([name]):
            print(f"{name}: skipped, not installed (make frameworks)", flush=True)
            continue
        args.framework = name
        try:
            with tempfile.TemporaryDirectory() as folder:
                args.folder = folder
                found = launch(work, args, args.ranks)
        except Exception:
            traceback.print_exc()
            failed = True
            continue
        good = found["loss_spread"] < CLOSE and (found["norm_spread"] or 0.0) < CLOSE
        good = good and found["resumed"] in (None, 0.0) and found["reloaded"] == 0.0
        failed = failed or not good
        known = version(PACKAGES.get(name, name))
        line = {"framework": name, "framework_version": known, "steps": args.steps, "replicas": args.replicas}
        line |= found
        print(json.dumps({key: value for key, value in line.items() if not isinstance(value, list)}), flush=True)
        if not args.quick:
            card = environment_card(torch.device("cpu"), command)
            append_line(path, result_line(card, benchmark="frameworks", case=name, ranks=args.ranks, **line))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
