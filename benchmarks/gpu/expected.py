"""What single figures of a first day on a GPU are expected to be, and what to change where they are worse.

The host's time is a number of calls for each hop and each compute, or for a pass
that is a graph, as benchmarks/gpu/driver_calls.py last counted them (results/cpu-2core/driver_calls.jsonl), times the
time of a call, plus torch's overhead for a product. The time of a call is not measured: host times are ranges between
two estimates. All other figures come from the planner (rtp_ext/planner), with its rates for the GPU. How sums and two
streams count there was measured on an H100 (results/h100-80gb-hbm3-1gpu).

gpu_on_paper.py makes the tables of docs/gpu.md from them; summary.py compares results with them.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtp_ext.planner import (
    Cluster,
    ModelSpec,
    RotatedOperation,
    Strategy,
    TimeConstants,
    Weight,
    estimate_memory,
    estimate_time,
)
from rtp_ext.planner.constants import constants, driver_call_range, host_constant
from rtp_ext.planner.rotation.seconds import rotation_seconds
from rtp_ext.planner.time.links import Group
from rtp_ext.planner.time.work import Product, product_s, traffic_s

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.card import RESULTS
from shared.table import Row, last_command, read_lines

CALLS = RESULTS / "cpu-2core" / "driver_calls.jsonl"
H100, H100_RESULTS = Cluster.preset("h100-80gb"), RESULTS / "h100-80gb-hbm3-1gpu"
TIME = TimeConstants.default()
RATIO, VALUE = 0.03, 0.10  # how far a ratio, and another figure, may be from its prediction and still be as predicted
SUM_SHAPE = (8192, 4096)  # tokens and features of the sums of an input gradient
SUM_DEPTHS = {512: "q of Llama-3-8B on 8 ranks", 768: "q, k and v", 1792: "gate or up"}
STRATEGIES = {
    "rtp": Strategy(rtp=8),
    "rtp-recompute": Strategy(rtp=8, bundle="recompute"),
    "rtp-fused": Strategy(rtp=8, bundle="recompute", fused_loss=True),
    "fsdp2": Strategy(dp=8, zero=3),
}
# of each figure: what a worse one means, and what to change then
CHANGES = {
    "host": 'the host limits small layers: CUDA graphs, `Ring(graphs="on")`',
    "sums": "sums move more slowly: more shards in one product, so that sums are read and written less often",
    "split": "products with a shard are too small: several shards in one product, or route `gather`",
    "hidden": "hops take memory bandwidth or SMs from products: fewer CTAs or streams of a hop, or another link",
    "roofline": "T_gR / T_g1 and E_hide say which of the two it is",
    "memory": "look at `transient` and `slot` in the results: the allocator, or the slots",
    "step": "`host` close to the step: graphs; else the same as for T_gR / T_g1 and E_hide",
    "kernels": "the kernel is not limited by memory: its launch configuration, with `ncu`",
    "train": "one rank has no hops: calls of Python, or products in other layouts",
}


@dataclass(frozen=True)
class Expected:
    """The prediction of one figure, `least` to `most`. `tolerance`: how far beyond them is still as predicted."""

    least: float
    most: float
    less_is_better: bool = True
    tolerance: float = VALUE

    @classmethod
    def ratio(cls, value: float, *, less_is_better: bool = True) -> Expected:
        return cls(value, value, less_is_better, RATIO)

    def verdict(self, value: float) -> str:
        """Returns `as predicted`, `better`, or `worse by` a percentage of the nearest predicted value."""
        below, above = self.least * (1 - self.tolerance), self.most * (1 + self.tolerance)
        if below <= value <= above:
            return "as predicted"
        if (value < below) == self.less_is_better:
            return "better"
        nearest = self.most if value > above else self.least
        return f"worse by {100 * abs(value / nearest - 1):.0f} %"

    def text(self, digits: int = 2) -> str:
        return Range(self.least, self.most).text(digits)


@dataclass(frozen=True)
class Range:
    """The least estimate and what was measured on an H100, in microseconds."""

    least: float
    most: float

    def text(self, digits: int = 0, scale: float = 1.0) -> str:
        least, most = (f"{scale * each:.{digits}f}" for each in (self.least, self.most))
        return least if least == most else f"{least} - {most}"


@dataclass(frozen=True)
class Host:
    """Calls of the driver by the host for a hop, for a compute, and for a pass besides these, and microseconds of each
    beyond these calls."""

    calls: tuple[float, float, float]
    beyond: tuple[float, float, float]
    source: str

    def parts(self) -> list[Range]:
        least, most = (1e6 * call for call in driver_call_range())
        return [Range(n * least + more, n * most + more) for n, more in zip(self.calls, self.beyond, strict=True)]

    def step(self, hops: int, computes: int) -> Range:
        """A forward and a backward."""
        counts = (hops, computes, 2)
        least = sum(count * part.least for count, part in zip(counts, self.parts(), strict=True))
        return Range(least, sum(count * part.most for count, part in zip(counts, self.parts(), strict=True)))


def hosts() -> dict[str, Host]:
    counted = {}
    for row in last_command(read_lines(CALLS)):
        counted[row["transport"], row["mode"]] = row
    product, group, replay, thread = (
        1e6 * each
        for each in (
            *(TIME.engine_product_s, TIME.nccl_call_s),
            *(host_constant("replay_s"), host_constant("nccl_thread_s")),
        )
    )

    def steps(transport: str, modes: tuple[str, ...], more: float, source: str) -> Host:
        hop, compute = (
            max(counted[transport, mode][key] for mode in modes) for key in ("calls_per_hop", "calls_per_compute")
        )
        return Host((hop, compute, 0.0), (more, product, 0.0), f"{hop:g} and {compute:g} calls{source}")

    pass_ = counted["ce", "replayed"]["calls_per_pass"]
    return {
        "ce": steps("ce", ("push", "pull", "mixed"), 0.0, ""),
        "graphs": Host((0.0, 0.0, pass_), (0.0, 0.0, replay), f"{pass_:g} calls a pass, and the lookup of the graph"),
        "blocking": steps("nccl", ("registered, blocking",), group, ", and a group call of NCCL"),
        "threads": steps("nccl", ("registered",), group + thread, ", a group call of NCCL and a thread for each hop"),
    }


TRAIN = Expected.ratio(1.0)  # a step of one rank over that of the plain model, which does the same


def hop_us(link: str) -> Expected:
    """The host's time of a hop over a transport, or over a link of an emulated ring, which has no more calls."""
    hop = hosts()["blocking" if "nccl" in link else "ce"].parts()[0]
    return Expected(hop.least, hop.most)


def cluster_of(device: str) -> Cluster | None:
    """Eight GPUs with this name, as torch reports it, in one host; None for a GPU that the planner has no rates of."""
    for name, fields in constants()["gpus"].items():
        if device.removeprefix("NVIDIA ") == fields.get("data_sheet"):
            return Cluster.preset(name)
    return None


def over(cluster: Cluster, bytes_per_second: float | None) -> Cluster:
    """The same GPUs with hops at a measured rate."""
    return cluster if bytes_per_second is None else dataclasses.replace(cluster, nccl_ring_bytes_per_s=bytes_per_second)


def sum_us(cluster: Cluster, depth: int, beta: int) -> Expected:
    """A product [8192, depth] x [depth, 4096] of 16 bits; its float32 result is written (beta = 0), or added."""
    tokens, features = SUM_SHAPE
    seconds = product_s(Product("sums", tokens, features, depth), cluster, TIME, result_bytes=4.0 * (1 + beta))
    return Expected(1e6 * seconds, 1e6 * seconds)


def sum_ratio(cluster: Cluster, depth: int) -> Expected:
    """The time with beta = 1 over that with beta = 0."""
    return Expected.ratio(sum_us(cluster, depth, 1).least / sum_us(cluster, depth, 0).least)


def layer_seconds(
    cluster: Cluster, outputs: int, inputs: int, tokens: int, ranks: int, direction: str, rate: float | None = None
) -> tuple[float, float, float, float]:
    """T_g1, T_gR, T_c and T_ov of a rotated linear layer, as rtp_ext/measure/layer.py takes them: weights need no cast;
    the input gradient and this rank's gradient are cast at the end."""
    layer = RotatedOperation("linear", (Weight((outputs, inputs)),))
    time = rotation_seconds(layer, tokens, Group(over(cluster, rate), ranks), TIME, route="direct")
    passes = {"forward": (0,), "backward": (1,), "step": (0, 1)}[direction]
    whole, shards, hops, span = (
        sum(each[pass_] for pass_ in passes) for each in (time.unsplit_s, time.computes_s, time.hops_s, time.makespan_s)
    )
    casts = traffic_s(6.0 * (tokens * inputs + outputs * inputs / ranks), cluster, TIME) if 1 in passes else 0.0
    return whole, shards + casts, hops, span + casts


def timed_products() -> list[tuple[str, float, float]]:
    """Name, measured and predicted microseconds of all products that one H100 was timed with. With shards: the median
    over links, of products without hops."""
    found, cases = [], dict[tuple[Any, ...], list[Row]]()
    for row in read_lines(H100_RESULTS / "sums.jsonl"):
        product = Product("", *SUM_SHAPE, row["k"])
        for name, size in (("16_bits", None), ("beta0", 4.0), ("beta1", 8.0)):
            predicted = product_s(product, H100, TIME, result_bytes=size)
            found.append((f"k = {row['k']}, {name}", row[f"t_{name}_us"], 1e6 * predicted))
    for row in read_lines(H100_RESULTS / "overlap.jsonl"):
        case = (row["n"], row["k"], row["tokens"], row["ranks"], row["direction"])
        cases.setdefault(case, []).append(row)
    for case, rows in cases.items():
        name, (whole, shards, *_) = rows[0]["case"], layer_seconds(H100, *case)
        found.append((f"{name}, whole", rows[0]["t_g1_us"], 1e6 * whole))
        found.append((f"{name}, shards", statistics.median(row["t_gr_us"] for row in rows), 1e6 * shards))
    return found


def overlap(
    cluster: Cluster, outputs: int, inputs: int, tokens: int, ranks: int, direction: str, rate: float | None = None
) -> dict[str, Expected]:
    """T_gR / T_g1 (`split`), E_hide (`hidden`) and T_g1 / T_ov (`roofline`) of a rotated linear layer; as
    rtp_ext/measure/overlap_metrics.py defines them. `rate`: bytes per second of a hop; None: NVLink's."""
    whole, shards, hops, span = layer_seconds(cluster, outputs, inputs, tokens, ranks, direction, rate)
    hidden = min(1.0, (shards + hops - span) / min(shards, hops))
    return {
        "split": Expected.ratio(shards / whole),
        "hidden": Expected(hidden, 1.0, less_is_better=False),
        "roofline": Expected.ratio(whole / span, less_is_better=False),
    }


def peak_bytes(cluster: Cluster, strategy: str, tokens: int) -> Expected:
    """Of one rank of 8 with Llama-3-8B, as benchmarks/memory_per_rank.py measures it."""
    model = ModelSpec.preset("llama-3-8b", seq=tokens)
    peak = estimate_memory(model, cluster, STRATEGIES[strategy], 8).peak_allocated_bytes
    return Expected(peak, peak)


def step_ratio(
    cluster: Cluster,
    strategy: str,
    layers: int,
    vocabulary: int,
    tokens: int,
    rate: float | None = None,
    group: int = 0,
) -> Expected:
    """Forward and backward of one rank of 8 with blocks of Llama-3-8B, over those of the plain model on one GPU. group:
    shards per product; 0: as planned."""
    seq = min(2048, tokens)
    model = dataclasses.replace(ModelSpec.preset("llama-3-8b", seq=seq), layers=layers, vocab=vocabulary)
    samples = tokens // seq

    def passes(where: Cluster, plan: Strategy, ranks: int) -> float:
        told = estimate_time(model, where, dataclasses.replace(plan, micro_batch=samples), ranks * samples)
        return sum(time for name, time in told.components.items() if name not in ("optimizer", "gradients", "bubble"))

    plain = passes(dataclasses.replace(cluster, gpus=1), Strategy(stack="torch"), 1)
    rotated = dataclasses.replace(STRATEGIES[strategy], group=group)
    return Expected.ratio(passes(over(cluster, rate), rotated, 8) / plain)


def kernel_gb_per_s(cluster: Cluster) -> Expected:
    """Bytes that a kernel limited by memory reads and writes in a second, in 1e9."""
    rate = cluster.hbm_bytes_per_s * TIME.hbm_fraction / 1e9
    return Expected(rate, rate, less_is_better=False)
