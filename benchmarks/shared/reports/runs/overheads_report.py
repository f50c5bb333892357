"""The table of the fixed cost of a call, from overheads/calls.py."""

from collections.abc import Callable
from typing import Any

from shared.reports.names import NAMES

Row = dict[str, Any]

OVERHEADS: dict[str, Callable[[Row], str | None]] = {
    "strategy": lambda row: _NAMES.get(row["strategy"], NAMES.get(row["strategy"], row["strategy"])),
    "processes": lambda row: str(row["ranks"]),
    "us": lambda row: f"{row['us']:.0f}",
    "processor time, us": lambda row: f"{row['cpu_us']:.0f}",
    "context switches": lambda row: f"{row['switches']:.1f}",
    "calls of Python": lambda row: f"{row['calls']:.0f}",
}
_NAMES = {"plain": "plain layers", "emulated": "rtp, emulated ring of two ranks", "fsdp2": "`fully_shard` per layer"}


def overheads_note(rows: list[Row]) -> str:
    """Returns the text below a command."""
    first = rows[0]
    return (
        f" {first['layers']} linear layers of {first['case'].split('/')[0].split('-')[1]} features, {first['tokens']} "
        "tokens on each rank, forward and backward, one thread a rank. All numbers are for one layer."
    )
