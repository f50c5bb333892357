"""Graphs that break at rotation; what would trace or transform it is refused, and the ring lives on."""

import copy

import pytest
import torch
from grids import few
from harness import Cases, on_ranks
from models import make_batch, make_model
from reference import assert_same, random
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import rtp_ext
from rtp_ext.functional import rotated_linear
from rtp_ext.nn import RotatedLinear

TIMEOUT = 60.0


class Inner(nn.Module):
    """A user's module, which a flyweight runs once for every rank, with its own random numbers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(random(2 * 6, 10, dtype=torch.float64, seed=3))

    def forward(self, x):
        return nn.functional.dropout(torch.tanh(nn.functional.linear(x, self.weight)), 0.5)


class Wrapped(nn.Module):
    """A model whose blocks are checkpointed, and a flyweight behind it."""

    def __init__(self, ring, checkpointed):
        super().__init__()
        self.inner = rtp_ext.fully_rotate(make_model(checkpointed=checkpointed), mesh=ring)
        self.copies = rtp_ext.nn.Flyweight(Inner(), ring, shard_dims={"weight": 0})

    def forward(self, ids):
        return self.copies(self.inner(ids)[..., :10]).sin().sum()


def _parts(rank, ranks):
    """Other people's code that rotation calls, and that calls rotation again in backward."""
    cases = Cases()
    ids, _ = make_batch(rank, 0)
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        for checkpointed in few((True, False), (None, True, False)):
            torch._dynamo.reset()
            graphs = []

            def backend(graph, _inputs, graphs=graphs):
                graphs.append(graph.print_readable(print_output=False))
                return graph

            model = Wrapped(ring, checkpointed)
            results = []
            for call in (torch.compile(model, backend=backend), model):
                torch.manual_seed(7)
                loss = call(ids)
                loss.backward()
                gradients = {
                    name: p.grad.to_local().clone() for name, p in model.named_parameters() if p.grad is not None
                }
                results.append((loss.detach(), gradients))
                model.zero_grad()
            (loss, gradients), (expected, others) = results
            with cases.case(f"checkpointed {checkpointed}"):
                assert_same(loss, expected, 1e-12, "loss")
                assert gradients.keys() == others.keys() and "copies.module.weight" in gradients, sorted(gradients)
                for name, gradient in gradients.items():
                    assert_same(gradient, others[name], 1e-12, name)
                assert not any("tanh" in graph for graph in graphs), "the flyweight's module was compiled"
                assert any("sin" in graph for graph in graphs), "control: the rest was compiled"
    cases.finish()


def _loss(model, batch):
    ids, targets = batch
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def _step(model, rank, step, compiled=None):
    """Returns the loss and all gradients of one step, and its hops. `compiled`: the callable to use instead."""
    ring = rtp_ext.ring_of(model)
    before = ring.hops("weight"), ring.hops("gradient")
    loss = _loss(model if compiled is None else compiled, make_batch(rank, step))
    loss.backward()
    gradients = [p.grad.to_local().clone() for p in model.parameters()]
    model.zero_grad()
    return loss.detach(), gradients, ring.hops("weight") - before[0], ring.hops("gradient") - before[1]


def _compile(rank, ranks):
    cases = Cases()
    eager = rtp_ext.fully_rotate(make_model(), timeout=TIMEOUT)
    expected = [_step(eager, rank, step) for step in range(3)]
    for backend in few(("aot_eager",), ("eager", "aot_eager")):  # the parts are compiled without AOTAutograd
        torch._dynamo.reset()
        model = rtp_ext.fully_rotate(make_model(), timeout=TIMEOUT)
        compiled = torch.compile(model, backend=backend)
        for step, (loss, gradients, *hops) in enumerate(expected):
            with cases.case(f"{backend}, step {step}"):
                got, theirs, *their_hops = _step(model, rank, step, compiled)
                assert_same(got, loss, 1e-12, "loss")
                for (name, _), one, other in zip(model.named_parameters(), theirs, gradients, strict=True):
                    assert_same(one, other, 1e-12, name)
                assert their_hops == hops, f"expected {hops} hops, got {their_hops}"
        rtp_ext.ring_of(model).close()
    torch._dynamo.reset()
    model = rtp_ext.fully_rotate(make_model(), timeout=TIMEOUT)

    @torch.compile(backend="aot_eager")
    def train_step(batch):
        loss = _loss(model, batch)
        loss.backward()
        return loss.detach()

    with cases.case("a whole step, backward inside"):
        assert_same(train_step(make_batch(rank, 0)), expected[0][0], 1e-12, "loss")
        for (name, parameter), gradient in zip(model.named_parameters(), expected[0][1], strict=True):
            assert_same(parameter.grad.to_local(), gradient, 1e-12, name)
    with cases.case("a functional form is refused in one graph"):
        torch._dynamo.reset()
        ring, x = rtp_ext.ring_of(eager), random(4, 6, dtype=torch.float64, seed=rank)
        weight = torch.ones(2, 6, dtype=torch.float64)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="skip"):
            torch.compile(lambda: rotated_linear(x, weight, ring=ring), backend="eager", fullgraph=True)()
    assert_same(_step(eager, rank, 0)[0], expected[0][0], 1e-12, "eagerly again")
    cases.finish()


@on_ranks(few([2], [2, 3]), timeout=240.0)
def test_a_compiled_model_is_the_eager_one(rank, ranks):
    """Runs in one start, since the imports of the compiler take longer than either case."""
    _parts(rank, ranks)
    _compile(rank, ranks)


def _dual(function, x):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(x, torch.ones_like(x)))


def _fake(function, x):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return function(mode.from_tensor(x))


def _broken(**_):
    raise RuntimeError("before anything was posted")


REFUSED = {
    "grad": lambda function, x: torch.func.grad(lambda x: function(x).sum())(x),
    "vjp": lambda function, x: torch.func.vjp(function, x),
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (torch.ones_like(x),)),
    "vmap": lambda function, x: torch.func.vmap(function)(x.unsqueeze(0)),
    "jit.trace": lambda function, x: torch.jit.trace(function, (x,)),
    "fake tensors": _fake,
    "make_fx": lambda function, x: make_fx(function)(x),
}


@on_ranks(few([3], [2, 3]))
def test_what_cannot_be_traced_is_refused_and_the_ring_lives_on(rank, cases):
    plain = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 6)).double()
    with torch.no_grad():
        for number, parameter in enumerate(plain.parameters()):
            parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=number))
    model = rtp_ext.fully_rotate(copy.deepcopy(plain), bundle=False, timeout=TIMEOUT)
    ring = rtp_ext.ring_of(model)
    x = random(4, 6, dtype=torch.float64, seed=50 + rank)
    layer = RotatedLinear(6, 6, ring=ring, dtype=torch.float64)

    def functional(x):  # of plain shards that the ranks have not agreed on
        return rotated_linear(x, torch.ones(2, 6, dtype=torch.float64), ring=ring)

    for name, attempt in REFUSED.items():
        for what, function in (("model", model), ("layer", layer), ("functional", functional)):
            with cases.case(f"{name} of a {what}"):
                with pytest.raises(RuntimeError, match="does not support") as raised:
                    attempt(function, x)
                assert not isinstance(raised.value, rtp_ext.RotationError) and ring.alive
    with (
        cases.case("export"),
        pytest.raises(RuntimeError, match=r"torch.export: .*Export the plain model: "),
    ):
        torch.export.export(model, (x,), strict=False)
    with cases.case("a dual number"), pytest.raises(RuntimeError, match=r"jvp|forward"):
        _dual(layer, x)
    with cases.case("an error of the host is what it is"):
        with pytest.raises(AttributeError, match="pickle"):
            ring.exchange(lambda: None)
        with pytest.raises(RuntimeError, match="before anything was posted") as raised:
            ring.communicator.collectively("all_reduce", _broken, group=None)
        assert not isinstance(raised.value, rtp_ext.RotationError)
    assert ring.alive
    y, expected = model(x), plain(x)
    assert_same(y, expected, 1e-12, "an eager pass afterwards")
    y.sum().backward()
