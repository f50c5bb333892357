"""Search for the fastest plans that fit."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rtp_ext.planner.constants import check_at_least, check_known, constants, memory_constant
from rtp_ext.planner.memory.estimate import estimate_memory, planned_bytes, stage_memory
from rtp_ext.planner.memory.report import MemoryReport
from rtp_ext.planner.memory.states import parameter_counts
from rtp_ext.planner.plans.stages import best_stages, stage_costs
from rtp_ext.planner.specs.cluster import Cluster
from rtp_ext.planner.specs.model import ModelSpec
from rtp_ext.planner.specs.strategy import LARGEST, OUTER, Strategy
from rtp_ext.planner.time.estimate import estimate_time
from rtp_ext.planner.time.report import TimeReport

_MICRO_BATCHES = (1, 2, 4, 8, 16)
_CHUNKS = (1, 2, 4)
_LONG_SEQ = 16384  # tokens; from here on, context-parallel ranks share samples
_LARGEST_RING = 64
_SPARE = 4  # layouts examined in full beyond the requested number
Layout = tuple[int, int, int, int, int, int]  # tp, pp, cp, rtp, dp, zero


@dataclass(frozen=True)
class Plan:
    """A plan with its memory and time.

    Attributes:
        rank: 1 for the fastest plan and for all within the model's error of it; then the number of faster plans + 1.
        tied: whether other plans of the list have this rank.
        binding: the limiting factor: memory, or the largest part of the step other than the model's arithmetic.
    """

    strategy: Strategy
    memory: MemoryReport
    time: TimeReport
    rank: int
    tied: bool
    binding: str

    @property
    def step_seconds(self) -> float:
        return self.time.step_seconds

    def to_dict(self) -> dict[str, Any]:
        fields = {"rank": self.rank, "tied": self.tied, "binding": self.binding}
        return {**fields, **self.memory.to_dict(), "time": self.time.to_dict()}


def search(
    model: ModelSpec,
    cluster: Cluster,
    *,
    global_batch: int,
    seq: int | None = None,
    top: int = 10,
    outer: Sequence[str] = ("allreduce",),
    period: int = 1,
    uneven: bool = False,
) -> list[Plan]:
    """Returns the fastest plans on all GPUs that stay below the memory limit (`safe_fraction`), one per layout.

    A layout is tp, pp, cp, rtp, dp and zero. For each, the search takes the fastest micro-batch, recomputation and
    interleaving; where no plan at all fits, it offloads states to the host (rings and zero=3). All plans fuse head and
    loss (`fused_loss`), so that none gains by it; stacks follow `Strategy.stack`.
    Tensor parallelism stays inside a node; rings may span nodes. Plans whose predicted times lie within the model's
    error (constants.json, `search`) have the same rank.

    Args:
        global_batch: samples of a step.
        seq: tokens of a sample; default: the model's own.
        top: number of plans to return at most; none if no plan fits.
        outer: policies to try between replicas of rings. All but `allreduce` and `zero` train differently from data
            parallelism, so that they are tried only on request, every `period` steps.
        uneven: also gives non-interleaved pipelines the stages, and the recomputed layers of each, that an integer
            program finds best; needs scipy.

    >>> model, cluster = ModelSpec.preset("llama-3-8b"), Cluster.preset("h100-80gb", gpus=8)
    >>> best = search(model, cluster, global_batch=64, top=1)[0]
    >>> best.strategy.gpus
    8

    Raises:
        ValueError: sizes that are not positive whole numbers, or an unknown policy.
        ImportError: `uneven` without scipy.
    """
    check_at_least("search", 1, global_batch=global_batch, top=top, period=period)
    for policy in outer:
        check_known("outer policy", policy, OUTER)
    wished = [{"outer": policy, **({"period": period} if policy not in OUTER[:2] else {})} for policy in outer]
    if seq is not None:
        model = dataclasses.replace(model, seq=seq)
    found = _of_all_layouts(model, cluster, global_batch, wished)
    if not found and cluster.offloads:
        found = _of_all_layouts(model, cluster, global_batch, ({"offload": True},))
    if uneven:
        found = sorted(
            (_with_best_stages(model, cluster, pair, global_batch) for pair in found[: top + _SPARE]),
            key=lambda pair: pair[0],
        )
    kept = []
    for _, strategy in found[: top + _SPARE]:
        memory = estimate_memory(model, cluster, strategy, global_batch)
        if memory.verdict == "fits":
            kept.append((strategy, memory, estimate_time(model, cluster, strategy, global_batch)))
    return _ranked(model, cluster, global_batch, kept[:top])


def fastest_ring(
    model: ModelSpec, cluster: Cluster, *, global_batch: int, **changes: Any
) -> tuple[float, Strategy] | None:
    """Returns the seconds of a step of the fastest plan with a ring that stays below the memory limit, and the plan;
    None if there is none. changes: fields of all plans, such as `frozen` and `lora_rank`."""
    every = _of_all_layouts(model, cluster, global_batch, (changes,))
    return next((pair for pair in every if pair[1].rtp > 1), None)


def _of_all_layouts(
    model: ModelSpec, cluster: Cluster, global_batch: int, between: Sequence[dict[str, Any]]
) -> list[tuple[float, Strategy]]:
    """Returns the fastest plan that fits of each layout, the fastest first. between: fields to try, of rings with
    replicas; where they name offloading or frozen weights, of all layouts that can have them."""
    smaller = any(fields.get("offload") or fields.get("frozen") for fields in between)
    found = (
        _fastest(model, cluster, layout, global_batch, between, always=smaller)
        for layout in layouts(model, cluster, global_batch, whole=not smaller)
    )
    return sorted((best for best in found if best is not None), key=lambda pair: pair[0])


def layouts(model: ModelSpec, cluster: Cluster, global_batch: int | None, *, whole: bool = True) -> Iterator[Layout]:
    """Yields the layouts that divide the model, the cluster and the batch; `whole`: and whose states fit on the GPUs
    in float32. Otherwise those whose shards can be offloaded or frozen."""
    gpus = cluster.gpus
    for tp in _divisors(gpus, min(cluster.gpus_per_node, model.kv_heads)):
        for pp in _divisors(gpus // tp, min(model.layers, LARGEST)):
            for cp in _divisors(gpus // (tp * pp), model.seq // _LONG_SEQ * 2 if model.seq >= _LONG_SEQ else 1):
                for rtp in _divisors(gpus // (tp * pp * cp), _LARGEST_RING):
                    dp = gpus // (tp * pp * cp * rtp)
                    if global_batch is not None and (global_batch < dp * rtp or global_batch % (dp * rtp)):
                        continue
                    for zero in (0,) if rtp > 1 or dp * cp == 1 else (1, 3):
                        layout = (tp, pp, cp, rtp, dp, zero)
                        if _states_fit(model, cluster, layout) if whole else rtp > 1 or zero == 3:
                            yield layout


def _divisors(number: int, largest: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, largest) + 1) if number % divisor == 0]


def _base(cluster: Cluster, layout: Layout, **changes: Any) -> Strategy:
    tp, pp, cp, rtp, dp, zero = layout
    fields = {"tp": tp, "pp": pp, "cp": cp, "rtp": rtp, "dp": dp, "zero": zero, "sequence_parallel": tp > 1}
    stack = {"stack": "torch"} if cluster.cpus and rtp == 1 and zero < 3 else {}  # else by itself
    return Strategy(**{**fields, "fused_loss": True, **stack, **changes})


def _states_fit(model: ModelSpec, cluster: Cluster, layout: Layout) -> bool:
    """Returns whether a lower bound fits: two bytes per weight, and the sharded states."""
    try:
        strategy = _base(cluster, layout)
        strategy.check(model, cluster)
    except ValueError:
        return False
    values = sum(count.value for count in parameter_counts(model, strategy, 0))
    shards = strategy.rtp if strategy.rtp > 1 else strategy.dp * strategy.cp
    least = values * (16 / shards if strategy.rtp > 1 or strategy.zero == 3 else 6 + 12 / shards)
    return least <= limit_bytes(cluster)


@functools.lru_cache(maxsize=1 << 14)
def limit_bytes(cluster: Cluster) -> float:
    """Limit of allocated bytes: below this share of a GPU's memory no published run failed (constants.json)."""
    return memory_constant("safe_fraction") * cluster.memory_bytes


def allocated_bytes(
    model: ModelSpec,
    strategy: Strategy,
    global_batch: int | None,
    cluster: Cluster | None = None,
    *,
    lean: bool = False,
) -> float:
    """Returns the maximum over the first and the last stage; stages between hold less. lean, or without a cluster: a
    lower bound, with slots of one shard."""
    return max(_bytes_of_stages(model, strategy, global_batch, cluster, lean))


def _bytes_of_stages(
    model: ModelSpec, strategy: Strategy, global_batch: int | None, cluster: Cluster | None, lean: bool
) -> Iterator[float]:
    micro_batches = strategy.micro_batches(global_batch)
    hosts = strategy.hosts(cluster) if cluster else 1
    planned = 0.0 if lean or cluster is None else planned_bytes(model, cluster, strategy)
    ends = range(strategy.pp) if strategy.stage_layers or strategy.stage_recompute else {0, strategy.pp - 1}
    for stage in ends:
        yield stage_memory(model, strategy, stage, micro_batches, hosts=hosts, planned=planned).allocated_bytes


def _fits(model: ModelSpec, strategy: Strategy, global_batch: int | None, cluster: Cluster) -> bool:
    """Returns whether `allocated_bytes` stays below the limit. Its lower bound comes first: it needs no times."""
    limit = limit_bytes(cluster)
    return all(
        size <= limit
        for lean in ((True, False) if strategy.rtp > 1 else (False,))
        for size in _bytes_of_stages(model, strategy, global_batch, cluster, lean)
    )


def _variants(model: ModelSpec, cluster: Cluster, layout: Layout, global_batch: int | None) -> Iterator[list[Strategy]]:
    """Yields lists of strategies of a layout, each in the order of more recomputation and less memory."""
    rtp = layout[3]
    modes: list[dict[str, Any]] = [{"recompute": "none"}, {"recompute": "selective"}, {"recompute": "full"}]
    if rtp > 1:
        modes.insert(1, {"bundle": "recompute"})
    for micro_batch in _MICRO_BATCHES:
        for chunks in _CHUNKS if layout[1] > 1 else (1,):
            more = {"schedule": "interleaved", "interleave": chunks} if chunks > 1 else {}
            strategies = [_base(cluster, layout, micro_batch=micro_batch, **more, **mode) for mode in modes]
            try:
                strategies[0].check(model, cluster, global_batch)
            except ValueError:
                continue
            yield strategies


def _with_best_stages(
    model: ModelSpec, cluster: Cluster, pair: tuple[float, Strategy], global_batch: int
) -> tuple[float, Strategy]:
    """Returns the same plan with its best stages, if that is faster and fits."""
    seconds, plan = pair
    if plan.pp == 1 or plan.interleave > 1 or plan.rtp > 1:
        return pair
    m = plan.micro_batches(global_batch)
    cut = best_stages(stage_costs(model, cluster, plan, m), model.layers, m, limit_bytes(cluster))
    if cut is None:
        return pair
    mode = "full" if plan.recompute == "none" else plan.recompute
    own = {"recompute": mode, "stage_recompute": cut.recomputed} if any(cut.recomputed) else {"recompute": "none"}
    other = dataclasses.replace(plan, stage_layers=cut.layers, **own)
    faster = estimate_time(model, cluster, other, global_batch).step_seconds
    return (faster, other) if faster < seconds and _fits(model, other, global_batch, cluster) else pair


def _fastest(
    model: ModelSpec,
    cluster: Cluster,
    layout: Layout,
    global_batch: int,
    changes: Sequence[dict[str, Any]] = ({},),
    *,
    always: bool = False,
) -> tuple[float, Strategy] | None:
    """Returns the fastest plan of a layout that fits. changes: fields to try; unless `always`, of rings with replicas
    only."""
    best: tuple[float, Strategy] | None = None
    tried = changes if always or (layout[3] > 1 and layout[4] > 1) else ({},)
    for plain, change in itertools.product(_variants(model, cluster, layout, global_batch), tried):
        try:
            strategies = [dataclasses.replace(strategy, **change) for strategy in plain] if change else plain
        except ValueError:
            if not always:
                raise
            continue  # a layout that cannot have these fields
        for strategy in strategies:
            if _fits(model, strategy, global_batch, cluster):
                seconds = estimate_time(model, cluster, strategy, global_batch).step_seconds
                if best is None or seconds < best[0]:
                    best = seconds, strategy
                break  # more recomputation takes longer
    return best


def _ranked(
    model: ModelSpec, cluster: Cluster, global_batch: int, kept: list[tuple[Strategy, MemoryReport, TimeReport]]
) -> list[Plan]:
    margin = 1 + constants()["search"]["tie_fraction"]["value"]
    ranks: list[int] = []
    for index, (_, _, time) in enumerate(kept):
        leader = kept[ranks[-1] - 1][2].step_seconds if ranks else 0.0
        ranks.append(ranks[-1] if ranks and time.step_seconds <= leader * margin else index + 1)
    return [
        Plan(
            strategy, memory, time, rank, ranks.count(rank) > 1, _binding(model, cluster, global_batch, strategy, time)
        )
        for (strategy, memory, time), rank in zip(kept, ranks, strict=True)
    ]


def _binding(model: ModelSpec, cluster: Cluster, global_batch: int, strategy: Strategy, time: TimeReport) -> str:
    """Returns the limiting factor: memory, if a larger micro-batch or less recomputation would be faster but does not
    fit; otherwise the largest component other than arithmetic."""
    changes: list[tuple[str, dict[str, Any]]] = [
        (f"micro_batch={2 * strategy.micro_batch}", {"micro_batch": 2 * strategy.micro_batch})
    ]
    if strategy.recompute != "none":
        changes.append(("recompute=none", {"recompute": "none"}))
    if strategy.bundle == "recompute":
        changes.append(("bundle=yes", {"bundle": True}))
    for what, change in changes:
        other = dataclasses.replace(strategy, **change)
        try:
            faster = estimate_time(model, cluster, other, global_batch).step_seconds < time.step_seconds
        except ValueError:
            continue
        needed = allocated_bytes(model, other, global_batch, cluster)
        if faster and needed > limit_bytes(cluster):
            return f"memory: {what} would be faster and needs {needed / 1e9:.0f} GB"
    rest = {name: seconds for name, seconds in time.components.items() if name not in ("gemm", "attention")}
    name = max(rest, key=lambda component: rest[component])
    return f"{name.replace('_', ' ')}: {rest[name] / time.step_seconds:.0%} of the step"


def smallest_cluster(model: ModelSpec, cluster: Cluster, *, largest: int = 16384) -> tuple[Cluster, Strategy]:
    """Returns the fewest GPUs on which a plan with one sample at a time stays below the memory limit, and that plan.

    Tries 1, 2, 4, ... GPUs of one node, then whole nodes.

    Raises:
        ValueError: none up to `largest` GPUs.
    """
    gpus, node = 1, cluster.gpus_per_node
    while gpus <= largest:
        sized = dataclasses.replace(cluster, gpus=gpus)
        for layout in layouts(model, sized, None):
            for strategies in _variants(model, sized, layout, None):
                strategy = strategies[-1]
                if _fits(model, strategy, None, sized):
                    held = ((allocated_bytes(model, s, None, sized), s) for s in strategies)
                    return sized, next(s for size, s in held if size <= limit_bytes(cluster))
                break  # larger micro-batches and more chunks take more memory
        gpus = min(2 * gpus, node) if gpus < node else gpus + node
    raise ValueError(f"model {model.name}: no plan fits into up to {largest} GPUs of {cluster.name}")
