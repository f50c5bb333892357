"""Figures of the planner's own runs: counted bytes against predicted ones, and the largest model under a budget."""

from __future__ import annotations

import argparse
from typing import Any

Row = dict[str, Any]
SAFE = 0.8  # of a memory: what fits by the estimate (Fujii et al., arXiv 2411.06465)
MIB = 2**20
_GROWN = {"layers": "layers", "hidden": "the hidden size"}


def planned(rows: list[Row], args: argparse.Namespace) -> Any:
    """Counted bytes of every run over predicted ones; above the dashed line a run at the 80 % line would not fit."""
    from matplotlib.ticker import NullFormatter
    from shared.reports.figure import HOLLOW, MARKERS, CannotPlot, canvas, style

    from planner.planned import last_of_each

    if not (rows := last_of_each(row for row in rows if row["benchmark"] == "planner_grid")):
        raise CannotPlot("expected runs of planner_grid.py, found none")
    figure, (kept, peak) = canvas(2, 4.2)
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    for axes, what in ((kept, "kept"), (peak, "peak")):
        for index, name in enumerate(strategies):
            own = [row for row in rows if row["strategy"] == name]
            predicted = [row[f"predicted_{what}_bytes"] / MIB for row in own]
            counted = [row[f"counted_{what}_bytes"] / MIB for row in own]
            look = {
                **style(index),
                **(HOLLOW if index >= len(MARKERS) else {}),
                "linestyle": "none",
            }  # styles come again
            axes.plot(predicted, counted, label=name, alpha=0.8, **look)
        ends = [
            min(row[f"predicted_{what}_bytes"] for row in rows),
            max(row[f"predicted_{what}_bytes"] for row in rows),
        ]
        line = [0.8 * ends[0] / MIB, 1.2 * ends[1] / MIB]
        axes.plot(line, line, color="black", linewidth=0.8, label="as predicted")
        axes.plot(line, [x / SAFE for x in line], color="black", linewidth=0.8, linestyle="--", label="80 % line")
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks([10, 20, 50, 100, 200], ["10", "20", "50", "100", "200"])
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("MiB predicted for a rank", fontsize=9)
    kept.set_title("parameters, gradients, optimizer state: MiB counted", fontsize=9, loc="left")
    peak.set_title("peak of a step: MiB counted", fontsize=9, loc="left")
    peak.legend(fontsize=6, frameon=False, ncols=2)
    return figure, rows, f"{len(rows)} runs on CPUs, 1 to {max(row['ranks'] for row in rows)} ranks"


def capacity(rows: list[Row], args: argparse.Namespace) -> Any:
    """Parameters of the largest model within the budget over ranks, found by running; hollow: predicted."""
    from shared.reports.figure import HOLLOW, CannotPlot, canvas, style

    from planner.capacity import last_of_each

    if not (rows := last_of_each(row for row in rows if row["benchmark"] == "capacity")):
        raise CannotPlot("expected results of capacity.py, found none")
    ways = list(dict.fromkeys(row["grown"] for row in rows))
    figure, panels = canvas(len(ways))
    for axes, grown in zip(panels, ways, strict=True):
        names = list(dict.fromkeys(row["strategy"] for row in rows if row["grown"] == grown))
        for index, name in enumerate(names):
            own = [row for row in rows if (row["grown"], row["strategy"]) == (grown, name)]
            own.sort(key=lambda row: row["ranks"])
            sizes = [row["ranks"] for row in own]
            axes.plot(sizes, [row["parameters"] / 1e6 for row in own], label=name, linewidth=1.2, **style(index))
            axes.plot(sizes, [row["predicted_parameters"] / 1e6 for row in own], **{**style(index), **HOLLOW})
        counts = sorted({row["ranks"] for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_xlabel("ranks", fontsize=9)
        axes.set_title(f"largest model, growing {_GROWN[grown]}: 1e6 parameters", fontsize=9, loc="left")
        axes.set_ylim(bottom=0)
    panels[-1].legend(fontsize=7, frameon=False)
    budget = rows[-1]["budget_bytes"] / MIB
    return figure, rows, f"{budget:g} MiB a rank, {rows[-1]['tokens']} tokens of each rank; hollow: predicted"
