"""Gradients that land after their pass, between GPUs of the simulation, whose products and additions are enqueued: the
results are those of one process, also where a gradient is finished and read on different streams."""

import threading
from datetime import timedelta

import pytest
import torch
from reference import TOLERANCE, assert_same, chunk, differs, random
from simulated_cuda import one_of_ranks, run_threads, skip_without_headers, values
from simulated_cuda.late import late
from test_transport_ce import Rank

from rtp_ext import _native

skip_without_headers()

DTYPE, TIMEOUT = torch.float64, timedelta(seconds=20)
LAYERS, FEATURES = 4, 7  # the last rank has fewer rows
WAYS = {
    "chain": {},
    "halves": {"halves": True},
    "halves of groups": {"halves": True, "group": 2},
    "groups": {"group": 2},
    "direct": {"gradient_route": "direct"},
    "direct, apart": {"gradient_route": "direct", "gradients_apart": True},
    "direct, apart, groups": {"gradient_route": "direct", "gradients_apart": True, "group": 2},
}
COLLECTIVES = {"collectives": {"route": "gather", "collective": True}, "chain": {}}


def _work(rank, sim, ranks, ids, barrier, ways):
    """Over `ce`; over `nccl` where there are two ids."""
    if len(ids) == 1:
        end = Rank(sim, rank, ranks, ids[0], barrier, "push", TIMEOUT)
        executor = end.executor
    else:
        transport = sim.counted(sim.nccl(ids, rank, ranks, TIMEOUT, None), sim.Tally())
        executor = _native.Executor(transport, rank, ranks, torch.device("cpu"))
    executor.allow_late(1)
    shape = _native.LinearBundle([_native.LinearShape(FEATURES, FEATURES, by_outputs=True, transposed=False)], [False])
    projections = [_native.Projection(0, 0, 0, FEATURES)]
    with one_of_ranks(sim, rank, executor, barrier=barrier):
        sim.set_compute(True)
        for at, (name, way) in enumerate(ways.items()):
            gradients, expected, seen = [], [], []
            for layer in range(LAYERS):
                weight = random(FEATURES, FEATURES, dtype=DTYPE, seed=layer)
                pairs = [
                    [random(3, FEATURES, dtype=DTYPE, seed=100 * layer + 10 * r + n + at) for n in (1, 2)]
                    for r in range(ranks)
                ]
                expected.append(chunk(sum(dy.t() @ x for x, dy in pairs) / ranks, ranks, rank))
                usual = dict(route="ring", in_place=False, slot_cap=0, halves=False, late=True, name=f"{name} {layer}")
                options = _native.RotationOptions(compute_dtype=DTYPE, reduce_dtype=DTYPE, **(usual | way))
                (x, dy), local = pairs[rank], chunk(weight, ranks, rank).clone()
                with late(sim):
                    _, gradient = _native.linear_backward(
                        executor, [dy], [x], [local], shape, projections, [True], [True], options
                    )
                    gradients.append(gradient)
            with late(sim):
                unread = gradients[-1].clone()  # control: nothing has added what arrives last
                for gradient in reversed(gradients):  # the last one finishes all
                    executor.land(gradient)
                    seen.append(gradient.clone())
            sim.synchronize()
            for layer, gradient in enumerate(reversed(seen)):
                assert_same(gradient, expected[layer], TOLERANCE[DTYPE], f"{name}, layer {layer}")
            assert differs(unread, expected[-1], TOLERANCE[DTYPE]) or not len(unread), f"control: {name}"
        assert executor.landed_late() == LAYERS * len(ways)
        if len(ids) == 1:
            end.check_rest()
        else:
            executor.close()


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_results_of_one_process(sim, ranks):
    sim.controls.delay_us = 200
    for ways, ids in ((WAYS, 1), (COLLECTIVES, 2)):
        arguments = (sim, ranks, [sim.unique_id() for _ in range(ids)], threading.Barrier(ranks), ways)
        values(run_threads(_work, ranks, *arguments))
