"""The tables of results by the formats of weights and gradients on the ring."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from shared.card import last_command

Row = dict[str, Any]

TRAVEL: dict[str, Callable[[Row], str | None]] = {
    "run": lambda row: row["strategy"] + (" (control, simulated)" if row["control"] else ""),
    "loss, held out": lambda row: f"{row['eval_loss']:.4f}",
    "of float32's": lambda row: apart(row),
    "MiB a rank sends in a step": lambda row: None if row["ring_bytes"] is None else f"{row['ring_bytes'] / 2**20:.2f}",
    "seconds": lambda row: f"{row['seconds']:.0f}",
}


def ways_of(row: Row) -> str | None:
    """Describes the values that travelled in another format than that of the computation; None if there are none."""
    told = []
    if row.get("travel"):
        told.append(f"weights {row['travel']}")
    if row.get("frozen"):
        told.append(f"frozen weights {row['frozen']}")
    gradients = row.get("gradient_travel") or row.get("reduce_dtype")
    if gradients not in (None, "float32"):
        told.append(f"gradients {gradients}")
    if row.get("gradient_route") not in (None, "auto"):
        told.append(f"route {row['gradient_route']}")
    return ", ".join(told) or None


def apart(row: Row) -> str:
    """Formats the distance of a held-out loss from float32's, with its standard error over the seeds."""
    error = "" if row["off_error"] is None else f" ± {row['off_error']:.2%}"
    return f"{row['off']:+.2%}{error}"


def over_seeds(rows: Sequence[Row]) -> list[Row]:
    """One row for each way to travel: means over the seeds, and `off`, by how much of it the held-out loss is above the
    one that float32 reached from the same seed; with `off_error`, the standard error, None for one seed."""
    whole = {row["seed"]: row["eval_loss"] for row in rows if row["strategy"] == "float32"}
    merged = []
    for name in dict.fromkeys(row["strategy"] for row in rows):
        mine = [row for row in rows if row["strategy"] == name]
        off = [row["eval_loss"] / whole[row["seed"]] - 1 for row in mine]
        means = {key: statistics.fmean(row[key] for row in mine) for key in ("eval_loss", "seconds")}
        losses = [statistics.fmean(step) for step in zip(*(row["losses"] for row in mine), strict=True)]
        error = statistics.stdev(off) / math.sqrt(len(off)) if len(off) > 1 else None
        of_seeds = {"off": statistics.fmean(off), "off_error": error, "seeds": len(mine)}
        merged.append({**mine[0], **means, "losses": losses, **of_seeds})
    return merged


def last_travel_run(lines: list[Row]) -> list[Row]:
    """The last run of travel_curves.py, as `over_seeds`; none where there is none."""
    run = last_command(lines)
    return over_seeds(run) if any(line["strategy"] == "float32" for line in run) else []


def travel_note(rows: list[Row]) -> str:
    """Returns the text below a command."""
    first = rows[0]
    seeds = f", means over {first['seeds']} seeds" if first["seeds"] > 1 else ""
    shape = f"{first['shape']}, {first['ranks']} ranks"
    return f" {shape}, {first['steps']} steps of {first['tokens']} tokens per rank{seeds}."
