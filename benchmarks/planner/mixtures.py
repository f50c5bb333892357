"""Which mesh for a mixture of experts, on paper: the tables of docs/moe.md, from the planner.

    python benchmarks/planner/mixtures.py          # prints them
    python benchmarks/planner/mixtures.py --write  # rewrites them in docs/moe.md
    python benchmarks/planner/mixtures.py --check  # exit status 1 where the page says anything else

Meshes are predicted; nothing ran. H100 of 80 GB, eight to a node, a 400 Gb/s port each; one sample of 8192 tokens
for every GPU and step, fused loss, AdamW, float32 states. For each number of GPUs the fastest plan that stays below the
memory line: replicas times rings of any power of two, agreeing by an all-reduce or by ZeRO, experts divided over N
ranks and rotated over r, with and without recomputation.

The other table holds one published mixture, whose experts were gathered and divided, against the planner: its shared
experts count as routed ones, but for the exchange of tokens, and JAX as compiled torch with a fused loss.
"""

import argparse
import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rtp_ext.planner import Cluster, ModelSpec, Strategy, TimeReport, estimate_memory, estimate_time
from rtp_ext.planner.plans.search import limit_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.table import markdown, marker, renew, wishes, with_blocks

from planner import published

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


def published_step(parts: int) -> tuple[TimeReport, float]:
    """Returns the planner's step of the published mixture with experts over `parts` GPUs, and its seconds without the
    exchange of rows for shared experts."""
    model = ModelSpec.llama(name="marin", **published.MARIN_SIZES)
    all_active = dataclasses.replace(model, experts_per_token=model.experts_per_token + published.MARIN_SHARED)
    gpus, batch = published.MARIN_GPUS, published.MARIN_BATCH
    own = {"dp": gpus, "zero": 3, "ep": parts, "micro_batch": batch // gpus, "recompute": "full"}
    strategy = Strategy(fused_loss=True, compiled=True, **own)  # type: ignore[arg-type]
    cluster = Cluster.preset("gb200-186gb", gpus=gpus)
    routed, whole = (estimate_time(each, cluster, strategy, batch) for each in (model, all_active))
    more = whole.components["expert_parallel"] - routed.components["expert_parallel"]
    return whole, whole.step_seconds - more


def published_table() -> str:
    (gathered, first), (_, second) = published_step(1), published_step(published.MARIN_GPUS)
    ratio = published.MARIN_GATHERED / published.MARIN_DIVIDED
    both = {
        "experts gathered (ZeRO-3): step, s": (published.MARIN_STEP, first),
        "of it, computing": (published.MARIN_COMPUTE, gathered.groups["compute"]),
        "of that, forwards again in backward": (published.MARIN_AGAIN, gathered.components["recomputation"]),
        "of it, collectives alone": (published.MARIN_EXPOSED, gathered.groups["exposed communication"]),
        "experts divided over 64: step, s": (published.MARIN_STEP * ratio, second),
        "divided / gathered": (ratio, second / first),
    }
    return markdown(("", "published", "planner"), [(key, *(f"{one:.3g}" for one in two)) for key, two in both.items()])


def rewrite(texts: list[str]) -> list[str]:
    return with_blocks(texts, BLOCK, {"meshes": table, "published": published_table})


def main() -> None:
    parser = argparse.ArgumentParser(description="Meshes of mixtures. See the top of the file.")
    wishes(parser)
    renew(parser.parse_args(), [PAGE], rewrite, BLOCK, "the planner: python benchmarks/planner/mixtures.py --write")


if __name__ == "__main__":
    main()
