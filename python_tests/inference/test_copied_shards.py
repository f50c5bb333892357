"""Shards that copy engines copy from their owners, against the simulated CUDA runtime and NCCL: what computes read is
right in any order of the streams, the owner takes no part, and two planted mistakes are noticed."""

import threading
from datetime import timedelta

import pytest
import simulated_cuda
import torch
from reference import random
from simulated_cuda import one_of_ranks, run_threads, skip_without_headers
from simulated_cuda.mutants import COPIED_MUTANTS

from rtp_ext import _native

skip_without_headers()

TIMEOUT = timedelta(seconds=20)
DTYPE = torch.float64
OPTIONS = {
    "route": "direct",
    "in_place": False,
    "compute_dtype": DTYPE,
    "reduce_dtype": DTYPE,
    "slot_cap": 0,
    "halves": False,
}
SHAPES = [[[6], [5]], [[4], [4]], [[7], [3]]]  # of three layers: elements of the shards of two ranks, repeated


@pytest.fixture
def sim():
    with simulated_cuda.simulation() as module:
        yield module


def shapes_of(layer, ranks):
    return [SHAPES[layer][owner % 2] for owner in range(ranks)]


def shard(layer, owner, ranks):
    return random(*shapes_of(layer, ranks)[owner], dtype=DTYPE, seed=10 * layer + owner)


def forwards(rank, sim, ranks, id_, barrier, mutant=-1, sleeps=()):
    """Runs forwards and returns what computes have read, by forward, layer and owner."""
    bytes_, unit = 3 * 64, 64
    source = sim.copied_shards(id_, rank, ranks, bytes_, TIMEOUT, mutant)
    executor = _native.Executor(sim.emulated("sm-local"), rank, ranks, torch.device("cpu"))
    with one_of_ranks(sim, rank, executor, barrier=barrier):
        source.connect([""] * ranks, [bytes_] * ranks, [[layer * unit for layer in range(3)]] * ranks)
        local = []
        for layer in range(3):
            values = shard(layer, rank, ranks)
            local.append(source.memory(layer * unit, values.nbytes).view(DTYPE))
            local[-1].copy_(values)
        executor.take_from(source)
        barrier.wait(20)
        read = {}
        if rank not in sleeps:
            sim.set_compute(True)
            for forward in range(3):
                for layer in range(3):
                    executor.enter(forward + 1, False, 0, [])
                    options = _native.RotationOptions(name=f"layer {layer}", **OPTIONS)
                    execution = _native.Execution.forward(executor, [local[layer]], [shapes_of(layer, ranks)], options)
                    while (step := execution.next()) is not None:
                        weight = execution.weight()[0]
                        read[forward, layer, step.owner] = out = torch.empty_like(weight)
                        sim.launch_copy(out, weight)
                executor.end_forward()
            sim.synchronize()
        counts = source.pulled_bytes, executor.prefetched(), executor.slots("weight").peak_slots
        barrier.wait(20)  # no rank copies any more
        source.close()
        executor.take_from(None)
    return read, counts


def wrong(results, ranks, sleeps=()):
    """The reads of wrong values."""
    for rank, result in enumerate(results):
        if isinstance(result, BaseException):
            raise result
        assert len(result[0]) == (0 if rank in sleeps else 9 * ranks)
    return [
        (rank, key)
        for rank, (read, _) in enumerate(results)
        for key, value in read.items()
        if not torch.equal(value, shard(key[1], key[2], ranks))
    ]


@pytest.mark.parametrize("ranks", [2, 3])
def test_computes_read_the_shards_of_their_owners(sim, ranks):
    sim.controls.delay_us = 200
    sleeps = (1,)  # an owner that computes nothing
    results = run_threads(forwards, ranks, sim, ranks, sim.unique_id(), threading.Barrier(ranks), -1, sleeps)
    assert wrong(results, ranks, sleeps) == []
    pulled, prefetched, slots = results[0][1]
    assert pulled == 3 * sum(shard(layer, owner, ranks).nbytes for layer in range(3) for owner in range(1, ranks))
    assert (prefetched, slots) == ((4, 4), 2), "in two forwards, the first shards of two layers came ahead"


@pytest.mark.parametrize("mutant", COPIED_MUTANTS)
def test_a_mistake_is_noticed(sim, mutant):
    number = list(COPIED_MUTANTS).index(mutant)
    for seed in range(10):
        sim.reset(seed)
        sim.controls.delay_us = 500
        if wrong(run_threads(forwards, 3, sim, 3, sim.unique_id(), threading.Barrier(3), number), 3):
            return
    raise AssertionError(f"not noticed: {mutant}")
