"""Rings against `fully_shard`, cell by cell: at no more memory, as the engine is and with what is to come."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from rtp_ext.planner.constants import TimeConstants
from rtp_ext.planner.plans.search import allocated_bytes, limit_bytes
from rtp_ext.planner.plans.when import BASE, LINKS, MODELS, TOKENS, cluster_of, contenders
from rtp_ext.planner.rotation.family import BUILT, PIECES
from rtp_ext.planner.specs.cluster import Cluster
from rtp_ext.planner.specs.model import ModelSpec
from rtp_ext.planner.specs.strategy import RECOMPUTE, Strategy
from rtp_ext.planner.time.estimate import estimate_time
from rtp_ext.planner.time.report import TimeReport
from rtp_ext.planner.time.stage import StageClock

TO_COME = tuple(piece for piece in PIECES if piece not in BUILT)
STEPS = tuple(
    "+".join(TO_COME[:count]) for count in range(len(TO_COME) + 1)
)  # the engine as it is, then piece by piece
_CERTAIN = ("gemm", "attention", "elementwise", "recomputation", "optimizer")  # of every plan of a layout


@dataclass(frozen=True)
class Side:
    """A plan of a cell: its bytes are those of the allocator."""

    strategy: Strategy
    time: TimeReport
    allocated_bytes: float

    @property
    def seconds(self) -> float:
        return self.time.step_seconds


@dataclass(frozen=True)
class Match:
    """One cell. peer: the fastest `fully_shard` over NCCL; free: the fastest whose collectives take no multiprocessors;
    rings: the fastest at no more memory than `peer`, by STEPS; None: none fits."""

    model: str
    gpus: int
    link: str
    tokens: int
    peer: Side
    free: Side
    rings: dict[str, Side | None]

    def ratio(self, pieces: str, *, free: bool = False) -> float:
        """Returns the time of the ring over that of `fully_shard`; infinity without a ring."""
        ring, other = self.rings[pieces], self.free if free else self.peer
        return ring.seconds / other.seconds if ring else float("inf")

    def binding(self, pieces: str) -> str:
        """Returns the component of the ring's time that exceeds that of `fully_shard` the most; empty where the ring is
        not slower."""
        ring = self.rings[pieces]
        if ring is None:
            return "memory"
        if self.ratio(pieces) <= 1.0:
            return ""
        ours, theirs = dict(ring.time.components), dict(self.peer.time.components)
        for parts in (ours, theirs):  # the same bytes of either
            parts["exposed hops"] = parts.pop("rotation") + parts.pop("unsharding")
        more = {name: ours[name] - theirs[name] for name in ours}
        name = max(more, key=lambda component: more[component])
        return f"{name.replace('_', ' ')} {more[name] / self.peer.seconds:+.0%}"


def _variants(gpus: int, family: str) -> list[Strategy]:
    found = []
    for name, plan in contenders(gpus):
        if name == family:
            found += [
                dataclasses.replace(plan, micro_batch=micro_batch, recompute=recompute)
                for micro_batch in (1, 2, 4, 8)
                for recompute in RECOMPUTE
            ]
    return found


def _runs(model: ModelSpec, cluster: Cluster, strategy: Strategy) -> bool:
    try:
        strategy.check(model, cluster, cluster.gpus)
    except ValueError:
        return False
    return True


def _fastest(
    model: ModelSpec,
    cluster: Cluster,
    plans: Sequence[Strategy],
    limit: float,
    constants: TimeConstants,
) -> Side | None:
    """Returns the fastest of plans of at most `limit` bytes, which come with a lower bound of their time."""
    best: Side | None = None
    fitting = [
        plan
        for plan in plans
        if _runs(model, cluster, plan)
        and allocated_bytes(model, plan, cluster.gpus, cluster, lean=True) <= min(limit, limit_bytes(cluster))
    ]

    def least(plan: Strategy) -> float:
        plain = dataclasses.replace(plan, to_come="")
        parts = estimate_time(model, cluster, plain, cluster.gpus, constants=constants).components
        return sum(parts[name] for name in _CERTAIN)

    for bound, plan in sorted(((least(plan), plan) for plan in fitting), key=lambda pair: pair[0]):
        if best is not None and bound >= best.seconds:
            break
        time = estimate_time(model, cluster, plan, cluster.gpus, constants=constants)
        if best is not None and time.step_seconds >= best.seconds:
            continue
        held = allocated_bytes(model, plan, cluster.gpus, cluster)
        if held <= min(limit, limit_bytes(cluster)):
            best = Side(plan, time, held)
    return best


def match(
    model: ModelSpec | str,
    gpus: int,
    link: str,
    tokens: int,
    *,
    base: str = BASE,
    steps: Sequence[str] = (STEPS[0], STEPS[-1]),
    constants: TimeConstants | None = None,
) -> Match | None:
    """Compares the fastest plans of a cell, with `tokens` per GPU and one sample per micro-batch; None where no
    `fully_shard` or no ring fits at all. steps: of STEPS, to compare; a ring tries the layouts of the first and of the
    last of them for those between."""
    constants = TimeConstants.default() if constants is None else constants
    model = ModelSpec.preset(model, seq=tokens) if isinstance(model, str) else dataclasses.replace(model, seq=tokens)
    cluster = cluster_of(link, gpus, base)
    plans = _variants(gpus, "fsdp")
    peer = _fastest(model, cluster, plans, limit_bytes(cluster), constants)
    quiet = [dataclasses.replace(plan, symm_mem=True) for plan in plans]
    free = _fastest(model, cluster, quiet, limit_bytes(cluster), constants)
    if peer is None or free is None:
        return None
    rings: dict[str, Side | None] = {}
    every, kept = _variants(gpus, "rtp"), list[Strategy]()
    if _fastest(model, cluster, every, limit_bytes(cluster), constants) is None:
        return None
    for step in (steps[0], *steps[:0:-1]):
        tried = kept if len(rings) > 0 and step != steps[-1] else every
        own = [dataclasses.replace(plan, to_come=step) for plan in tried]
        rings[step] = _fastest(model, cluster, own, peer.allocated_bytes, constants)
        found = rings[step]
        kept += [found.strategy] if found else []
    return Match(model.name, gpus, link, tokens, peer, free, {step: rings[step] for step in steps})


def matches(steps: Sequence[str] = (STEPS[0], STEPS[-1])) -> list[Match]:
    """Returns the cells of `grid` in which a ring and `fully_shard` both fit."""
    found = (
        match(model, gpus, link, tokens, steps=steps) for model, gpus in MODELS for link in LINKS for tokens in TOKENS
    )
    return [each for each in found if each is not None]


def ring_text(model: ModelSpec, cluster: Cluster, strategy: Strategy) -> str:
    """Formats a ring's plan: ranks, samples, recomputation, shards per product of attention and MLP, gradients."""
    more = ", recompute " + strategy.recompute if strategy.recompute != "none" else ""
    more += ", hidden again" if strategy.bundle == "recompute" else ""
    block = StageClock(model, cluster, strategy, TimeConstants.default()).block
    if block is not None:
        groups = sorted({block.plan.groups[0], block.plan.groups[-1]}, reverse=True)
        more += f", g {'/'.join(map(str, groups))}, {block.plan.gradients}"
    return f"{strategy.rtp} ranks x {strategy.micro_batch}{more}"
