"""Plots: memory and time of several plans as bars, and a map of where rotation wins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rtp_ext.planner.display.text import GB
from rtp_ext.planner.memory.report import COMPONENTS, OUTSIDE_THE_ALLOCATOR, MemoryReport
from rtp_ext.planner.plans.when import BASE, LINKS, Cell, gpu_text
from rtp_ext.planner.time.report import TimeReport

_GROUP_COLORS = {"compute": "#9ecae1", "exposed communication": "#d95f0e", "bubble": "#bdbdbd"}
_MOST = 2.0  # ratio at the ends of the colour scale


def plot_plans(file: str, names: Sequence[str], reports: Sequence[MemoryReport], times: Sequence[TimeReport]) -> None:
    """Draws two bars per plan: the memory of the largest stage by component, in GB, with the memory limit, and the
    predicted time of a step in seconds: compute, exposed communication, bubble.

    Raises:
        ImportError: matplotlib is missing; OSError or ValueError: `file` cannot be written.
    """
    figure_class = _figure_class()
    figure = figure_class(figsize=(12.0, 2.4 + 0.6 * len(reports)), layout="constrained")
    axes, clock = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    left = [0.0] * len(reports)
    for index, component in enumerate(COMPONENTS):
        sizes = [report.components[component] / GB for report in reports]
        if not any(sizes):
            continue
        label = component.replace("_", " ")
        color = "lightgray" if component == OUTSIDE_THE_ALLOCATOR else f"C{index}"
        axes.barh(range(len(reports)), sizes, left=left, height=0.6, label=label, color=color)
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    first = reports[0]
    for fraction, style in ((first.safe_fraction, "--"), (1.0, "-")):
        line = fraction * first.memory_bytes / GB
        axes.axvline(line, color="black", linestyle=style, linewidth=1.0)
        axes.annotate(f"{fraction:.0%} ", (line, -0.57), ha="right", va="top", fontsize=8)
    axes.set_yticks(range(len(reports)), [f"{name}\n{r.verdict}" for name, r in zip(names, reports, strict=True)])
    axes.set_ylim(len(reports) - 0.4, -0.6)
    axes.set_xlabel(
        "memory of the GPU that holds most, GB (1e9 bytes)\nthe limits apply to the allocator: all but the gray part"
    )
    left = [0.0] * len(times)
    for group, color in _GROUP_COLORS.items():
        seconds = [time.groups[group] for time in times]
        clock.barh(range(len(times)), seconds, left=left, height=0.6, label=group, color=color)
        left = [before + more for before, more in zip(left, seconds, strict=True)]
    for row, time in enumerate(times):
        clock.annotate(f" {time.tflops_per_gpu:.0f} TFLOP/s", (left[row], row), va="center", fontsize=8)
    clock.set_xlim(0, 1.25 * max(left))
    clock.set_xlabel("predicted time of a step, s")
    figure.suptitle(f"{first.model} on {first.cluster}", fontsize=10)
    figure.legend(fontsize=7, ncols=5, loc="outside lower center")
    figure.savefig(file, dpi=150)


def plot_when(file: str, cells: Sequence[Cell], base: str = BASE) -> None:
    """Draws one map per link: models over tokens per GPU, coloured by the time of the best plan without rotation
    divided by that of the best with it, with the name of the fastest family. base: of the grid.

    Raises:
        ImportError: matplotlib is missing; OSError or ValueError: `file` cannot be written.
    """
    figure_class = _figure_class()
    models = list(dict.fromkeys((cell.model, cell.gpus) for cell in cells))
    tokens = sorted({cell.tokens for cell in cells})
    links = [link for link in LINKS if any(cell.link == link for cell in cells)]
    figure = figure_class(figsize=(4.6 * len(links) + 1.0, 0.75 * len(models) + 1.8), layout="constrained")
    panels = figure.subplots(1, len(links), sharey=True, squeeze=False)[0]
    image = None
    for panel, link in zip(panels, links, strict=True):
        shown = {(cell.model, cell.gpus, cell.tokens): cell for cell in cells if cell.link == link}
        rows = [[shown[(*model, size)] for size in tokens] for model in models]
        values = [[_shade(cell.advantage) for cell in row] for row in rows]
        image = panel.imshow(values, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
        for y, row in enumerate(rows):
            for x, cell in enumerate(row):
                finite = math.isfinite(cell.advantage) and cell.advantage > 0
                ratio = f"\n{cell.advantage:.2f}" if finite else ""
                panel.text(x, y, f"{cell.winner}{ratio}", ha="center", va="center", fontsize=7)
        panel.set_xticks(range(len(tokens)), [str(size) for size in tokens])
        panel.set_yticks(range(len(models)), [f"{name}\n{gpus} GPUs" for name, gpus in models])
        panel.set_xlabel("tokens of each GPU")
        panel.set_title(link, fontsize=10)
    if image is not None:
        bar = figure.colorbar(image, ax=list(panels), ticks=[-1, 0, 1])
        bar.ax.set_yticklabels([f"{1 / _MOST:g}", "1", f"{_MOST:g}"])
        bar.set_label("time of the others / time of RTP")
    figure.suptitle(f"Predicted fastest plans on {gpu_text(base)}; blue: rotation wins", fontsize=11)
    figure.savefig(file, dpi=130)


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install 'rtp-ext[plot]'") from error
    return Figure


def _shade(advantage: float) -> float:
    """Maps a ratio to -1 to 1 on a logarithmic scale; 0 where nothing fits."""
    if advantage != advantage:
        return 0.0
    if not 0 < advantage < math.inf:
        return 1.0 if advantage else -1.0
    return max(-1.0, min(1.0, math.log(advantage) / math.log(_MOST)))
