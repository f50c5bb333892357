"""Panels, colours and markers that all figures share."""

from __future__ import annotations

from typing import Any

MARKERS = "osD^vP*X"
COLOURS = ("#1f4e79", "#f2b366", "#7a7a7a", "#4a90c4", "#b03a2e", "#117864", "#5b2c6f", "#000000")
HOLLOW = {"linestyle": "--", "linewidth": 1, "markerfacecolor": "white", "zorder": 1}


class CannotPlot(ValueError):
    """The results do not hold what the figure shows."""


def canvas(columns: int, height: float = 3.6) -> tuple[Any, Any]:
    """Returns a figure of one row of `columns` panels, `height` inches high, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * columns + 1, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for each in axes:
        each.spines[["right", "top"]].set_visible(False)
        each.tick_params(labelsize=8)
    return figure, axes


def style(index: int) -> dict[str, Any]:
    """Returns colour and marker of line number `index`."""
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 5}


def token_axis(axes: Any, tokens: list[int]) -> None:
    """Makes the x axis logarithmic in tokens per rank."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{number:g}" for number in tokens])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("tokens per rank", fontsize=9)
