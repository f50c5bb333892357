"""Rings on many GPUs, on paper: docs/scale.md's table and figure, from the planner.

    python benchmarks/planner/scale.py          # prints the table
    python benchmarks/planner/scale.py --write  # rewrites the tables in docs/scale.md and draws its figure
    python benchmarks/planner/scale.py --check  # exit status 1 where the page says anything else

Everything is predicted; nothing ran at this size. H200 of 141 GB, eight to a node, a 400 Gb/s port each; one sample of
8192 tokens for every GPU, everything recomputed. A ring has eight ranks on each of its nodes, and as few nodes as its
share of the model needs; more GPUs are more rings, which agree by an all-reduce, by ZeRO's
reduce-scatter and gather, or by DiLoCo every 50 steps. `one ring` is one over all GPUs (at most 1,024). Some
sizes are shown beside groups of fully_shard.
Efficiency is the time that whole products, attention and elementwise kernels take over the time of a step, times the
share of time that failures leave.
"""

import argparse
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rtp_ext.planner import Cluster, ModelSpec, Strategy, estimate_memory, estimate_time, goodput
from rtp_ext.planner.plans.differences import differences
from rtp_ext.planner.plans.search import limit_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/


from shared.table import markdown, marker, renew, wishes, with_blocks, wrapped

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scale.md"
BLOCK = marker("scale")
GPU = "h200-141gb"
MODELS = {"llama-3-70b": 16, "llama-3-405b": 256}  # ranks of the smallest ring that fits
SHOWN = (16, 64, 256, 1024, 16384, 98304)
COMPUTES = ("gemm", "attention", "elementwise", "recomputation")
SEQ = 8192
LARGEST_RING = 1024
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 1024, 2048, 4096, 6144)  # rings
MOST = 100_000
FORMS: dict[str, dict[str, object]] = {
    "replicas, all-reduce": {},
    "replicas, ZeRO": {"outer": "zero"},
    "replicas, DiLoCo H = 50": {"outer": "diloco", "period": 50},
}
ONE_RING = "one ring"
SHARDED = "fully_shard"  # groups as large as the rings, their replicas agreeing by an all-reduce: HSDP
BESIDE = (1, 64)  # rings that are shown beside as many such groups; and as many as there can be
GPU_HOURS = 1.8 * 16384  # between failures of one GPU: 1.8 hours on 16,384 (Meta's clusters)
RESTART_S, STALL_S, STORAGE = 600.0, 180.0, 2e12  # of the whole run; of the other replicas (FT-HSDP); bytes per second


@dataclass(frozen=True)
class Point:
    """One size of one form."""

    model: str
    form: str
    gpus: int
    ring: int
    step_seconds: float
    busy: float  # share of a step that whole products, attention and elementwise kernels take
    lost_to: str  # the largest of what else a step takes
    alone: float  # share of time that failures leave where each stops all
    parted: float | None  # the same where the other replicas go on; None: there are none
    memory_gb: float


def _plan(form: str, ring: int, rings: int) -> Strategy:
    if form == SHARDED:
        return Strategy(zero=3, dp=ring * rings, replicate=rings, fused_loss=True, recompute="full")
    own = {**FORMS.get(form, {})} if rings > 1 else {}
    return Strategy(rtp=ring, dp=rings, fused_loss=True, recompute="full", **own)  # type: ignore[arg-type]


def point(name: str, form: str, ring: int, rings: int) -> Point:
    model = ModelSpec.preset(name, seq=SEQ)
    cluster = Cluster.preset(GPU, gpus=ring * rings)
    plan = _plan(form, ring, rings)
    time = estimate_time(model, cluster, plan, plan.replicas)
    memory = estimate_memory(model, cluster, plan, plan.replicas)
    checkpoint = 14 * model.parameters / STORAGE
    alone = goodput(plan.gpus, GPU_HOURS, checkpoint, RESTART_S).effective
    parted = None
    if rings > 1:
        parted = goodput(plan.gpus, GPU_HOURS, checkpoint, RESTART_S, rings, stall_seconds=STALL_S).effective
    return Point(
        name,
        form,
        plan.gpus,
        ring,
        time.step_seconds,
        sum(time.components[part] for part in COMPUTES) / time.step_seconds,
        max(set(time.components) - set(COMPUTES), key=lambda part: time.components[part]),
        alone,
        parted,
        memory.peak_allocated_bytes / 1e9,
    )


@functools.cache
def points() -> tuple[Point, ...]:
    return tuple(_points())


def _points() -> Iterator[Point]:
    for name, ring in MODELS.items():
        for form in FORMS:
            yield from (point(name, form, ring, rings) for rings in SIZES if ring * rings <= MOST)
        size = ring
        while size <= LARGEST_RING:
            yield point(name, ONE_RING, size, 1)
            size *= 2


def efficiency(p: Point, *, failures: bool = True) -> float:
    """Per GPU; with failures, the better of stopping all replicas and continuing without the replica that failed."""
    share = max(p.alone, p.parted or 0.0) if failures else 1.0
    return p.busy * share


def table() -> str:
    heads = ("model", "form", "GPUs", "ring", "step s", "GB", "tokens of a step", "efficiency", "lost most to")
    heads += ("failures stop all", "others go on", "with failures")
    lines = []
    for p in points():
        if p.gpus not in SHOWN:
            continue
        plain = f"{100 * efficiency(p, failures=False):.1f} %"
        parted = "-" if p.parted is None else f"{100 * p.parted:.1f} %"
        tokens = f"{p.gpus * SEQ / 1e6:.1f}e6"
        whole = (f"{100 * p.alone:.1f} %", parted, f"{100 * efficiency(p):.1f} %")
        size = (f"{p.gpus:,}", str(p.ring), f"{p.step_seconds:.2f}", f"{p.memory_gb:.0f}", tokens)
        lines.append((p.model, p.form, *size, plain, p.lost_to, *whole))
    return markdown(heads, lines)


def like() -> str:
    """Rings beside groups of fully_shard of the same size, with all else the same."""
    rows, slower, larger = [], [], ""
    line = limit_bytes(Cluster.preset(GPU)) / 1e9
    for name, ring in MODELS.items():
        for rings in (*BESIDE, max(size for size in SIZES if ring * size <= MOST)):
            forms = next(iter(FORMS)), SHARDED
            if unlike := differences([_plan(form, ring, rings) for form in forms]):
                raise ValueError(f"expected plans that differ in the way to share the work alone, got {unlike}")
            ours, theirs = (point(name, form, ring, rings) for form in forms)
            slower.append(ours.step_seconds / theirs.step_seconds)
            sizes = (f"{p.memory_gb:.0f}{', above the line' if p.memory_gb > line else ''}" for p in (ours, theirs))
            times = (f"{p.step_seconds:.2f}" for p in (ours, theirs))
            rows.append((name, f"{ours.gpus:,}", str(ring), *times, *sizes, f"{slower[-1]:.2f}"))
        if theirs.memory_gb > line:
            twice = point(name, SHARDED, 2 * ring, 1)
            larger += f" Groups of {2 * ring} take {twice.memory_gb:.0f} GB and {twice.step_seconds:.2f} s for {name}."
    heads = ("model", "GPUs", "ring or group", "ring, step s", "`fully_shard`, step s", "ring, GB", "`fully_shard`, GB")
    first = (
        "**In these predictions rings win little time, and some memory.** Beside `fully_shard` in groups as large as "
        "the rings, as many of them, with the same fused loss, recomputation and dtypes, a step with rings takes "
        f"{min(slower):.3f} to {max(slower):.3f} times as long, in less memory. They gather one operation at a time "
        "(`Ring(collective=True)`), not a layer, and copy nothing into and out of flat buffers; shard by shard, on two "
        f"levels, they would take less memory and more time. The memory line is at {line:.0f} GB.{larger}"
    )
    return f"\n{wrapped(first)}\n{markdown((*heads, 'time, ring / `fully_shard`'), rows)}"


def draw(output: Path) -> None:
    """A panel for each model: efficiency over GPUs, without failures and with them."""
    from plot import canvas, style

    figure, panels = canvas(len(MODELS))
    for axes, name in zip(panels, MODELS, strict=True):
        for index, form in enumerate((*FORMS, ONE_RING)):
            own = [p for p in points() if p.model == name and p.form == form]
            sizes, look = [p.gpus for p in own], {**style(index), "markersize": 4}
            axes.plot(sizes, [efficiency(p, failures=False) for p in own], label=form, linewidth=1, **look)
            hollow = {**look, "markerfacecolor": "white", "linestyle": "--", "linewidth": 0.8}
            axes.plot(sizes, [efficiency(p) for p in own], **hollow)
        whole = [p for p in points() if p.model == name and p.form == next(iter(FORMS))]
        axes.plot([p.gpus for p in whole], [p.busy * p.alone for p in whole], "k:", label="where failures stop all")
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("GPUs", fontsize=9)
        axes.set_title(f"{name}: efficiency of a GPU", fontsize=9, loc="left")
    panels[0].plot([], [], color="black", linestyle="--", marker="o", markerfacecolor="white", label="with failures")
    panels[0].legend(fontsize=7, frameon=False, loc="lower left")
    figure.supxlabel("predicted by rtp_ext.planner; nothing ran at this size", fontsize=6, color="#444444")
    for suffix in (".png", ".svg"):
        figure.savefig(output.with_suffix(suffix))


def rewrite(texts: list[str]) -> list[str]:
    return with_blocks(texts, BLOCK, {"like": like, "rings": table})


def main() -> None:
    parser = argparse.ArgumentParser(description="Rings on many GPUs. See the top of the file.")
    wishes(parser)
    args = parser.parse_args()
    if args.write:
        draw(PAGE.parent / "figures" / "scale.png")
    renew(args, [PAGE], rewrite, BLOCK, "the planner: python benchmarks/planner/scale.py --write")


if __name__ == "__main__":
    main()
