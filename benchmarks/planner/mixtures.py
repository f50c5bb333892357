"""Which mesh for a mixture of experts, on paper: the table of docs/moe.md, from the planner.

    python benchmarks/planner/mixtures.py          # prints it
    python benchmarks/planner/mixtures.py --write  # rewrites it in docs/moe.md
    python benchmarks/planner/mixtures.py --check  # exit status 1 where the page says anything else

Everything is predicted; nothing ran. H100 of 80 GB, eight to a node, a 400 Gb/s port each; one sample of 8192 tokens
for every GPU and step, fused loss, AdamW, float32 states. For each number of GPUs the fastest plan that stays below the
memory line: replicas times rings of any power of two, agreeing by an all-reduce or by ZeRO, experts divided over N
ranks and rotated over r, with and without recomputation.
"""

import argparse
import functools
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rtp_ext.planner import Cluster, ModelSpec, Strategy, estimate_memory, estimate_time
from rtp_ext.planner.plans.search import limit_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.table import markdown, marker, renew, wishes, with_blocks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "moe.md"
BLOCK = marker("mixtures")
SEQ = 8192
GPUS = (8, 64, 512)
GPU = "h100-80gb"
# Sizes from the released models. Of DeepSeek-V3 all layers are mixtures without the shared expert, and attention has
# about as many weights as its latent one.
MODELS = {
    "Mixtral 8x7B": ModelSpec.preset("mixtral-8x7b", seq=SEQ),
    "gpt-oss-20b": ModelSpec.llama(
        name="gpt-oss-20b",
        **{"layers": 24, "hidden": 2880, "heads": 64, "kv_heads": 8, "head_dim": 64, "ffn": 2880, "vocab": 201088},
        **{"seq": SEQ, "experts": 32, "experts_per_token": 4},
    ),
    "Qwen3-30B-A3B": ModelSpec.llama(
        name="qwen3-30b-a3b",
        **{"layers": 48, "hidden": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "ffn": 768, "vocab": 151936},
        **{"seq": SEQ, "experts": 128, "experts_per_token": 8, "qk_norm": True},
    ),
    "DeepSeek-V3": ModelSpec.llama(
        name="deepseek-v3",
        **{"layers": 61, "hidden": 7168, "heads": 128, "kv_heads": 4, "head_dim": 96, "ffn": 2048, "vocab": 129280},
        **{"seq": SEQ, "experts": 256, "experts_per_token": 8},
    ),
}
FORMS = ("ring alone", "divided alone", "both")


@dataclass(frozen=True)
class Plan:
    """A plan that fits. seconds: of a step."""

    strategy: Strategy
    seconds: float
    gigabytes: float

    @property
    def form(self) -> str:
        ring, parts = self.strategy.rtp, self.strategy.ep
        return FORMS[0] if parts == 1 else FORMS[1] if parts == ring else FORMS[2]

    @property
    def mesh(self) -> str:
        return f"{self.strategy.dp} x {self.strategy.rtp // self.strategy.ep} x {self.strategy.ep}"


def strategies(model: ModelSpec, gpus: int) -> Iterator[Strategy]:
    sizes = [2**power for power in range(1, gpus.bit_length()) if gpus % 2**power == 0]
    for ring, parts, recompute in itertools.product(sizes, (1, *sizes), ("none", "full")):
        if ring % parts or (parts > 1 and model.experts % ring):
            continue
        for outer in ("allreduce", "zero") if gpus > ring else ("allreduce",):
            own = {"dp": gpus // ring, "rtp": ring, "ep": parts, "outer": outer, "recompute": recompute}
            yield Strategy(fused_loss=True, **own)  # type: ignore[arg-type]


@functools.cache
def fastest(name: str, gpus: int) -> dict[str, Plan]:
    """Returns the fastest plan of each form that has one."""
    model, cluster = MODELS[name], Cluster.preset(GPU, gpus=gpus)
    found: dict[str, Plan] = {}
    states = 8 * model.parameters  # float32 weights and gradients, which a ring has once
    for strategy in strategies(model, gpus):
        if states / strategy.rtp > limit_bytes(cluster):
            continue
        held = estimate_memory(model, cluster, strategy, gpus).peak_allocated_bytes
        if held > limit_bytes(cluster):
            continue
        plan = Plan(strategy, estimate_time(model, cluster, strategy, gpus).step_seconds, held / 1e9)
        if plan.form not in found or plan.seconds < found[plan.form].seconds:
            found[plan.form] = plan
    return found


def table() -> str:
    heads = ("model", "GPUs", *(f"{form}, step s" for form in FORMS), "fastest: replicas x ring x expert", "GB")
    rows = []
    for name, gpus in itertools.product(MODELS, GPUS):
        plans = fastest(name, gpus)
        best = min(plans.values(), key=lambda plan: plan.seconds, default=None)
        times = (f"{plans[form].seconds:.3g} ({plans[form].mesh})" if form in plans else "-" for form in FORMS)
        again = "" if best is None or best.strategy.recompute == "none" else ", recomputed"
        ways = "-" if best is None else f"{best.mesh}{again}"
        rows.append((name, str(gpus), *times, ways, "-" if best is None else f"{best.gigabytes:.0f}"))
    return markdown(heads, rows)


def rewrite(texts: list[str]) -> list[str]:
    return with_blocks(texts, BLOCK, {"meshes": table})


def main() -> None:
    parser = argparse.ArgumentParser(description="Meshes of mixtures. See the top of the file.")
    wishes(parser)
    renew(parser.parse_args(), [PAGE], rewrite, BLOCK, "the planner: python benchmarks/planner/mixtures.py --write")


if __name__ == "__main__":
    main()
