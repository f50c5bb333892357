"""The tables of counted driver calls."""

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def _number(key: str) -> Callable[[Row], str | None]:
    return lambda row: None if row[key] is None else f"{row[key]:g}"


CALLS: dict[str, Callable[[Row], str | None]] = {
    "transport": lambda row: f"`{row['transport']}`",
    "mode": lambda row: row["mode"],
    "calls a hop": _number("calls_per_hop"),
    "calls a compute": _number("calls_per_compute"),
    "calls a pass": _number("calls_per_pass"),
    "NCCL calls a hop": _number("nccl_calls_per_hop"),
    "NCCL calls a pass": _number("nccl_calls_per_pass"),
    "events made a pass": _number("events_created_per_pass"),
}


def calls_note(rows: list[Row]) -> str:
    """Returns the text below a command."""
    return (
        f" Counted in the simulation, not timed: rank 0 of {rows[0]['ranks']}, forward and backward of a linear layer."
    )
