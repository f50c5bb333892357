"""Guarantees of CUDA and NCCL, as far as the simulation enforces them: memory that copies still use stays mapped, no
context is made on another rank's GPU, no code is loaded while streams wait, hops need few calls."""

import gc
import threading
import time
from datetime import timedelta

import pytest
import simulated_cuda
import torch
from gpu import driver_calls
from simulated_cuda import run_threads, skip_without_headers, values
from test_transport_ce import MODES, Rank, connected_news

from rtp_ext import RingTimeout, RotationError, _native

skip_without_headers()

SHAPES = [[[6]] * 3]
MOST_CALLS = {"hop": 12, "compute": 4, "graph": 12}


def rotate(executor, route="direct"):
    execution = _native.Execution.rotate(executor, [torch.ones(6)], SHAPES, route, False)
    while execution.next() is not None:
        pass


def layers_behind_a_silent_rank(rank, sim, id_, barrier, mode, layers, news):
    """Enqueues `layers` passes that wait for a rank without posts; the host does not wait, as with a GPU."""
    end = Rank(sim, rank, 3, id_, barrier, mode, timedelta(seconds=1), news=news[rank])
    rotate(end.executor)
    barrier.wait(20)
    if rank < 2:
        sim.set_compute(True)
        start = time.monotonic()
        with pytest.raises(RotationError):
            for _ in range(layers):
                rotate(end.executor)
            while time.monotonic() < start + 20:
                sim.ce_check(end.transport)
                time.sleep(0.01)
        end.executor.fail("the watchdog gave up")
        waited = time.monotonic() - start
        del end.executor, end.transport
        sim.synchronize()
        sim.set_compute(False)
        barrier.wait(20)
        return waited
    barrier.wait(20)
    return 0.0


@pytest.mark.parametrize(("mode", "first_device"), [("push", 0), ("pull", 0), ("push", 1)])
def test_what_waits_for_a_lost_rank_ends_before_its_memory_is_unmapped(sim, mode, first_device):
    """The simulation notes a mistake, and the fixture fails, where a communicator that has windows ends before the
    copies that use them. A wait of every stream ends each time the flags are raised; there are hundreds. The device
    that threads happen to have need not be the ring's."""
    sim.controls.first_device = first_device
    arguments = (sim, sim.unique_id(), threading.Barrier(3), mode, 80, connected_news(3))
    assert max(values(run_threads(layers_behind_a_silent_rank, 3, *arguments, timeout=60.0))) < 1 + 2 + 3


def test_memory_that_may_still_be_used_is_left_to_the_process(sim):
    """A compute that never ends delays hops with any flags set."""

    def work(rank, id_, barrier):
        end = Rank(sim, rank, 2, id_, barrier, "push", timedelta(seconds=1))
        barrier.wait(20)
        sim.set_compute(True)
        sim.launch_endless()
        execution = _native.Execution.rotate(end.executor, [torch.ones(6)], [[[6]] * 2], "ring", False)
        with pytest.raises(RingTimeout, match="did not answer"):
            while True:
                if execution.next() is None:
                    sim.ce_check(end.transport)
                    time.sleep(0.01)
        end.executor.fail("given up")
        del execution, end.executor, end.transport
        gc.collect()
        sim.set_compute(False)

    values(run_threads(work, 2, sim.unique_id(), threading.Barrier(2)))
    assert sim.mistakes() == []
    sim.controls.released = True  # the delayed copies run now, on memory that still exists
    assert simulated_cuda.settled(sim)


@pytest.mark.parametrize("mode", MODES)
def test_no_context_is_made_on_the_device_that_a_thread_happens_to_have(sim, mode):
    """Every rank's threads start on one device; its own is another. The watchdog's and NCCL's are such threads."""
    sim.controls.first_device = 1

    def work(rank, id_, barrier):
        end = Rank(sim, rank, 2, id_, barrier, mode)
        end.both_channels(1, [5, 4], "direct")
        end.executor.close()

    values(run_threads(work, 2, sim.unique_id(), threading.Barrier(2)))
    assert sim.contexts() == {0}


def test_a_query_leaves_no_error_for_torch_to_find(sim):
    """After a launch torch reads the last error, which cudaErrorNotReady sets, too. The ring has queried whether its
    first hops had ended, and queries whether graphs have."""

    def work(_):
        stream, event, flag = sim.Stream(), sim.Event(), torch.zeros(1, dtype=torch.int32)
        a, b = (torch.zeros(4, dtype=torch.float64) for _ in range(2))
        stream.wait_value(flag, 1)
        event.record(stream)
        assert not event.reached() and not stream.idle()
        sim.launch_copy(a, b)
        before = sim.mistakes()
        assert not stream.query(), "control: the query itself"
        sim.launch_copy(a, b)
        flag.fill_(1)
        stream.synchronize()
        return before

    assert values(run_threads(work, 1)) == [[]]
    assert len(sim.mistakes()) == 1 and "an error that an earlier call has left: 600" in sim.mistakes()[0]
    sim.reset(1)

    def ring(rank, id_, barrier):
        sim.controls.delay_us = 5000
        end = Rank(sim, rank, 2, id_, barrier, "push")  # waits for its first hops
        sim.launch_copy(torch.zeros(1), torch.zeros(1))
        end.executor.close()

    values(run_threads(ring, 2, sim.unique_id(), threading.Barrier(2)))


def test_what_has_arrived_counts_before_ones_own_shard_is_fetched(sim):
    """Rank 1 is late. Rank 0 receives from rank 2, which is there, and sends to rank 1: its compute does not wait."""

    def work(rank, id_, barrier, arrived):
        end = Rank(sim, rank, 3, id_, barrier, "pull")
        rotate(end.executor, "ring")
        barrier.wait(20)
        if rank == 1:
            assert arrived.wait(10), "the compute of rank 0 waits for rank 1 to fetch"
            rotate(end.executor, "ring")
            return
        sim.set_compute(True)
        local, seen = torch.full((6,), float(rank)), torch.full((6,), -1.0)
        execution = _native.Execution.rotate(end.executor, [local], SHAPES, "ring", False)
        assert execution.next().owner == rank
        step = execution.next()
        sim.launch_copy(seen, execution.weight()[0])
        if rank == 0:
            assert step.owner == 2
            deadline = time.monotonic() + 10
            while not seen.eq(2).all() and time.monotonic() < deadline:
                time.sleep(0.001)
            if seen.eq(2).all():
                arrived.set()
        execution.finish()
        sim.synchronize()
        sim.set_compute(False)

    values(run_threads(work, 3, sim.unique_id(), threading.Barrier(3), threading.Event()))


def test_the_code_of_raised_flags_is_loaded_before_anybody_waits(sim):
    """The control of the simulation: a first copy while a stream of the rank waits is a mistake."""

    def work(rank, id_, barrier):
        end = Rank(sim, rank, 2, id_, barrier, "push")
        stream, a, b = sim.Stream(), torch.ones(4), torch.zeros(4)
        stream.copy(a, b)  # not the first: the transport has made one
        stream.synchronize()
        end.executor.close()

    values(run_threads(work, 2, sim.unique_id(), threading.Barrier(2)))
    assert sim.mistakes() == []

    def unprepared(_):
        waiting, other, flag = sim.Stream(), sim.Stream(), torch.zeros(1, dtype=torch.int32)
        a, b = torch.ones(4), torch.zeros(4)
        waiting.wait_value(flag, 1)
        deadline = time.monotonic() + 10
        while not waiting.waits and time.monotonic() < deadline:  # its thread gets there when it is let
            time.sleep(0.001)
        other.copy(a, b)
        flag.fill_(1)
        waiting.synchronize()
        other.synchronize()

    values(run_threads(unprepared, 1))
    assert len(sim.mistakes()) == 1 and "while one of its streams waits" in sim.mistakes()[0]
    sim.reset(1)


def test_calls_of_the_driver_keep_to_their_budget():
    rows = driver_calls.rows(4)
    assert {(row["transport"], row["mode"]) for row in rows} == set(driver_calls.CASES)
    for row in rows:
        where = f"{row['transport']}, {row['mode']}: {row['calls']}"
        if row["mode"] == "replayed":
            assert 0 < row["calls_per_pass"] <= MOST_CALLS["graph"] and row["calls"]["cudaGraphLaunch"] == 1, where
            assert row["events_created_per_pass"] == row["events_destroyed_per_pass"] == 0, where
            continue
        assert 0 < row["calls_per_hop"] <= MOST_CALLS["hop"], where
        assert 0 < row["calls_per_compute"] <= MOST_CALLS["compute"], where
        assert row["events_created_per_pass"] == row["events_destroyed_per_pass"] == 0, where
        assert row["captures_asked_per_pass"] == 1, where
