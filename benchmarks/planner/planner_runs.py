"""The published runs of published.py as plans, each with what the planner predicts of it."""

import functools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner import published
from rtp_ext.planner import (
    Cluster,
    Measurement,
    ModelSpec,
    Strategy,
    TimeConstants,
    estimate_memory,
    estimate_time,
    read_measurements,
)
from rtp_ext.planner.memory.report import MemoryReport
from rtp_ext.planner.time.report import TimeReport

GIB = 2**30
# VIA-Research/vTrain@f8dda84, data/ground_truth_*.csv (MIT): A100, Megatron-DeepSpeed, 1F1B, full recomputation
ONE_NODE, SEVERAL_NODES = (Path(__file__).with_name(f"vtrain_{nodes}.csv") for nodes in ("one_node", "several_nodes"))
# torchtitan's H100: HBM2e of 2.4 TB/s and 500 W. Dynamic power is C V^2 f, and voltage follows frequency, so that a
# chip held to a part of its power runs at that part's cube root (power caps on this very part: arXiv 2604.11391).
_SLOWED = (500 / 700) ** (1 / 3)
_H100_96 = {
    "base": "h100-80gb",
    "name": "h100-96gb",
    "memory_bytes": 96e9,
    "hbm_bytes_per_s": 2.4e12,
    "bf16_achievable_flops_per_s": 794.5e12 * _SLOWED,
    "fp8_achievable_flops_per_s": 1402.6e12 * _SLOWED,
    "exponentials_per_s": 4.18e12 * _SLOWED,
}


@dataclass(frozen=True)
class Run:
    """A published run. `measured`: in `unit`, None if only memory is known; `gib`: reserved memory.

    `ran`: whether it worked; otherwise it ran out of memory.
    """

    name: str
    model: ModelSpec
    cluster: Cluster
    strategy: Strategy
    global_batch: int
    measured: float | None
    unit: str  # "s", "TFLOP/s" or "tokens/s", the latter two of one GPU
    gib: float | None = None
    ran: bool = True

    @functools.cached_property
    def time(self) -> TimeReport:
        return estimate_time(self.model, self.cluster, self.strategy, self.global_batch)

    @functools.cached_property
    def memory(self) -> MemoryReport:
        return estimate_memory(self.model, self.cluster, self.strategy, self.global_batch)

    @property
    def predicted(self) -> float:
        """Returns the prediction in the unit of the measurement."""
        if self.unit == "s":
            return self.time.step_seconds
        if self.unit == "TFLOP/s":
            return self.time.tflops_per_gpu
        return self.time.tokens / self.time.step_seconds / self.time.gpus

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1. Raises ValueError where nothing was measured."""
        if self.measured is None:
            raise ValueError(f"expected a run that was timed, got {self.name}")
        return self.predicted / self.measured - 1

    @property
    def memory_ratio(self) -> float:
        """Estimated allocated over measured reserved bytes. Raises ValueError where memory is not known."""
        if self.gib is None:
            raise ValueError(f"expected a run whose memory is known, got {self.name}")
        return self.memory.peak_allocated_bytes / (self.gib * GIB)


def _chunked(chunks: int) -> dict[str, Any]:
    return {"schedule": "interleaved", "interleave": chunks} if chunks > 1 else {}


def vtrain() -> list[Measurement]:
    """On 64 to 512 A100."""
    return read_measurements(SEVERAL_NODES)


def one_node() -> list[Measurement]:
    """On 2 to 8 A100."""
    return read_measurements(ONE_NODE)


def halves(runs: Sequence[Measurement]) -> dict[str, tuple[list[Measurement], list[Measurement]]]:
    """Ways to fit the time model to one part of `vtrain` and judge it by the other."""
    small = [run for run in runs if run.cluster.gpus < 512]
    large = [run for run in runs if run.cluster.gpus == 512]
    return {
        "every second run": (list(runs[::2]), list(runs[1::2])),
        "64 and 256 GPUs": (small, large),
        "512 GPUs": (large, small),
    }


def regrets(runs: Iterable[Measurement], constants: TimeConstants | None = None) -> list[float]:
    """Returns the slowdown of the model's best plan against the fastest measured, for each size with a choice."""
    sizes: dict[Any, list[tuple[float, float]]] = {}
    for run in runs:
        key = (run.model, run.cluster.gpus, run.global_batch)
        sizes.setdefault(key, []).append((run.predicted_s(constants), run.step_seconds))
    chosen = [pairs for pairs in sizes.values() if len(pairs) > 1]
    return [min(pairs)[1] / min(measured for _, measured in pairs) - 1 for pairs in chosen]


def sc21() -> list[Run]:
    """With the best micro-batch and number of chunks, as the paper takes them; it does not say which."""
    return [max(_sc21(*row), key=lambda run: run.predicted) for row in published.SC21]


def _sc21(
    heads: int, hidden: int, layers: int, tp: int, pp: int, gpus: int, batch: int, measured: float
) -> Iterable[Run]:
    model = ModelSpec.gpt(layers=layers, hidden=hidden, heads=heads, vocab=51200, seq=2048)
    cluster, dp = Cluster.preset("a100-80gb", gpus=gpus), gpus // tp // pp
    own = {"tp": tp, "pp": pp, "dp": dp, "recompute": "full", "flash_attention": False}
    for micro_batch in (1, 2, 4, 8):
        for chunks in (1, 2):
            if (chunks > 1 and (pp == 1 or layers % (pp * chunks))) or batch % (dp * micro_batch):
                continue
            plan = Strategy(**own, micro_batch=micro_batch, **_chunked(chunks))
            yield Run(f"{model.parameters / 1e9:.1f}B", model, cluster, plan, batch, measured, "TFLOP/s")


def korthikanti() -> list[Run]:
    """Full recomputation and selective, model by model."""
    runs = []
    for layers, hidden, heads, tp, pp, gpus, batch, micro_batch, chunks, full, selective in published.KORTHIKANTI:
        model = ModelSpec.gpt(layers=layers, hidden=hidden, heads=heads, vocab=51200, seq=2048)
        cluster = Cluster.preset("a100-80gb", gpus=gpus)
        own = {"tp": tp, "pp": pp, "micro_batch": micro_batch, "flash_attention": False, **_chunked(chunks)}
        for seconds, how in (
            (full, {"recompute": "full"}),
            (selective, {"recompute": "selective", "sequence_parallel": True}),
        ):
            name = f"{model.parameters / 1e9:.0f}B {how['recompute']}"
            runs.append(Run(name, model, cluster, Strategy(**own, **how), batch, seconds, "s"))
    return runs


def llama3(chunks: int = 2) -> list[Run]:
    """The paper does not print the number of chunks."""
    runs = []
    for tp, cp, pp, dp, seq, batch, measured in published.LLAMA3:
        own = {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "zero": 1, "sequence_parallel": True}
        plan = Strategy(**own, **_chunked(chunks))
        cluster = Cluster.preset("h100-80gb", gpus=plan.gpus)
        name = f"Llama 3 405B, {plan.gpus} H100, {seq} tokens"
        runs.append(
            Run(name, ModelSpec.preset("llama-3-405b", seq=seq), cluster, plan, batch * dp, measured, "TFLOP/s")
        )
    return runs


def nemo() -> list[Run]:
    runs = []
    for gpu, model, gpus, batch, micro_batch, fsdp, tp, pp, cp, chunks, measured in published.NEMO:
        own = {"tp": tp, "pp": pp, "cp": cp, "dp": gpus // (tp * pp * cp), "micro_batch": micro_batch, "fp8": True}
        own |= {"zero": 3 if fsdp else 1, "stack": "megatron", "sequence_parallel": tp > 1, **_chunked(chunks)}
        name = f"{title(model)}, {gpus} {gpu.split('-')[0].upper()}"
        cluster = Cluster.preset(gpu, gpus=gpus)
        runs.append(Run(name, ModelSpec.preset(model), cluster, Strategy(**own), batch, measured, "TFLOP/s"))
    return runs


def torchtitan() -> list[Run]:
    runs = []
    for row in published.TORCHTITAN:
        model, gpu, seq, fsdp, tp, pp, cp, batch, recompute, loss, note, fp8, tokens, gib, ran = row
        # under pipelines a local batch runs in as many micro-batches as there are stages
        own = {"dp": fsdp, "tp": tp, "pp": pp, "cp": cp, "zero": 3, "sequence_parallel": tp > 1, "loss": loss}
        own |= {"compiled": "compiled" in note or fp8, "fused_norm": "fused RMSNorm" in note}
        own |= {"fp8_scaling": "rowwise" if "rowwise" in note else "tensorwise"}
        plan = Strategy(**own, micro_batch=batch // pp, recompute=recompute, fp8=fp8)
        base = _H100_96 if gpu == "h100-96gb" else {"base": gpu, "name": gpu}
        cluster = Cluster.from_json(base, gpus=plan.gpus)
        layout = " ".join(f"{name} {ranks}" for name, ranks in (("TP", tp), ("PP", pp), ("CP", cp)) if ranks > 1)
        where = ", ".join(filter(None, (f"{plan.gpus} {gpu.split('-')[0].upper()}", layout, f"{seq} tokens", note)))
        name = f"{title(model)}, {where}"
        spec = ModelSpec.preset(model, seq=seq)
        runs.append(Run(name, spec, cluster, plan, fsdp * batch, tokens, "tokens/s", gib, ran))
    return runs


def title(preset: str) -> str:
    """llama-3-8b -> Llama 3 8B"""
    family, version, size = preset.split("-")
    return f"{family.title()} {version} {size.upper()}"


def megatron_7b() -> MemoryReport:
    """The run of published.MEGATRON_7B."""
    model = ModelSpec.gpt(layers=32, hidden=4096, heads=32, kv_heads=8, vocab=131073, seq=8192, tied=False)
    plan = Strategy(dp=2, pp=4, zero=1, **_chunked(8))
    return estimate_memory(model, Cluster.preset("h100-80gb"), plan, 8)


@functools.cache
def every_run() -> dict[str, list[Run]]:
    """All but those of one node, by where they come from."""
    vtrain_runs = [
        Run("vTrain", run.model, run.cluster, run.strategy, run.global_batch, run.step_seconds, "s") for run in vtrain()
    ]
    return {
        "vTrain": vtrain_runs,
        "SC'21": sc21(),
        "arXiv 2205.05198": korthikanti(),
        "arXiv 2407.21783": llama3(),
        "NeMo": nemo(),
        "torchtitan": torchtitan(),
    }


def mean(values: Iterable[float]) -> float:
    return statistics.mean(list(values))
