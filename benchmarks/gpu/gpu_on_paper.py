"""Predicts rotated linear layers on GPUs from counted calls and published constants.

    python benchmarks/gpu/gpu_on_paper.py          # the tables of docs/gpu.md and gpu_calls.md
    python benchmarks/gpu/gpu_on_paper.py --write  # rewrites the tables in these pages
    python benchmarks/gpu/gpu_on_paper.py --check  # exit status 1 where a page has other tables

No number here was measured on a GPU. The time of a forward and a backward is the maximum of the GPU's time and the time
of the host to enqueue them.

- `first day`: one layer on several machines; rtp_ext/planner/rotation/seconds.py runs the executor's schedule;
- `one GPU`: the figures of benchmarks/gpu/first_day.sh on one H100;
- `host`: layers on eight H100, for the time of the host over each transport; the GPU's time is that of
  rtp_ext/ring/routes/route_planner.py.

The host's time is that of benchmarks/gpu/expected.py, which also has the single figures of the table `one GPU`.
Rates and times are those of the planner (rtp_ext/gpu_rates.py, rtp_ext/planner/constants.json, with sources).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rtp_ext.planner import Cluster, RotatedOperation, Weight
from rtp_ext.planner.constants import driver_call_range
from rtp_ext.planner.rotation.seconds import rotation_seconds
from rtp_ext.planner.time.links import Group
from rtp_ext.ring.routes.route_planner import Device, LayerSize, Link, predict

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.table import marker, renew, wishes, with_blocks

from gpu import expected
from gpu.expected import TIME, Range, hosts

PAGES = [Path(__file__).resolve().parents[2] / "docs" / name for name in ("gpu.md", "gpu_calls.md")]
BLOCK = marker("gpu_on_paper")

RANKS = 8
SHAPES = {  # outputs, inputs
    "Llama-7B": (11008, 4096),
    "Llama-3-8B": (14336, 4096),
    "Llama-3-70B": (28672, 8192),
    "Llama-3-405B": (53248, 16384),
    "GPT-3": (49152, 12288),
}
TOKENS = (1024, 2048, 4096, 8192)
FIRST_TOKENS = (2048, 8192)

H100 = Cluster.preset("h100-80gb")
LINK = Link(H100.nccl_ring_bytes_per_s, TIME.nccl_base_s + TIME.nccl_intra_step_s, "NVLink 4")
GPU = Device(
    H100.bf16_achievable_flops_per_s * TIME.gemm_fraction,
    H100.streaming_multiprocessors,
    TIME.engine_launch_s,
    H100.name,
    H100.hbm_bytes_per_s * TIME.hbm_fraction,
)


NAMES = {"ce": "`ce`", "graphs": "`ce`, graphs", "blocking": "`nccl`, blocking", "threads": "`nccl`, non-blocking"}


@dataclass(frozen=True)
class Row:
    """The times of a forward and a backward of one layer, in microseconds."""

    shape: str
    tokens: int
    compute: float
    gpu: float
    ce: Range
    graphs: Range
    blocking: Range
    threads: Range


def rows() -> list[Row]:
    made, takes = [], hosts()
    computes, hops = 3 * RANKS, 3 * (RANKS - 1)  # forward: R and R - 1; backward: twice as many
    for shape, (outputs, inputs) in SHAPES.items():
        for tokens in TOKENS:
            layer = LayerSize(outputs, inputs, 2, 4)
            gpu = predict(RANKS, tokens, layer, LINK, GPU)["rotate"] * 1e6
            alone = predict(RANKS, tokens, layer, Link(1e18, 0.0, "none"), GPU)["rotate"] * 1e6
            steps = {name: each.step(hops, computes) for name, each in takes.items()}
            times = {name: Range(max(gpu, step.least), max(gpu, step.most)) for name, step in steps.items()}
            made.append(Row(shape, tokens, alone, gpu, **times))
    return made


def host_tables() -> str:
    lines = [
        f"| layer | tokens | products alone | with hops | {' | '.join(NAMES.values())} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows():
        times = " | ".join(getattr(row, name).text() for name in NAMES)
        lines.append(f"| {row.shape} | {row.tokens} | {row.compute:.0f} | {row.gpu:.0f} | {times} |")
    lines += ["", "| time of the host, us | a hop | a compute | a pass in addition | source |", "|---|---|---|---|---|"]
    for name, each in hosts().items():
        lines.append(f"| {NAMES[name]} | {' | '.join(part.text(1) for part in each.parts())} | {each.source} |")
    return "\n".join(lines) + "\n"


# -- what to compare with on the first day -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """One ring on all GPUs. `route`: of the Ring; `hosts`: levels of the ring, 1: flat. transport: what `auto` takes
    there, where route `ring` is asked for over several hosts."""

    name: str
    cluster: Cluster
    route: str
    hosts: int
    transport: str


MACHINES = (
    Machine("8 x H100", H100, "direct", 1, "`ce`"),
    Machine("2 x 8 x H100, two levels", Cluster.preset("h100-80gb", gpus=16), "two-level", 2, "`ce+nccl`"),
    Machine("2 x 8 x H100, flat", Cluster.preset("h100-80gb", gpus=16), "ring", 1, "`nccl`"),
    Machine("8 x A100", Cluster.preset("a100-80gb"), "direct", 1, "`ce`"),
    Machine("4 x RTX 4090, no direct access", Cluster.preset("rtx-4090-24gb", gpus=4), "ring", 1, "`nccl`"),
)


@dataclass(frozen=True)
class First:
    """A forward and a backward of one layer, in milliseconds: products with the whole weight, the rotation, and the
    host's time to enqueue both, whose bounds are in microseconds."""

    machine: str
    transport: str
    tokens: int
    whole: tuple[float, float]
    rotation: tuple[float, float]
    host: Range

    @property
    def shares(self) -> tuple[float, float]:
        """The time of whole products over that of the rotation."""
        return self.whole[0] / self.rotation[0], self.whole[1] / self.rotation[1]


def first_day() -> list[First]:
    outputs, inputs = SHAPES["Llama-3-8B"]
    layer, made = RotatedOperation("linear", (Weight((outputs, inputs)),)), []
    least, most = driver_call_range()
    for machine in MACHINES:
        for tokens in FIRST_TOKENS:
            group, route = Group(machine.cluster, machine.cluster.gpus), machine.route
            ways = {"route": "direct"} if route == "direct" else {"hosts": machine.hosts}
            time = rotation_seconds(layer, tokens, group, TIME, **ways)
            host, calls = sum(time.host_s), sum(time.host_calls)
            whole, rotation = ((1e3 * pair[0], 1e3 * pair[1]) for pair in (time.unsplit_s, time.makespan_s))
            bounds = Range(1e6 * (host - calls * (most - least)), 1e6 * host)
            made.append(First(machine.name, machine.transport, tokens, whole, rotation, bounds))
    return made


def first_table() -> str:
    lines = [
        "| machine | transport | tokens | whole products, forward | forward | share | whole products, backward | "
        "backward | share | host |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in first_day():
        passes = " | ".join(
            f"{whole:.2f} | {rotation:.2f} | {100 * share:.0f} %"
            for whole, rotation, share in zip(row.whole, row.rotation, row.shares, strict=True)
        )
        host = row.host.text(2, 1e-3)
        lines.append(f"| {row.machine} | {row.transport} | {row.tokens} | {passes} | {host} |")
    return "\n".join(lines) + "\n"


# -- the figures that one GPU gives ------------------------------------------------------------------------------------


def limiting_hop_us() -> float:
    """The host's time of a hop from which on it limits a layer of Llama-3-8B with 2048 tokens on 8 ranks."""
    row = next(each for each in rows() if (each.shape, each.tokens) == ("Llama-3-8B", 2048))
    return (row.gpu - 3 * RANKS * hosts()["ce"].parts()[1].most) / (3 * (RANKS - 1))


def one_gpu_table() -> str:
    def cases(figures: dict[str, expected.Expected], digits: int = 2) -> str:
        return "; ".join(f"{name} {each.text(digits)}" for name, each in figures.items())

    def layers(figure: str) -> str:
        return "; ".join(
            f"{name.removeprefix('Llama-3-')} {tokens}: "
            + ", ".join(
                f"{expected.overlap(H100, *SHAPES[name], tokens, RANKS, pass_)[figure].least:.2f}"
                for pass_ in ("forward", "backward")
            )
            for name in ("Llama-3-8B", "Llama-3-70B")
            for tokens in (8192, 2048)
        )

    steps = {tokens: expected.step_ratio(H100, "rtp", 4, 32768, tokens) for tokens in (8192, 2048)}
    memory = {name: expected.peak_bytes(H100, name, 2048).most / 2**30 for name in ("rtp", "rtp-fused", "fsdp2")}
    told = {
        "sums": (
            "float32 sums with beta = 1 over beta = 0, [8192 x 4096]",
            cases({f"k = {depth}": expected.sum_ratio(H100, depth) for depth in expected.SUM_DEPTHS}),
        ),
        "host": ("the host's time of a hop, us", f"{cases({'`ce`': expected.hop_us('ce')}, 1)}"),
        "split": ("T_gR / T_g1: forward, backward", layers("split")),
        "hidden": ("E_hide, at least", layers("hidden")),
        "roofline": ("roofline, T_g1 / T_ov", layers("roofline")),
        "memory": ("peak of one rank, GiB", "; ".join(f"`{name}` {size:.1f}" for name, size in memory.items())),
        "step": (
            "forward and backward of a rank of 8 over plain torch, 4 blocks of 8B",
            cases({f"{tokens} tokens": each for tokens, each in steps.items()}),
        ),
        "kernels": ("a kernel of this package, GB/s", expected.kernel_gb_per_s(H100).text(0)),
        "train": ("a step of one rank over plain torch", expected.TRAIN.text(1)),
    }
    lines = ["| figure | predicted | where it is worse |", "|---|---|---|"]
    for name, (figure, predicted) in told.items():
        change = expected.CHANGES[name]
        if name == "host":
            change = f"above {limiting_hop_us():.0f} us, 8B at 2048 tokens: {change}"
        lines.append(f"| {figure} | {predicted} | {change} |")
    return "\n".join(lines) + "\n"


BLOCKS: dict[str, Callable[[], str]] = {
    "first day": first_table,
    "one GPU": one_gpu_table,
    "host": host_tables,
}


def rewrite(texts: list[str]) -> list[str]:
    """Returns the pages with their tables generated anew. Raises ValueError for a missing or unknown block."""
    return with_blocks(texts, BLOCK, BLOCKS)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    wishes(parser)
    options = parser.parse_args(argv)
    renew(options, PAGES, rewrite, BLOCK, "this script: python benchmarks/gpu/gpu_on_paper.py --write")


if __name__ == "__main__":
    main()
