"""Uneven pipeline stages and partial recomputation, each at its optimum.

A pipeline whose stages take t_i per micro-batch takes (m - 1) max t_i + sum t_i. Two of the lecture's search methods
(Kun Yuan, part 07) are used: dynamic programming over the cuts, and an integer program that also chooses the number of
recomputed layers of every stage, solved by HiGHS (Huangfu and Hall, Math. Prog. Comp. 10, 2018) through scipy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rtp_ext.planner.constants import TimeConstants, check_at_least
from rtp_ext.planner.memory.estimate import stage_memory
from rtp_ext.planner.memory.states import stage_layers
from rtp_ext.planner.specs.cluster import Cluster
from rtp_ext.planner.specs.model import ModelSpec
from rtp_ext.planner.specs.strategy import Strategy
from rtp_ext.planner.time.stage import StageClock

Fits = Callable[[int, int], bool]


@dataclass(frozen=True)
class Cut:
    """Layers of every stage, and how many of each are `recomputed`.

    `seconds`: of the pipeline; `evaluations`: number of evaluations of a stage's cost.
    """

    layers: tuple[int, ...]
    seconds: float
    evaluations: int
    recomputed: tuple[int, ...] = ()


def pipeline_seconds(stages: Sequence[float], micro_batches: int) -> float:
    """Returns (m - 1) max t + sum t (arXiv 1811.06965)."""
    return (micro_batches - 1) * max(stages) + sum(stages)


def cut_layers(
    layer_seconds: Sequence[float],
    stages: int,
    micro_batches: int,
    *,
    first_seconds: float = 0.0,
    last_seconds: float = 0.0,
    fits: Fits | None = None,
) -> Cut | None:
    """Cuts layers, which may differ, into stages of at least one layer, so that the pipeline is fastest.

    The sum over all stages is the same for every cut, so the slowest stage decides. best[i][j] is its least time where
    the first i stages have the first j layers: the minimum over k of max(best[i - 1][k], cost of k to j).

    Args:
        first_seconds, last_seconds: of the parts of the first and the last stage other than layers.
        fits: whether stage i may have a number of layers. The result is None where no cut fits.

    Raises:
        ValueError: fewer layers than stages.
    """
    check_at_least("cut_layers", 1, stages=stages, micro_batches=micro_batches)
    count = len(layer_seconds)
    if count < stages:
        raise ValueError(f"cut_layers: expected at least {stages} layers for as many stages, got {count}")
    ends = [0.0]
    for seconds in layer_seconds:
        ends.append(ends[-1] + seconds)
    evaluations = 0
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(stages):
        row: dict[int, tuple[float, int]] = {}
        more = (first_seconds if stage == 0 else 0.0) + (last_seconds if stage == stages - 1 else 0.0)
        for last in range(stage + 1, count - (stages - 1 - stage) + 1):
            if stage == stages - 1 and last != count:
                continue
            for first, (slowest, _) in best[stage].items():
                if first >= last or (fits is not None and not fits(stage, last - first)):
                    continue
                evaluations += 1
                found = max(slowest, ends[last] - ends[first] + more)
                if last not in row or found < row[last][0]:
                    row[last] = found, first
        best.append(row)
    if count not in best[stages]:
        return None
    sizes, last = [], count
    for stage in range(stages, 0, -1):
        first = best[stage][last][1]
        sizes.append(last - first)
        last = first
    total = ends[-1] + first_seconds + last_seconds
    seconds = (micro_batches - 1) * best[stages][count][0] + total
    return Cut(tuple(reversed(sizes)), seconds, evaluations)


@dataclass(frozen=True)
class StageCosts:
    """Costs of a pipeline's stages: seconds per micro-batch and bytes per GPU, both linear in layers.

    Attributes:
        layer_seconds: of a layer without and with recomputation.
        end_seconds: of the parts of the first and the last stage other than layers, added to the stage's own.
        fixed_bytes: of every stage, independent of its layers.
        kept_bytes, recomputed_bytes: of every stage per layer without and with recomputation, including its states.
    """

    layer_seconds: tuple[float, float]
    end_seconds: tuple[float, ...]
    fixed_bytes: tuple[float, ...]
    kept_bytes: tuple[float, ...]
    recomputed_bytes: tuple[float, ...]


def stage_costs(
    model: ModelSpec, cluster: Cluster, strategy: Strategy, micro_batches: int, constants: TimeConstants | None = None
) -> StageCosts:
    """Derives the costs from two estimates of each: layers add seconds and bytes linearly."""
    constants = TimeConstants.default() if constants is None else constants
    hosts = strategy.hosts(cluster)
    mode = "full" if strategy.recompute == "none" else strategy.recompute
    kinds = [
        dataclasses.replace(strategy, recompute=kind, stage_layers=(), stage_recompute=()) for kind in ("none", mode)
    ]
    clocks = [StageClock(model, cluster, kind, constants) for kind in kinds]
    layer = [sum(clock.per_layer.values()) for clock in clocks]
    ends, fixed, kept, again = [], [], [], []
    for stage in range(strategy.pp):
        ends.append(clocks[0].stage(stage).total - stage_layers(model, kinds[0], stage) * layer[0])
        held = []
        for kind in kinds:
            sizes = []
            for extra in (0, 1):
                layers = _even(model.layers, strategy.pp, stage, extra)
                counted = dataclasses.replace(kind, stage_layers=layers)
                grown = dataclasses.replace(model, layers=sum(layers))
                sizes.append(stage_memory(grown, counted, stage, micro_batches, hosts=hosts).allocated_bytes)
            held.append((sizes[0], sizes[1] - sizes[0], layers[stage] - 1))
        kept.append(held[0][1])
        again.append(held[1][1])
        # buffers for recomputation do not depend on the number of recomputed layers: the larger of both kinds
        fixed.append(max(size - count * each for size, each, count in held))
    return StageCosts((layer[0], layer[1]), tuple(ends), tuple(fixed), tuple(kept), tuple(again))


def _even(layers: int, stages: int, stage: int = 0, extra: int = 0) -> tuple[int, ...]:
    return tuple(layers // stages + (i < layers % stages) + (extra if i == stage else 0) for i in range(stages))


def best_stages(
    costs: StageCosts, layers: int, micro_batches: int, limit: float, *, recompute: bool = True
) -> Cut | None:
    """Returns layers of every stage, and how many of them are recomputed, at the least time below a memory limit.

    The integer program: kept_i and again_i are whole numbers, T >= t_i = kept_i a + again_i b + end_i for every stage;
    minimise (m - 1) T + sum t_i, subject to: the layers add up, every stage has at least one, and fixed_i + kept_i k_i
    + again_i r_i <= limit. None where nothing fits.

    Raises:
        ImportError: scipy is missing.
    """
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError as error:
        raise ImportError("an integer program needs scipy: pip install 'rtp-ext[search]'") from error
    stages = len(costs.end_seconds)
    plain, again = costs.layer_seconds
    eye = np.eye(stages)
    column = np.ones((stages, 1))
    objective = np.concatenate([np.full(stages, plain), np.full(stages, again), [micro_batches - 1.0]])
    slowest = np.hstack([plain * eye, again * eye, -column])
    memory = np.hstack([np.diag(costs.kept_bytes), np.diag(costs.recomputed_bytes), 0 * column]) / limit
    every = np.hstack([eye, eye, 0 * column])
    everywhere = np.hstack([np.ones(2 * stages), [0.0]])[None]
    found = milp(
        objective / max(plain, 1e-12),
        integrality=np.concatenate([np.ones(2 * stages), [0]]),
        bounds=Bounds(0, np.concatenate([np.full(stages, layers), np.full(stages, layers * recompute), [np.inf]])),
        constraints=[
            LinearConstraint(slowest, -np.inf, -np.array(costs.end_seconds)),
            LinearConstraint(memory, -np.inf, 1 - np.array(costs.fixed_bytes) / limit),
            LinearConstraint(every, 1, np.inf),
            LinearConstraint(everywhere, layers, layers),
        ],
        options={"mip_rel_gap": 1e-6},
    )
    if found.x is None:
        return None
    counts = [round(value) for value in found.x[: 2 * stages]]
    kept, recomputed = counts[:stages], counts[stages:]
    seconds = [k * plain + r * again + end for k, r, end in zip(kept, recomputed, costs.end_seconds, strict=True)]
    sizes = tuple(k + r for k, r in zip(kept, recomputed, strict=True))
    nodes = int(getattr(found, "mip_node_count", 0) or 0)
    return Cut(sizes, pipeline_seconds(seconds, micro_batches), max(nodes, 1), tuple(recomputed))
