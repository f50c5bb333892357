"""A backward in two parts, as zero-bubble pipelines run it: gradients of inputs first, those of parameters later. Each
part computes and sends only the requested gradients."""

import copy

import pytest
import torch
from autograd_subjects import SUBJECTS, Subject, converted, features, numbers
from grids import few, needs_split_backwards
from harness import Cases, on_ranks
from reference import assert_same, chunk, differs, full, local, random, wholes
from test_autograd import named, weighed
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

import rtp_ext
from rtp_ext.functional import rotated_linear

TOLERANCE = 1e-10
TIMEOUT = 30.0
# Their weight gradients are computed from the weights: these travel in both parts.
READ_WEIGHTS = {"mlp", "mlp, recomputed", "experts", "head and loss", "flyweight"}


class Scaled(nn.Module):
    """Parameters of its own before and after a layer, and norms on either side of another."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(7))
        self.first, self.norm = nn.LayerNorm(6), nn.LayerNorm(7)
        self.layer, self.last = nn.Linear(6, 7), nn.Linear(7, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.last(self.layer(self.first(x * self.before)) * self.after))


class Adapted(nn.Module):
    """A layer beside which an adapter is put once it rotates."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.adapter.T

    def adapt(self) -> None:
        self.adapter = nn.Parameter(random(7, 6, dtype=torch.float64, seed=77))


ALL = {**SUBJECTS, "scaled": Subject(Scaled, features(3, 6))}


class Hops:
    """Hops since the last question."""

    def __init__(self, ring: rtp_ext.Ring) -> None:
        self.ring, self.before = ring, (0, 0)
        self.new()

    def new(self) -> tuple[int, int]:
        now = self.ring.hops("weight"), self.ring.hops("gradient")
        found = now[0] - self.before[0], now[1] - self.before[1]
        self.before = now
        return found


def gradients_of(module: nn.Module, expected: dict[str, Tensor]) -> None:
    parameters = named(module)
    found = dict(zip(expected, wholes(parameters[name].grad for name in expected), strict=True))
    for name, gradient in expected.items():
        assert_same(found[name], gradient, TOLERANCE, f"gradient of {name}")


def _subject(label: str, subject: Subject, ring: rtp_ext.Ring, in_place: bool, cases: Cases) -> None:
    rank, ranks = ring.rank, ring.size
    plain = subject.make()
    module = subject.rotate(copy.deepcopy(plain), ring, in_place)
    hops, batches = Hops(ring), subject.batches(ranks, True)
    (sum(weighed(plain(*batch)) for batch in batches) / ranks).backward()
    theirs = {name: parameter.grad for name, parameter in named(plain).items()}
    mine = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in batches[rank]]

    loss = weighed(module(*mine))
    hops.new()
    loss.backward()
    together = hops.new()
    with cases.case(f"{label} over {ring.transport}: together"):
        gradients_of(module, theirs)
    module.zero_grad()
    for tensor in mine:
        tensor.grad = None

    if any(tensor.requires_grad for tensor in mine):
        loss = weighed(module(*mine))
        hops.new()
        _, groups = stage_backward_input([loss], None, mine, module.parameters())
        found = hops.new()
        with cases.case(f"{label} over {ring.transport}: the inputs' part"):
            assert found == (together[0], 0), f"expected {together[0]} weight hops alone, got {found}"
            assert all(parameter.grad is None for parameter in module.parameters())
            for tensor, batch in zip(mine, batches[rank], strict=True):
                expected = None if batch.grad is None else batch.grad * ranks
                assert_same(tensor.grad, expected, TOLERANCE, "input gradient")
        stage_backward_weight(module.parameters(), groups)
        found = hops.new()
        with cases.case(f"{label} over {ring.transport}: the parameters' part"):
            gradients_of(module, theirs)
            expected = (together[0] if label in READ_WEIGHTS else 0, together[1])
            assert found == expected, f"expected {expected} hops, got {found}"

    with cases.case(f"{label} over {ring.transport}: one parameter after the other"):
        loss = weighed(module(*mine))
        hops.new()
        for name, gradient in theirs.items():
            (one,) = torch.autograd.grad(loss, [named(module)[name]], retain_graph=True)
            assert_same(full(one), gradient, TOLERANCE, f"gradient of {name} alone")
        weights, sums = hops.new()
        assert sums >= together[1] and (weights == 0 or label not in ("linear", "convolution", "embedding"))


def _checkpointed(ring: rtp_ext.Ring, cases: Cases) -> None:
    """Recomputations run in either part."""
    plain = Subject(lambda: nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 5)), features(3, 6)).make()
    model = converted(copy.deepcopy(plain), ring, False)
    inputs = [random(3, 6, dtype=torch.float64, seed=rank).requires_grad_() for rank in range(ring.size)]
    (sum(weighed(plain(x)) for x in inputs) / ring.size).backward()
    mine = inputs[ring.rank].detach().clone().requires_grad_()
    loss = weighed(checkpoint(model, mine, use_reentrant=False))
    _, groups = stage_backward_input([loss], None, [mine], model.parameters())
    stage_backward_weight(model.parameters(), groups)
    with cases.case("checkpointed"):
        assert_same(mine.grad, inputs[ring.rank].grad * ring.size, TOLERANCE, "input gradient")
        gradients_of(model, {name: parameter.grad for name, parameter in plain.named_parameters()})


def _adapted(ring: rtp_ext.Ring, cases: Cases) -> None:
    """A parameter that was added after conversion is averaged in either kind of backward, for any way to accumulate."""
    plain = Subject(Adapted, features(3, 6)).make()
    model = converted(copy.deepcopy(plain), ring, False)
    plain.adapt(), model.adapt()
    inputs = [random(3, 6, dtype=torch.float64, seed=rank).requires_grad_() for rank in range(ring.size)]
    losses = [weighed(plain(x)) for x in inputs]
    (alone,) = torch.autograd.grad(losses[ring.rank], [plain.adapter], retain_graph=True)
    (sum(losses) / ring.size).backward()
    theirs = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for twice in (1, 2):  # the second backward adds to an average
        mine = inputs[ring.rank].detach().clone().requires_grad_()
        loss = weighed(model(mine))
        _, groups = stage_backward_input([loss], None, [mine], model.parameters())
        stage_backward_weight(model.parameters(), groups)
        with cases.case(f"an adapter, {twice} times"):
            gradients_of(model, {name: gradient * twice for name, gradient in theirs.items()})
            assert differs(alone, theirs["adapter"], TOLERANCE), "control: not averaged"
    model.zero_grad()
    weighed(model(mine)).backward()
    with cases.case("an adapter, one backward"):
        gradients_of(model, theirs)
    penalty = torch.autograd.grad(weighed(model(mine).square()), [model.adapter], create_graph=True)[0].square().sum()
    with cases.case("an adapter, differentiated twice"), pytest.raises(RuntimeError, match="double backward"):
        penalty.backward()


def _leaves(ring: rtp_ext.Ring, cases: Cases) -> None:
    """Shards that are plain leaves: torch does not report whether torch.autograd.grad needs their gradients."""
    whole = random(7, 6, dtype=torch.float64, seed=1), random(7, dtype=torch.float64, seed=2)
    shards = [chunk(tensor, ring.size, ring.rank).clone().requires_grad_() for tensor in whole]
    inputs = [random(3, 6, dtype=torch.float64, seed=10 + rank).requires_grad_() for rank in range(ring.size)]
    theirs = [tensor.clone().requires_grad_() for tensor in whole]
    total = sum(weighed(nn.functional.linear(x, *theirs)) for x in inputs) / ring.size
    weight, bias, *dxs = torch.autograd.grad(total, [*theirs, *inputs])
    weight, bias = (chunk(gradient, ring.size, ring.rank) for gradient in (weight, bias))
    x, dx = inputs[ring.rank], dxs[ring.rank] * ring.size
    loss = weighed(rotated_linear(x, *shards, ring=ring))
    hops, once = Hops(ring), ring.size - 1
    wanted = {
        "x": ([x], [dx], (once, 0)),
        "weight": ([shards[0]], [weight], (0, once)),
        "bias": ([shards[1]], [bias], (0, once)),
        "x and bias": ([x, shards[1]], [dx, bias], (once, once)),
    }
    for label, (of, expected, sent) in wanted.items():
        found = torch.autograd.grad(loss, of, retain_graph=True)
        with cases.case(f"leaves: {label}"):
            assert (now := hops.new()) == sent, f"expected {sent} hops, got {now}"
            for actual, gradient in zip(found, expected, strict=True):
                assert_same(local(actual), gradient, TOLERANCE, label)
    torch.autograd.backward(loss, inputs=[shards[0]], retain_graph=True)
    with cases.case("leaves: backward of some"):
        assert hops.new() == (0, once)
        assert_same(shards[0].grad, weight, TOLERANCE, "weight")
        assert shards[1].grad is None and x.grad is None


def _parts(ring: rtp_ext.Ring, cases: Cases) -> None:
    """A part that was converted before the model: the inputs of the model determine its backward, too."""
    plain = Subject(lambda: nn.Sequential(nn.Embedding(5, 6), Scaled(), nn.Linear(7, 6), Scaled()), features()).make()
    for split in (True, False):  # the layers after the embedding are a stage whose inputs require gradients
        expected = nn.Sequential(*plain[1:]) if split else plain
        model = copy.deepcopy(expected)
        model.zero_grad()
        converted(model[-1], ring, False)
        converted(model, ring, False)
        inputs = [random(3, 6, dtype=torch.float64, seed=rank).requires_grad_() for rank in range(ring.size)]
        batches = inputs if split else [numbers(3, 4, seed=rank) for rank in range(ring.size)]
        expected.zero_grad()
        (sum(weighed(expected(x)) for x in batches) / ring.size).backward()
        loss = weighed(model(batches[ring.rank]))
        if split:
            _, groups = stage_backward_input([loss], None, [batches[ring.rank]], model.parameters())
            stage_backward_weight(model.parameters(), groups)
        else:
            loss.backward()
        with cases.case(f"a model with a part, split {split}"):
            gradients_of(model, {name: parameter.grad for name, parameter in expected.named_parameters()})


def _disagreeing(ring: rtp_ext.Ring, cases: Cases) -> None:
    model = converted(Subject(Scaled, features(3, 6)).make(), ring, False)
    with (
        cases.case("inputs that want gradients on one rank"),
        pytest.raises(ValueError, match="inputs that want gradients"),
    ):
        model(random(3, 6, dtype=torch.float64, seed=1).requires_grad_(ring.rank == 0))


@needs_split_backwards
@on_ranks(few([2], [2, 3]))
def test_backwards_in_two_parts(cases):
    for in_place, transport in [(False, "shm"), (True, "c10d")]:
        with rtp_ext.Ring(transport=transport, timeout=TIMEOUT) as ring:
            for label, subject in ALL.items():
                _subject(label, subject, ring, in_place, cases)
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        _checkpointed(ring, cases)
        _adapted(ring, cases)
        _leaves(ring, cases)
        _parts(ring, cases)
        _disagreeing(ring, cases)
