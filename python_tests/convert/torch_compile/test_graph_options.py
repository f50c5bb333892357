"""Options of rings and models in graphs of torch.compile: what the eager model computes with them, and its hops."""

from __future__ import annotations

import functools

import pytest
import torch
from graph_cases import Mixed, compare, in_graphs, step
from grids import few
from harness import on_ranks
from models import make_batch
from reference import assert_same, differs
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy

import rtp_ext
from rtp_ext.convert.modules.shared_input import join

TIMEOUT = 60.0
BF16 = torch.bfloat16


class Adapted(nn.Module):
    """A layer and a low-rank addition to it, as the peft package adds one."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        self.base_layer = base
        generator = torch.Generator().manual_seed(seed)
        like = {"dtype": base.weight.dtype, "generator": generator}
        self.lora_A = nn.Parameter(torch.randn(base.in_features, 3, **like))
        self.lora_B = nn.Parameter(torch.randn(3, base.out_features, **like))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base_layer(x)
        return y + 2.0 * (x.to(self.lora_A.dtype) @ self.lora_A @ self.lora_B).to(y.dtype)


def adapt(model: nn.Module) -> nn.Module:
    """All weights frozen, the head and a layer of the block adapted."""
    model.requires_grad_(False)
    model.head = Adapted(model.head, seed=1)
    model.unused = Adapted(model.unused, seed=2)
    return model


OF_MODELS = ("mp_policy", "bundle")  # the other options are those of rings


def mixed(dtype=torch.float32, change=lambda model: model, after=lambda model: model, **options) -> nn.Module:
    own = {name: options.pop(name) for name in OF_MODELS if name in options}
    ring = rtp_ext.Ring(timeout=TIMEOUT, **options)
    return after(rtp_ext.fully_rotate(change(Mixed().to(dtype)), mesh=ring, **own))


POLICY = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=torch.float32)
# by name: how the model is made, and whether a forward is under autocast
OPTIONS = {
    "nothing": ({}, False),
    "autocast": ({}, True),
    "mp_policy": ({"mp_policy": POLICY}, False),
    "mp_policy, gradients in bfloat16": ({"mp_policy": MixedPrecisionPolicy(BF16, BF16)}, False),
    "parameters in bfloat16": ({"dtype": BF16}, False),
    "adapters, then rotated": ({"change": adapt}, False),
    "rotated, then adapters": ({"after": adapt}, False),
    "rotated, then adapters, autocast": ({"after": adapt}, True),
    "travel bfloat16": ({"travel": "bfloat16"}, False),
    "travel int8": ({"travel": "int8"}, False),
    "travel int8, autocast": ({"travel": "int8"}, True),
    "gradient_route direct": ({"gradient_route": "direct"}, False),
    "gradient_travel int8": ({"gradient_route": "direct", "gradient_travel": "int8"}, False),
    "checksum": ({"checksum": True}, False),
    "gathered layers": ({"route": "gather"}, False),
    "recomputed bundles": ({"bundle": "recompute"}, False),
    "late gradients": ({"transport": "tcp"}, False),
}
# In `make test` several at once.
MANY = "travel int8, two hops ahead, gradient_travel int8, checksum, autocast"
OPTIONS[MANY] = (
    {"travel": "int8", "gradient_route": "direct", "gradient_travel": "int8", "checksum": True},
    True,
)
ENOUGH = ["mp_policy", "gathered layers", MANY]
CHANGES = ("autocast", "mp_policy", "rotated, then adapters", "travel bfloat16", "travel int8")  # what comes out


@in_graphs
@on_ranks(few([3], [2, 3]), timeout=600.0)
def test_options_in_one_graph(rank, cases):
    backend = "aot_eager"
    names = few(ENOUGH, list(OPTIONS))
    batch = [make_batch(rank, 0, 6)[0]]
    outputs = {}
    for name in names:
        make, autocast = OPTIONS[name]

        def compiled(model, autocast=autocast):
            graph = torch.compile(model, backend=backend, fullgraph=True)
            return functools.partial(_under, autocast, graph)

        counters.clear()
        outputs[name] = compare(
            cases, name, lambda make=make: mixed(**make), compiled, batch, 0.0, functools.partial(_under, autocast)
        )
        with cases.case(f"{name}: one graph"):
            assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"], counters
    with cases.case("control: what an option changes shows"):
        plain = mixed()
        expected = plain(batch[0])
        rtp_ext.ring_of(plain).close()
        for name in {*CHANGES, MANY} & set(names):
            assert differs(outputs[name], expected, 1e-4), name
        for name in {"checksum", "gradient_travel int8"} & set(names):
            assert_same(outputs[name], expected, 0.0, f"{name} changes nothing of what comes out")
    _divided(cases, backend, batch[0])


def _divided(cases, backend, batch):
    """A divide factor that is set, and reset, after the trace of a graph without a multiplication."""
    torch._dynamo.reset()
    eager, model = mixed(), mixed()
    compiled, known = torch.compile(model, backend=backend), {}
    for factor in (None, 0.5, None):
        for each in (eager, model):
            rtp_ext.set_gradient_divide_factor(each, factor)
        with cases.case(f"gradients divided by {factor}"):
            expected, gradients, hops = step(eager, eager, batch)
            output, theirs, their_hops = step(model, compiled, batch)
            assert_same(output, expected, 0.0, "output")
            for key, gradient in gradients.items():
                assert_same(theirs[key], gradient, 0.0, key)
            assert their_hops == hops, f"expected {hops} hops, got {their_hops}"
            known[factor] = gradients["head.weight"]
    with cases.case("control: the factor shows"):
        assert differs(known[0.5], known[None], 0.5)
    for each in (eager, model):
        rtp_ext.ring_of(each).close()


def _under(autocast, call, *arguments):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return call(*arguments)


class Together(nn.Module):
    """Layers that travel together; one is written to, or called in another mode, after they were sent."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(10, 6) for _ in range(3))
        self.between = between
        generator = torch.Generator().manual_seed(4)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = self.q_proj(x)
        if self.between in ("weight", "bias"):
            with torch.no_grad():
                getattr(self.v_proj, self.between).mul_(3.0)
        if self.between == "first weight":  # which has been used
            with torch.no_grad():
                self.first.weight.mul_(3.0)
        y = y + self.k_proj(x)
        grad = torch.set_grad_enabled(torch.is_grad_enabled() and self.between != "no_grad")
        with grad, torch.autocast("cpu", BF16, enabled=self.between == "autocast"):
            z = self.v_proj(x)
        return y * z


@on_ranks(2, timeout=600.0)
@in_graphs
def test_what_happens_between_layers_that_travel_together(rank, cases):
    backend = "aot_eager"
    x = torch.randn(4, 10, generator=torch.Generator().manual_seed(60 + rank))
    for between in ("nothing", "no_grad", "autocast", "weight", "bias", "first weight"):
        torch._dynamo.reset()
        eager, model = (rtp_ext.fully_rotate(Together(between), timeout=TIMEOUT) for _ in range(2))
        for each in (eager, model):
            join(each, ("q_proj", "k_proj", "v_proj"), "together")
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        with cases.case(between):
            if between in ("weight", "bias"):
                with pytest.raises(rtp_ext.RotationError, match=rf"v_proj.*{between}.*written to earlier in the same"):
                    compiled(x)
                assert rtp_ext.ring_of(model).alive
            elif between == "first weight":  # as when it is written to between the graph and its backward
                wanted = x.clone().requires_grad_()
                for call in (eager, compiled):
                    with pytest.raises(RuntimeError, match="inplace operation"):
                        call(wanted).sum().backward()
            else:
                expected, found = eager(x), compiled(x)
                assert_same(found, expected, 0.0, "output")
                for y in (expected, found):
                    y.sum().backward()
                for (name, one), other in zip(eager.named_parameters(), model.parameters(), strict=True):
                    if one.grad is None:
                        assert other.grad is None, name
                    else:
                        assert_same(other.grad.to_local(), one.grad.to_local(), 0.0, name)
            if between not in ("weight", "bias"):  # refused before anything is known of the graph
                assert model.q_proj.together.shared is (between in ("nothing", "first weight")), "who travels together"
        for each in (eager, model):
            rtp_ext.ring_of(each).close()
