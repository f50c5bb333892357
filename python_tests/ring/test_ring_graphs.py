"""Passes as graphs, without a GPU: which rings have them, and that operations write their results to the given memory.
python_tests/engine/pass_graphs/test_pass_graphs.py tests replays."""

from types import SimpleNamespace

import pytest
import torch
from pretended_hosts import graphs_of
from reference import random
from replayed import replayed
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from rtp_ext import Ring, RotationError
from rtp_ext.functional import rotated_linear, rotated_linears, rotated_mlp
from rtp_ext.options import RingOptions
from rtp_ext.ring import graphs as module
from rtp_ext.ring.graphs import CAPTURED, Pass, PassGraphs, _fill, _places

CPU, DOUBLE = torch.device("cpu"), torch.float64


def test_rings_that_have_no_graphs_say_why():
    ring = Ring.emulated(2)
    assert not ring.graphs.on and ring.graphs.reason == "not asked for" and ring.prefetch == 1
    ring = Ring.emulated(2, graphs="auto")
    assert not ring.graphs.on and "no CUDA streams" in ring.graphs.reason and ring.prefetch == 1
    with pytest.raises(
        ValueError, match="expected graphs 'auto' or 'off', got 'on': over the transport emulated there"
    ):
        Ring.emulated(2, graphs="on")
    with pytest.raises(ValueError, match="expected graphs to be one of auto, on, off, got 'always'"):
        Ring.emulated(2, graphs="always")
    ring.close()


def _executor():
    """An executor over a transport that supports graphs, for choose_graphs()."""
    return SimpleNamespace(
        takes_graphs=lambda: True, prefetch=lambda _: None, fix_slots=lambda: None, generation=lambda: 0
    )


def test_what_was_not_tried_together_is_refused():
    for wish in ("auto", "on"):
        assert graphs_of(_executor(), wish).on, "control: nothing else refuses"
        assert graphs_of(_executor(), wish, travel="bfloat16").on
    for told, option in (
        ({"travel": "int8"}, "travel='int8'"),
        ({"gradient_travel": "int8"}, "gradient_travel='int8'"),
        ({"tensor_parallel": True}, "tensor parallelism"),
    ):
        graphs = graphs_of(_executor(), "auto", **told)
        assert not graphs.on and graphs.reason == f"{option} and graphs were not tried together"
        with pytest.raises(ValueError, match=f"got 'on': {option} and graphs were not tried"):
            graphs_of(_executor(), "on", **told)


def test_host_memory_and_graphs_are_refused():
    for wanted in ("auto", "on"):
        graphs, executor = graphs_of(_executor(), wanted), _executor()
        ring = SimpleNamespace(
            graphs=graphs,
            communicator=SimpleNamespace(executor=executor),
            device=CPU,
            host_memory=None,
            offload_policy=None,
            options=RingOptions(),
        )
        Ring.offload(ring, OffloadPolicy())
        assert ring.graphs.on and isinstance(ring.offload_policy, OffloadPolicy), "control: nothing is offloaded"
        if wanted == "on":
            with pytest.raises(ValueError, match=r"with offload_policy=CPUOffloadPolicy, got 'on'"):
                Ring.offload(ring, CPUOffloadPolicy())
        else:
            Ring.offload(ring, CPUOffloadPolicy())
            assert not ring.graphs.on and "offload_policy=CPUOffloadPolicy" in ring.graphs.reason


def test_a_ring_with_graphs_sends_nothing_ahead():
    with replayed() as rings, Ring.emulated(2) as ring:
        assert ring.graphs is rings[0] and ring.prefetch == 0
        for _ in range(3):
            rotated_linear(random(3, 4, dtype=DOUBLE, seed=1), random(2, 4, dtype=DOUBLE, seed=2), ring=ring)
        assert ring.prefetched() == (0, 0)
    with Ring.emulated(2) as ring:
        assert ring.prefetch == 1


def test_a_graph_of_the_caller_is_refused():
    captured = SimpleNamespace(captured=lambda: True, fix_slots=lambda: None)
    with pytest.raises(RotationError, match=r"up: expected no CUDA graph of the caller's .* graphs='off'"):
        PassGraphs(captured, "", on=True, device=CPU).run("up", max, (1, 2))


class Placed:
    """Stands for the graphs of a ring: every pass runs once more with its results given, and must fill these."""

    on = True

    def __init__(self, executor):
        self.executor, self.seen = executor, []

    def run(self, operation, function, arguments):
        executor = self.executor
        expected = _tensors(function(executor, *arguments))
        executor.note_results()
        noted = function(executor, *arguments)
        asked = executor.results()
        executor.clear_results()
        places = _places(noted, list(enumerate(asked)))
        assert places is not None, f"{operation}: {function} returns memory that nobody gave it"
        given = [torch.full_like(each, float("nan")) for each in asked]
        executor.give_results(given)
        returned = function(executor, *arguments)
        executor.clear_results()
        filled = _fill(places, given)
        assert type(filled) is type(returned) and len(_tensors(filled)) == len(expected) > 0
        for mine, theirs, first in zip(_tensors(filled), _tensors(returned), expected, strict=True):
            assert mine.data_ptr() == theirs.data_ptr() and torch.equal(mine, first), f"{operation}: {function}"
        self.seen.append(function)
        return filled

    def forget(self):
        pass


def _tensors(returned):
    if isinstance(returned, torch.Tensor):
        return [returned]
    if isinstance(returned, (list, tuple)):
        return [tensor for each in returned for tensor in _tensors(each)]
    return []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_operations_write_their_results_where_they_are_told(dtype):
    ranks, tokens, inputs = 3, 5, 6
    with Ring.emulated(ranks) as ring:
        placed = ring._op_runner.graphs = Placed(ring.communicator.executor)

        def numbers(*shape, seed):
            return random(*shape, dtype=dtype, seed=seed).requires_grad_()

        x = numbers(tokens, inputs, seed=1)
        up, gate = numbers(4, inputs, seed=2), numbers(4, inputs, seed=3)
        down, bias = numbers(inputs, 4, seed=4), numbers(4, seed=5)
        partial = numbers(7, 2, seed=6)
        calls = [
            lambda: rotated_linear(x, up, bias, ring=ring),
            lambda: sum(
                y.sum()
                for y in rotated_linears([x, x * 2], [up, gate], ring=ring, projections=[(0, 0, 0, 12), (1, 1, 0, 12)])
            ),
            lambda: rotated_linear(x, partial, ring=ring, shard_dim=1),
            lambda: rotated_mlp(x, up, down, gate, activation="swiglu", ring=ring),
            lambda: rotated_mlp(x, up, down, activation="gelu", recompute=True, ring=ring),
        ]
        for call in calls:
            call().sum().backward()
        frozen = up.detach()
        rotated_linear(x, frozen, ring=ring).sum().backward()  # no gradient of the weight
        assert set(placed.seen) == set(CAPTURED)


def test_a_pass_that_returns_other_memory_is_not_captured():
    class Executor:
        def generation(self):
            return 0

        def captured(self):
            return False

        def traced(self):
            return False

        def note_results(self):
            pass

        def results(self):
            return []

        def clear_results(self):
            pass

        def fix_slots(self):
            pass

    graphs = PassGraphs(Executor(), "asked for", on=True, device=CPU)
    x = torch.ones(3)
    for _ in range(4):
        assert torch.equal(graphs.run("an operation", lambda _, x: x * 2, [x]), x * 2)
    assert (graphs.captured, graphs.replayed, graphs.stepped) == (0, 0, 4)


def test_shapes_and_options_tell_passes_apart():
    seen = []

    class Told(PassGraphs):
        def _first(self, known, function, arguments):
            assert isinstance(known, Pass) and known.results is None
            seen.append(arguments)
            return self._step(function, arguments)

    ring = Ring.emulated(2)
    graphs = Told(ring.communicator.executor, "asked for", on=False, device=CPU)
    graphs._generation = ring.communicator.executor.generation()

    def nothing(*_):
        return None

    first = [torch.ones(2, 3), [torch.ones(4), None], (True, False)]
    others = [
        [torch.ones(3, 2).t(), [torch.ones(4), None], (True, False)],
        [torch.ones(2, 3), [torch.ones(4, dtype=torch.float64), None], (True, False)],
        [torch.ones(2, 3), [None, torch.ones(4)], (True, False)],
        [torch.ones(2, 3), [torch.ones(4), None], (True, True)],
    ]
    for arguments in (first, *others, first):
        graphs.run("an operation", nothing, arguments)
    assert len(graphs._passes) == 1 + len(others)
    ring.close()


def test_passes_that_are_in_use_are_kept(monkeypatch):
    monkeypatch.setattr(module, "MOST_PASSES", 2)
    ring = Ring.emulated(2)
    graphs = PassGraphs(ring.communicator.executor, "asked for", on=False, device=CPU)

    def nothing(*_):
        return None

    for tokens in (1, 2, 1, 3, 1):
        graphs.run("an operation", nothing, [torch.ones(tokens)])
    assert [key[1][0] for key in graphs._passes] == [torch.Size([3]), torch.Size([1])]
    ring.close()


def test_copies_of_graphs_are_not_called_copies_by_copy_engines():
    asked = [None, "sm-local", "ce-local", "ce-local:4", "pcie"]
    eager, graphs = ([module.emulated_link(link, SimpleNamespace(on=on)) for link in asked] for on in (False, True))
    assert eager == ["sm-local", *asked[1:]] and graphs == ["sm-local"] * 4 + ["pcie"]
