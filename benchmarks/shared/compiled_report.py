"""The table of docs/compile.md, from the results of compiled.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

MARKER = re.compile(r"(<!-- compiled: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_KEY = ("ranks", "shape", "tokens", "dtype", "checkpoint", "fused_head", "strategy", "mode")


def last_lines(path: Path) -> list[dict[str, Any]]:
    """Of each case the last line, in the order of the first ones."""
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    return list({tuple(line[key] for key in _KEY): line for line in lines}.values())


def page(text: str, results: Path) -> str:
    """A page with its table made anew; `results`: the folder of the machines."""
    if not MARKER.search(text):
        raise ValueError("expected a block <!-- compiled: MACHINE --> ... <!-- end -->, found none")
    return MARKER.sub(
        lambda found: found[1] + table(last_lines(results / found[2] / "compiled.jsonl")) + found[4], text
    )


def table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "\nNot measured yet: `make compiled`.\n\n"
    head = ["ranks", "strategy", "mode", "graphs", "graph breaks", "hops of a step", "step, ms", "of eager"]
    lines = [[*head, "first step, s", "peak, MiB"]]
    lines.append(["---"] * len(lines[0]))
    for row in rows:
        options = [name for key, name in (("fused_head", "fused head"), ("checkpoint", "recomputed")) if row[key]]
        strategy = "a ring" if row["strategy"] == "rtp" else f"`{row['strategy']}`"
        cells = [str(row["ranks"]), ", ".join([strategy, *options]), row["mode"]]
        cells += [str(row["graphs"]), str(row["graph_breaks"]), "" if row["hops"] is None else str(row["hops"])]
        cells += [f"{row['step_ms']:.1f}", f"{row['against_eager']:.2f}", f"{row['first_step_s']:.1f}"]
        lines.append([*cells, f"{row['peak_bytes'] / 2**20:.0f}"])
    commands = "\n".join(f"    {command}" for command in dict.fromkeys(row["command"] for row in rows))
    dates = sorted({row["date"][:10] for row in rows})
    commits = ", ".join(dict.fromkeys(str(row["commit"]) for row in rows))
    about = f"Measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))} at commit {commits}, torch "
    about += f"{', '.join(dict.fromkeys(row['torch'] for row in rows))}: "
    about += f"{'; '.join(dict.fromkeys(row['shape'] for row in rows))}, {rows[0]['tokens']} tokens a rank."
    return f"\n{commands}\n\n{about}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\n"
