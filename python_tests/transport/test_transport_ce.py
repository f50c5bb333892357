"""The copy-engine transport, run against the simulated CUDA runtime and NCCL: passes give what one process gives, every
flag is back at 0 after each, and a failure reaches every rank."""

import re
import threading
import time
from datetime import timedelta

import pytest
import simulated_cuda
import torch
from grids import few
from native_options import rotation_options
from reference import TOLERANCE, assert_same, random
from simulated_cuda import one_of_ranks, run_threads, skip_without_headers, values
from simulated_cuda.mutants import ALL, MODES_OF_MUTANTS
from test_cuda_transports import linear, primitives

from rtp_ext import RingTimeout, RotationError, _native

skip_without_headers()

TIMEOUT = timedelta(seconds=20)
DTYPE = torch.float64
# pull weights, pull gradients
MODES = {"push": (False, False), "pull": (True, True), "mixed": (True, False)}


class Rank:
    """One rank of a ring over `ce`, with what its checks need."""

    def __init__(
        self, sim, rank, ranks, id_, barrier, mode, timeout=TIMEOUT, mutant=None, news=None, late=False, hosts=1
    ):
        """`late`: copies of local shards run when the compute stream gets there, too."""
        number = -1 if mutant is None else list(ALL).index(mutant)
        self.sim, self.rank, self.ranks, self.barrier = sim, rank, ranks, barrier
        self.transport = sim.ce(id_, rank, ranks, timeout, news, number)
        sim.set_ce_modes(self.transport, *MODES[mode])
        used = sim.counted(self.transport, sim.Tally()) if late else self.transport
        self.executor = _native.Executor(used, rank, ranks, torch.device("cpu"), hosts)

    def check_rest(self):
        """Every flag of every rank is 0 between passes, so that a captured pass can be replayed."""
        self.barrier.wait(20)
        end = time.monotonic() + 5  # each rank waits for its own streams alone
        while not self.sim.ce_at_rest(self.transport):
            assert time.monotonic() < end, f"rank {self.rank}: a flag is raised after a pass"
            time.sleep(0.01)
        self.barrier.wait(20)

    def both_channels(self, layer, lengths, route, bundle=False):
        """A backward in which weights and gradients of `lengths` elements per owner travel at once. `bundle`: that of
        an MLP, whose wgrads read weights."""
        rank, ranks = self.rank, self.ranks
        shapes = [[[n] for n in lengths], [[2 * n + 1] for n in lengths]]  # a bundle of two tensors
        wholes = [[random(*s, dtype=DTYPE, seed=layer * 100 + j) for j, s in enumerate(part)] for part in shapes]
        mine = [part[rank].clone() for part in wholes]
        sums = [torch.empty_like(part) for part in mine]
        options = rotation_options(route, f"layer {layer}", DTYPE)
        execution = _native.Execution.backward(self.executor, mine, shapes, sums, shapes, options, True, bundle)
        where = f"layer {layer}, {route}, rank {rank} of {ranks}"
        while (step := execution.next()) is not None:
            if rank == 0 and self.sim.controls.delay_us:  # the others are ahead, and must not overwrite its data
                time.sleep(0.002)
            if step.compute == "dgrad":
                for part, weight in enumerate(execution.weight()):
                    assert_same(weight, wholes[part][step.owner], 0.0, f"{where}: weight of {step.owner}")
                continue
            arrived = execution.gradient_in()
            for part, out in enumerate(execution.gradient_out()):
                before = arrived[part].clone() if arrived else torch.zeros_like(out)
                out.copy_(before + wholes[part][step.owner] * (rank + 1))
        execution.finish()
        total = ranks * (ranks + 1) / 2
        for part in range(2):
            assert_same(sums[part], wholes[part][rank] * total, TOLERANCE[DTYPE], f"{where}: gradient")


def passes(rank, sim, ranks, id_, barrier, mode, rounds, mutant=None, timeout=TIMEOUT):
    end = Rank(sim, rank, ranks, id_, barrier, mode, timeout, mutant)
    with one_of_ranks(sim, rank, end.executor, barrier=barrier):
        for turn in range(rounds):
            for route in ("ring", "direct"):
                linear(end.executor, 1 + turn, route, rank, ranks)
                end.check_rest()
                primitives(sim, end.executor, route, rank, ranks, asynchronous=True)
                for layer in range(3):
                    end.both_channels(layer, [5 + 3 * owner for owner in range(ranks)], route)
                end.check_rest()
        for lengths in ([40] * ranks, [3] * (ranks - 1) + [0], [0] * (ranks - 1) + [7]):  # slots grow, empty shards
            for route in ("ring", "direct"):
                end.both_channels(20, lengths, route)
                end.check_rest()
        linear(end.executor, 51, "ring", rank, ranks, features=(2, 3))
        end.executor.clear_slots()
        linear(end.executor, 52, "direct", rank, ranks, features=(40, 9))
        end.check_rest()
        end.executor.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", few([3], [2, 3, 4]))
def test_passes_give_what_one_process_gives(sim, ranks, mode):
    for delay in (0, 300):
        sim.controls.delay_us = delay
        values(run_threads(passes, ranks, sim, ranks, sim.unique_id(), threading.Barrier(ranks), mode, 2))


@pytest.mark.parametrize(("mutant", "mode"), MODES_OF_MUTANTS)
def test_a_mistake_in_the_protocol_is_caught(sim, mutant, mode):
    for seed in range(5):
        sim.reset(seed)
        sim.controls.delay_us = 1000
        arguments = (sim, 4, sim.unique_id(), threading.Barrier(4), mode, 2, mutant, timedelta(seconds=1))
        results = run_threads(passes, 4, *arguments)
        if any(isinstance(result, (AssertionError, RingTimeout)) for result in results):
            return
        assert simulated_cuda.settled(sim)
    raise AssertionError(f"not noticed: {mutant}")


def connected_news(ranks):
    news = [_native.PeerStatus(rank, ranks) for rank in range(ranks)]
    for one in news:
        assert one.connect([other.address() for other in news]) == ranks - 1
    return news


def until_failure(rank, sim, ranks, id_, barrier, mode, timeout, fault, news):
    """Runs passes until one raises; the last rank does what `fault` says after its first. Returns the error and how
    long after the fault it came."""
    end = Rank(sim, rank, ranks, id_, barrier, mode, timeout, news=news[rank])
    linear(end.executor, 1, "ring", rank, ranks)
    barrier.wait(20)
    if rank == ranks - 1:
        if fault == "fails":
            end.executor.fail("an error of its own")
        return end  # alive, and silent
    start = time.monotonic()
    with pytest.raises(RotationError) as raised:
        for turn in range(10000):
            try:
                linear(end.executor, 2 + turn % 3, "direct", rank, ranks)
            except AssertionError:  # what a released wait let through; the next call raises
                continue
    waited = time.monotonic() - start
    with pytest.raises(RotationError, match="cannot be used any more"):
        linear(end.executor, 2, "ring", rank, ranks)
    return raised.value, waited


@pytest.mark.parametrize("fault", ["is silent", "fails"])
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_failure_reaches_every_rank(sim, mode, fault):
    ranks, timeout = 4, 2.0
    arguments = (sim, ranks, sim.unique_id(), threading.Barrier(ranks), mode, timedelta(seconds=timeout), fault)
    survivors = values(run_threads(until_failure, ranks, *arguments, connected_news(ranks)))[:-1]
    for error, waited in survivors:
        assert isinstance(error, RingTimeout) and waited < timeout + 3
    said = [str(error) for error, _ in survivors]
    if fault == "fails":
        assert any("rank 3 of the ring has failed: an error of its own" in text for text in said), said
    else:  # the rank that waited for the silent one names it, and the others pass that on
        first = "hop . of 3: rank 3 of the ring did not answer .waited [23]"
        assert all(re.search(f"linear . .*, (weight|gradient) {first}", text) for text in said), said


def test_a_failure_reaches_who_waits_for_a_registration(sim):
    """No rank waits for the timeout, which is longer than the test."""

    def work(rank, id_, barrier, news):
        end = Rank(sim, rank, 2, id_, barrier, "push", timedelta(seconds=100), news=news[rank])
        barrier.wait(20)
        if rank == 1:
            time.sleep(0.2)
            end.executor.fail("an error")
            return end
        start = time.monotonic()
        with pytest.raises(RingTimeout, match="rank 1 of the ring has failed: an error"):
            end.both_channels(1, [5, 4], "ring")
        assert not end.executor.alive and time.monotonic() - start < 10

    values(run_threads(work, 2, sim.unique_id(), threading.Barrier(2), connected_news(2)))


def test_passes_can_be_captured_once_their_slots_exist(sim):
    def work(rank, id_, barrier):
        end = Rank(sim, rank, 2, id_, barrier, "mixed", timedelta(seconds=1))
        end.both_channels(1, [5, 4], "ring")
        barrier.wait(20)
        sim.controls.capturing = True
        if rank == 1:
            time.sleep(1.5)  # longer than the timeout: hops of a capture run when the graph does
        end.both_channels(2, [5, 4], "direct")
        end.check_rest()
        with pytest.raises(RotationError, match="cannot be made or ended while a graph is captured"):
            end.both_channels(3, [500, 400], "ring")
        barrier.wait(20)
        sim.controls.capturing = False

    values(run_threads(work, 2, sim.unique_id(), threading.Barrier(2)))


def test_what_is_lacking_is_said(sim):
    assert sim.ce_refusal() is None
    sim.controls.version = 22809
    assert sim.ce_refusal() == "it needs ncclGetPeerDevicePointer of NCCL 2.29.2, but torch loaded NCCL 2.28.9"
    sim.controls.version, sim.controls.lacks_memory_ops = 23007, True
    assert "lacks cuStreamBatchMemOp" in sim.ce_refusal()
    sim.controls.lacks_memory_ops, sim.controls.null_windows = False, True
    errors = run_threads(lambda rank, id_: sim.ce(id_, rank, 2, TIMEOUT, None), 2, sim.unique_id())
    assert all(isinstance(error, RotationError) and "NCCL gave no window" in str(error) for error in errors), errors


def test_a_ring_that_is_dropped_disturbs_no_neighbour(sim):
    def work(rank, id_, barrier, news):
        end = Rank(sim, rank, 3, id_, barrier, "push", news=news[rank])
        linear(end.executor, 1, "ring", rank, 3)
        if rank == 1:
            del end.executor, end.transport
        barrier.wait(20)
        if rank != 1:
            time.sleep(0.2)  # the watchdog looks every 20 ms
            sim.ce_check(end.transport)
        barrier.wait(20)
        if rank == 0:
            end.executor.fail("an error")  # the control: this the other must learn of
        elif rank == 2:
            with pytest.raises(RingTimeout, match="rank 0 of the ring has failed: an error"):
                for _ in range(500):
                    sim.ce_check(end.transport)
                    time.sleep(0.02)

    values(run_threads(work, 3, sim.unique_id(), threading.Barrier(3), connected_news(3)))


LINKS = ["sm-local", "ce-local", "ce-local:1", "ce-local:2", "ce-local:4", "nccl-self", "nccl-self:4", "pcie"]


@pytest.mark.parametrize("name", LINKS)
def test_links_of_the_emulated_ring_copy(sim, name):
    sim.controls.delay_us = 500
    link, stream = sim.EmulatedLink(name), sim.Stream()
    sizes = [1, 700, 9 << 20]  # bytes: smaller than any cut, and more than two chunks of the pinned memory
    before = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
    between = [torch.zeros_like(part) for part in before]
    after = [torch.zeros_like(part) for part in before]
    for _ in range(2):
        link.copy(stream, between, before)
        link.copy(stream, after, between)  # follows the first hop, whatever streams that took
        stream.synchronize()
        for mine, part in zip(before, after, strict=True):
            assert torch.equal(part, mine)
            part.zero_()


@pytest.mark.parametrize(
    "name", ["", "wire", "ce-local:3", "ce-local:", "ce-local:2x", "sm-local:2", "nccl-self:0", "pcie:1"]
)
def test_unknown_links_are_value_errors(sim, name):
    with pytest.raises(ValueError, match="expected a link of sm-local, .* or pcie, got " + name):
        sim.EmulatedLink(name)
