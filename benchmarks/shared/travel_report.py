"""What is said of results by what weights and gradients travelled in."""

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]

TRAVEL: dict[str, Callable[[Row], str | None]] = {
    "run": lambda row: row["strategy"] + (" (control, simulated)" if row["control"] else ""),
    "loss, held out": lambda row: f"{row['eval_loss']:.4f}",
    "of float32's": lambda row: f"{row['eval_loss'] / row['whole_loss'] - 1:+.2%}",
    "MiB a rank sends in a step": lambda row: None if row["ring_bytes"] is None else f"{row['ring_bytes'] / 2**20:.2f}",
    "seconds": lambda row: f"{row['seconds']:.0f}",
}


def ways_of(row: Row) -> str | None:
    """What travelled otherwise than it is computed with, in words; None for nothing."""
    told = []
    if row.get("travel"):
        told.append(f"weights {row['travel']}")
    gradients = row.get("gradient_travel") or row.get("reduce_dtype")
    if gradients not in (None, "float32"):
        told.append(f"gradients {gradients}")
    if row.get("gradient_route") not in (None, "auto"):
        told.append(f"route {row['gradient_route']}")
    return ", ".join(told) or None


def last_travel_run(lines: list[Row]) -> list[Row]:
    """The rows of the last run of travel_curves.py, with the held-out loss of float32; none where there is none."""
    run = [line for line in lines if (line["command"], line["date"]) == (lines[-1]["command"], lines[-1]["date"])]
    whole = [line["eval_loss"] for line in run if line["strategy"] == "float32"]
    return [{**line, "whole_loss": whole[0]} for line in run] if whole else []


def travel_note(rows: list[Row]) -> str:
    """For below a command."""
    first = rows[0]
    return f" {first['shape']}, {first['ranks']} ranks, {first['steps']} steps of {first['tokens']} tokens per rank."
