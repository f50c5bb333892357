"""The lecture's ways to search for a plan, side by side on one problem: value found, evaluations, seconds.

    python benchmarks/planner/search_ways.py

The problem: where to cut the 32 layers of Llama 3 8B into four pipeline stages, and how many layers of each to
recompute, so that a step with 16 micro-batches is fastest and every stage stays below the memory line (8 H100, 8192
tokens). Small enough that every possibility can be tried. Seconds and bytes are the planner's, linear in layers. An
evaluation is one look at what a stage (dynamic programming) or a pipeline (all others) costs; the integer program looks
at none, but solves linear programs.

    enumeration      every cut, each stage with as few recomputed layers as fit
    dynamic          best[i][j] = min max(best[i - 1][k], stage i of layers k to j)
    integer          whole numbers of layers of both kinds for every stage, by HiGHS
    zeroth order     random moves of one layer between two stages, kept where the step is no slower; restarts
    reinforcement    REINFORCE: a softmax for every stage over its number of layers, rewarded by the step's seconds

Kun Yuan, "Optimization for Deep Learning (Part II)", 8 June 2024, part 07. The last line is what the planner's own
search, which enumerates layouts, takes for Llama 3 405B on 16,384 GPUs. One JSON line a way is appended to
results/MACHINE/search_ways.jsonl.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rtp_ext.planner import Cluster, ModelSpec, Strategy, search
from rtp_ext.planner.plans import search as search_module
from rtp_ext.planner.plans.search import limit_bytes
from rtp_ext.planner.plans.stages import StageCosts, best_stages, cut_layers, pipeline_seconds, stage_costs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.card import RESULTS, append_line, command_line, environment_card, machine_name, result_line

LAYERS, STAGES, BATCH = 32, 4, 64
SEED, TRIES, MOVES = 0, 20, 200
EPISODES, LEARNING_RATE, SPREAD = 4000, 0.3, 6  # numbers of layers that the policy may choose: even +- SPREAD


class Problem:
    """The cost of a pipeline, with a count of its evaluations."""

    def __init__(self, costs: StageCosts, micro_batches: int, limit: float) -> None:
        self.costs, self.micro_batches, self.limit, self.evaluations = costs, micro_batches, limit, 0

    def recomputed(self, stage: int, layers: int) -> int | None:
        """The fewest layers to recompute so that the stage fits; None where none are enough."""
        costs = self.costs
        kept, again = costs.kept_bytes[stage], costs.recomputed_bytes[stage]
        over = costs.fixed_bytes[stage] + kept * layers - self.limit
        count = max(0, math.ceil(over / (kept - again) - 1e-9))
        return count if count <= layers else None

    def stage(self, stage: int, layers: int) -> float:
        again = self.recomputed(stage, layers) if layers >= 1 else None
        if again is None:
            return math.inf
        plain, costly = self.costs.layer_seconds
        return (layers - again) * plain + again * costly + self.costs.end_seconds[stage]

    def pipeline(self, cut: tuple[int, ...]) -> float:
        self.evaluations += 1
        return pipeline_seconds([self.stage(i, n) for i, n in enumerate(cut)], self.micro_batches)


def enumeration(problem: Problem) -> float:
    cuts = itertools.combinations(range(1, LAYERS), STAGES - 1)
    return min(problem.pipeline(tuple(b - a for a, b in itertools.pairwise((0, *ends, LAYERS)))) for ends in cuts)


def dynamic(problem: Problem) -> float:
    """Returns the least sum for every possible slowest stage; the sum also matters, since recomputation adds to it."""
    best = {(0, 0.0): 0.0}  # layers given so far and the slowest stage -> sum
    for stage in range(STAGES):
        found: dict[tuple[int, float], float] = {}
        for (given, slowest), total in best.items():
            last = stage == STAGES - 1
            for layers in (LAYERS - given,) if last else range(1, LAYERS - given - (STAGES - 1 - stage) + 1):
                problem.evaluations += 1
                seconds = problem.stage(stage, layers)
                if math.isinf(seconds):
                    continue
                key = (given + layers, max(slowest, seconds))
                found[key] = min(found.get(key, math.inf), total + seconds)
        best = _undominated(found)
    return min((problem.micro_batches - 1) * slowest + total for (_, slowest), total in best.items())


def _undominated(found: dict[tuple[int, float], float]) -> dict[tuple[int, float], float]:
    """Without states that another of as many layers is no worse than in both the slowest stage and the sum."""
    kept: dict[tuple[int, float], float] = {}
    least: dict[int, float] = {}
    for (given, slowest), total in sorted(found.items(), key=lambda item: (item[0][0], item[0][1], item[1])):
        if total < least.get(given, math.inf):
            kept[given, slowest] = least[given] = total
    return kept


def integer(problem: Problem) -> float:
    found = best_stages(problem.costs, LAYERS, problem.micro_batches, problem.limit)
    return math.inf if found is None else found.seconds


def zeroth_order(problem: Problem) -> float:
    dice, best = np.random.default_rng(SEED), math.inf
    for _ in range(TRIES):
        cut = [int(size) for size in 1 + dice.multinomial(LAYERS - STAGES, [1 / STAGES] * STAGES)]
        seconds = problem.pipeline(tuple(cut))
        for _ in range(MOVES):
            source, target = dice.choice(STAGES, 2, replace=False)
            other = list(cut)
            other[source], other[target] = other[source] - 1, other[target] + 1
            found = problem.pipeline(tuple(other))
            if found <= seconds:
                cut, seconds = other, found
        best = min(best, seconds)
    return best


def reinforcement(problem: Problem) -> float:
    dice, best, baseline = np.random.default_rng(SEED), math.inf, 0.0
    choices = np.arange(LAYERS // STAGES - SPREAD, LAYERS // STAGES + SPREAD + 1)
    logits = np.zeros((STAGES - 1, len(choices)))
    scale = problem.pipeline((LAYERS // STAGES,) * STAGES)
    scale = scale if math.isfinite(scale) else sum(problem.costs.layer_seconds) * LAYERS * problem.micro_batches
    for episode in range(EPISODES):
        chances = np.exp(logits - logits.max(1, keepdims=True))
        chances /= chances.sum(1, keepdims=True)
        picked = [int(dice.choice(len(choices), p=row)) for row in chances]
        sizes = [int(choices[pick]) for pick in picked]
        seconds = problem.pipeline((*sizes, LAYERS - sum(sizes)))
        best = min(best, seconds)
        reward = -min(seconds / scale, 3.0)
        baseline = reward if episode == 0 else 0.95 * baseline + 0.05 * reward
        for row, pick in enumerate(picked):
            logits[row] -= LEARNING_RATE * (reward - baseline) * chances[row]
            logits[row, pick] += LEARNING_RATE * (reward - baseline)
    return best


WAYS: dict[str, Callable[[Problem], float]] = {
    "enumeration": enumeration,
    "dynamic programming": dynamic,
    "integer programming": integer,
    "zeroth order": zeroth_order,
    "reinforcement learning": reinforcement,
}


def the_problem() -> Problem:
    model, cluster = ModelSpec.preset("llama-3-8b", seq=8192), Cluster.preset("h100-80gb", gpus=8)
    plan = Strategy(pp=STAGES, dp=2, zero=1, recompute="full", micro_batch=2)
    m = plan.micro_batches(BATCH)
    return Problem(stage_costs(model, cluster, plan, m), m, limit_bytes(cluster))


def large_search() -> tuple[float, int, float]:
    """Llama 3 405B on 16,384 GPUs: value, estimates of time, seconds of one core."""
    counts, plain = 0, search_module.estimate_time

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal counts
        counts += 1
        return plain(*args, **options)

    search_module.estimate_time = counting
    try:
        start = time.process_time()
        plans = search(ModelSpec.preset("llama-3-405b"), Cluster.preset("h100-80gb", gpus=16384), global_batch=16384)
        return plans[0].step_seconds, counts, time.process_time() - start
    finally:
        search_module.estimate_time = plain


def main() -> None:
    parser = argparse.ArgumentParser(description="Ways to search, side by side. See the top of the file.")
    parser.add_argument("--machine", help="folder under results/ (default: from the CPU)")
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="append the results here instead")
    args = parser.parse_args()
    machine = args.machine or machine_name(torch.device("cpu"))
    output = args.output or RESULTS / machine / "search_ways.jsonl"
    card = environment_card(torch.device("cpu"), command_line())
    least = cut_layers([1.0] * LAYERS, STAGES, BATCH)  # loads what takes time on first use
    assert least is not None and integer(the_problem()) > 0
    rows = []
    for name, way in WAYS.items():
        problem = the_problem()
        start = time.process_time()
        found = way(problem)
        rows.append((name, "stages of llama-3-8b", found, problem.evaluations, time.process_time() - start))
    rows.append(("enumeration of layouts", "llama-3-405b on 16384 GPUs", *large_search()))
    for name, what, value, evaluations, seconds in rows:
        print(f"{name:<24}{what:<28}{value:>10.5f} s {evaluations:>8} evaluations {seconds:>8.3f} s of a core")
        told = {"way": name, "problem": what, "value_s": value, "evaluations": evaluations, "processor_s": seconds}
        append_line(output, result_line(card, benchmark="search_ways", case=f"{what}/{name}", **told))


if __name__ == "__main__":
    main()
