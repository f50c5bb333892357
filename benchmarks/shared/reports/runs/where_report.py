"""The table of where a step's time goes: of the last run of compare.py --where."""

from collections.abc import Callable
from typing import Any

from shared.reports.names import NAMES, ways_of

Row = dict[str, Any]


def _milliseconds(*keys: str) -> Callable[[Row], str | None]:
    def cell(row: Row) -> str | None:
        if any(row.get(f"{key}_ms") is None for key in keys):
            return None
        return f"{sum(row[f'{key}_ms'] for key in keys):.0f}"

    return cell


def _thread(kind: str) -> Callable[[Row], str | None]:
    """The milliseconds on a core, and those ready to run while another thread had it."""

    def cell(row: Row) -> str | None:
        times = row["threads_ms"].get(kind)
        return None if times is None or times[0] < 0.5 else f"{times[0]:.0f} + {times[1]:.0f}"

    return cell


WHERE: dict[str, Callable[[Row], str | None]] = {
    "tokens per rank": lambda row: str(row["tokens"]),
    "strategy": lambda row: NAMES.get(row["strategy"], row["strategy"]),
    "travels": ways_of,
    "step, ms (median)": lambda row: f"{row['step_ms']:.0f}",
    "of the roof": lambda row: None if row.get("roof_ms") is None else f"{row['step_ms'] / row['roof_ms']:.2f}",
    "forward and backward, ms": _milliseconds("forward_backward"),
    "GEMMs": _milliseconds("products"),
    "conversions": _milliseconds("conversions"),
    "waits for weights": _milliseconds("weights"),
    "for gradients": _milliseconds("gradients", "ends"),
    "for slots": _milliseconds("slots"),
    "posting": _milliseconds("posting"),
    "collectives": _milliseconds("collectives"),
    "the rest": _milliseconds("outside"),
    "optimizer, ms": _milliseconds("optimizer"),
    "main thread, ms on a core + ready": _thread("main"),
    "threads of rtp": _thread("transport"),
    "threads of Gloo": _thread("gloo"),
    "packets, ms of all cores": _milliseconds("interrupts"),
}


def last_where(lines: list[Row], words: list[str]) -> list[Row]:
    """Returns the lines of the last run. `words`: the model, and --travel of the run or `exact`."""
    model, travel = words
    mine = [
        line
        for line in lines
        if line["case"].startswith(f"{model}/") and (line.get("asked_travel") or "exact") == travel
    ]
    return [line for line in mine if (line["date"], line["command"]) == (mine[-1]["date"], mine[-1]["command"])]


def where_note(rows: list[Row]) -> str:
    """Returns the text below a command."""
    first = rows[0]
    return (
        f" {first['hosts']} hosts made on this machine, links of {first['rate']}. Means over the ranks, and over "
        f"{first['recorded']} recorded steps."
    )
