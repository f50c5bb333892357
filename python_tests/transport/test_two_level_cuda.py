"""Rings of two levels over simulated GPUs: `ce` or `nccl` inside a host, `nccl` between hosts. Passes give what one
process gives, hops inside and between hosts wait for each other only where they share memory, and a failure on either
level reaches every rank."""

import functools
import re
import threading
import time
from datetime import timedelta

import pytest
import simulated_cuda
import torch
from grids import few
from harness import run_ranks
from simulated_cuda import one_of_ranks, run_threads, skip_without_headers, values
from simulated_cuda.mutants import ALL
from test_cuda_transports import linear, primitives
from test_transport_ce import Rank, connected_news

from rtp_ext import RingTimeout, RotationError, _native

skip_without_headers()

TIMEOUT = timedelta(seconds=20)
SHAPES = [(2, 2), (2, 3), (3, 2)]  # hosts, ranks of each
CPU = torch.device("cpu")


class LevelRank(Rank):
    """One rank of a ring of `hosts` hosts."""

    def __init__(
        self, sim, rank, hosts, per_host, ids, barrier, inner, timeout=TIMEOUT, *, news=None, plant=("", ""),
        mutant=None, tally=None,
    ):  # fmt: skip
        inner_end, outer_end = sim.levels(rank, hosts * per_host, per_host, timeout, news)
        host = ids["hosts"][rank // per_host]
        if inner == "ce":
            level = sim.ce_level(inner_end, host[0], -1 if mutant is None else list(ALL).index(mutant))
        else:
            level = sim.nccl_level(inner_end, host)
        outer = sim.nccl_level(outer_end, ids["ring"])
        self.inner, self.outer, self.inner_kind = level, outer, inner
        if tally is not None:
            level = sim.counted(level, tally["inner"])
            outer = sim.counted(outer, tally["outer"], level)
        if plant[0] == "inner":
            level = sim.without_wait(level, plant[1])
        if plant[0] == "outer":
            outer = sim.without_wait(outer, plant[1])
        transport = _native.CompositeTransport(level, outer, rank, per_host)
        self.sim, self.rank, self.ranks, self.barrier, self.transport = sim, rank, hosts * per_host, barrier, transport
        self.executor = _native.Executor(transport, rank, self.ranks, CPU, hosts)

    def check_rest(self):
        self.barrier.wait(20)
        if self.inner_kind == "ce":
            end = time.monotonic() + 5
            while not self.sim.ce_at_rest(self.inner):
                assert time.monotonic() < end, f"rank {self.rank}: a flag is raised after a pass"
                time.sleep(0.01)
        self.barrier.wait(20)


def unique_ids(sim, hosts):
    pair = lambda: [sim.unique_id(), sim.unique_id()]  # noqa: E731
    return {"hosts": [pair() for _ in range(hosts)], "ring": pair()}


def passes(rank, sim, hosts, per_host, ids, barrier, inner, plant=("", ""), mutant=None, timeout=TIMEOUT):
    ranks = hosts * per_host
    end = LevelRank(sim, rank, hosts, per_host, ids, barrier, inner, timeout, plant=plant, mutant=mutant)
    with one_of_ranks(sim, rank, end.executor, barrier=barrier):
        for turn, route in enumerate(("two-level", "ring", "two-level", "direct", "two-level")):
            linear(end.executor, 1 + turn, route, rank, ranks)
            primitives(sim, end.executor, route, rank, ranks, asynchronous=True)
            for layer in range(2):
                end.both_channels(layer, [5 + 3 * owner for owner in range(ranks)], route, bundle=layer > 0)
            end.check_rest()
        for lengths in ([40] * ranks, [3] * (ranks - 1) + [0]):  # slots grow, empty shards
            end.both_channels(20, lengths, "two-level")
        linear(end.executor, 50, "gather", rank, ranks, features=(2 * ranks, 3))
        linear(end.executor, 51, "two-level", rank, ranks, features=(2, 3))
        end.executor.clear_slots()
        linear(end.executor, 52, "two-level", rank, ranks, features=(40, 9))
        end.check_rest()
        end.executor.close()


def run(sim, hosts, per_host, inner, **options):
    arguments = (hosts, per_host, unique_ids(sim, hosts), threading.Barrier(hosts * per_host), inner)
    work = functools.partial(passes, **options)
    return run_threads(work, hosts * per_host, sim, *arguments)


@pytest.mark.parametrize("inner", ["ce", "nccl"])
@pytest.mark.parametrize(("hosts", "per_host"), SHAPES)
def test_passes_give_what_one_process_gives(sim, hosts, per_host, inner):
    for delay in few([300], [0, 300]):
        sim.controls.delay_us = delay
        values(run(sim, hosts, per_host, inner))


def rotations(rank, sim, hosts, per_host, ids, barrier, inner, route, plant=("", ""), timeout=TIMEOUT):
    """The first passes of a ring, in both directions."""
    ranks = hosts * per_host
    end = LevelRank(sim, rank, hosts, per_host, ids, barrier, inner, timeout, plant=plant)
    for reverse in (False, True):
        execution = _native.Execution.rotate(end.executor, [torch.ones(6)], [[[6]] * ranks], route, reverse)
        while execution.next() is not None:
            pass
        execution.finish()
    end.executor.close()


@pytest.mark.parametrize("control", ["first_contact", "serial_launches"])
@pytest.mark.parametrize("inner", ["ce", "nccl"])
def test_nccl_may_hold_up_calls_and_launches(sim, inner, control):
    """NCCL connects two ranks in their first calls for each other, each of which waits for the other one; and where
    kernels of several communicators do not fit side by side, it runs them in the order of the host's calls."""
    setattr(sim.controls, control, True)
    for route in ("ring", "direct", "two-level"):
        arguments = (2, 3, unique_ids(sim, 2), threading.Barrier(6), inner, route)
        values(run_threads(rotations, 6, sim, *arguments))


def test_flat_hops_that_are_split_between_communicators_hang(sim):
    """Control: each rank would wait in one call for a peer that waits in another."""
    sim.controls.first_contact = True
    arguments = (2, 3, unique_ids(sim, 2), threading.Barrier(6), "nccl", "ring", ("inner", "joint"))
    results = run_threads(rotations, 6, sim, *arguments, timedelta(seconds=1))
    assert any(isinstance(result, RingTimeout) for result in results), results


# The waits of one level that are left out
PLANTS = [(level, wait) for level in ("inner", "outer") for wait in ("received", "channel")]


@pytest.mark.parametrize("plant", few([PLANTS[0], PLANTS[3]], PLANTS), ids="-".join)
def test_a_missing_wait_is_caught(plant):
    simulated_cuda.build()
    for delay_us in (1000, 3000, 10000):
        ((caught, results),) = run_ranks(_passes_without, 1, plant, None, delay_us)
        if caught:
            return
    raise AssertionError(f"no rank noticed: {results}")


MUTANTS = ["copies before the slot is offered", "offers slots that are still in use"]


@pytest.mark.parametrize("mutant", few(MUTANTS[1:], MUTANTS))
def test_a_mistake_inside_a_host_is_caught(mutant):
    for delay_us in (1000, 3000, 10000):
        ((caught, results),) = run_ranks(_passes_without, 1, ("", ""), mutant, delay_us)
        if caught:
            return
    raise AssertionError(f"no rank noticed: {results}")


def caught_without(sim, plant, mutant):
    """Returns whether a rank finds a mistake, and the messages of all. The errors hold the executors, and end here."""
    results = run(sim, 2, 2, "ce", plant=plant, mutant=mutant, timeout=timedelta(seconds=1))
    caught = any(isinstance(result, (AssertionError, RotationError)) for result in results)
    return caught, [repr(result) for result in results]


def _passes_without(rank, _, plant, mutant, delay_us):
    """In a process of its own: a rank that does not wait may write to memory that has been freed."""
    with simulated_cuda.simulation() as sim:
        sim.controls.delay_us = delay_us
        caught = caught_without(sim, plant, mutant)
        assert simulated_cuda.settled(sim)
        sim.reset(1)  # forgets what the simulation reports of such a rank
        return caught


def test_hops_inside_a_host_do_not_wait_for_those_between_hosts(sim):
    """Host 1 does not take part yet. Host 0 computes with all of its shards, on a flat ring only with the own one."""
    hosts, per_host = 2, 3
    ranks = hosts * per_host
    entered, released, early = threading.Barrier(per_host + 1), threading.Event(), {}

    def work(rank, ids, barrier):
        end = LevelRank(sim, rank, hosts, per_host, ids, barrier, "ce")
        for route in ("two-level", "ring"):
            sim.set_compute(True)
            for turn in range(2):  # the first allocates the slots
                barrier.wait(20)
                if turn == 1 and rank >= per_host:
                    assert released.wait(20)
                seen = []
                execution = _native.Execution.rotate(
                    end.executor, [torch.full((6,), float(rank))], [[[6]] * ranks], route, False
                )
                while (step := execution.next()) is not None:
                    sim.launch(functools.partial(seen.append, step.owner))
                execution.finish()
                if turn == 1 and rank < per_host:
                    time.sleep(0.3)
                    early[route, rank] = sorted(seen)
                    entered.wait(20)
                sim.synchronize()
                assert sorted(seen) == list(range(ranks))
            barrier.wait(20)
            released.clear()
        sim.set_compute(False)
        end.executor.close()

    def release():
        for _ in range(2):
            entered.wait(60)
            released.set()

    releasing = threading.Thread(target=release)
    releasing.start()
    values(run_threads(work, ranks, unique_ids(sim, hosts), threading.Barrier(ranks)))
    releasing.join()
    for rank in range(per_host):
        assert early["two-level", rank] == [0, 1, 2]
        # control: the shards of lower ranks have come along the chain; all others are behind host 1
        assert early["ring", rank] == list(range(rank + 1))


def until_failure(rank, sim, hosts, per_host, ids, barrier, inner, fault, news, timeout, route="two-level"):
    """Returns the error of a survivor, and the seconds after the fault at which it came."""
    ranks = hosts * per_host
    longest = timeout if rank == ranks - 2 else 3 * timeout  # the neighbour of the silent rank is the first to miss it
    end = LevelRank(sim, rank, hosts, per_host, ids, barrier, inner, longest, news=news[rank])
    linear(end.executor, 1, route, rank, ranks)
    barrier.wait(20)
    if rank == ranks - 1:
        if fault == "fails":
            end.executor.fail("an error of its own")
        return end  # alive, and silent
    start = time.monotonic()
    sim.set_compute(True)
    with pytest.raises(RotationError) as raised:
        while True:
            execution = _native.Execution.rotate(end.executor, [torch.ones(4)], [[[4]] * ranks], route, False)
            while execution.next() is not None:
                time.sleep(0.002)
    waited = time.monotonic() - start
    sim.set_compute(False)
    assert not end.executor.alive
    return str(raised.value), type(raised.value), waited


@pytest.mark.parametrize("fault", ["is silent", "fails"])
@pytest.mark.parametrize("inner", ["ce", "nccl"])
def test_a_failure_reaches_every_rank(sim, inner, fault):
    """Ranks are named by their number in the ring, on both levels."""
    hosts, per_host, seconds = 2, 2, 2.0 if fault == "is silent" else 100.0
    ranks = hosts * per_host
    arguments = (sim, hosts, per_host, unique_ids(sim, hosts), threading.Barrier(ranks), inner, fault)
    survivors = values(run_threads(until_failure, ranks, *arguments, connected_news(ranks), timedelta(seconds=seconds)))
    said = [text for text, *_ in survivors[:-1]]
    for _, kind, waited in survivors[:-1]:
        assert kind is RingTimeout and waited < (10 if fault == "fails" else seconds + 3)
    assert fault == "is silent" or any("rank 3 of the ring has failed: an error" in text for text in said), said
    if fault == "is silent":  # rank 3, or rank 0 of the next hop between hosts, which waits for the same
        assert re.search(r"rank [03] of the ring did not answer \(waited 2", said[2]), said


def test_a_failure_on_a_flat_route_names_the_rank_that_a_half_of_a_hop_waits_for(sim):
    """Rank 2 is silent. Rank 3, the first of its host, receives from it over NCCL, and sends to rank 4 over `ce`."""
    news, seconds = connected_news(6), timedelta(seconds=2)

    def work(rank, ids, barrier):
        longest = seconds if rank == 3 else 3 * seconds
        end = LevelRank(sim, rank, 2, 3, ids, barrier, "ce", longest, news=news[rank])
        linear(end.executor, 1, "ring", rank, 6)
        barrier.wait(20)
        if rank == 2:
            return end
        sim.set_compute(True)
        with pytest.raises(RingTimeout) as raised:
            while True:
                execution = _native.Execution.rotate(end.executor, [torch.ones(4)], [[[4]] * 6], "ring", False)
                while execution.next() is not None:
                    time.sleep(0.002)
        sim.set_compute(False)
        return str(raised.value)

    first = values(run_threads(work, 6, unique_ids(sim, 2), threading.Barrier(6)))[3]
    assert re.search(r"hop [12] of 5: rank [24] of the ring did not answer \(waited 2", first), first


@pytest.mark.parametrize("level", ["inner", "outer"])
def test_a_failure_of_one_level_ends_the_other(sim, level):
    """No rank waits for the timeout, which is longer than the test."""

    def work(rank, ids, barrier):
        end = LevelRank(sim, rank, 2, 2, ids, barrier, "nccl", timedelta(seconds=100))
        linear(end.executor, 1, "two-level", rank, 4)
        barrier.wait(20)
        if rank > 0:
            barrier.wait(20)
            end.executor.fail("the test is over")
            return
        sim.set_compute(True)
        execution = _native.Execution.rotate(end.executor, [torch.ones(4)], [[[4]] * 4], "two-level", False)
        while execution.next() is not None:
            pass
        execution.finish()
        start = time.monotonic()
        sim.abort(end.inner if level == "inner" else end.outer, "an error of one level")
        sim.synchronize()  # both levels have ended their waits
        assert time.monotonic() - start < 10
        sim.set_compute(False)
        with pytest.raises(RotationError, match="an error of one level"):
            linear(end.executor, 2, "two-level", rank, 4)
        barrier.wait(20)

    values(run_threads(work, 4, unique_ids(sim, 2), threading.Barrier(4)))


def test_calls_of_hops(sim):
    """Driver calls of a hop, counted: those between hosts cost a group of NCCL, those inside what `ce` costs alone."""
    counts = {"inner": [], "outer": []}

    def work(rank, ids, barrier):
        tally = {"inner": sim.Tally(), "outer": sim.Tally()}
        end = LevelRank(sim, rank, 2, 3, ids, barrier, "ce", tally=tally)
        sim.set_compute(True)
        for _ in range(6):  # the first ones create slots and events
            before = {level: (each.hops, each.cuda, each.nccl) for level, each in tally.items()}
            end.sim.synchronize()
            execution = _native.Execution.rotate(end.executor, [torch.ones(6)], [[[6]] * 6], "two-level", False)
            while execution.next() is not None:
                pass
            execution.finish()
            sim.synchronize()
            barrier.wait(20)
            after = {level: (each.hops, each.cuda, each.nccl) for level, each in tally.items()}
            if rank == 0:
                for level in tally:
                    counts[level].append([b - a for a, b in zip(before[level], after[level], strict=True)])
        sim.set_compute(False)
        end.executor.close()

    values(run_threads(work, 6, unique_ids(sim, 2), threading.Barrier(6)))
    (inner_hops, inner_cuda, inner_nccl), (outer_hops, outer_cuda, outer_nccl) = (min(each) for each in counts.values())
    assert (inner_hops, outer_hops) == (4, 1)
    # one more: the first hop inside the host of what came from the other host waits for its arrival
    assert inner_nccl == 0 and inner_cuda <= 12 * inner_hops + 1, counts
    assert 0 < outer_nccl <= 8 and outer_cuda <= 6, counts


def test_levels_must_share_their_streams(sim):
    inner, outer = [sim.nccl([sim.unique_id(), sim.unique_id()], 0, 1, TIMEOUT, None) for _ in range(2)]
    with pytest.raises(ValueError, match="nccl and nccl must share their streams"):
        _native.CompositeTransport(inner, outer, 0, 1)
    for transport in (inner, outer):
        _native.Executor(transport, 0, 1, CPU).close()
    with pytest.raises(ValueError, match="expected hosts of equally many of 4 ranks, got 3 a host"):
        sim.levels(0, 4, 3, TIMEOUT, None)
