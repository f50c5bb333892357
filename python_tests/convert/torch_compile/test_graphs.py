"""torch.compile puts rotated operations into its graphs: outputs, gradients and hops are those of eager calls."""

import pytest
import torch
from graph_cases import Mixed, compare, in_graphs
from grids import few
from harness import on_ranks
from models import make_batch, make_model
from reference import assert_same, random
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters

import rtp_ext
from rtp_ext.convert.modules.shared_input import join
from rtp_ext.nn import RotatedLinear

TIMEOUT = 60.0


def _compare(cases, name, make, compiled, batches):
    compare(cases, name, lambda: rtp_ext.fully_rotate(make(), timeout=TIMEOUT), compiled, batches)


@in_graphs
@on_ranks(few([3], [2, 3]), timeout=600.0)
def test_one_graph_is_the_eager_model(rank, ranks, cases):
    backend = "aot_eager"
    batches = [make_batch(rank, step, tokens)[0] for step, tokens in enumerate((6, 8, 5))]
    whole = {"backend": backend, "fullgraph": True}

    def inside(model):  # whose hooks are in the graph too
        return torch.compile(lambda ids: model(ids) * 1.0, **whole)

    def blocks(model):  # one by one, within an eager model
        for block in model.blocks:
            block.compile(**whole)
        return model

    def small():
        return make_model(blocks=1)

    counters.clear()
    _compare(cases, "a model", Mixed, lambda model: torch.compile(model, dynamic=True, **whole), batches)
    with cases.case("one graph for all numbers of tokens"):
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"], counters
    if ranks == 2:
        _compare(cases, "a function around a model", small, inside, batches[:1])
        _compare(cases, "blocks", small, blocks, batches[:1])


@on_ranks(2, timeout=600.0)
@in_graphs
def test_what_cannot_be_in_a_graph_breaks_it_or_is_refused(rank, cases):
    layer = nn.Linear(6, 6).double()
    x = random(4, 6, dtype=torch.float64, seed=50 + rank)
    with rtp_ext.Ring(timeout=TIMEOUT) as ring, rtp_ext.Ring(in_place=True, timeout=TIMEOUT) as moving:
        in_place = RotatedLinear.from_module(layer, moving)
        plain = RotatedLinear.from_module(layer, ring)
        for what, twin in (("in place", in_place), ("in the compute dtype of the wrong input", plain)):
            torch._dynamo.reset()
            given = x if twin is in_place else x.float()
            with cases.case(f"{what}: one graph is refused"), pytest.raises(Unsupported):
                torch.compile(twin, backend="aot_eager", fullgraph=True)(given)
        torch._dynamo.reset()
        with cases.case("in place: the graph breaks, and numbers are right"):
            assert_same(torch.compile(in_place, backend="aot_eager")(x), layer(x), 1e-12, "output")
        with cases.case("a wrong dtype is the eager error"), pytest.raises(TypeError, match="dtype"):
            torch.compile(plain, backend="aot_eager")(x.float())
        torch._dynamo.reset()
        compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
        with cases.case("a parameter that is not the registered one"):
            assert_same(compiled(x), layer(x), 1e-12, "output")
            held = plain._parameters["weight"]
            moved = nn.Parameter(held.detach().clone())
            plain._parameters["weight"] = moved  # found again: it is registered
            assert_same(compiled(x), layer(x), 1e-12, "output of the parameter in its place")
        assert ring.alive
    with cases.case("a ring that is gone"), pytest.raises(rtp_ext.RotationError, match="closed"):
        compiled(x)


class Written(nn.Module):
    """Layers that travel together, and an input that is written to before the last of them is called."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(10, 6, bias=False) for _ in range(3))
        self.writes = writes
        for number, parameter in enumerate(self.parameters()):
            parameter.data = random(*parameter.shape, dtype=torch.float64, seed=300 + number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = self.q_proj(x) + self.k_proj(x)
        if self.writes:
            x.mul_(3.0)
        return y * self.v_proj(x)


@on_ranks(2, timeout=600.0)
@in_graphs
def test_an_input_that_is_written_to_between_layers_that_travel_together(rank, cases):
    backend = "aot_eager"
    x = random(4, 10, dtype=torch.float64, seed=60 + rank)
    for writes in (False, True):
        torch._dynamo.reset()
        plain = Written(writes)
        model = rtp_ext.fully_rotate(Written(writes), timeout=TIMEOUT)
        join(model, ("q_proj", "k_proj", "v_proj"), "written")
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        with torch.no_grad():
            expected = plain(x)
        for time in range(2):
            with cases.case(f"input that is written to {writes}, time {time}"), torch.no_grad():
                assert_same(compiled(x), expected, 1e-12, "output")
                together = model.q_proj.together.shared
                assert together is not writes, "they travel together where nobody writes"
        if writes:  # which the backward would read: refused, as eagerly
            for what, call in (("compiled", torch.compile(model, backend=backend, fullgraph=True)), ("eager", model)):
                with cases.case(f"{what}, with gradients"), pytest.raises(RuntimeError, match="inplace operation"):
                    call(x).sum().backward()
        rtp_ext.ring_of(model).close()
