"""Figures of the committed results: overlap against tokens, memory by component, scaling against the ideal.

    python benchmarks/plot.py overlap benchmarks/results/h200-1gpu/overlap.jsonl --output docs/figures/overlap
    python benchmarks/plot.py memory benchmarks/results/h200-1gpu/memory_per_rank.jsonl --output docs/figures/memory
    python benchmarks/plot.py memory benchmarks/results/cpu-2core/compare.jsonl --model mlp --tokens 256 --output FILE
    python benchmarks/plot.py scaling benchmarks/results/cpu-2core/compare.jsonl --model mlp --output FILE
    python benchmarks/plot.py rates benchmarks/results/cpu-2core/hosts.jsonl --model mlp --output docs/figures/rates
    python benchmarks/plot.py rates benchmarks/results/cpu-2core/lora.jsonl --log --output docs/figures/lora
    python benchmarks/plot.py outer benchmarks/results/cpu-2core/outer.jsonl --output docs/figures/outer
    python benchmarks/plot.py forwards benchmarks/results/cpu-2core/forwards.jsonl --output docs/figures/forwards
    python benchmarks/plot.py paper benchmarks/results/cpu-2core/peers.jsonl --output docs/figures/paper
    python benchmarks/plot.py planned benchmarks/results/cpu-2core/planner_grid.jsonl --output docs/figures/planner_grid
    python benchmarks/plot.py recipes benchmarks/results/cpu-2core/recipes.jsonl --output docs/figures/recipes
    python benchmarks/plot.py capacity benchmarks/results/cpu-2core/capacity.jsonl --output docs/figures/capacity
    python benchmarks/plot.py experts benchmarks/results/cpu-2core/experts.jsonl --output docs/figures/experts

Writes FILE.png and FILE.svg. The results must be committed without changes, unless --uncommitted marks the figure as a
draft. If a case was measured several times, the last line counts. Markers, dashes and hatching distinguish all series,
so a print in black and white is readable.
"""

import argparse
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from experts import last_ways
from forwards import last_forwards
from outer import last_outer_run
from planner.capacity import searched_again
from planner.planned import planned_again
from shared.hosts import bits_per_second
from shared.reports import last_runs, runs_of
from shared.table import NAMES, Row, read_lines, ways_of

MARKERS = "osD^vP*X"
COLOURS = ("#1f4e79", "#f2b366", "#7a7a7a", "#4a90c4", "#b03a2e", "#117864", "#5b2c6f", "#000000")
HOLLOW = {"linestyle": "--", "linewidth": 1, "markerfacecolor": "white", "zorder": 1}
SAFE = 0.8  # of a memory: what fits by the estimate (Fujii et al., arXiv 2411.06465)
MIB = 2**20
_GROWN = {"layers": "layers", "hidden": "the hidden size"}
COMPONENTS = {
    "parameters": ("parameter_bytes", {"facecolor": "#1f4e79"}),
    "gradients": ("gradient_bytes", {"facecolor": "#ffffff", "hatch": "////"}),
    "optimizer state": ("optimizer_bytes", {"facecolor": "#f2b366"}),
    "transient, activations included": ("transient_bytes", {"facecolor": "#d6e6f5", "hatch": ".."}),
}


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


def committed(path: Path) -> bool:
    """Whether git has this version of the file."""
    commands = (["ls-files", "--error-unmatch", path.name], ["diff", "--quiet", "HEAD", "--", path.name])
    return all(
        subprocess.run(["git", *command], cwd=path.resolve().parent, capture_output=True).returncode == 0
        for command in commands
    )


def about(rows: list[Row]) -> str:
    """Returns the text below a figure: the machine and the versions of the measurement."""
    devices = ", ".join(sorted({row["device"] for row in rows}))
    commits = ", ".join(sorted({str(row["commit"]) for row in rows}))
    return f"{devices}; {min(row['date'] for row in rows)[:10]}; commit {commits}"


def overlap(rows: list[Row], args: argparse.Namespace) -> Any:
    """E_hide, and speed against one whole GEMM with its ceiling, over tokens; a line for each transport and link."""

    def kind(row: Row) -> tuple[Any, ...]:
        return row["shape"], row["ranks"], row["direction"], row["dtype"]

    wished = (args.shape, args.ranks, args.direction, None)
    rows = [row for row in rows if all(w in (None, is_) for w, is_ in zip(wished, kind(row), strict=True))]
    if not rows:
        raise CannotPlot(f"no case has shape, ranks and direction {wished[:3]}")
    chosen = Counter(map(kind, rows)).most_common(1)[0][0]
    rows = [row for row in rows if kind(row) == chosen]
    lines: dict[str, dict[int, Row]] = {}
    for row in rows:
        name = row["link"] or row["transport"]
        name += "" if row.get("max_ctas") is None else f", {row['max_ctas']} CTAs"
        lines.setdefault(name + (", graph" if row.get("graph") else ""), {})[row["tokens"]] = row
    figure, (hidden, speed) = canvas(2)
    for index, (name, points) in enumerate(sorted(lines.items())):
        tokens = sorted(points)
        look = style(index)
        some = [number for number in tokens if points[number]["e_hide"] is not None]
        hidden.plot(some, [points[number]["e_hide"] for number in some], label=name, **look)
        speed.plot(tokens, [points[number]["roofline"] for number in tokens], label=name, **look)
        most = [points[number]["t_g1_us"] / points[number]["ceiling_us"] for number in tokens]
        hollow = {**look, "markerfacecolor": "white", "markersize": 9, "zorder": 1}
        speed.plot(tokens, most, linestyle=(4 * index, (4, 3)), linewidth=1, **hollow)
    for axes, title in ((hidden, "hidden part of the communication"), (speed, "speed, one whole GEMM = 1")):
        axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
        axes.set_title(title, fontsize=9, loc="left")
        token_axis(axes, sorted({row["tokens"] for row in rows}))
    hidden.axhline(0, color="black", linewidth=0.8)
    speed.set_ylim(bottom=0)
    speed.plot([], [], color="black", linestyle="--", linewidth=1, label="hollow: ceiling, GEMM or hops alone")
    speed.legend(fontsize=7, edgecolor="none", loc="best")
    shape, ranks, direction, dtype = chosen
    stands = ", one process stands for the ring" if all(row["transport"] == "emulated" for row in rows) else ""
    shown = [row for points in lines.values() for row in points.values()]
    return figure, shown, f"{shape}, {direction}, R = {ranks}, {dtype}{stands}"


def memory(rows: list[Row], args: argparse.Namespace) -> Any:
    """Bars of a rank's peak, stacked by component."""
    rows = [row for row in rows if row.get("transient_bytes") is not None]
    model = args.model or (rows[-1]["case"].split("/")[0] if rows else "")
    rows = [row for row in rows if row["case"].startswith(f"{model}/")]
    for key in ("ranks", "tokens"):
        wish = getattr(args, key)
        wish = rows[-1][key] if wish is None and rows else wish
        rows = [row for row in rows if row[key] == wish]
    if all(row["benchmark"] == "compare" for row in rows):  # a run; memory_per_rank has one for each strategy
        rows = [row for row in rows if (row["command"], row["date"]) == (rows[-1]["command"], rows[-1]["date"])]
    rows = [row for row in rows if (row["dtype"], row["device"]) == (rows[-1]["dtype"], rows[-1]["device"])]
    last = {row["strategy"]: row for row in rows}
    if not last:
        raise CannotPlot(f"no line with memory of model {model!r} with these ranks and tokens")
    rows = list(last.values())
    figure, (axes,) = canvas(1, 1.8 + 0.45 * len(rows))
    names = [NAMES.get(name, name).replace("`", "").replace(", ", ",\n") for name in last]
    partial = [
        "" if row.get("layers") == row.get("full_layers") else f" ({row['layers']} of {row['full_layers']} layers)"
        for row in rows
    ]
    left = [0.0] * len(rows)
    for label, (key, look) in COMPONENTS.items():
        sizes = [row[key] / 2**30 for row in rows]
        axes.barh(range(len(rows)), sizes, left=left, label=label, edgecolor="#222222", linewidth=0.7, **look)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for place, total in enumerate(left):
        axes.text(total, place, f" {total:.3g}", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [name + note for name, note in zip(names, partial, strict=True)], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(left))
    axes.set_xlabel("GiB per rank at the peak of a step", fontsize=9)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize=7, frameon=False)
    return figure, rows, f"{model}: {rows[0]['tokens']} tokens per rank, R = {rows[0]['ranks']}"


def scaling(rows: list[Row], args: argparse.Namespace) -> Any:
    """Tokens per second of all ranks against the most that any strategy has at R = 1."""
    model = args.model or rows[-1]["case"].split("/")[0]
    rows = last_runs(rows, model)
    rows = [row for row in rows if (row["command"], row["device"]) == (rows[-1]["command"], rows[-1]["device"])]
    tokens = args.tokens or rows[-1]["tokens"]
    rows = [row for row in rows if row["tokens"] == tokens and row["strategy"] != "single"]
    if {row["ranks"] for row in rows} <= {1} or not any(row["ranks"] == 1 for row in rows):
        raise CannotPlot(f"expected results of {model} at {tokens} tokens for R = 1 and more, got too few")
    lines: dict[str, dict[int, Row]] = {}
    for row in rows:
        lines.setdefault(row["strategy"], {})[row["ranks"]] = row
    figure, (axes,) = canvas(1)
    one = max(row["tokens_per_s"] for row in rows if row["ranks"] == 1)
    for index, (name, points) in enumerate(lines.items()):
        sizes = sorted(points)
        ratios = np.array([points[size]["tokens_per_s"] / one for size in sizes])
        steps = np.array([[points[size][f"{key}_ms"] for size in sizes] for key in ("step", "p20", "p80")])
        errors = ratios * np.abs(steps[0] / steps[[2, 1]] - 1)  # a slow step is few tokens per second
        label = NAMES.get(name, name).replace("`", "")
        axes.errorbar(sizes, ratios, errors, label=label, capsize=2, linewidth=1.2, **style(index))
    sizes = sorted({row["ranks"] for row in rows})
    shared = [size for size in sizes if any(row["ranks"] == size and row.get("cores_shared") for row in rows)]
    ideal = [min(size, rows[0]["cores"]) if size in shared else size for size in sizes]
    axes.plot(sizes, ideal, color="black", linestyle="--", linewidth=1, label="ideal")
    axes.set_xticks(sizes)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks", fontsize=9)
    axes.set_title("tokens per second, the fastest of one rank = 1", fontsize=9, loc="left")
    axes.legend(fontsize=7, frameon=False)
    note = f"\nR = {', '.join(map(str, shared))} take turns on {rows[0]['cores']} cores" if shared else ""
    return figure, rows, f"{model}: {tokens} tokens per rank{note}"


def rates(rows: list[Row], args: argparse.Namespace) -> Any:
    """Step time over the rate of the links between made hosts, and the least it could be; a panel for every batch."""
    model = args.model or rows[-1]["case"].split("/")[0]
    rows = [row for row in rows if row["case"].startswith(f"{model}/") and row.get("roof_ms") is not None]
    rows = [row for row in rows if args.tokens in (None, row["tokens"]) and args.ranks in (None, row["ranks"])]
    if not rows:
        raise CannotPlot(f"no line between made hosts of model {model!r} with these ranks and tokens")
    kinds: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        names = ("hosts", "ranks_per_host", "delay", "dtype", "device", "asked_travel")
        kinds.setdefault(tuple(row.get(name) for name in names), []).append(row)
    rows = max(reversed(kinds.values()), key=lambda kind: len({row["rate"] for row in kind}))  # the latest of equals
    places: dict[str, int] = {}
    for row in sorted(rows, key=lambda row: bits_per_second(None if row["rate"] == "none" else row["rate"]) or 1e99):
        places.setdefault(row["rate"], len(places))
    lines: dict[str, dict[tuple[int, str], Row]] = {}
    for row in rows:  # of a case that was measured several times the last line counts
        name = NAMES.get(row["strategy"], row["strategy"])
        lines.setdefault(", ".join(filter(None, (name, ways_of(row)))), {})[row["tokens"], row["rate"]] = row
    tokens = sorted({row["tokens"] for row in rows})
    figure, panels = canvas(len(tokens))
    for axes, count in zip(panels, tokens, strict=True):
        for index, (name, points) in enumerate(lines.items()):
            some = [rate for rate in places if (count, rate) in points]
            where, look = [places[rate] for rate in some], style(index)
            for key, more in (("step_ms", {"label": name.replace("`", "")}), ("roof_ms", HOLLOW)):
                values = [points[count, rate][key] / 1e3 for rate in some]
                axes.plot(where, values, **{**look, "linewidth": 1.2, **more})
        axes.set_xticks(range(len(places)), ["no limit" if rate == "none" else rate for rate in places])
        if args.log:
            axes.set_yscale("log")
            for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                which("{x:g}")
            axes.tick_params(axis="y", which="minor", labelsize=6)
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel("rate of each host's link", fontsize=9)
        axes.set_title(f"seconds a step, {count} tokens per rank", fontsize=9, loc="left")
    panels[-1].plot([], [], color="black", marker="o", label="hollow: the least it could be", **HOLLOW)
    panels[-1].legend(fontsize=7, frameon=False)
    first, shown = rows[-1], [row for points in lines.values() for row in points.values()]
    return figure, shown, f"{model}: {first['hosts']} hosts of {first['ranks_per_host']}, {first['dtype']}"


def outer(rows: list[Row], args: argparse.Namespace) -> Any:
    """Loss of policies between replicas over steps, bytes and seconds, of the last run."""
    if not (rows := last_outer_run(rows, args.words)):
        raise CannotPlot("expected a run of outer.py with all-reduce among its policies, found none")
    figure, panels = canvas(3)
    kinds = {
        "steps": lambda row: row["points"],
        "MiB that a replica has sent": lambda row: [count / 2**20 for count in row["point_bytes"]],
        "seconds": lambda row: row["point_seconds"],
    }
    for axes, (label, along) in zip(panels, kinds.items(), strict=True):
        for index, row in enumerate(rows):
            look = {
                **style(index),
                "markersize": 4,
                "linewidth": 1,
                "linestyle": ("-", "--")[index // len(COLOURS) % 2],
            }
            losses = [statistics.fmean(row["losses"][max(0, i - 9) : i + 1]) for i in range(len(row["losses"]))]
            points = [(x, y) for x, y in zip(along(row), losses, strict=True) if x > 0]
            often = {"markevery": max(1, len(points) // 8)}
            axes.plot([x for x, _ in points], [y for _, y in points], label=row["strategy"], **look, **often)
        axes.set_xlabel(label, fontsize=9)
    for axes in panels[1:]:
        axes.set_xscale("log")
    panels[0].set_title("loss, nats per byte, mean of all replicas and of the last ten points", fontsize=9, loc="left")
    panels[0].legend(fontsize=6, frameon=False, ncols=2)
    first = rows[-1]
    between = f", made hosts at {first['rate']}" if "rate" in first else ""
    return figure, rows, f"{first['replicas']} replicas of {first['ring']}, {first['tokens']} tokens per rank{between}"


def forwards(rows: list[Row], args: argparse.Namespace) -> Any:
    """Tokens a second of forwards alone over the tokens of a pass, of the last run; a panel for each kind of links."""
    if not (rows := last_forwards(rows, ["equal"])):
        raise CannotPlot("expected a run of forwards.py, found none")
    links = list(dict.fromkeys(row.get("rate") for row in rows))
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    figure, panels = canvas(len(links))
    for axes, link in zip(panels, links, strict=True):
        for name in names:
            mine = sorted(
                (r for r in rows if (r.get("rate"), r["strategy"]) == (link, name)), key=lambda r: r["tokens"]
            )
            tokens, look = [row["tokens"] for row in mine], style(names.index(name))
            label = NAMES[name].replace("`", "")
            axes.plot(tokens, [row["tokens_per_s"] for row in mine], label=label, linewidth=1.2, **look)
            if name == "rtp-tcp" and link is not None:
                most = [row["tokens_per_s"] * row["step_ms"] / row["roof_ms"] for row in mine]
                axes.plot(tokens, most, label="its roof", **{**look, **HOLLOW})
        token_axis(axes, sorted({row["tokens"] for row in rows}))
        axes.set_ylim(bottom=0)
        axes.set_title(f"tokens a second, {'one host' if link is None else link}", fontsize=9, loc="left")
        axes.legend(fontsize=6, frameon=False)
    return figure, rows, f"{rows[0]['shape']}, {rows[0]['ranks']} ranks"


def paper(rows: list[Row], args: argparse.Namespace) -> Any:
    """What the paper compares: memory and throughput over tokens and ranks; two panels for each number of ranks."""
    model = args.model or rows[-1]["case"].split("/")[0]
    runs = runs_of(rows, model)
    sizes = sorted({ranks for _, ranks, _ in runs if args.ranks in (None, ranks)})
    if not sizes:
        raise CannotPlot(f"no line of model {model!r} with these ranks on one host")
    names = list(dict.fromkeys(["rtp", *(name for name, *_ in runs if name not in ("none", "single"))]))
    figure, panels = canvas(2 * len(sizes))
    for index, ranks in enumerate(sizes):
        memory, speed = panels[2 * index : 2 * index + 2]
        tokens = sorted({count for _, size, count in runs if size == ranks})
        for number, name in enumerate(names):
            mine = [runs[name, ranks, count] for count in tokens if (name, ranks, count) in runs]
            where, look = [row["tokens"] for row in mine], {"linewidth": 1.2, **style(number)}
            label = NAMES.get(name, name).replace("`", "")
            memory.plot(where, [row["peak_bytes"] / 2**20 for row in mine], label=label, **look)
            speed.plot(where, [row["tokens_per_s"] for row in mine], **look)
        alone = [
            (count, runs["single", ranks, count]["peak_bytes"] / ranks / 2**20)
            for count in tokens
            if ("single", ranks, count) in runs
        ]
        if alone:
            memory.plot(*zip(*alone, strict=True), color="black", linestyle=":", label="one process / R")
        memory.set_title(f"peak, MiB per rank, R = {ranks}", fontsize=9, loc="left")
        speed.set_title(f"tokens a second, R = {ranks}", fontsize=9, loc="left")
        for axes in (memory, speed):
            token_axis(axes, tokens)
            axes.set_ylim(bottom=0)
    panels[0].legend(fontsize=6, frameon=False)
    shown = list(runs.values())
    shared = " that take turns on fewer cores where there are more" if any(row["cores_shared"] for row in shown) else ""
    return figure, shown, f"{shown[0]['shape']}; ranks{shared}" if shared else shown[0]["shape"]


def planned(rows: list[Row], args: argparse.Namespace) -> Any:
    """Counted bytes of every run over predicted ones; above the dashed line a run at the 80 % line would not fit."""
    from matplotlib.ticker import NullFormatter

    if not (rows := planned_again([row for row in rows if row["benchmark"] == "planner_grid"])):
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
    if not (rows := searched_again([row for row in rows if row["benchmark"] == "capacity"])):
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


def recipes(rows: list[Row], args: argparse.Namespace) -> Any:
    """Losses over steps of each recipe of products in 8 bits, smoothed, and their ratio to those without one."""
    runs = {row["recipe"]: row for row in rows if row["benchmark"] == "train_lm"}
    if None not in runs:
        raise CannotPlot("expected runs of train_lm.py with and without --recipe, found none without")
    figure, (losses, ratios) = canvas(2)
    width = 20  # steps of a running mean
    smooth = {name: np.convolve(row["losses"], np.ones(width) / width, "valid") for name, row in runs.items()}
    for index, (name, values) in enumerate(smooth.items()):
        steps = np.arange(width, width + len(values))
        look = {**style(index), "markevery": (10 * index, 80)}
        losses.plot(steps, values, label=name or runs[None]["dtype"], linewidth=1, **look)
        ratios.plot(steps, 100 * (values / smooth[None] - 1), linewidth=1, **look)
    losses.set_title(f"loss, mean of {width} steps", fontsize=9, loc="left")
    ratios.set_title("% above that without a recipe", fontsize=9, loc="left")
    losses.legend(fontsize=6, frameon=False)
    for axes in (losses, ratios):
        axes.set_xlabel("step", fontsize=9)
    shown = list(runs.values())
    return figure, shown, f"{shown[0]['shape']}; {shown[0]['ranks']} ranks"


def experts(rows: list[Row], args: argparse.Namespace) -> Any:
    """Bars of the step time of each way to share experts; a panel for each kind of links."""
    if not (rows := last_ways([row for row in rows if row["benchmark"] == "experts"], [])):
        raise CannotPlot("expected results of experts.py, found none")
    links = list(dict.fromkeys(row.get("rate") for row in rows))
    figure, panels = canvas(len(links), 1.5 + 0.3 * len({row["strategy"] for row in rows}))
    for axes, link in zip(panels, links, strict=True):
        own = [row for row in rows if row.get("rate") == link]
        steps, low, high = ([row[key] for row in own] for key in ("step_ms", "p20_ms", "p80_ms"))
        errors = np.maximum(0, [np.subtract(steps, low), np.subtract(high, steps)])  # few rounds: a median below p20
        rings = [row["strategy"].startswith("rtp") for row in own]
        for ring, label, look in (
            (True, "experts rotate, or are divided", {"facecolor": "#4a90c4"}),
            (False, "fully_shard gathers them", {"facecolor": "#ffffff", "hatch": "////"}),
        ):
            which = [place for place, is_ring in enumerate(rings) if is_ring is ring]
            error = {"xerr": errors[:, which], "capsize": 2, "ecolor": "#222222"}
            values = [steps[place] for place in which]
            axes.barh(which, values, label=label, edgecolor="#222222", linewidth=0.7, **look, **error)
        for place, step in enumerate(steps):
            axes.text(high[place], place, f"  {step:.0f}", va="center", fontsize=8)
        axes.set_yticks(range(len(own)), [row["strategy"] for row in own], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.15 * max(high))
        where = "one host" if link is None else f"{own[0]['hosts']} hosts of {own[0]['ranks_per_host']}, {link}"
        axes.set_title(f"milliseconds a step, {where}", fontsize=9, loc="left")
    panels[0].legend(fontsize=7, frameon=False, loc="upper right")
    return figure, rows, f"{rows[0]['shape']}; {rows[0]['tokens']} tokens a rank, {rows[0]['ranks']} ranks"


FIGURES = {"overlap": overlap, "memory": memory, "scaling": scaling, "rates": rates, "outer": outer}
FIGURES |= {"forwards": forwards, "planned": planned, "capacity": capacity, "paper": paper, "recipes": recipes}
FIGURES["experts"] = experts


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Figures of the committed results. See the top of the file.")
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("results", type=Path, nargs="+", metavar="FILE.jsonl")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="FILE.png and FILE.svg are written")
    parser.add_argument("--uncommitted", action="store_true", help="draw a draft from results that are not committed")
    parser.add_argument("--model", help="of memory, scaling and rates (default: the last measured)")
    parser.add_argument("--words", nargs="+", default=[], help="of outer: what chooses the run, as in report.py")
    parser.add_argument("--shape", help="of overlap (default: the most measured)")
    parser.add_argument("--direction", choices=("forward", "backward", "step"))
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--log", action="store_true", help="of rates: seconds on a logarithmic axis")
    args = parser.parse_args(argv)
    drafts = [path for path in args.results if not committed(path)]
    if drafts and not args.uncommitted:
        sys.exit(f"{drafts[0]} is not committed as it lies here (--uncommitted draws a draft)")
    try:
        figure, rows, title = FIGURES[args.figure]([row for path in args.results for row in read_lines(path)], args)
    except ImportError:
        sys.exit("a plot needs matplotlib: pip install 'rtp-ext[plot]'")
    except ValueError as problem:
        sys.exit(str(problem))
    figure.suptitle(("DRAFT, not committed: " if drafts else "") + title, fontsize=10, fontweight="bold")
    figure.supxlabel(about(rows), fontsize=6, color="#444444")
    for suffix in (".png", ".svg"):
        path = args.output.with_name(args.output.name + suffix)
        figure.savefig(path)
        print(path)


if __name__ == "__main__":
    main()
