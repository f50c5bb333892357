"""Passes as graphs over the transport `ce`, on the simulated CUDA runtime: replays give the results of one process,
independent of whether other ranks replay the same pass, and a failure reaches every rank that waits in a graph."""

import gc
import threading
import time
from collections import Counter
from datetime import timedelta

import pytest
import torch
from grids import few
from native_options import rotation_options
from pretended_hosts import graphs_of
from simulated_cuda import one_of_ranks, run_threads, skip_without_headers, values
from test_transport_ce import DTYPE, Rank, connected_news

from rtp_ext import RingTimeout, RotationError, _native
from rtp_ext.ring.graphs import PassGraphs

skip_without_headers()

STEPS = 9


class Graphs(PassGraphs):
    """Puts results at their last addresses, or with `other` at new ones, in place of torch's allocator."""

    def __init__(self, executor, **options):
        super().__init__(executor, "asked for", on=True, device=torch.device("cpu"))
        self.other, self.made = 0, {}

    def _places_for(self, results):
        key = (self.other, *results)
        if key not in self.made:
            self.made[key] = [torch.empty(shape, dtype=dtype) for shape, dtype in results]
        return self.made[key]


class Layer:
    """An operation on shards of `rows` numbers: y[j] = W_j + x[j]; dx[j] = W_j, and the sum over ranks of dy[j]."""

    def __init__(self, sim, rank, ranks, number, rows, route):
        self.sim, self.rank, self.ranks, self.number, self.rows = sim, rank, ranks, number, rows
        self.shapes, self.route = [[[rows]] * ranks], route
        self.local = torch.zeros(rows, dtype=DTYPE)
        self.inputs = [[torch.zeros(ranks * rows, dtype=DTYPE) for _ in range(2)] for _ in range(3)]  # x, dy; by place
        self.options = rotation_options(route, f"layer {number}", DTYPE)

    def of(self, step, owner, what=0):
        """The numbers of a rank in a step: of its shard (0), of x (1), of dy (2)."""
        first = 1 + self.number + 10 * step + 1000 * owner + 100000 * what
        return torch.arange(first, first + self.rows, dtype=DTYPE)

    def whole(self, step, what):
        return torch.cat([self.of(step + self.rank, owner, what) for owner in range(self.ranks)])

    def feed(self, step, place):
        self.local.copy_(self.of(step, self.rank))
        for what, tensor in enumerate(self.inputs[place], start=1):
            tensor.copy_(self.whole(step, what))
        return self.inputs[place]

    def part(self, tensor, owner):
        return tensor.narrow(0, owner * self.rows, self.rows)

    def forward(self, executor, local, x):
        y = executor.result([self.ranks * self.rows], DTYPE)
        execution = _native.Execution.rotate(executor, [local], self.shapes, self.route, False)
        while (step := execution.next()) is not None:
            self.sim.launch_copy(self.part(y, step.owner), execution.weight()[0])
            self.sim.launch_add(self.part(y, step.owner), self.part(x, step.owner))
        return [y]

    def backward(self, executor, local, dy):
        dx = executor.result([self.ranks * self.rows], DTYPE)
        gradient = executor.result([self.rows], DTYPE)
        execution = _native.Execution.backward(
            executor, [local], self.shapes, [gradient], self.shapes, self.options, True, False
        )
        while (step := execution.next()) is not None:
            if step.compute == "dgrad":
                self.sim.launch_copy(self.part(dx, step.owner), execution.weight()[0])
                continue
            arrived, (out,) = execution.gradient_in(), execution.gradient_out()
            if arrived and arrived[0].data_ptr() != out.data_ptr():
                self.sim.launch_copy(out, arrived[0])
            (self.sim.launch_add if arrived else self.sim.launch_copy)(out, self.part(dy, step.owner))
        return dx, gradient, None

    def step(self, graphs, step, place, evaluates=False, results=None):
        """A forward and a backward, checked. The host waits for the device at the end of each. `results`: where they
        lie, if not at `place`."""
        x, dy = self.feed(step, place)
        graphs.other = place if results is None else results
        where = f"layer {self.number}, {self.route}, step {step}, rank {self.rank} of {self.ranks}: {graphs!r}"
        (y,) = graphs.run(f"layer {self.number} forward", self.forward, [self.local, x])
        self.sim.synchronize()
        weights = torch.cat([self.of(step, owner) for owner in range(self.ranks)])
        assert torch.equal(y, weights + self.whole(step, 1)), where
        if evaluates:
            return
        dx, gradient, nothing = graphs.run(f"layer {self.number} backward", self.backward, [self.local, dy])
        self.sim.synchronize()
        total = sum(self.of(step + rank, self.rank, 2) for rank in range(self.ranks))
        assert torch.equal(dx, weights) and torch.equal(gradient, total) and nothing is None, where


def train(rank, sim, ranks, id_, barrier, mode):
    """Layers of different sizes, an evaluation between, and addresses that change on some ranks but not on others.
    Returns the numbers of captured, replayed and other passes, before and after slots have grown."""
    end = Rank(sim, rank, ranks, id_, barrier, mode, late=True)
    executor = end.executor
    executor.prefetch(False)
    counts = []
    with one_of_ranks(sim, rank, executor, barrier=barrier):
        sim.set_compute(True)
        graphs = Graphs(executor)
        layers = [Layer(sim, rank, ranks, number, rows, route) for number, (rows, route) in enumerate(
            [(6, "direct"), (4, "ring"), (6, "direct")])]  # fmt: skip
        for turn in range(2):
            before = graphs.captured, graphs.replayed, graphs.stepped
            hops = executor.hops("weight"), executor.bytes_sent("gradient")
            for step in range(STEPS):
                # The first rank's tensors move once, the last one's move back, or, in the first turn, never move.
                moves = step % 3 if rank == ranks - 1 else step == 4
                results = 100 + step if rank == ranks - 1 and turn == 0 else None
                for layer in layers:
                    layer.step(graphs, step, int(moves), results=results)
                    if step % 4 == 3:
                        layer.step(graphs, step, 0, evaluates=True)
            now = graphs.captured, graphs.replayed, graphs.stepped
            counts.append(tuple(b - a for a, b in zip(before, now, strict=True)))
            passes = STEPS * len(layers) * 2 + STEPS // 4 * len(layers)
            assert counts[-1][1] + counts[-1][2] == passes
            each = STEPS * 2 + STEPS // 4
            assert executor.hops("weight") - hops[0] == each * len(layers) * (ranks - 1)
            assert executor.bytes_sent("gradient") - hops[1] == STEPS * (6 + 4 + 6) * 8 * (ranks - 1)
            sim.synchronize()
            end.check_rest()
            if turn == 0:
                Layer(sim, rank, ranks, 7, 50, "ring").step(graphs, 0, 0)  # slots grow: all graphs are of other ones
        executor.close()
        sim.synchronize()
        graphs.forget()
    return counts


@pytest.mark.parametrize(
    ("mode", "ranks"), few([("push", 2), ("pull", 3)], [("push", 2), ("pull", 3), ("mixed", 3), ("push", 3)])
)
def test_replayed_passes_are_those_of_one_process(sim, mode, ranks):
    for delay in (0, 200):
        sim.controls.delay_us = delay
        told = values(
            run_threads(train, ranks, sim, ranks, sim.unique_id(), threading.Barrier(ranks), mode, timeout=60.0)
        )
        for rank, turn in ((0, 0), (0, 1), (-1, 1)):
            captured, replayed, _ = told[rank][turn]
            assert captured >= 6 and replayed > captured, told
        assert told[-1][0][:2] < told[0][0][:2] and told[-1][0][2] > told[0][0][2], "it steps while others replay"
    assert sim.mistakes() == []


def test_a_graph_of_slots_that_are_gone_is_not_launched(sim):
    class Careless(Graphs):
        def forget(self):
            self._generation = self._executor.generation()

    def work(rank, id_, barrier):
        end = Rank(sim, rank, 2, id_, barrier, "push", 4.0, late=True)
        sim.set_compute(True)
        graphs = Careless(end.executor)
        layer = Layer(sim, rank, 2, 0, 6, "direct")
        for step in range(5):
            layer.step(graphs, step, 0)
        assert graphs.replayed > 0
        Layer(sim, rank, 2, 1, 60, "direct").step(graphs, 0, 0)
        with pytest.raises(RotationError, match="a graph of slots that are gone"):
            layer.step(graphs, 5, 0)
        sim.set_compute(False)

    values(run_threads(work, 2, sim.unique_id(), threading.Barrier(2)))


def until_failure(rank, sim, id_, barrier, fault, timeout, news):
    """Ranks 0 and 1 replay; rank 2 runs `fault` after the first steps."""
    end = Rank(sim, rank, 3, id_, barrier, "push", timeout, news=news[rank], late=True)
    sim.set_compute(True)
    graphs = Graphs(end.executor)
    layer = Layer(sim, rank, 3, 0, 6, "direct")
    for step in range(6):
        layer.step(graphs, step, 0)
    assert graphs.replayed >= 4
    barrier.wait(20)
    if rank == 2:
        if fault == "fails":
            end.executor.fail("an error of its own")
        barrier.wait(30)
        sim.set_compute(False)
        return None
    start, stepped = time.monotonic(), graphs.stepped
    x, _ = layer.feed(6, 0)
    with pytest.raises(RotationError) as raised:
        while time.monotonic() < start + 20:
            graphs.run("layer 0 forward", layer.forward, [layer.local, x])
            time.sleep(0.01)
    waited = time.monotonic() - start
    assert graphs.stepped == stepped, "control: it was in graphs that they waited"
    end.executor.fail("given up")
    del end.executor, end.transport, graphs
    gc.collect()
    sim.synchronize()
    sim.set_compute(False)
    barrier.wait(30)
    return str(raised.value), waited


@pytest.mark.parametrize(("fault", "timeout"), [("is silent", 1.0), ("fails", 100.0)])
def test_a_failure_reaches_who_waits_in_a_graph(sim, fault, timeout):
    """The memory of the graph stays mapped until it has ended: otherwise the simulation notes an error."""
    arguments = (sim, sim.unique_id(), threading.Barrier(3), fault, timedelta(seconds=timeout), connected_news(3))
    for told in values(run_threads(until_failure, 3, *arguments, timeout=60.0))[:2]:
        text, waited = told
        assert waited < min(timeout, 5) + 5
        if fault == "fails":
            assert "rank 2 of the ring has failed: an error of its own" in text
        else:
            assert "layer 0 forward, as a graph" in text and "a rank of the ring did not answer" in text
    assert sim.mistakes() == []


def test_an_error_in_a_capture_ends_the_capture(sim):
    """The pass raises while it is captured: the ring fails, no capture remains, and the others receive the failure."""
    news = connected_news(2)

    def work(rank, id_, barrier):
        end = Rank(sim, rank, 2, id_, barrier, "push", timedelta(seconds=100), news=news[rank], late=True)
        sim.set_compute(True)
        graphs, layer = Graphs(end.executor), Layer(sim, rank, 2, 0, 6, "direct")
        for step in range(2):
            layer.step(graphs, step, 0)
        barrier.wait(20)
        x, _ = layer.feed(2, 0)

        def broken(executor, local, x):
            del executor, local, x
            raise RotationError("what an operation says")

        if rank == 0:
            with pytest.raises(RotationError, match="what an operation says"):
                graphs._aside("layer 0 forward", broken, [layer.local, x], None, captured=True)
            assert not end.executor.captured()
            end.executor.fail("what an operation says")
        else:
            with pytest.raises(RingTimeout, match="rank 0 of the ring has failed"):
                while True:
                    graphs.run("layer 0 forward", layer.forward, [layer.local, x])
                    time.sleep(0.01)
        sim.synchronize()
        sim.set_compute(False)
        barrier.wait(30)

    values(run_threads(work, 2, sim.unique_id(), threading.Barrier(2)))
    assert sim.mistakes() == []


def test_transports_that_need_both_ends_captured_are_refused(sim):
    def work(rank, ids):
        executor = _native.Executor(sim.nccl(ids, rank, 2, timedelta(seconds=20), None), rank, 2, torch.device("cpu"))
        with pytest.raises(ValueError, match="expected graphs 'auto' or 'off', got 'on': over the transport nccl both"):
            graphs_of(executor, "on", transport="nccl", device="cuda")
        found = graphs_of(executor, "auto", transport="nccl", device="cuda")
        assert not found.on and "number of tokens" in found.reason

    values(run_threads(work, 2, [sim.unique_id() for _ in range(2)]))

    def alone(_):
        return _native.Executor(sim.ce(sim.unique_id(), 0, 1, timedelta(seconds=20), None), 0, 1, torch.device("cpu"))

    (executor,) = values(run_threads(alone, 1))
    with pytest.raises(ValueError, match="late_gradients is 1"):
        graphs_of(executor, "on", device="cuda", size=1, late_gradients=1)
    assert graphs_of(executor, "auto", device="cuda", size=1).on


def test_what_a_capture_may_not_contain_is_noticed(sim):
    """The simulation itself: streams that are not joined, events from outside, queries of captured events."""
    one, two, event, outside = sim.Stream(), sim.Stream(), sim.Event(), sim.Event()
    a, b = torch.arange(4.0), torch.zeros(4)
    outside.record(two)
    sim.begin_capture(one)
    event.record(one)
    two.wait(event)
    two.copy(b, a)  # nothing of `one` comes after it
    with pytest.raises(RotationError, match=r"EndCapture\(.*failed with code 904"):
        sim.end_capture(one)
    sim.begin_capture(one)
    with pytest.raises(RotationError, match="failed with code 905"):
        one.wait(outside)
    with pytest.raises(RotationError, match="failed with code 901"):
        sim.end_capture(one)
    sim.begin_capture(one)
    event.record(one)
    event.reached()
    two.wait(event)
    two.copy(b, a)
    event.record(two)
    one.wait(event)
    graph = sim.end_capture(one)
    found = Counter(text.split(" by ")[0].split(" of an event")[0] for text in sim.mistakes())
    assert found == {
        "a stream that is being captured waits for an event from outside of the capture": 1,
        "cudaEventQuery": 1,  # of an event of the capture; others may be asked for
    }, sim.mistakes()
    sim.reset(1)
    assert b.eq(0).all(), "what is captured does not run"
    for first in (1.0, 5.0):
        a.copy_(torch.arange(first, first + 4))
        graph.launch(one)
        one.synchronize()
        assert torch.equal(a, b)
    del graph
    assert sim.mistakes() == []
