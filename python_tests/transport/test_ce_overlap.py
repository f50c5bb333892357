"""Hops of the transport `ce` are not in lock-step: a rank serves its peers while its own copies wait, and a slot is
offered as soon as it is free. The controls are protocols in lock-step, which give the same numbers."""

import threading
import time

import pytest
import torch
from simulated_cuda import run_threads, skip_without_headers, values
from simulated_cuda.mutants import LOCK_STEP, modes_of
from test_transport_ce import Rank

from rtp_ext import _native

skip_without_headers()

RANKS, SLOW = 5, 1
# The ranks that receive every shard although the slow rank's first slot stays in use, so that its third receive waits.
# In push, the rank that sends this hop to the slow one waits with it, and so do the ranks that it and the slow rank
# send to afterwards.
SERVED = {"push": {4}, "pull": {0, 2, 3, 4}}
CASES = [(mode, mutant) for mode in ("push", "pull") for mutant in (None, *LOCK_STEP) if
         mutant is None or mode in modes_of(mutant)]  # fmt: skip


def soon(condition, seconds):
    """Returns whether the condition holds within so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def rotation(rank, sim, id_, barrier, mode, mutant, done, released):
    """Rotates the shards straight from their owners; the slow rank's compute of its first received shard waits until
    `released`. Each rank adds itself to `done` when it has computed with every shard."""
    end = Rank(sim, rank, RANKS, id_, barrier, mode, mutant=mutant)
    sim.set_compute(True)
    local, seen = torch.full((6,), float(rank)), torch.full((RANKS, 6), -1.0)
    for turn in range(2):  # the first allocates the slots
        execution = _native.Execution.rotate(end.executor, [local], [[[6]] * RANKS], "direct", False)
        computes = 0
        while (step := execution.next()) is not None:
            if (turn, rank, computes) == (1, SLOW, 1):
                sim.launch(lambda: released.wait(20))
            sim.launch_copy(seen[step.owner], execution.weight()[0])
            computes += 1
            if turn == 1 and computes == RANKS:
                sim.launch(lambda: done.add(rank))
        execution.finish()
        if turn == 0:
            sim.synchronize()
            barrier.wait(20)
            seen.fill_(-1.0)
    assert released.wait(30)
    sim.synchronize()
    assert torch.equal(seen, torch.arange(RANKS).unsqueeze(1).expand(RANKS, 6).float())
    end.check_rest()
    sim.set_compute(False)
    end.executor.close()


@pytest.mark.parametrize(("mode", "mutant"), CASES)
def test_a_slow_rank_delays_only_the_hops_that_need_its_slot(sim, mode, mutant):
    done, released = set(), threading.Event()
    watched = []

    def watch():
        watched.append(soon(lambda: done >= SERVED[mode], 10.0 if mutant is None else 0.5))
        time.sleep(0.1)  # for a rank that should not be served
        watched.append(set(done))
        released.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    arguments = (sim, sim.unique_id(), threading.Barrier(RANKS), mode, mutant, done, released)
    values(run_threads(rotation, RANKS, *arguments))
    watcher.join()
    served, early = watched
    assert done == set(range(RANKS))
    if mutant is None:
        assert served and early == SERVED[mode]
    else:
        assert not served and early < SERVED[mode], "control: a protocol in lock-step"


@pytest.mark.parametrize("mutant", [None, "offers follow the copies, push"])
def test_a_receiver_offers_both_slots_before_the_first_data_arrives(sim, mutant):
    """Rank 0 is late. Rank 1 receives from it and has two free slots, so that two of rank 0's flags are raised."""
    shapes = [[[6]] * 3]

    def rotate(executor, rank):
        execution = _native.Execution.rotate(executor, [torch.full((6,), float(rank))], shapes, "ring", False)
        while execution.next() is not None:
            pass
        execution.finish()

    def work(rank, id_, barrier):
        end = Rank(sim, rank, 3, id_, barrier, "push", mutant=mutant)
        sim.set_compute(True)
        rotate(end.executor, rank)
        sim.synchronize()
        end.check_rest()
        if rank == 0:
            expected = 2 if mutant is None else 1
            assert soon(lambda: sim.ce_raised(end.transport) >= expected, 10.0)
            time.sleep(0.2)
            assert sim.ce_raised(end.transport) == expected
        rotate(end.executor, rank)
        sim.synchronize()
        end.check_rest()
        sim.set_compute(False)

    values(run_threads(work, 3, sim.unique_id(), threading.Barrier(3)))


def test_freeing_slots_waits_for_their_uses_and_for_no_other_stream(sim):
    def work(rank, id_, barrier):
        end = Rank(sim, rank, 2, id_, barrier, "mixed")
        end.both_channels(1, [5, 4], "direct")
        sim.set_compute(True)
        other, flag, used = sim.Stream(), torch.zeros(1, dtype=torch.int32), []
        other.wait_value(flag, 1)
        execution = _native.Execution.rotate(end.executor, [torch.ones(6)], [[[6]] * 2], "direct", False)
        while execution.next() is not None:
            sim.launch(lambda: (time.sleep(0.2), used.append(rank)))
        execution.finish()
        sim.set_compute(False)  # the stream of the pass is no longer the current one, and its work goes on
        assert not used, "control: the computes are late"
        before = sim.calls().get("cudaDeviceSynchronize", 0)
        end.executor.clear_slots()
        assert len(used) == 2 and not other.idle()
        assert sim.calls().get("cudaDeviceSynchronize", 0) == before == 0
        flag.fill_(1)
        other.synchronize()
        barrier.wait(20)
        end.executor.close()

    values(run_threads(work, 2, sim.unique_id(), threading.Barrier(2)))
