"""The table of docs/optimizers.md, from the results of third_party_optimizers.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.reports import own_pages

CLOSE = 1e-4

# What became of an optimizer as it is, and by on_shards: rows and columns.
AS_IS = ("right", "an error", "wrong numbers")
ON_SHARDS = ("right", "refused")


def page(text: str, results: Path) -> str:
    """Returns the page with a new table; `results`: the folder of the machines."""
    return own_pages.made_anew(
        text,
        "third-party optimizers",
        lambda machine: table(last_lines(results / machine / "third_party_optimizers.jsonl")),
    )


def last_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the last line of each optimizer and number of ranks. Raises ValueError without lines."""
    rows = own_pages.last_lines(path, lambda line: (line["optimizer"], line["ranks"]))
    if not rows:
        raise ValueError(f"expected results in {path}, found none")
    return rows


def outcome(found: dict[str, Any]) -> str:
    """Returns `right`, `refused` by on_shards, `an error`, or `wrong numbers`."""
    if found["built"] or found["trained"]:
        return "refused" if "on_shards: " in found["built"] else "an error"
    return "right" if found["off"] <= CLOSE else "wrong numbers"


def table(rows: list[dict[str, Any]]) -> str:
    """One cell for each pair of outcomes; of several numbers of ranks, the worse."""
    by_class: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_class.setdefault(row["class"], []).append(row)
    cells: dict[tuple[str, str], list[str]] = {}
    failing = []
    for name, lines in sorted(by_class.items(), key=lambda item: item[0].lower()):
        if any(line["plain"] for line in lines):
            failing.append(name)
            continue
        as_is, on_shards = (
            max((outcome(line[way]) for line in lines), key=order.index)
            for way, order in (("as_is", AS_IS), ("on_shards", (*ON_SHARDS, "an error", "wrong numbers")))
        )
        cells.setdefault((as_is, on_shards), []).append(name)
    lines_of_table = [["as they are", "by `on_shards`", "", "classes"]]
    for (as_is, on_shards), names in sorted(cells.items(), key=lambda item: (-len(item[1]), item[0])):
        lines_of_table.append([as_is, on_shards, str(len(names)), ", ".join(names)])
    lines_of_table.append(
        ["", "", str(len(failing)), "fail on the plain model as they are called here: " + ", ".join(failing)]
    )
    ranks = " and ".join(str(number) for number in sorted({row["ranks"] for row in rows}))
    packages = ", ".join(dict.fromkeys(row["package"] for row in rows))
    return own_pages.measured(rows, f", {packages}, on {ranks} ranks.", lines_of_table)
