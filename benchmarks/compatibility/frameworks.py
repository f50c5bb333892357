"""Trains small models with third-party frameworks, on a ring and with their own sharding, and compares the results.

    python benchmarks/compatibility/frameworks.py  # transformers, peft, trl, grpo, dpo, accelerate, ...
    python benchmarks/compatibility/frameworks.py --only lightning --steps 6 --quick
    python benchmarks/compatibility/frameworks.py --only transformers,lightning --ranks 4 --replicas 2  # two rings

`make frameworks` installs the frameworks and calls this program. Every run is also resumed from its middle, and its
saved model is reloaded. One JSON line per framework is appended to results/MACHINE/frameworks.jsonl, unless --quick;
the table of docs/frameworks.md shows the last line of each. The exit status is 1 if a run differs by more than 1e-4, or
if a resumed or reloaded run differs at all.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import rtp_ext

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.card import add_output_options, append_line, complete_output, environment_card, result_line
from shared.launch import Place, launch
from shared.table import Cell, Row, Table, last_of_each, told

from compatibility.framework_runs import Run, accelerate, as_torchrun, lightning, peft, transformers

CLOSE = 1e-4

# -- all runs by name; those of packages that few have import them -----------------------------------------------------


def trl(folder: str, steps: int) -> Run:
    from compatibility.trl_runs import sft

    return sft(folder, steps)


def grpo(folder: str, steps: int, rotate: Callable[[], dict[str, Any]] = dict) -> Run:
    from compatibility.trl_runs import grpo as run

    return run(folder, steps, rotate)


def dpo(folder: str, steps: int) -> Run:
    from compatibility.trl_runs import dpo as run

    return run(folder, steps)


def torchtitan(folder: str, steps: int) -> Run:
    from compatibility.titan import run

    return run(folder, steps)


RUNS: dict[str, Callable[..., Run]] = {
    each.__name__: each for each in (transformers, peft, trl, grpo, dpo, accelerate, lightning, torchtitan)
}
PACKAGES = {"grpo": "trl", "dpo": "trl"}  # of runs that are not named after theirs
WITH_REPLICAS = ("transformers", "grpo", "lightning")  # which take `rotate`


def missing(names: Iterable[str]) -> list[str]:
    """Returns those of the named runs whose packages are not installed."""
    return [name for name in names if find_spec(PACKAGES.get(name, name)) is None]


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


# -- the table of docs/frameworks.md -----------------------------------------------------------------------------------


def _mesh(line: Row) -> str:
    replicas = line.get("replicas", 1)
    return str(line["ranks"]) if replicas == 1 else f"{replicas} x {line['ranks'] // replicas}"


def _named(row: Row) -> str:
    """`trl 1.16.0`, or `trl 1.16.0, GRPO` of a run that has another name than its package."""
    run = row["framework"]
    label = f"{PACKAGES.get(run, run)} {row['framework_version']}"
    return f"{label}, {run.upper()}" if run in PACKAGES else label


def _spread(key: str) -> Cell:
    return lambda row: "" if row[key] is None else f"{row[key]:.0e}"


def _equal(key: str) -> Cell:
    def cell(row: Row) -> str:
        if row[key] is None:
            return ""
        return "equal" if row[key] == 0 else f"differs by {row[key]:.0e}"

    return cell


TABLE = Table(
    "frameworks",
    {
        "framework": _named,
        "ranks": _mesh,
        "compared with": told("reference"),
        "steps": told("steps"),
        "losses differ by": _spread("loss_spread"),
        "gradient norms by": _spread("norm_spread"),
        "parameters on a rank": lambda row: f"{100 * row['kept']:.1f} %",
        "resumed in the middle": _equal("resumed"),
        "saved and loaded": _equal("reloaded"),
    },
    lambda lines, _: last_of_each(lines, lambda line: (line["framework"], _mesh(line))),
    lambda rows: ". Ranks: of one ring, or replicas x those of a ring.",
    machine=False,
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare frameworks with and without a ring. See the top of the file.")
    parser.add_argument("--only", default=",".join(RUNS), help=f"of {', '.join(RUNS)}")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1, help="rings that hold the same shards")
    add_output_options(parser, quick="append nothing to the results")
    parser.set_defaults(device="cpu", threads=1)
    args = parser.parse_args()
    names = args.only.split(",")
    unknown = [name for name in names if name not in RUNS]
    if unknown:
        parser.error(f"--only: expected some of {', '.join(RUNS)}, got {', '.join(unknown)}")
    if args.replicas < 1 or args.ranks % args.replicas:
        parser.error(f"--replicas: expected a divisor of {args.ranks} ranks, got {args.replicas}")
    if args.replicas > 1 and not set(names) <= set(WITH_REPLICAS):
        parser.error(f"--replicas: expected --only some of {', '.join(WITH_REPLICAS)}, got {args.only}")
    complete_output(args, "frameworks", parser.error)
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
        card = environment_card(torch.device("cpu"), args.command)
        append_line(args.output, result_line(card, benchmark="frameworks", case=name, ranks=args.ranks, **line))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
