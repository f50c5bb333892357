"""Passes as graphs combined with all other options of a pass: over the transport `ce` in the simulation, with the
unmodified operations of the extension and torch's operators as kernels of the compute stream, replays give the same
bits as passes that are enqueued hop by hop."""

import threading
from dataclasses import dataclass, field

import pytest
import torch
from grids import few
from reference import chunk, random
from simulated_cuda import one_of_ranks, run_threads, skip_without_headers, values
from simulated_cuda.late import late
from test_pass_graphs import Graphs
from test_transport_ce import Rank

from rtp_ext import _native

skip_without_headers()

TOKENS, INPUTS, STEPS = 3, 6, 7
BF16, F32 = torch.bfloat16, torch.float32
DIRECT = {"gradient_route": "direct"}


@dataclass
class Case:
    """The options of passes, and the operations that take them."""

    options: dict = field(default_factory=dict)
    multiprocessors: int = 0
    linears_only: bool = False
    mode: str = "push"
    hosts: int = 1


CASES = {
    "plain": Case(mode="mixed"),
    "weights in bfloat16": Case({"travel": "bfloat16"}),
    "bfloat16, gradients too": Case({"compute_dtype": BF16, "reduce_dtype": BF16}),
    "gathered": Case({"route": "gather"}),
    "groups": Case({**DIRECT, "group": 2}),
    "straight home": Case(DIRECT, mode="mixed"),
    "straight home in bfloat16": Case({**DIRECT, "compute_dtype": BF16, "reduce_dtype": BF16}),
    "straight": Case({**DIRECT, "route": "direct"}, mode="pull"),
    "halves": Case({"halves": True}, linears_only=True),
    "two lanes": Case(multiprocessors=3, linears_only=True),
    "pieces": Case({"slot_cap": 64, "travel": "bfloat16"}, linears_only=True),
}
TWO_LEVELS = {
    "two levels": Case({"route": "two-level"}, hosts=2),
    "two levels, bfloat16 and two lanes": Case(
        {"route": "two-level", "travel": "bfloat16"}, multiprocessors=3, hosts=2
    ),
}


class Calls:
    """Passes of operations on one rank: `made[number](last)`, of the last result, gives a function and arguments."""

    def __init__(self, rank, ranks, case):
        options = {"route": "ring", "in_place": False, "compute_dtype": F32, "reduce_dtype": F32, "slot_cap": 0}
        options |= {"halves": False, **case.options}
        self.dtype, self.ranks, self.rank = options["compute_dtype"], ranks, rank
        self.tensors = []
        self.made = [
            *self._linears(options),
            *([] if case.linears_only else [*self._partial(options), *self._mlps(options)]),
        ]

    def tensor(self, *shape, dim=None):
        """One that is fed anew in every step; `dim`: this rank's shard of the whole."""
        whole = torch.zeros(shape, dtype=self.dtype)
        mine = whole if dim is None else chunk(whole, self.ranks, self.rank, dim).clone()
        self.tensors.append((mine, shape, dim))
        return mine

    def feed(self, step):
        for number, (tensor, shape, dim) in enumerate(self.tensors):
            seed = 1000 * step + 10 * number + (self.rank if dim is None else 0)
            whole = random(*shape, dtype=self.dtype, seed=seed)
            tensor.copy_(whole if dim is None else chunk(whole, self.ranks, self.rank, dim))

    def _linears(self, options):
        outs = [5, 4] if options["slot_cap"] == 0 else [40]
        shapes = [_native.LinearShape(out, INPUTS, by_outputs=True, transposed=False) for out in outs]
        bundle = _native.LinearBundle(shapes, [True] * len(outs))
        projections = [_native.Projection(0, layer, 0, out) for layer, out in enumerate(outs)]
        told = _native.RotationOptions(name="linears", **options)
        local = [part for out in outs for part in (self.tensor(out, INPUTS, dim=0), self.tensor(out, dim=0))]
        x, dys = self.tensor(TOKENS, INPUTS), [self.tensor(TOKENS, out) for out in outs]
        yield lambda last: (_native.linear_forward, [[x], local, bundle, projections, told])
        # together, and in the two parts of a zero-bubble pipeline
        for of_x, of_parameters in ((True, True), (True, False), (False, True)):
            yield lambda last, of_x=of_x, of=of_parameters: (
                _native.linear_backward,
                [dys, [x], local, bundle, projections, [of_x], [of] * len(local), told],
            )

    def _partial(self, options):
        shape = _native.LinearShape(7, INPUTS, by_outputs=False, transposed=False)
        told = _native.RotationOptions(name="partial", **options)
        weight, bias = self.tensor(7, INPUTS, dim=1), self.tensor(7, dim=0)
        x, dy = self.tensor(TOKENS, INPUTS), self.tensor(TOKENS, 7)
        yield lambda last: (_native.partial_linear_forward, [x, weight, bias, shape, told])
        yield lambda last: (_native.partial_linear_backward, [dy, x, weight, shape, (True, True, True), told])

    def _mlps(self, options):
        for gated, keeps, activation in ((True, True, "silu"), (False, False, "gelu_tanh")):
            shape = _native.MlpShape(
                in_features=INPUTS, hidden_features=8, out_features=5, gated=gated, transposed=False, up_bias=True,
                down_bias=True, activation=activation,
            )  # fmt: skip
            told = _native.RotationOptions(name=f"mlp {activation}", **options)
            ups = [part for _ in range(1 + gated) for part in (self.tensor(8, INPUTS, dim=0), self.tensor(8, dim=0))]
            local = [*ups, self.tensor(5, 8, dim=1), self.tensor(5, dim=0)]
            x, dy = self.tensor(TOKENS, INPUTS), self.tensor(TOKENS, 5)
            yield lambda last, x=x, local=local, shape=shape, keeps=keeps, told=told: (
                _native.mlp_forward,
                [x, local, shape, keeps, told],
            )
            yield lambda last, dy=dy, x=x, local=local, shape=shape, told=told: (
                _native.mlp_backward,
                [dy, x, *last[1:], local, shape, True, [True] * len(local), told],
            )


def tensors_of(returned):
    if isinstance(returned, torch.Tensor):
        return [returned]
    if isinstance(returned, (list, tuple)):
        return [tensor for each in returned for tensor in tensors_of(each)]
    return []


def same(one, other):
    return len(one) == len(other) > 0 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def compare(rank, sim, ranks, ids, barrier, case):
    ends = [Rank(sim, rank, ranks, id_, barrier, case.mode, late=True, hosts=case.hosts) for id_ in ids]
    plain, executor = (end.executor for end in ends)
    with one_of_ranks(sim, rank, plain, executor, barrier=barrier):
        calls = Calls(rank, ranks, case)
        expected = []
        for step in range(STEPS):
            calls.feed(step)
            returned = None
            for call in calls.made:
                function, arguments = call(returned)
                returned = function(plain, *arguments)
                expected.append([tensor.clone() for tensor in tensors_of(returned)])
        assert not same(expected[0], expected[len(calls.made)]), "control: steps differ"
        executor.prefetch(False)
        sim.set_compute(True)
        graphs, answers = Graphs(executor), iter(expected)
        for step in range(STEPS):
            calls.feed(step)
            returned = None
            for number, call in enumerate(calls.made):
                function, arguments = call(returned)
                graphs.other = number
                with late(sim) as operators:
                    returned = graphs.run(f"call {number}", function, arguments)
                sim.synchronize()
                assert same(tensors_of(returned), next(answers)), f"call {number} of step {step}, {graphs!r}"
                if step == STEPS - 1:
                    assert operators.enqueued == 0, f"call {number} is no graph: {graphs!r}"
        assert graphs.captured >= len(calls.made) and graphs.replayed >= 2 * len(calls.made), graphs
        ends[1].check_rest()
        for each in (plain, executor):
            each.close()
        graphs.forget()


def check(sim, ranks, cases):
    for seed, (name, case) in enumerate(cases.items()):
        sim.controls.multiprocessors, sim.controls.delay_us = case.multiprocessors, 50 * (seed % 2)
        ids = [sim.unique_id() for _ in range(2)]
        results = run_threads(compare, ranks, sim, ranks, ids, threading.Barrier(ranks), case, timeout=60.0)
        for rank, result in enumerate(results):
            if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
                raise AssertionError(f"{name}: rank {rank} of {ranks} failed: {result}") from result
        values(results)
        assert sim.mistakes() == [], name


@pytest.mark.parametrize("ranks", few([3], [2, 3]))
def test_replays_give_the_bits_of_passes_that_are_enqueued(sim, ranks):
    names = few(
        ["plain", "straight home in bfloat16", "straight", "gathered", "groups"],
        list(CASES),
    )
    check(sim, ranks, {name: CASES[name] for name in names})


def test_replays_on_two_levels(sim):
    check(sim, 4, {name: TWO_LEVELS[name] for name in few(["two levels"], list(TWO_LEVELS))})
