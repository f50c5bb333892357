"""The tables of growth over layers, ranks and parameters, and the exponents of costs."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from shared.reports.names import NAMES

Row = dict[str, Any]

COSTS = {"convert": "conversion", "first_step": "first step", "step": "later step", "save": "save", "load": "load"}
SIZES = {"layers": "layers", "ranks": "ranks", "parameters": "parameters"}  # by sweep, the key that grows


def last_sweeps(lines: list[Row], words: list[str]) -> list[Row]:
    """Returns the lines of the last run of each sweep, or of the sweep that `words` name; none where there is none."""
    found = []
    for sweep in words or SIZES:
        mine = [line for line in lines if line["sweep"] == sweep]
        cases = {(line["ranks"], line["layers"], line["parameters"], line["strategy"]): line for line in mine}
        found += cases.values()
    return found


def growths(lines: list[Row]) -> Iterator[tuple[Row, str, float, float]]:
    """Yields (line, cost, exponent, processor seconds) of each cost and each case but the smallest of its sweep."""
    before: dict[tuple[str, str], Row] = {}
    for line in lines:
        key = line["sweep"], line["strategy"]
        smaller, before[key] = before.get(key), line
        if smaller is None:
            continue
        size = SIZES[line["sweep"]]
        for cost in COSTS:
            name = f"{cost}_processor_s"
            if line.get(name) is not None:
                ratio = line[name] / smaller[name]
                yield line, cost, math.log(ratio) / math.log(line[size] / smaller[size]), line[name]


def _cost(name: str) -> Callable[[Row], str | None]:
    def cell(row: Row) -> str | None:
        if row.get(f"{name}_s") is None:
            return None
        exponent = row.get("exponents", {}).get(name)
        grown = "" if exponent is None else f", {exponent:.2f}"
        return f"{row[f'{name}_s']:.3f} ({row[f'{name}_processor_s']:.3f}{grown})"

    return cell


GROWTH: dict[str, Callable[[Row], str | None]] = {
    "layers": lambda row: str(row["layers"]),
    "ranks": lambda row: str(row["ranks"]),
    "parameters": lambda row: f"{row['parameters']:.2g}",
    "strategy": lambda row: NAMES.get(row["strategy"], row["strategy"]),
    **{f"{heading}, s (processor, exponent)": _cost(name) for name, heading in COSTS.items()},
    "peak of the conversion, MiB": lambda row: (
        None if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.1f}"
    ),
}


def growth_rows(lines: list[Row], words: list[str]) -> list[Row]:
    """Returns `last_sweeps` with the exponents of each line."""
    rows = last_sweeps(lines, words)
    for row, cost, exponent, _ in growths(rows):
        row.setdefault("exponents", {})[cost] = exponent
    return rows


def growth_note(rows: list[Row]) -> str:
    """Returns the text below a command."""
    layers = " and ".join(dict.fromkeys(row["shape"].split(" x ")[1] for row in rows))
    return f" Layers: {layers}; {rows[0]['tokens']} tokens per rank, one thread a rank."
