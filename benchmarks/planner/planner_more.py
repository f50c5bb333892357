"""Tables of docs/predictions.md: search methods, and our own runs."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from shared.card import RESULTS

from planner import planner_runs as runs
from planner.capacity import last_of_each as last_searches
from planner.planned import last_of_each


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n\n"


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / "cpu-2core" / f"{name}.jsonl").read_text().splitlines()]


def ways() -> str:
    """Ways to search, of their last run."""
    last = {(row["problem"], row["way"]): row for row in _lines("search_ways")}
    rows = [
        (way, what, f"{row['value_s']:.5g} s", f"{row['evaluations']:,}", f"{row['processor_s']:.3g} s")
        for (what, way), row in last.items()
    ]
    return markdown(("way", "problem", "step found", "evaluations", "of a core"), rows)


def grid() -> str:
    """Counted and predicted bytes of our own runs, by strategy."""
    last = last_of_each(_lines("planner_grid"))
    by_strategy: dict[str, list[dict[str, Any]]] = {}
    for row in last:
        by_strategy.setdefault(row["strategy"], []).append(row)
    rows = []
    for name, own in [*by_strategy.items(), ("all", last)]:
        cells_ = [name, str(len(own))]
        for what in ("kept", "slots", "peak"):
            ratios = [
                row[f"predicted_{what}_bytes"] / row[f"counted_{what}_bytes"]
                for row in own
                if row[f"counted_{what}_bytes"]
            ]
            cells_.append(f"{min(ratios):.3f}-{max(ratios):.3f}" if ratios else "-")
        errors = [abs(row["predicted_peak_bytes"] / row["counted_peak_bytes"] - 1) for row in own]
        rows.append((*cells_, f"{100 * runs.mean(errors):.1f} %"))
    heads = ("strategy", "runs", "kept: predicted / counted", "slots", "peak", "peak wrong by, on average")
    return markdown(heads, rows)


def capacity() -> str:
    """The largest models within a budget of every rank, found by running and predicted. On one rank all strategies are
    the same, but for recomputation."""
    rows = [
        (
            f"{row['budget_bytes'] / 2**20:g} MiB",
            row["grown"],
            row["strategy"],
            str(row["ranks"]),
            *(f"{row[size]} ({row[count] / 1e6:.2f}e6)" if row[size] else "none" for size, count in _FOUND),
            f"{row['peak_bytes'] / 2**20:.1f} MiB" if row["peak_bytes"] else "-",
            f"{row['next_peak_bytes'] / 2**20:.1f} MiB" if row["next_peak_bytes"] else "-",
        )
        for row in last_searches(_lines("capacity"))
        if row["ranks"] > 1 or row["strategy"].startswith("rtp")
    ]
    heads = (
        "budget",
        "grown",
        "strategy",
        "ranks",
        "largest that ran (parameters)",
        "predicted",
        "peak",
        "of the next",
    )
    return markdown(heads, rows)


_FOUND = (("largest", "parameters"), ("predicted_largest", "predicted_parameters"))
