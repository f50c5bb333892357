"""First hops of two layers ahead, and of a backward, over the simulated transports between GPUs: the results are those
of one process, every hop that was sent ahead is used, and a weight that is written in between is sent again."""

import threading
from datetime import timedelta

import pytest
import torch
from reference import TOLERANCE, assert_same, chunk, differs, random
from simulated_cuda import one_of_ranks, run_threads, skip_without_headers, values
from test_cuda_transports import TRANSPORTS, connect, unique_ids
from test_transport_ce import MODES, Rank
from test_two_level_cuda import LevelRank
from test_two_level_cuda import unique_ids as ids_of_levels

from rtp_ext import _native

skip_without_headers()

DTYPE, TIMEOUT = torch.float64, timedelta(seconds=20)
LAYERS, FEATURES, STEPS = 4, 7, 4  # some ranks of four have a smaller shard
FLAT = [*TRANSPORTS, *(f"ce {mode}" for mode in MODES)]


def inputs(layer, step, rank):
    """The input and the output gradient of a layer."""
    return [random(3, FEATURES, dtype=DTYPE, seed=1000 * layer + 100 * step + 10 * rank + n) for n in range(2)]


def train(executor, rank, ranks, route, prefetch=2):
    """A few steps of layers in the order of a model, each checked against one process. In step 2 the weight of layer 2
    is written after its first hop may have left. Returns the hops that were sent ahead, and those that were used."""
    executor.prefetch(prefetch)
    wholes = [random(FEATURES, FEATURES, dtype=DTYPE, seed=layer) for layer in range(LAYERS)]
    local = [chunk(whole, ranks, rank).clone() for whole in wholes]
    shape = _native.LinearShape(FEATURES, FEATURES, by_outputs=True, transposed=False)
    bundle, projections = _native.LinearBundle([shape], [False]), [_native.Projection(0, 0, 0, FEATURES)]

    def write(layer, factor):
        stale = wholes[layer].clone()
        wholes[layer].mul_(factor), local[layer].mul_(factor)
        assert differs(stale, wholes[layer], 1e-3), "control: a stale shard would show"

    def enter(layer, step, backward):
        options = _native.RotationOptions(
            route=route,
            in_place=False,
            compute_dtype=DTYPE,
            reduce_dtype=DTYPE,
            slot_cap=0,
            halves=False,
            name=f"layer {layer}",
        )
        executor.enter(2 * step + backward + 1, backward, layer + 1, [local[layer]])
        return bundle, projections, options

    for step in range(STEPS):
        for layer in range(LAYERS):
            if step == 2 and layer == 1:
                write(2, 1.25)
            x, _ = inputs(layer, step, rank)
            (y,) = _native.linear_forward(executor, [x], [local[layer]], *enter(layer, step, False))
            assert_same(y, x @ wholes[layer].t(), TOLERANCE[DTYPE], f"step {step}, layer {layer}: y")
        for layer in reversed(range(LAYERS)):
            x, dy = inputs(layer, step, rank)
            bundle_, projections_, options = enter(layer, step, True)
            dx, dw = _native.linear_backward(
                executor, [dy], [x], [local[layer]], bundle_, projections_, [True], [True], options
            )
            total = sum(dy.t() @ x for x, dy in (inputs(layer, step, each) for each in range(ranks))) / ranks
            assert_same(dx, dy @ wholes[layer], TOLERANCE[DTYPE], f"step {step}, layer {layer}: dx")
            assert_same(dw, chunk(total, ranks, rank), TOLERANCE[DTYPE], f"step {step}, layer {layer}: dw")
        for layer in range(LAYERS):
            write(layer, 0.9)
    return executor.prefetched()


def expected(prefetch):
    """From the second step on all layers but the first of a phase, or of a step; and the one that was written."""
    every = (2 * LAYERS - 1 if prefetch == 2 else 2 * (LAYERS - 1)) * (STEPS - 1)
    return every


def flat(rank, sim, kind, ranks, ids, barrier):
    if kind.startswith("ce"):
        end = Rank(sim, rank, ranks, ids, barrier, kind.removeprefix("ce "), TIMEOUT)
        executor = end.executor
    else:
        end, executor = None, connect(sim, kind, ids, rank, ranks)
    with one_of_ranks(sim, rank, executor, barrier=barrier):
        found = [train(executor, rank, ranks, route) for route in ("ring", "direct")]
        if end is not None:
            end.check_rest()
        executor.close()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", FLAT)
def test_flat_rings(sim, kind, ranks):
    sim.controls.delay_us = 200
    ids = sim.unique_id() if kind.startswith("ce") else unique_ids(sim, kind)
    print(kind, ranks, values(run_threads(flat, ranks, sim, kind, ranks, ids, threading.Barrier(ranks)))[0])


def levels(rank, sim, hosts, per_host, ids, barrier, inner):
    end = LevelRank(sim, rank, hosts, per_host, ids, barrier, inner, TIMEOUT)
    with one_of_ranks(sim, rank, end.executor, barrier=barrier):
        found = train(end.executor, rank, hosts * per_host, "two-level")
        end.check_rest()
        end.executor.close()
    return found


@pytest.mark.parametrize("inner", ["ce", "nccl"])
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 3)])
def test_two_levels(sim, inner, shape):
    sim.controls.delay_us = 200
    arguments = (*shape, ids_of_levels(sim, shape[0]), threading.Barrier(shape[0] * shape[1]), inner)
    print(inner, shape, values(run_threads(levels, shape[0] * shape[1], sim, *arguments))[0])
