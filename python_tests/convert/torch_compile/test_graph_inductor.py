"""Graphs of converted models by inductor: cold and warm, one for all numbers of tokens, tied weights, a layer with an
unused output; and writes to weights that the backward would read, which autograd cannot detect."""

import functools
import logging
import os

import pytest
import torch
from graph_cases import compare, in_graphs, step
from grids import few
from harness import on_ranks
from models import make_batch
from reference import assert_same, differs, random
from torch import nn
from torch._dynamo.utils import counters

import rtp_ext

TIMEOUT = 60.0


class Tied(nn.Module):
    """The head is the embedding's table, and the output of one layer is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.unused = nn.Embedding(19, 8), nn.Linear(8, 5)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 19, bias=False)
        self.head.weight = self.embed.weight
        for number, parameter in enumerate(self.parameters()):
            parameter.data = random(*parameter.shape, dtype=torch.float64, seed=400 + number)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        self.unused(x)
        return self.head(self.norm(x))


class Writing(nn.Module):
    """Writes to a weight that it has used, within its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 5, bias=False)
        self.layer.weight.data = random(5, 8, dtype=torch.float64, seed=5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        with torch.no_grad():
            self.layer.weight.mul_(3.0)
        return y


def rotated(model: nn.Module) -> nn.Module:
    return rtp_ext.fully_rotate(model, mesh=rtp_ext.Ring(timeout=TIMEOUT, checksum=True))


def _write(parameter, factor):
    with torch.no_grad():
        parameter.mul_(factor)


def _writes(rank, cases, batches):
    """The effect of a write to each parameter between a forward and its backward."""
    torch._dynamo.reset()
    eager, model = rotated(Tied()), rotated(Tied())
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    outputs = []
    for number, name in enumerate(("embed.weight", "unused.weight", "norm.weight")):
        for what, owner, call in (("eager", eager, eager), ("compiled", model, compiled)):
            with cases.case(f"a write to {name}, {what}"):
                output = call(batches[0])
                _write(owner.get_parameter(name), 1.0 + number)
                if name == "unused.weight":
                    output.square().mean().backward()
                else:
                    with pytest.raises(RuntimeError, match="inplace operation"):
                        output.square().mean().backward()
        for each in (eager, model):
            each.zero_grad()
        with cases.case(f"the step after a write to {name}"):
            expected, gradients, hops = step(eager, eager, batches[0])
            output, theirs, their_hops = step(model, compiled, batches[0])
            outputs.append(expected)
            assert_same(output, expected, 1e-12, "output")
            for key, gradient in gradients.items():
                assert (gradient is None) is (theirs[key] is None), key
                if gradient is not None:
                    assert_same(theirs[key], gradient, 1e-12, key)
            assert their_hops == hops, f"expected {hops} hops, got {their_hops}"
    with cases.case("control: a write to the norm shows, one to what nobody uses does not"):
        assert differs(outputs[2], outputs[0], 1e-3) and not differs(outputs[1], outputs[0], 0.0)
    for each in (eager, model):
        rtp_ext.ring_of(each).close()


def _writes_inside(rank, cases, batches):
    torch._dynamo.reset()
    x = random(4, 8, dtype=torch.float64, seed=60 + rank).requires_grad_()
    compiled = functools.partial(torch.compile, fullgraph=True)
    for what, made in (("eager", lambda model: model), ("compiled", compiled)):
        model = rotated(Writing())
        with cases.case(f"a write within the forward, {what}"):
            output = made(model)(x)
            assert_same(output, Writing()(x), 1e-12, "output")
            with pytest.raises(RuntimeError, match="inplace operation"):
                output.sum().backward()
        rtp_ext.ring_of(model).close()


@in_graphs
@on_ranks(few([2], [2, 3]), timeout=600.0)
def test_inductor_cold_warm_and_written_to(rank, cases, tmp_path):
    folder = str(tmp_path)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # here: ranks do not have the parent's environment
    torch._inductor.config.compile_threads = 1  # no pool of processes, each of which would import torch
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    torch._inductor.config.fx_graph_cache = True
    batches = [make_batch(rank, number, tokens)[0] for number, tokens in enumerate((6, 8))]
    for state in ("cold", "warm"):
        counters.clear()
        compiled = functools.partial(torch.compile, fullgraph=True, dynamic=True)
        compare(cases, state, lambda: rotated(Tied()), compiled, batches)
        with cases.case(f"{state}: one graph for all numbers of tokens"):
            assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"], counters
    with cases.case("the second time as the first: torch 2.14 stores no graph with effects"):
        found = counters["inductor"]
        assert found["fxgraph_cache_bypass"] + found["fxgraph_cache_hit"] > 0, counters
    for check in few([_writes], [_writes, _writes_inside]):
        check(rank, cases, batches)
