"""Hops of all layers ahead, into the backward, over the simulated transports between GPUs: the results are those
of one process, a weight that is written in between is sent again, and a ring may end while such hops are in flight."""

import threading
from datetime import timedelta

import pytest
import torch
from grids import few
from native_options import rotation_options
from reference import TOLERANCE, assert_same, chunk, differs, random
from simulated_cuda import one_of_ranks, run_threads, skip_without_headers, values
from test_cuda_transports import TRANSPORTS, connect, unique_ids
from test_transport_ce import MODES, Rank
from test_two_level_cuda import LevelRank
from test_two_level_cuda import unique_ids as ids_of_levels

from rtp_ext import _native

skip_without_headers()

DTYPE, TIMEOUT = torch.float64, timedelta(seconds=20)
LAYERS, FEATURES, STEPS = 4, 7, 4  # the last rank has fewer rows
FLAT = [(kind, ranks) for kind in (*TRANSPORTS, *(f"ce {mode}" for mode in MODES)) for ranks in (2, 3)]
LEVELS = [(inner, shape) for inner in ("ce", "nccl") for shape in ((2, 2), (3, 2), (2, 3))]


def operands(layer, step, rank):
    """The input and the output gradient of a layer."""
    return [random(3, FEATURES, dtype=DTYPE, seed=1000 * layer + 100 * step + 10 * rank + n) for n in range(2)]


class Layers:
    """Linear layers in the order of a model, on one rank, each checked against one process."""

    def __init__(self, executor, rank, ranks, route):
        self.executor, self.rank, self.ranks, self.route = executor, rank, ranks, route
        self.wholes = [random(FEATURES, FEATURES, dtype=DTYPE, seed=layer) for layer in range(LAYERS)]
        self.local = [chunk(whole, ranks, rank).clone() for whole in self.wholes]
        shape = _native.LinearShape(FEATURES, FEATURES, by_outputs=True, transposed=False)
        self.bundle = _native.LinearBundle([shape], [False])
        self.projections = [_native.Projection(0, 0, 0, FEATURES)]
        executor.prefetch(True, 1 << 20)

    def write(self, layer, factor):
        stale = self.wholes[layer].clone()
        self.wholes[layer].mul_(factor), self.local[layer].mul_(factor)
        assert differs(stale, self.wholes[layer], 1e-3), "control: a stale shard would show"

    def enter(self, layer, step, backward):
        self.executor.enter(2 * step + backward + 1, backward, layer + 1, [self.local[layer]])
        return rotation_options(self.route, f"layer {layer}", DTYPE)

    def forward(self, step):
        """In step 2 the weight of layer 2 is written after its first hop may have left."""
        for layer in range(LAYERS):
            if step == 2 and layer == 1:
                self.write(2, 1.25)
            x, _ = operands(layer, step, self.rank)
            options = self.enter(layer, step, False)
            given = self.executor, [x], [self.local[layer]], self.bundle, self.projections, options
            (y,) = _native.linear_forward(*given)
            assert_same(y, x @ self.wholes[layer].t(), TOLERANCE[DTYPE], f"step {step}, layer {layer}: y")

    def backward(self, step):
        for layer in reversed(range(LAYERS)):
            x, dy = operands(layer, step, self.rank)
            options = self.enter(layer, step, True)
            given = self.executor, [dy], [x], [self.local[layer]], self.bundle, self.projections, [True], [True]
            dx, dw = _native.linear_backward(*given, options)
            each = [operands(layer, step, rank) for rank in range(self.ranks)]
            total = sum(dy.t() @ x for x, dy in each) / self.ranks
            assert_same(dx, dy @ self.wholes[layer], TOLERANCE[DTYPE], f"step {step}, layer {layer}: dx")
            expected = chunk(total, self.ranks, self.rank)
            assert_same(dw, expected, TOLERANCE[DTYPE], f"step {step}, layer {layer}: dw")

    def train(self):
        sent, used = self.executor.prefetched()
        for step in range(STEPS):
            self.forward(step)
            self.backward(step)
            for layer in range(LAYERS):
                self.write(layer, 0.9)
        # From the second step on, every layer but the first. Layer 2 is sent again in step 2, within its own pass, and
        # so are those that had been sent behind it.
        hops, every = self.ranks - 1, (STEPS - 1) * (2 * LAYERS - 1)
        now = self.executor.prefetched()
        assert now[1] - used == hops * (every - 1) and (now[0] - sent) - (now[1] - used) > hops


def flat(rank, sim, kind, ranks, ids, barrier):
    end = None
    if kind.startswith("ce"):
        end = Rank(sim, rank, ranks, ids, barrier, kind.removeprefix("ce "), TIMEOUT)
    executor = connect(sim, kind, ids, rank, ranks) if end is None else end.executor
    with one_of_ranks(sim, rank, executor, barrier=barrier):
        for route in ("ring", "direct"):
            layers = Layers(executor, rank, ranks, route)
            layers.train()
        if end is not None:
            end.check_rest()
        sent, used = executor.prefetched()
        layers.forward(STEPS)
        sent, used = executor.prefetched()[0] - sent, executor.prefetched()[1] - used
        assert sent - used > ranks - 1, "hops of a backward are in flight"
    # The ring is dropped: the simulation checks that all streams end.


@pytest.mark.parametrize(
    ("kind", "ranks"), few([("nccl", 3), ("nccl registered", 2), ("ce push", 3), ("ce mixed", 2)], FLAT)
)
def test_flat_rings(sim, kind, ranks):
    sim.controls.delay_us = 200
    ids = sim.unique_id() if kind.startswith("ce") else unique_ids(sim)
    values(run_threads(flat, ranks, sim, kind, ranks, ids, threading.Barrier(ranks)))


def levels(rank, sim, hosts, per_host, ids, barrier, inner):
    end = LevelRank(sim, rank, hosts, per_host, ids, barrier, inner, TIMEOUT)
    with one_of_ranks(sim, rank, end.executor, barrier=barrier):
        Layers(end.executor, rank, hosts * per_host, "two-level").train()
        end.check_rest()
        end.executor.close()


@pytest.mark.parametrize(("inner", "shape"), few([("ce", (2, 2)), ("nccl", (2, 3))], LEVELS))
def test_two_levels(sim, inner, shape):
    sim.controls.delay_us = 200
    hosts, per_host = shape
    arguments = (hosts, per_host, ids_of_levels(sim, hosts), threading.Barrier(hosts * per_host), inner)
    values(run_threads(levels, hosts * per_host, sim, *arguments))
