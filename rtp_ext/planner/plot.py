"""Stacked bars of the memory of several plans against the line of what is safe."""

from __future__ import annotations

from collections.abc import Sequence

from rtp_ext.planner.report import COMPONENTS, OUTSIDE_THE_ALLOCATOR, MemoryReport
from rtp_ext.planner.text import GB


def plot_memory(file: str, names: Sequence[str], reports: Sequence[MemoryReport]) -> None:
    """Draws into `file` one bar for each plan: the components of the stage that allocates most, in GB.

    Raises:
        ImportError: matplotlib is missing; OSError or ValueError: `file` cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 2.2 + 0.6 * len(reports)), layout="constrained")
    axes = figure.subplots()
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
        "memory of the fullest GPU, GB (1e9 bytes)\nthe lines are for what the allocator holds: all but the gray part"
    )
    axes.set_title(f"{first.model} on {first.cluster}", fontsize=10)
    figure.legend(fontsize=7, ncols=4, loc="outside lower center")
    figure.savefig(file, dpi=150)
