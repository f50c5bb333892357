"""The protocol of `ce` under replay, and what becomes of graphs that run when their ring is dropped."""

import gc
import threading
from datetime import timedelta

import pytest
import simulated_cuda
from simulated_cuda import run_threads, values
from simulated_cuda.mutants import CE_MUTANTS
from test_pass_graphs import Graphs, Layer
from test_transport_ce import Rank

from rtp_ext import CudaError, RotationError

if simulated_cuda.include_folders() is None:
    pytest.skip("the headers of CUDA and NCCL are not installed", allow_module_level=True)

CALM = 6  # steps until all passes are graphs


def replays(rank, sim, ranks, id_, barrier, mode, mutant):
    """Passes that become graphs while nothing is late, and then replay while everything is. Returns the step in which
    the numbers were wrong, or nobody answered; None: none."""
    end, step = Rank(sim, rank, ranks, id_, barrier, mode, timedelta(seconds=3), mutant, late=True), 0
    try:
        sim.set_compute(True)
        graphs = Graphs(end.executor)
        layers = [Layer(sim, rank, ranks, number, 6, route) for number, route in enumerate(("direct", "ring"))]
        for step in range(CALM + 8):
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


@pytest.mark.parametrize("mutant", [None, *CE_MUTANTS])
def test_a_mistake_in_the_protocol_is_caught_where_passes_replay(sim, mutant):
    """In a replay, or on a slow machine before."""
    mode, found = "pull" if mutant and "read" in mutant else "push", []
    for seed in range(1 if mutant is None else 6):
        sim.reset(seed)
        arguments = (sim, 4, sim.unique_id(), threading.Barrier(4), mode, mutant)
        found = [step for step in values(run_threads(replays, 4, *arguments, timeout=60.0)) if step is not None]
        assert simulated_cuda.settled(sim)
        if found:
            break
    assert bool(found) == (mutant is not None), f"{mutant}: found in steps {found}"


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
        graphs.run("layer 0 forward", layer.forward, [layer.home, layer.inputs[0][0]])
        end.executor.fail("given up")
        del end.executor, end.transport, graphs
        gc.collect()
        assert sim.mistakes() == []
        sim.controls.released = True
        sim.synchronize()
        assert kept
        sim.set_compute(False)

    values(run_threads(work, 1, sim.unique_id(), threading.Barrier(1)))


def test_in_a_capture_of_the_caller_a_pass_is_refused(sim):
    """Passes that are no graphs are steps of it, as ever. The host keeps what they return until the device has written
    it: here no allocator does."""

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
            graphs.run("layer 0 forward", layer.forward, [layer.home, x])
        before = graphs.captured, graphs.replayed
        returned = graphs._step(layer.forward, [layer.home, x])
        assert (graphs.captured, graphs.replayed) == before
        barrier.wait(20)
        sim.controls.capturing = False
        sim.synchronize()
        assert returned[0].sum() > 0
        barrier.wait(20)
        end.executor.close()
        sim.set_compute(False)

    values(run_threads(work, 2, sim.unique_id(), threading.Barrier(2)))
