"""Predicted step times of RTP, fully_shard, tensor parallelism and hybrids over a grid: where rotation wins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rtp_ext.command_line import markdown, wrapped
from rtp_ext.planner.constants import TimeConstants, constants
from rtp_ext.planner.plans.search import allocated_bytes, limit_bytes
from rtp_ext.planner.specs.cluster import Cluster
from rtp_ext.planner.specs.model import ModelSpec
from rtp_ext.planner.specs.strategy import FROZEN, RECOMPUTE, Strategy, in_eight_bits
from rtp_ext.planner.time.estimate import estimate_time
from rtp_ext.planner.time.stage import StageClock

MODELS = (("gpt-3-xl", 8), ("llama-3-8b", 8), ("llama-3-70b", 64), ("llama-3-405b", 512))  # and number of GPUs
TOKENS = (1024, 2048, 4096, 8192, 16384)  # per GPU
LINKS = ("NVLink", "PCIe", "400 Gb/s")
BASE = "h100-80gb"
FAMILIES = ("rtp", "fsdp", "tp", "rtp hybrid", "other hybrid")
_RINGS = (4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Contender:
    """The fastest fitting plan of a family."""

    strategy: Strategy
    step_seconds: float
    allocated_bytes: float


@dataclass(frozen=True)
class Cell:
    """A point of the grid. `plans`: by family; None where no plan of it fits."""

    model: str
    gpus: int
    link: str
    tokens: int
    plans: dict[str, Contender | None]

    @property
    def advantage(self) -> float:
        """Step time of the best plan without rotation divided by that of the best with it: above 1, RTP wins.

        Infinity where only RTP fits, 0 where RTP does not fit, nan where nothing fits.
        """
        ours, others = self._best(True), self._best(False)
        if ours is None:
            return 0.0 if others else float("nan")
        return others.step_seconds / ours.step_seconds if others else float("inf")

    def to_dict(self) -> dict[str, Any]:
        """Returns the cell as values for JSON; `others_over_rtp` is None where rotation or all else does not fit."""
        ratio = self.advantage
        return {
            **dataclasses.asdict(self),
            "winner": self.winner,
            "others_over_rtp": ratio if 0 < ratio < float("inf") else None,
        }

    def _best(self, rotates: bool) -> Contender | None:
        fitting = [plan for name, plan in self.plans.items() if plan and name.startswith("rtp") == rotates]
        return min(fitting, key=lambda plan: plan.step_seconds, default=None)

    @property
    def winner(self) -> str:
        """The fastest family; `tie` where rotation and the others are within the model's error."""
        fitting = {name: plan.step_seconds for name, plan in self.plans.items() if plan}
        if not fitting:
            return "nothing fits"
        margin = 1 + constants()["search"]["tie_fraction"]["value"]
        if 1 / margin <= self.advantage <= margin:
            return "tie"
        return min(fitting, key=lambda name: fitting[name])


def cluster_of(link: str, gpus: int, base: str = BASE) -> Cluster:
    """Returns GPUs with one kind of link: NVLink or PCIe (direct access) inside nodes of 8, or a network port each."""
    if link == "PCIe":
        return dataclasses.replace(Cluster.preset(base, gpus=gpus, link="pcie"), name=f"{base}, PCIe")
    cluster = Cluster.preset(base, gpus=gpus)
    if link == "400 Gb/s":
        return dataclasses.replace(cluster, name=f"{base}, 400 Gb/s", gpus_per_node=1)
    return cluster


def contenders(gpus: int, recipe: str | None = None) -> Iterator[tuple[str, Strategy]]:
    """Yields plans by family. All use the torch stack with a fused loss: they differ only in the layout and, for
    rotation, in whether bundles recompute. Rings and groups of fully_shard have the same sizes, with replicas. recipe:
    all have products in eight bits, rings without tensor parallelism and bundles of MLPs."""
    fused: dict[str, Any] = {"fused_loss": True, "stack": "torch"}
    peers = fused | in_eight_bits(recipe, 1) if recipe else fused
    rings = fused | in_eight_bits(recipe, 2) if recipe else fused
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8, 16):
            rest, left = divmod(gpus, tp * pp)
            if left or not rest:
                continue
            layout: dict[str, Any] = {"tp": tp, "pp": pp, "sequence_parallel": tp > 1}
            shared = layout | peers
            for ring in _RINGS:
                if rest % ring == 0 and tp <= (1 if recipe else 2):
                    for bundle in (True,) if recipe else (True, "recompute"):
                        name = "rtp" if tp == pp == 1 else "rtp hybrid"
                        yield name, Strategy(rtp=ring, dp=rest // ring, bundle=bundle, **layout, **rings)
            if tp == pp == 1:
                for group in sorted({*_RINGS, rest}):
                    if rest % group == 0:
                        yield "fsdp", Strategy(dp=rest, zero=3, replicate=rest // group, **shared)
                continue
            if pp == 1 and tp == 8:
                yield "tp", Strategy(dp=rest, zero=1 if rest > 1 else 0, **shared)
            if rest > 1:
                yield "other hybrid", Strategy(dp=rest, zero=3, **shared)
            if pp > 1:
                yield "other hybrid", Strategy(dp=rest, zero=1 if rest > 1 else 0, **shared)


def links_of(base: str) -> tuple[str, ...]:
    """Returns the links to compare for a preset of a GPU: NVLink only where it joins a node of it.

    Raises:
        ValueError: the preset has no GPUs.
    """
    preset = constants()["gpus"][base]
    if preset.get("cpus"):
        raise ValueError(f"when: expected a preset of GPUs, whose links are compared, got {base}: sockets of CPUs")
    return LINKS if preset.get("link", "nvlink") == "nvlink" else LINKS[1:]


def compare(
    model: str | ModelSpec, gpus: int, link: str, tokens: int, base: str = BASE, recipe: str | None = None
) -> Cell:
    """Computes one cell, with one sample of `tokens` tokens per GPU. Each plan has its best recomputation (of all
    modes) and micro-batch. model: one, or the name of a preset. base: the name of a preset of a GPU. recipe: as of
    `contenders`."""
    model = ModelSpec.preset(model, seq=tokens) if isinstance(model, str) else dataclasses.replace(model, seq=tokens)
    cluster = cluster_of(link, gpus, base)
    best: dict[str, Contender | None] = dict.fromkeys(FAMILIES)
    for family, plan in contenders(gpus, recipe):
        for micro_batch in (1, 2, 4, 8):
            for recompute in RECOMPUTE:
                strategy = dataclasses.replace(plan, micro_batch=micro_batch, recompute=recompute)
                try:
                    strategy.check(model, cluster, gpus)
                except ValueError:
                    continue
                held = allocated_bytes(model, strategy, gpus, cluster)
                if held > limit_bytes(cluster):
                    continue
                seconds = estimate_time(model, cluster, strategy, gpus).step_seconds
                before = best[family]
                if before is None or seconds < before.step_seconds:
                    best[family] = Contender(strategy, seconds, held)
    return Cell(model.name, gpus, link, tokens, best)


def hidden_from(model: ModelSpec, cluster: Cluster, strategy: Strategy, most: int = 1 << 18) -> int | None:
    """Returns the fewest tokens of a GPU, in steps of 64, from which a layer's hops hide under its products.

    Hops hide where products wait for them for less than the error of the time model (tie_fraction of constants.json).
    Gathers of adapters do not count. None: more than `most` tokens. The model's `seq` is ignored: a GPU has one sample
    of all its tokens.
    """
    hidden = constants()["search"]["tie_fraction"]["value"]

    def hides(tokens: int) -> bool:
        long, plan = dataclasses.replace(model, seq=tokens), dataclasses.replace(strategy, micro_batch=1)
        clock = StageClock(long, cluster, plan, TimeConstants.default())
        parts = clock.per_layer
        return parts["rotation"] - clock.adapters_s <= hidden * (parts["gemm"] + parts["split"])

    count = fewest(lambda count: hides(64 * count), most // 64)
    return None if count is None else 64 * count


def fewest(holds: Callable[[int], bool], most: int) -> int | None:
    """Returns the smallest number from 1 to `most` from which on `holds` is True; None if it is False for `most`."""
    if not holds(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def grid(
    models: Sequence[tuple[str | ModelSpec, int]] = MODELS,
    tokens: Sequence[int] = TOKENS,
    links: Sequence[str] | None = None,
    base: str = BASE,
    recipe: str | None = None,
) -> list[Cell]:
    """Computes all cells, model by model. links: default: those of `base`, the name of a preset of a GPU. recipe: as of
    `contenders`."""
    links = links_of(base) if links is None else links
    return [
        compare(model, gpus, link, size, base, recipe) for model, gpus in models for link in links for size in tokens
    ]


def hidden_tokens(model: ModelSpec, gpus: int, base: str, strategy: Strategy) -> dict[str, dict[str, int | None]]:
    """Returns `hidden_from` by link and by the format of the frozen weights.

    strategy: with adapters or frozen weights. base: the name of a preset of a GPU.
    """
    ways: dict[str, dict[str, Any]] = {f"{strategy.param_dtype}": {}, "travel int8": {"travel": "int8"}}
    ways |= {f"frozen {blocks}": {"frozen": blocks} for blocks in FROZEN[1:]}
    plans = {
        name: dataclasses.replace(strategy, **{"frozen": None, "travel": None, **way}) for name, way in ways.items()
    }
    return {
        link: {name: hidden_from(model, cluster_of(link, gpus, base), plan) for name, plan in plans.items()}
        for link in LINKS
    }


def recipe_tokens(model: ModelSpec, gpus: int, base: str, recipe: str) -> dict[str, dict[str, int | None]]:
    """Returns tokens of a GPU by link, of rings of all GPUs, at most 64: `hidden_from` with and without the recipe, and
    the fewest from which a layer in 16 bits is no slower (1: always)."""
    plan = Strategy(rtp=min(gpus, _RINGS[-1]), fused_loss=True)
    scaled = dataclasses.replace(plan, recipe=recipe)
    found: dict[str, dict[str, int | None]] = {}
    for link in links_of(base):
        cluster = cluster_of(link, gpus, base)

        def no_slower(count: int, cluster: Cluster = cluster) -> bool:
            long = dataclasses.replace(model, seq=64 * count)
            clocks = (StageClock(long, cluster, each, TimeConstants.default()) for each in (plan, scaled))
            wide, narrow = (sum(clock.per_layer.values()) for clock in clocks)
            return wide <= narrow

        wide = fewest(no_slower, 1 << 12)
        found[link] = {
            "hops hide from, 16 bits": hidden_from(model, cluster, plan),
            f"from, {recipe}": hidden_from(model, cluster, scaled),
            "16 bits no slower from": None if wide is None else 64 * wide,
        }
    return found


def recipe_table(models: Sequence[tuple[str | ModelSpec, int]], base: str, recipe: str) -> str:
    """Formats `recipe_tokens` as a Markdown table."""
    rows: list[list[str]] = []
    for name, gpus in models:
        model = ModelSpec.preset(name) if isinstance(name, str) else name
        found = recipe_tokens(model, gpus, base, recipe)
        rows = rows or [["model, GPUs", "link", *next(iter(found.values()))]]
        for link, tokens in found.items():
            rows.append([f"{model.name}, {gpus}", link, *("-" if n is None else str(n) for n in tokens.values())])
    about = "Tokens of a GPU, predicted, not run; rings of all GPUs, at most 64; -: more than 262144."
    return "\n".join([*markdown(rows), "", *wrapped(about, then="")])


def hidden_table(model: ModelSpec, gpus: int, base: str, strategy: Strategy) -> str:
    """Formats `hidden_tokens` as a Markdown table."""
    found = hidden_tokens(model, gpus, base, strategy)
    ways = next(iter(found.values()))
    rows = [["link", *ways]]
    for link, tokens in found.items():
        rows.append([link, *("-" if each is None else str(each) for each in tokens.values())])
    about = f"Fewest tokens of a GPU from which hops of {model.name} hide under products, predicted: ring of "
    about += (
        f"{strategy.rtp} {base}, adapters of rank {strategy.lora_rank}, all other weights frozen; -: more than 262144."
    )
    return "\n".join([*markdown(rows), "", *wrapped(about, then="")])


def when_table(cells: Sequence[Cell], base: str = BASE) -> str:
    """Formats a Markdown table: predicted seconds of a step by family, and the winner with its advantage. base: of the
    grid."""
    times = [f"{name} s" for name in FAMILIES]
    rows = [["model, GPUs", "link", "tokens per GPU", *times, "RTP GB", "fsdp GB", "fastest", "others / RTP"]]
    for cell in cells:
        seconds = [f"{plan.step_seconds:.4g}" if plan else "-" for plan in cell.plans.values()]
        held = [
            f"{plan.allocated_bytes / 1e9:.0f}" if plan else "-" for plan in (cell.plans["rtp"], cell.plans["fsdp"])
        ]
        place = [f"{cell.model}, {cell.gpus}", cell.link, str(cell.tokens)]
        rows.append([*place, *seconds, *held, cell.winner, _ratio(cell)])
    about = (
        f"Predictions of rtp_ext.planner for {gpu_text(base)}; -: no plan of the family fits below the memory limit. "
        "All are on the torch stack with the fused loss, each with the recomputation (none, selective, full) that is "
        "fastest; GB are those of the fastest plan, not of the smallest."
    )
    return "\n".join([*markdown(rows), "", *wrapped(about, then="")])


def gpu_text(base: str) -> str:
    return "H100 of 80 GB" if base == BASE else base


def _ratio(cell: Cell) -> str:
    advantage = cell.advantage
    if advantage != advantage:
        return "-"
    return "only RTP fits" if advantage == float("inf") else "RTP does not fit" if not advantage else f"{advantage:.2f}"
