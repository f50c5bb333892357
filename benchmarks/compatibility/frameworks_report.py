"""The table of docs/frameworks.md, from the results of frameworks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.reports import own_pages

from compatibility.framework_table import PACKAGES


def last_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the last line of each framework and mesh, in the order of the first. Raises ValueError without lines."""
    rows = own_pages.last_lines(path, lambda line: (line["framework"], _mesh(line)))
    if not rows:
        raise ValueError(f"expected results in {path}, found none")
    return rows


def _mesh(line: dict[str, Any]) -> str:
    replicas = line.get("replicas", 1)
    return str(line["ranks"]) if replicas == 1 else f"{replicas} x {line['ranks'] // replicas}"


def page(text: str, results: Path) -> str:
    """Returns the page with a new table; `results`: the folder of the machines."""
    return own_pages.made_anew(
        text, "frameworks", lambda machine: table(last_lines(results / machine / "frameworks.jsonl"))
    )


def table(rows: list[dict[str, Any]]) -> str:
    head = [
        "framework",
        "ranks",
        "compared with",
        "steps",
        "losses differ by",
        "gradient norms by",
        "parameters on a rank",
    ]
    lines = [[*head, "resumed in the middle", "saved and loaded"]]
    for row in rows:
        cells = [_named(row), _mesh(row), row["reference"], str(row["steps"])]
        cells += [_spread(row["loss_spread"]), _spread(row["norm_spread"]), f"{100 * row['kept']:.1f} %"]
        lines.append([*cells, _equal(row["resumed"]), _equal(row["reloaded"])])
    return own_pages.measured(rows, ". Ranks: of one ring, or replicas x those of a ring.", lines)


def _named(row: dict[str, Any]) -> str:
    """`trl 1.16.0`, or `trl 1.16.0, GRPO` of a run that has another name than its package."""
    run = row["framework"]
    label = f"{PACKAGES.get(run, run)} {row['framework_version']}"
    return f"{label}, {run.upper()}" if run in PACKAGES else label


def _spread(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"


def _equal(value: float | None) -> str:
    if value is None:
        return ""
    return "equal" if value == 0 else f"differs by {value:.0e}"
