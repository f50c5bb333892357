"""The table of docs/compile.md, from the results of compiled.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.reports.own_pages import last_lines, made_anew, measured

_KEY = ("ranks", "shape", "tokens", "dtype", "checkpoint", "fused_head", "strategy", "mode")


def page(text: str, results: Path) -> str:
    """Returns the page with a new table; `results`: the folder of the machines."""

    def made(machine: str) -> str:
        return table(last_lines(results / machine / "compiled.jsonl", lambda line: tuple(line[key] for key in _KEY)))

    return made_anew(text, "compiled", made)


def table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "\nNot measured yet: `make compiled`.\n\n"
    head = ["ranks", "strategy", "mode", "graphs", "graph breaks", "hops of a step", "step, ms", "of eager"]
    lines = [[*head, "first step, s", "peak, MiB"]]
    for row in rows:
        options = [name for key, name in (("fused_head", "fused head"), ("checkpoint", "recomputed")) if row[key]]
        strategy = "a ring" if row["strategy"] == "rtp" else f"`{row['strategy']}`"
        cells = [str(row["ranks"]), ", ".join([strategy, *options]), row["mode"]]
        cells += [str(row["graphs"]), str(row["graph_breaks"]), "" if row["hops"] is None else str(row["hops"])]
        cells += [f"{row['step_ms']:.1f}", f"{row['against_eager']:.2f}", f"{row['first_step_s']:.1f}"]
        lines.append([*cells, f"{row['peak_bytes'] / 2**20:.0f}"])
    shapes = "; ".join(dict.fromkeys(row["shape"] for row in rows))
    return measured(rows, f": {shapes}, {rows[0]['tokens']} tokens a rank.", lines)
