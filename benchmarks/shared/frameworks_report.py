"""The table of docs/frameworks.md, from the results of frameworks.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

MARKER = re.compile(r"(<!-- frameworks: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def last_lines(path: Path) -> list[dict[str, Any]]:
    """Of each framework and mesh the last line, in the order of the first. Raises ValueError where there is none."""
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    if not lines:
        raise ValueError(f"expected results in {path}, found none")
    return list({(line["framework"], _mesh(line)): line for line in lines}.values())


def _mesh(line: dict[str, Any]) -> str:
    replicas = line.get("replicas", 1)
    return str(line["ranks"]) if replicas == 1 else f"{replicas} x {line['ranks'] // replicas}"


def page(text: str, results: Path) -> str:
    """A page with its table made anew; `results`: the folder of the machines."""
    if not MARKER.search(text):
        raise ValueError("expected a block <!-- frameworks: MACHINE --> ... <!-- end -->, found none")
    return MARKER.sub(
        lambda found: found[1] + table(last_lines(results / found[2] / "frameworks.jsonl")) + found[4], text
    )


def table(rows: list[dict[str, Any]]) -> str:
    first = rows[0]
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
    lines.append(["---"] * len(lines[0]))
    for row in rows:
        cells = [f"{row['framework']} {row['framework_version']}", _mesh(row), row["reference"], str(row["steps"])]
        cells += [_spread(row["loss_spread"]), _spread(row["norm_spread"]), f"{100 * row['kept']:.1f} %"]
        lines.append([*cells, _equal(row["resumed"]), _equal(row["reloaded"])])
    commands = "\n".join(f"    {command}" for command in dict.fromkeys(row["command"] for row in rows))
    dates = sorted({row["date"][:10] for row in rows})
    commits = ", ".join(dict.fromkeys(str(row["commit"]) for row in rows))
    about = (
        f"Measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))} at commit {commits}, torch {first['torch']}. "
    )
    about += "Ranks: of one ring, or replicas x those of a ring."
    return f"\n{commands}\n\n{about}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\n"


def _spread(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"


def _equal(value: float | None) -> str:
    if value is None:
        return ""
    return "equal" if value == 0 else f"differs by {value:.0e}"
