"""Uneven pipeline stages and recomputation of some layers, against every possibility on small cases."""

import dataclasses
import itertools
import random

import pytest

from rtp_ext.planner import Cluster, ModelSpec, Strategy, estimate_memory, estimate_time
from rtp_ext.planner.plans.search import limit_bytes
from rtp_ext.planner.plans.stages import StageCosts, best_stages, cut_layers, pipeline_seconds, stage_costs

H100 = Cluster.preset("h100-80gb", gpus=8)


def _cuts(layers, stages):
    """Yields all ways to assign layers to stages, at least one each."""
    for ends in itertools.combinations(range(1, layers), stages - 1):
        edges = (0, *ends, layers)
        yield tuple(b - a for a, b in itertools.pairwise(edges))


def test_dynamic_programming_finds_the_best_cut():
    dice, differs = random.Random(0), 0
    for layers, stages in ((5, 2), (7, 3), (9, 4), (6, 6)):
        seconds = [dice.choice((1.0, 1.0, 2.5)) for _ in range(layers)]
        ends = (dice.random(), 3 * dice.random())
        most = [dice.randint(1, layers) for _ in range(stages)]
        for fits in (None, lambda stage, count, most=most: count <= most[stage]):
            every = {}
            for cut in _cuts(layers, stages):
                if fits and not all(fits(stage, count) for stage, count in enumerate(cut)):
                    continue
                starts = [sum(cut[:stage]) for stage in range(stages)]
                times = [sum(seconds[a : a + n]) for a, n in zip(starts, cut, strict=True)]
                times[0], times[-1] = times[0] + ends[0], times[-1] + ends[1]
                every[cut] = pipeline_seconds(times, 8)
            found = cut_layers(seconds, stages, 8, first_seconds=ends[0], last_seconds=ends[1], fits=fits)
            if not every:
                assert found is None
                continue
            assert found is not None and found.seconds == pytest.approx(min(every.values()))
            assert every[found.layers] == pytest.approx(found.seconds) and sum(found.layers) == layers
            differs += found.seconds < max(every.values()) - 1e-9
    assert differs >= 3, "control: cuts differ"
    assert cut_layers([1.0] * 4, 2, 4, fits=lambda stage, count: False) is None
    with pytest.raises(ValueError, match="at least 3 layers for as many stages, got 2"):
        cut_layers([1.0, 1.0], 3, 1)


def test_the_integer_program_is_optimal():
    pytest.importorskip("scipy")
    layers, m = 6, 4
    for recomputes, limit in ((True, 40.0), (True, 26.0), (True, 21.0), (False, 40.0), (True, 9.0)):
        costs = StageCosts((1.0, 1.4), (0.3, 0.0, 0.9), (3.0, 2.0, 4.0), (9.0, 8.0, 7.0), (4.0, 4.0, 4.0))
        best = None
        for cut in _cuts(layers, 3):
            for again in itertools.product(*(range(n + 1) for n in cut)):
                if any(again) and not recomputes:
                    continue
                held = [
                    f + k * (n - r) + a * r
                    for f, k, a, n, r in zip(
                        costs.fixed_bytes, costs.kept_bytes, costs.recomputed_bytes, cut, again, strict=True
                    )
                ]
                if max(held) > limit:
                    continue
                times = [n + 0.4 * r + end for n, r, end in zip(cut, again, costs.end_seconds, strict=True)]
                seconds = pipeline_seconds(times, m)
                best = seconds if best is None else min(best, seconds)
        found = best_stages(costs, layers, m, limit, recompute=recomputes)
        assert (found is None) == (best is None), limit
        if found is not None:
            assert found.seconds == pytest.approx(best) and sum(found.layers) == layers
    assert best_stages(costs, layers, m, 1.0) is None


def test_plans_of_uneven_stages_are_what_the_program_says():
    """Linear costs and the full estimate agree, and the plan is faster than equal stages that recompute everything."""
    pytest.importorskip("scipy")
    model = ModelSpec.preset("llama-3-8b", seq=8192)
    base = Strategy(pp=4, dp=2, zero=1, recompute="full")
    m = base.micro_batches(64)
    costs = stage_costs(model, H100, base, m)
    found = best_stages(costs, model.layers, m, limit_bytes(H100))
    assert found is not None and 0 < sum(found.recomputed) < model.layers
    plan = dataclasses.replace(base, stage_layers=found.layers, stage_recompute=found.recomputed)
    memory, time = estimate_memory(model, H100, plan, 64), estimate_time(model, H100, plan, 64)
    assert memory.verdict == "fits" and [stage.layers for stage in memory.stages] == list(found.layers)
    once = time.components["optimizer"] + time.components["gradients"]
    assert time.step_seconds - once == pytest.approx(found.seconds, rel=0.02)
    for other in (base, dataclasses.replace(base, recompute="none")):
        slower = estimate_time(model, H100, other, 64).step_seconds > time.step_seconds
        assert slower or estimate_memory(model, H100, other, 64).verdict != "fits"
    whole = dataclasses.replace(base, stage_layers=(8, 8, 8, 8), stage_recompute=(8, 8, 8, 8))
    assert estimate_time(model, H100, whole, 64).step_seconds == pytest.approx(
        estimate_time(model, H100, base, 64).step_seconds
    )
    assert (
        estimate_memory(model, H100, whole, 64).peak_allocated_bytes
        == estimate_memory(model, H100, base, 64).peak_allocated_bytes
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pp": 2, "stage_layers": (16,)}, "stage_layers of 2 stages"),
        ({"pp": 2, "stage_layers": (32, 0)}, "at least 1 each"),
        ({"pp": 2, "stage_recompute": (1, 2)}, "stage_recompute needs recompute"),
        ({"pp": 2, "schedule": "interleaved", "interleave": 2, "stage_layers": (16, 16)}, "not interleaved"),
    ],
)
def test_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Strategy(**fields)
    with pytest.raises(ValueError, match="stage_layers of 32 layers, got 31"):
        Strategy(pp=2, stage_layers=(16, 15)).check(ModelSpec.preset("llama-3-8b"), H100)
