"""The transports between GPUs, run against the simulated CUDA runtime and NCCL: whole passes give what one process
gives, whatever the streams' delays are, and a failure reaches every rank."""

import time
from datetime import timedelta

import pytest
import simulated_cuda
import torch
from reference import TOLERANCE, assert_same, chunk, random
from simulated_cuda import run_threads, values

from rtp_ext import NcclError, RingTimeout, RotationError, _native

if simulated_cuda.include_folders() is None:
    pytest.skip("the headers of CUDA and NCCL are not installed", allow_module_level=True)

TIMEOUT = timedelta(seconds=20)
CPU = torch.device("cpu")
DTYPE = torch.float64
# name: function of the simulated module, communicators, options
TRANSPORTS = {
    "nccl": ("nccl", 2, {}),
    "nccl registered": ("nccl", 2, {"registered": True}),
}
OUT, IN = 10, 6


@pytest.fixture
def sim():
    module = simulated_cuda.load()
    module.reset(1)
    yield module
    module.controls.released = True
    assert simulated_cuda.settled(module), "streams did not end"
    assert module.mistakes() == []


def connect(sim, kind, ids, rank, ranks, timeout=TIMEOUT, plant=""):
    function, _, options = TRANSPORTS[kind]
    transport = getattr(sim, function)(ids, rank, ranks, timeout, **options)
    if plant:
        transport = sim.without_wait(transport, plant)
    return _native.Executor(transport, rank, ranks, CPU)


def unique_ids(sim, kind):
    return [sim.unique_id() for _ in range(TRANSPORTS[kind][1])]


def linear(executor, layer, route, rank, ranks, features=(OUT, IN)):
    """A forward and a backward of one rotated linear layer, checked against one process."""
    out, inputs = features
    weight = random(out, inputs, dtype=DTYPE, seed=layer)
    xs = [random(3, inputs, dtype=DTYPE, seed=100 * layer + r) for r in range(ranks)]
    dys = [random(3, out, dtype=DTYPE, seed=1000 * layer + r) for r in range(ranks)]
    home = chunk(weight, ranks, rank).clone()
    options = _native.RotationOptions(
        route=route, in_place=False, compute_dtype=DTYPE, reduce_dtype=DTYPE, slot_cap=0, name=f"linear {layer}"
    )
    shape = _native.LinearShape(out, inputs, by_outputs=True, transposed=False)
    bundle = _native.LinearBundle([shape], [False])
    projections = [_native.Projection(0, 0, 0, out)]
    (y,) = _native.linear_forward(executor, [xs[rank]], [home], bundle, projections, options)
    dx, dw = _native.linear_backward(
        executor, [dys[rank]], [xs[rank]], [home], bundle, projections, [True], [True], options
    )
    gradient = sum(dy.t() @ x for dy, x in zip(dys, xs, strict=True)) / ranks
    where = f"layer {layer}, {route}, rank {rank} of {ranks}"
    assert_same(y, xs[rank] @ weight.t(), TOLERANCE[DTYPE], f"{where}: y")
    assert_same(dx, dys[rank] @ weight, TOLERANCE[DTYPE], f"{where}: dx")
    assert_same(dw, chunk(gradient, ranks, rank), TOLERANCE[DTYPE], f"{where}: dw")


def primitives(sim, executor, route, rank, ranks, asynchronous):
    """rotate and collect, checked against one process. `asynchronous`: computes run later than the host, on a stream
    of their own, as on a GPU."""
    shapes = [[[2 + owner, 4] for owner in range(ranks)]]
    homes = [random(2 + owner, 4, dtype=DTYPE, seed=owner) for owner in range(ranks)]
    where = f"{route}, rank {rank} of {ranks}"
    sim.set_compute(asynchronous)
    try:
        for reverse in (False, True):
            seen = {}
            execution = _native.Execution.rotate(executor, [homes[rank].clone()], shapes, route, reverse)
            while (step := execution.next()) is not None:
                seen[step.owner] = torch.empty(2 + step.owner, 4, dtype=DTYPE)
                sim.launch_copy(seen[step.owner], execution.weight()[0])
            execution.finish()
            sim.synchronize()
            for owner in range(ranks):
                assert_same(seen[owner], homes[owner], 0.0, f"{where}: rotate, owner {owner}")
        home = torch.empty_like(homes[rank])
        execution = _native.Execution.collect(executor, [home], shapes)
        contributions = []
        while (step := execution.next()) is not None:
            contributions.append(homes[step.owner] * (rank + 1))
            arrived, (partial,) = execution.gradient_in(), execution.gradient_out()
            if not arrived:
                sim.launch_copy(partial, contributions[-1])
            else:
                if arrived[0].data_ptr() != partial.data_ptr():
                    sim.launch_copy(partial, arrived[0])
                sim.launch_add(partial, contributions[-1])
        execution.finish()
        sim.synchronize()
        total = ranks * (ranks + 1) / 2
        assert_same(home, homes[rank] * total, TOLERANCE[DTYPE], f"{where}: collect")
    finally:
        sim.synchronize()
        sim.set_compute(False)


def passes(rank, sim, kind, ids, ranks, rounds, plant=""):
    executor = connect(sim, kind, ids, rank, ranks, plant=plant)
    try:
        for turn in range(rounds):
            for route in ("ring", "direct"):
                linear(executor, 1 + turn, route, rank, ranks)
                primitives(sim, executor, route, rank, ranks, asynchronous=True)
        linear(executor, 50, "ring", rank, ranks, features=(40, 9))  # slots grow
        linear(executor, 51, "ring", rank, ranks)
        executor.clear_slots()
        linear(executor, 52, "direct", rank, ranks, features=(2, 3))  # some shards are empty
        executor.close()
    except BaseException as error:
        executor.fail(f"rank {rank}: {error}")  # so that the others do not wait
        raise


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_passes_give_what_one_process_gives(sim, kind, ranks):
    for delay in (0, 300):
        sim.controls.delay_us = delay
        values(run_threads(passes, ranks, sim, kind, unique_ids(sim, kind), ranks, 2))


@pytest.mark.parametrize("plant", ["received", "sent", "channel"])
def test_a_missing_wait_is_caught(sim, plant):
    sim.controls.delay_us = 300
    results = run_threads(passes, 3, sim, "nccl", unique_ids(sim, "nccl"), 3, 2, plant)
    assert any(isinstance(result, AssertionError) for result in results), results
