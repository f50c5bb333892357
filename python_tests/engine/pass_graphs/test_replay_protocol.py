"""The protocol of `ce` under replay, and graphs that still run when their ring is dropped."""

import gc
import threading
import time
import weakref
from datetime import timedelta

import pytest
import simulated_cuda
import torch
from grids import few
from simulated_cuda import run_threads, skip_without_headers, values
from simulated_cuda.mutants import MODES_OF_MUTANTS
from test_pass_graphs import Graphs, Layer
from test_transport_ce import Rank, connected_news

from rtp_ext import CudaError, RingTimeout, RotationError, _native

skip_without_headers()

CALM = 6  # steps until all passes are graphs
FIRST = 2  # the step that captures first
# Dependencies of the executor that a mutated capture omits: simulator.h
FORGOTTEN = ["waits_of_computes", "waits_of_hops", "ends_of_computes", "ends_of_hops"]


def replays(rank, sim, ranks, id_, barrier, mode, mutant=None, timeout=3):
    """Runs passes that become graphs without delays, and then replays them with delays. Returns the step in which the
    numbers were wrong or a rank timed out; None without a failure."""
    end, step = Rank(sim, rank, ranks, id_, barrier, mode, timedelta(seconds=timeout), mutant, late=True), 0
    try:
        sim.set_compute(True)
        graphs = Graphs(end.executor)
        layers = [Layer(sim, rank, ranks, number, 6, route) for number, route in enumerate(("direct", "ring"))]
        for step in range(CALM + 4):
            if step <= CALM:
                barrier.wait(20)
            if step == CALM:
                sim.controls.delay_us, stepped = 1000, graphs.stepped
            for layer in layers:
                layer.step(graphs, step, 0)
        assert graphs.stepped == stepped, "control: all of them were replays"
        end.check_rest()
        return None
    except (AssertionError, RotationError, threading.BrokenBarrierError) as error:
        barrier.abort()
        end.executor.fail(f"rank {rank}: {error}")
        return None if isinstance(error, threading.BrokenBarrierError) else step
    finally:
        sim.synchronize()
        sim.set_compute(False)


# Without replays, python_tests/transport/test_transport_ce.py plants all of them in a normal run.
REPLAYED = few(
    [("raises the flag before the copy", "push"), ("does not await that a slot was read, pull", "pull")],
    MODES_OF_MUTANTS,
)


@pytest.mark.parametrize(("mutant", "mode"), [(None, "push"), (None, "pull"), *REPLAYED])
def test_a_mistake_in_the_protocol_is_caught_where_passes_replay(sim, mutant, mode):
    """The error shows in a replay, or before it on a slow machine."""
    found = []
    for seed in range(1 if mutant is None else 6):
        sim.reset(seed)
        arguments = (sim, 4, sim.unique_id(), threading.Barrier(4), mode, mutant)
        found = [step for step in values(run_threads(replays, 4, *arguments, timeout=60.0)) if step is not None]
        assert simulated_cuda.settled(sim)
        if found:
            break
    assert bool(found) == (mutant is not None), f"{mutant}: found in steps {found}"


@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_an_order_that_a_capture_leaves_out_shows_where_it_is_replayed(sim, forgotten):
    """The control is the test above without a mutant: with all of its waits, and events where they belong, the same
    pass is right in every step. Passes that are enqueued one by one are right here, too."""
    found = []
    for seed in range(6):
        sim.reset(seed)
        sim.controls.forgotten = getattr(sim.Forgotten, forgotten)
        arguments = (sim, 3, sim.unique_id(), threading.Barrier(3), "push", None, 1)
        found = [step for step in values(run_threads(replays, 3, *arguments, timeout=60.0)) if step is not None]
        assert simulated_cuda.settled(sim)
        if found:
            break
    assert found and min(found) >= FIRST, f"{forgotten}: found in steps {found}"


def test_memory_outlives_a_graph_that_runs_and_a_capture_without_any_ends(sim):
    def work(_, id_, barrier):
        end = Rank(sim, 0, 1, id_, barrier, "push", timedelta(seconds=1), late=True)
        sim.set_compute(True)
        graphs, layer = Graphs(end.executor), Layer(sim, 0, 1, 0, 6, "direct")
        for step in range(2):
            layer.step(graphs, step, 0)
        sim.controls.lacks_graph_memory = True
        with pytest.raises(CudaError, match="torch has no memory for graphs"):
            layer.step(graphs, 2, 0)
        assert not end.executor.captured() and end.executor.alive
        sim.controls.lacks_graph_memory = False
        for step in range(2, 5):
            layer.step(graphs, step, 0)
        assert graphs.replayed >= 4
        kept = graphs.made  # no allocator keeps it for the stream that writes to it
        sim.launch_endless()
        graphs.run("layer 0 forward", layer.forward, [layer.local, layer.inputs[0][0]])
        end.executor.fail("given up")
        del end.executor, end.transport, graphs
        gc.collect()
        assert sim.mistakes() == []
        sim.controls.released = True
        sim.synchronize()
        assert kept
        sim.set_compute(False)

    values(run_threads(work, 1, sim.unique_id(), threading.Barrier(1)))


class Careless(Layer):
    """Leaves garbage, and then runs Python's collection: destroyed objects wait for the device, like a ring's slots."""

    def forward(self, executor, local, x):
        if executor.captured():
            self.garbage = self.leave(self.sim)
            gc.set_threshold(1, 1, 1)  # only now, since objects that survive a collection are rarely scanned again
            self.others = [[] for _ in range(1000)]  # more than Python has preallocated
        return super().forward(executor, local, x)

    def leave(self, sim):
        event = sim.Event()
        event.record(sim.Stream())
        cycle = [event]
        cycle.append(cycle)
        weakref.finalize(event, self.asks, sim)
        return weakref.ref(event)

    @staticmethod
    def asks(sim):
        sim.device_synchronize()


def test_nothing_is_collected_while_a_pass_is_captured(sim):
    def work(_, id_, barrier):
        end = Rank(sim, 0, 1, id_, barrier, "push", late=True)
        sim.set_compute(True)
        graphs, layer = Graphs(end.executor), Careless(sim, 0, 1, 0, 6, "direct")
        thresholds = gc.get_threshold()
        try:
            for step in range(5):
                layer.step(graphs, step, 0)
        finally:
            gc.set_threshold(*thresholds)
        assert graphs.replayed > 0 and gc.isenabled()
        gc.collect()
        assert layer.garbage() is None, "control: it was garbage"
        sim.set_compute(False)

    values(run_threads(work, 1, sim.unique_id(), threading.Barrier(1)))


def test_what_is_enqueued_while_a_ring_gives_up_ends_too(sim):
    """The launch of a pass meets a full queue, as when many passes are enqueued behind a lost rank. When it returns,
    the ring has failed, and all earlier work has ended."""

    def work(rank, id_, barrier, news):
        ranks = 4
        end = Rank(sim, rank, ranks, id_, barrier, "push", news=news[rank], late=True)
        sim.set_compute(True)
        graphs, layer = Graphs(end.executor), Layer(sim, rank, ranks, 0, 6, "ring")  # three hops through two slots
        for step in range(4):
            layer.step(graphs, step, 0)
        assert graphs.replayed > 0
        barrier.wait(20)
        x = layer.feed(4, 0)[0]
        if rank == 0:
            sim.controls.full_queue = True
        barrier.wait(20)
        if rank == 1:
            time.sleep(0.3)  # by then rank 0 is there
            end.executor.fail("an error")
        elif rank == 0:
            threading.Timer(1.0, setattr, (sim.controls, "full_queue", False)).start()
            graphs.run("layer 0 forward", layer.forward, [layer.local, x])  # returns when the ring has failed
            with pytest.raises(RingTimeout, match="rank 1 of the ring has failed: an error"):
                sim.ce_check(end.transport)
            sim.synchronize()
        barrier.wait(20)
        sim.set_compute(False)

    values(run_threads(work, 4, sim.unique_id(), threading.Barrier(4), connected_news(4), timeout=40.0))


def test_a_capture_of_the_caller_that_was_invalidated_is_named(sim):
    def work(rank, id_, barrier):
        end = Rank(sim, rank, 2, id_, barrier, "push")
        end.both_channels(1, [5, 4], "ring")
        barrier.wait(20)
        sim.set_compute(True)
        sim.begin_capture()
        with pytest.raises(CudaError, match=r"cudaDeviceSynchronize.. failed"):
            sim.device_synchronize()
        with pytest.raises(CudaError, match=r"a CUDA graph that was invalidated .*cudaStreamCaptureStatusInvalidated"):
            end.both_channels(2, [5, 4], "ring")
        with pytest.raises(CudaError, match="cudaStreamEndCapture"):
            sim.end_capture()
        sim.set_compute(False)

    values(run_threads(work, 2, sim.unique_id(), threading.Barrier(2)))
    assert sim.mistakes() == ["cudaDeviceSynchronize by a thread that captures"] * 2
    sim.reset(1)


def test_a_ring_that_fails_disturbs_no_capture_of_its_thread(sim):
    """The ring queries which hops have ended, which CUDA refuses during a capture of the thread. That refusal must not
    count as their end."""

    def work(rank, id_, barrier):
        end = Rank(sim, rank, 2, id_, barrier, "push")
        end.both_channels(1, [5, 4], "ring")
        barrier.wait(20)
        if rank == 0:
            sim.set_compute(True)
            execution = _native.Execution.rotate(end.executor, [torch.ones(6)], [[[6]] * 2], "ring", False)
            while execution.next() is not None:  # of a hop that rank 1 does not make
                pass
            sim.begin_capture()
            end.executor.fail("an error")
            sim.end_capture()
            sim.set_compute(False)
        barrier.wait(20)

    values(run_threads(work, 2, sim.unique_id(), threading.Barrier(2)))


def test_in_a_capture_of_the_caller_a_pass_is_refused(sim):
    """Passes that are not graphs become part of the capture, as before. The host keeps their results until the device
    has written them, since no allocator does so here."""

    def work(rank, id_, barrier):
        end = Rank(sim, rank, 2, id_, barrier, "push", late=True)
        sim.set_compute(True)
        graphs, layer = Graphs(end.executor), Layer(sim, rank, 2, 0, 6, "direct")
        for step in range(3):
            layer.step(graphs, step, 0)
        barrier.wait(20)
        sim.controls.capturing = True
        barrier.wait(20)
        x = layer.feed(3, 0)[0]
        with pytest.raises(RotationError, match="expected no CUDA graph of the caller's"):
            graphs.run("layer 0 forward", layer.forward, [layer.local, x])
        before = graphs.captured, graphs.replayed
        returned = graphs._step(layer.forward, [layer.local, x])
        assert (graphs.captured, graphs.replayed) == before
        barrier.wait(20)
        sim.controls.capturing = False
        sim.synchronize()
        assert returned[0].sum() > 0
        barrier.wait(20)
        end.executor.close()
        sim.set_compute(False)

    values(run_threads(work, 2, sim.unique_id(), threading.Barrier(2)))
