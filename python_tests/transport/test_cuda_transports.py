"""The transports between GPUs, run against the simulated CUDA runtime and NCCL: whole passes give what one process
gives, whatever the streams' delays are, and a failure reaches every rank."""

import gc
import os
import re
import threading
import time
from datetime import timedelta

import pytest
import simulated_cuda
import torch
from grids import few
from harness import run_ranks
from native_options import rotation_options
from reference import TOLERANCE, assert_same, chunk, random
from simulated_cuda import one_of_ranks, run_threads, skip_without_headers, values

from rtp_ext import NcclError, RingTimeout, RotationError, _native

skip_without_headers()

TIMEOUT = timedelta(seconds=20)
CPU = torch.device("cpu")
DTYPE = torch.float64
TRANSPORTS = {"nccl": {}, "nccl registered": {"registered": True}}
OUT, IN = 10, 6


def connect(sim, kind, ids, rank, ranks, timeout=TIMEOUT, plant="", news=None):
    transport = sim.nccl(ids, rank, ranks, timeout, news, **TRANSPORTS[kind])
    if plant:
        transport = sim.without_wait(transport, plant)
    return _native.Executor(transport, rank, ranks, CPU)


def unique_ids(sim):
    return [sim.unique_id() for _ in range(2)]


def linear(executor, layer, route, rank, ranks, features=(OUT, IN), **more):
    """A forward and a backward of one rotated linear layer, checked against one process."""
    out, inputs = features
    weight = random(out, inputs, dtype=DTYPE, seed=layer)
    xs = [random(3, inputs, dtype=DTYPE, seed=100 * layer + r) for r in range(ranks)]
    dys = [random(3, out, dtype=DTYPE, seed=1000 * layer + r) for r in range(ranks)]
    local = chunk(weight, ranks, rank).clone()
    options = rotation_options(route, f"linear {layer}", DTYPE, **more)
    shape = _native.LinearShape(out, inputs, by_outputs=True, transposed=False)
    bundle = _native.LinearBundle([shape], [False])
    projections = [_native.Projection(0, 0, 0, out)]
    (y,) = _native.linear_forward(executor, [xs[rank]], [local], bundle, projections, options)
    dx, dw = _native.linear_backward(
        executor, [dys[rank]], [xs[rank]], [local], bundle, projections, [True], [True], options
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
    local_shards = [random(2 + owner, 4, dtype=DTYPE, seed=owner) for owner in range(ranks)]
    where = f"{route}, rank {rank} of {ranks}"
    sim.set_compute(asynchronous)
    try:
        for reverse in (False, True):
            seen, local = {}, local_shards[rank].clone()
            execution = _native.Execution.rotate(executor, [local], shapes, route, reverse)
            while (step := execution.next()) is not None:
                seen[step.owner] = torch.empty(2 + step.owner, 4, dtype=DTYPE)
                sim.launch_copy(seen[step.owner], execution.weight()[0])
            execution.finish()
            sim.launch_copy(local, torch.zeros_like(local))  # as an optimizer would: every hop has left by then
            sim.synchronize()
            for owner in range(ranks):
                assert_same(seen[owner], local_shards[owner], 0.0, f"{where}: rotate, owner {owner}")
        local = torch.empty_like(local_shards[rank])
        execution = _native.Execution.collect(executor, [local], shapes)
        contributions = []
        while (step := execution.next()) is not None:
            contributions.append(local_shards[step.owner] * (rank + 1))
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
        assert_same(local, local_shards[rank] * total, TOLERANCE[DTYPE], f"{where}: collect")
    finally:
        sim.synchronize()
        sim.set_compute(False)


def passes(rank, sim, kind, ids, ranks, rounds, plant="", timeout=TIMEOUT):
    executor = connect(sim, kind, ids, rank, ranks, timeout, plant)
    with one_of_ranks(sim, rank, executor):
        for turn in range(rounds):
            for route in ("ring", "direct"):
                linear(executor, 1 + turn, route, rank, ranks)
                primitives(sim, executor, route, rank, ranks, asynchronous=True)
        linear(executor, 50, "ring", rank, ranks, features=(40, 9))  # slots grow
        linear(executor, 51, "ring", rank, ranks)
        executor.clear_slots()
        linear(executor, 52, "direct", rank, ranks, features=(2, 3))  # some shards are empty
        for layer, features in ((53, (OUT, IN)), (54, (2, 3)), (55, (ranks + 1, 3))):
            linear(executor, layer, "gather", rank, ranks, features, collective=True)
        linear(executor, 56, "ring", rank, ranks)
        executor.close()


@pytest.mark.parametrize("ranks", few([2, 3], [2, 3, 4]))
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_passes_give_what_one_process_gives(sim, kind, ranks):
    for delay in (0, 300):
        sim.controls.delay_us = delay
        values(run_threads(passes, ranks, sim, kind, unique_ids(sim), ranks, 2))


# Waits that a transport needs; one event of `nccl` stands for both ends of a hop, so that "sent" would not be missed.
PLANTS = [(kind, plant) for kind in TRANSPORTS for plant in ("received", "channel")]


def caught_without(sim, kind, plant, delay_us):
    """Returns whether any rank finds a wrong result, and the messages of all. The errors, which hold the executors, are
    dropped here."""
    sim.controls.delay_us = delay_us
    results = run_threads(passes, 3, sim, kind, unique_ids(sim), 3, 2, plant, timedelta(seconds=1))
    return any(isinstance(result, AssertionError) for result in results), [repr(result) for result in results]


def _passes_without(rank, _, kind, plant, delay_us):
    with simulated_cuda.simulation() as sim:
        return caught_without(sim, kind, plant, delay_us)


@pytest.mark.parametrize(("kind", "plant"), few([PLANTS[0], PLANTS[3]], PLANTS))
def test_a_missing_wait_is_caught(kind, plant):
    simulated_cuda.build()  # here, outside of the measured time
    # a busy machine may hold up the host for longer than the streams dawdle, and nothing is early: they dawdle more
    for delay_us in (1000, 3000, 10000):
        # in a process of its own: who does not wait may write to memory that is no longer there
        ((caught, results),) = run_ranks(_passes_without, 1, kind, plant, delay_us)
        if caught:
            return
    raise AssertionError(f"no rank noticed: {results}")


def until_failure(rank, sim, kind, ids, ranks, timeout, fault, barrier, news=None):
    """Runs passes until one raises; the last rank does what `fault` says when all have done the first. Returns the
    error, how long after the fault it came, and whether the executor is still alive.

    The computes run later than the host, as on a GPU: the host does not wait for what may never come.
    """
    executor = connect(sim, kind, ids, rank, ranks, timeout=timeout, news=news and news[rank])
    linear(executor, 1, "ring", rank, ranks)
    barrier.wait(20)
    start = time.monotonic()
    if rank == ranks - 1:
        if fault == "leaves":
            return executor  # alive, and silent
        if fault == "fails":
            executor.fail("an error of its own")
            return None
        sim.inject_error(rank, 0, 6)
    sim.set_compute(True)
    local, shapes = torch.ones(4), [[[4]] * ranks]
    with pytest.raises(RotationError) as raised:
        while True:
            execution = _native.Execution.rotate(executor, [local], shapes, "direct", False)
            while execution.next() is not None:
                time.sleep(0.002)
    waited = time.monotonic() - start
    sim.set_compute(False)
    with pytest.raises(RotationError, match="cannot be used any more"):
        linear(executor, 2, "ring", rank, ranks)
    return raised.value, waited, executor.alive


@pytest.mark.parametrize("fault", ["leaves", "fails", "asynchronous error"])
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_failure_reaches_every_rank(sim, kind, fault):
    timeout = 2.0
    arguments = (sim, kind, unique_ids(sim), 3, timedelta(seconds=timeout), fault, threading.Barrier(3))
    results = values(run_threads(until_failure, 3, *arguments))
    survivors = results if fault == "asynchronous error" else results[:-1]
    for _, waited, alive in survivors:
        assert not alive and waited < timeout + 5
    if fault == "asynchronous error":
        assert isinstance(results[-1][0], NcclError) and "code 6" in str(results[-1][0])
        survivors = results[:-1]
    first = next(error for error, *_ in survivors if "did not answer" in str(error))
    assert isinstance(first, RingTimeout)
    assert "rotate" in str(first) and "hop" in str(first), first
    assert timeout <= float(re.search(r"waited ([\d.]+) s", str(first))[1]) < timeout + 5, first


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_rank_that_takes_no_part_in_a_collective(sim, kind):
    def work(rank, ids):
        executor = connect(sim, kind, ids, rank, 3, timeout=timedelta(seconds=1))
        linear(executor, 1, "gather", rank, 3, collective=True)
        barrier.wait(20)
        if rank == 2:
            return executor  # alive, and silent
        with pytest.raises(RingTimeout, match="linear 2 forward, weight gather: a rank of the ring did not answer"):
            linear(executor, 2, "gather", rank, 3, collective=True)
        assert not executor.alive

    barrier = threading.Barrier(3)
    values(run_threads(work, 3, unique_ids(sim)))


def connected_news(ranks):
    news = [_native.PeerStatus(rank, ranks) for rank in range(ranks)]
    addresses = [one.address() for one in news]
    assert [one.connect(addresses) for one in news] == [ranks - 1] * ranks
    return news


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_failure_is_told_to_the_ranks_of_the_host(sim, kind):
    """No rank waits for the timeout, which is longer than the test."""
    arguments = (sim, kind, unique_ids(sim), 3, timedelta(seconds=100), "fails", threading.Barrier(3))
    results = values(run_threads(until_failure, 3, *arguments, connected_news(3)))
    for error, waited, alive in results[:-1]:
        assert isinstance(error, RingTimeout) and not alive and waited < 10
        assert "rank 2 of the ring has failed: an error of its own" in str(error)


def test_a_process_that_ends_is_noticed(sim):
    """All ranks wait for a rank whose process has ended."""
    address, told_address = os.pipe()
    leave, told_to_leave = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told_to_leave)
        news = _native.PeerStatus(1, 2)
        os.write(told_address, news.address().encode())
        os.read(leave, 1)
        os._exit(0)
    news = _native.PeerStatus(0, 2)
    assert news.connect([news.address(), os.read(address, 200).decode()]) == 1
    it_ends = threading.Barrier(2, action=lambda: os.close(told_to_leave))
    arguments = (sim, "nccl", unique_ids(sim), 2, timedelta(seconds=100), "leaves", it_ends)
    (error, waited, _), _ = values(run_threads(until_failure, 2, *arguments, [news, None]))
    os.waitpid(child, 0)
    assert isinstance(error, RingTimeout) and waited < 10
    assert "hop" in str(error) and "rank 1 of the ring did not answer: its process has ended" in str(error)
    for end in (address, told_address, leave):
        os.close(end)


def test_hops_of_a_capture_are_not_supervised(sim):
    def work(rank, ids):
        executor = connect(sim, "nccl", ids, rank, 2, timeout=timedelta(seconds=1))
        sim.controls.capturing = True
        if rank == 1:
            time.sleep(1.5)  # longer than the timeout
        linear(executor, 1, "ring", rank, 2)
        barrier.wait(20)
        sim.controls.capturing = False
        executor.close()

    barrier = threading.Barrier(2)
    values(run_threads(work, 2, unique_ids(sim)))


def test_memory_that_runs_out_on_one_rank_is_told_to_the_others(sim):
    """No rank waits for the timeout, which is longer than the test."""
    news, barrier = connected_news(2), threading.Barrier(2)

    def work(rank, ids):
        executor = connect(sim, "nccl", ids, rank, 2, timeout=timedelta(seconds=100), news=news[rank])
        linear(executor, 1, "ring", rank, 2)
        barrier.wait(20)
        sim.set_compute(True)  # the host does not wait for hops
        shapes = [[[4], [2**60 if rank == 1 else 4]]]
        start = time.monotonic()
        with pytest.raises(RuntimeError) as raised:
            while time.monotonic() < start + 10:
                execution = _native.Execution.rotate(executor, [torch.ones(4)], shapes, "ring", False)
                while execution.next() is not None:
                    time.sleep(0.002)
        sim.set_compute(False)
        assert not executor.alive
        return (raised.value,)

    (told,), (out_of_memory,) = values(run_threads(work, 2, unique_ids(sim)))
    assert not isinstance(out_of_memory, RotationError), "torch's own error"
    assert isinstance(told, RingTimeout) and "rank 1 of the ring has failed: rotate" in str(told)


def test_a_slot_that_a_graph_knows_stays(sim):
    """A larger slot replaces another one only if no graph uses it."""

    def work(rank, ids):
        executor = connect(sim, "nccl", ids, rank, 2)

        def pass_of(elements):
            execution = _native.Execution.rotate(executor, [torch.ones(elements)], [[[elements]] * 2], "ring", False)
            while execution.next() is not None:
                pass

        def slots():
            return executor.slots("weight").slots

        pass_of(10)
        few = slots()
        pass_of(20)
        assert slots() == few, "control: made way"
        barrier.wait(20)
        sim.controls.capturing = True
        barrier.wait(20)
        pass_of(20)
        barrier.wait(20)
        sim.controls.capturing = False
        barrier.wait(20)
        pass_of(60)
        assert slots() == few + 1
        pass_of(100)
        assert slots() == few + 1
        executor.close()

    barrier = threading.Barrier(2)
    values(run_threads(work, 2, unique_ids(sim)))


def test_slots_that_nccl_knows_are_not_made_in_a_capture(sim):
    def work(rank, ids):
        executor = connect(sim, "nccl registered", ids, rank, 2)
        barrier.wait(20)
        sim.controls.capturing = True
        with pytest.raises(RotationError, match="slots cannot be made or ended while a graph is captured"):
            _native.Execution.rotate(executor, [torch.ones(4)], [[[4], [4]]], "ring", False).next()
        barrier.wait(20)
        sim.controls.capturing = False

    barrier = threading.Barrier(2)
    values(run_threads(work, 2, unique_ids(sim)))


def test_communicators_outlive_the_graphs_of_the_caller(sim):
    """NCCL ends a communicator after the graphs that hold its calls: closing is refused, dropping does not wait."""

    def work(rank, ids, closes):
        executor = connect(sim, "nccl", ids, rank, 2)
        shard = torch.ones(10)

        def pass_():
            execution = _native.Execution.rotate(executor, [shard], [[[10]] * 2], "ring", False)
            while execution.next() is not None:
                pass

        pass_()
        sim.set_compute(True)
        barrier.wait(20)
        sim.begin_capture()
        pass_()
        graph = sim.end_capture()
        barrier.wait(20)
        started = time.monotonic()
        if closes:
            with pytest.raises(RotationError, match="expected no CUDA graph with hops of this ring, got 1"):
                executor.close()
            assert executor.alive
            pass_()
            sim.synchronize()
            del graph
            executor.close()
        else:
            del executor
            gc.collect()
            assert time.monotonic() - started < 10
            del graph
        sim.set_compute(False)

    for closes in (True, False):
        barrier = threading.Barrier(2)
        values(run_threads(lambda rank, ids, closes=closes: work(rank, ids, closes), 2, unique_ids(sim)))
        assert sim.mistakes() == []
