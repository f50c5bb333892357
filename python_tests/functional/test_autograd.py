"""Uses of autograd besides one backward: writes to weights before it, double backward, and computations with gathered
weights. The results are exactly those of one process; cases that plain torch or the ring cannot compute are refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from autograd_subjects import SUBJECTS, Subject, converted, features, numbers
from grids import few
from harness import Cases, on_ranks
from reference import assert_same, differs, full, random
from test_convert import assert_same_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rtp_ext
from rtp_ext.nn import RotatedLinear

TOLERANCE = 1e-10
TIMEOUT = 30.0
VARIANTS = [(False, "shm"), (True, "c10d")]  # in place over c10d: the local shards travel
WRITTEN = r"modified by an inplace operation"
TWICE = r"double backward is not supported"


def named(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name.removeprefix("module."): parameter for name, parameter in module.named_parameters()}


def weighed(y: Tensor) -> Tensor:
    return (y * random(*y.shape, dtype=torch.float64, seed=9)).sum()


def attempt(loss: Tensor) -> str | None:
    """Runs the backward. Returns its error about a write in between, if there is one."""
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error), error
        return str(error)
    return None


def written_in_between(subject: Subject, ring: rtp_ext.Ring, in_place: bool, cases: Cases, label: str) -> None:
    """Tests every parameter in turn, with an input that requires a gradient and one that does not."""
    rank, ranks = ring.rank, ring.size
    plain = subject.make()
    module = subject.rotate(copy.deepcopy(plain), ring, in_place)
    ours, theirs = named(module), named(plain)
    for name in theirs:
        for needs in (True, False):
            plain.zero_grad()
            module.zero_grad()
            batches = subject.batches(ranks, needs)
            mine = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in batches[rank]]
            loss, losses = weighed(module(*mine)), [weighed(plain(*batch)) for batch in batches]
            write(ours[name], theirs[name], 2.0)
            refused, expected = attempt(loss), attempt(sum(losses) / ranks)
            write(ours[name], theirs[name], 0.5)
            with cases.case(f"{label}: {name} written, input gradient {needs}"):
                if expected is not None or name in subject.stricter:
                    assert refused is not None, "expected an error, got gradients of other weights"
                    continue
                assert refused is None, f"expected gradients, got {refused}"
                for each, parameter in theirs.items():
                    assert_same(full(ours[each].grad), parameter.grad, TOLERANCE, f"gradient of {each}")
                if needs and batches[rank][0].is_floating_point():
                    assert_same(mine[0].grad, batches[rank][0].grad * ranks, TOLERANCE, "input gradient")


def write(ours: Tensor, theirs: Tensor, factor: float) -> None:
    with torch.no_grad():
        ours.mul_(factor)
        theirs.mul_(factor)


def _written(rank, ranks):
    cases = Cases()
    for in_place, transport in VARIANTS:
        with rtp_ext.Ring(transport=transport, timeout=TIMEOUT) as ring:
            for label, subject in SUBJECTS.items():
                written_in_between(subject, ring, in_place, cases, f"{label}, in_place={in_place}")
    cases.finish()


def _adamw(**options: Any) -> Callable[[nn.Module], None]:
    return lambda module: torch.optim.AdamW(module.parameters(), lr=0.1, **options).step()


def _in_place(of: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    def write(module: nn.Module) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                of(parameter).mul_(2.0)

    return write


# Fused steps write behind the back of plain torch; here they are noticed.
WRITERS: dict[str, Callable[[nn.Module], object]] = {
    "SGD": lambda module: torch.optim.SGD(module.parameters(), lr=0.1).step(),
    "SGD, foreach": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, foreach=True).step(),
    "AdamW": _adamw(foreach=False),
    "AdamW, foreach": _adamw(foreach=True),
    "AdamW, fused": _adamw(fused=True),
    "a DTensor": _in_place(lambda parameter: parameter),
    "a local tensor": _in_place(lambda parameter: parameter.to_local()),
    "load_state_dict": lambda module: module.load_state_dict(copy.deepcopy(module.state_dict())),
    "set_model_state_dict": lambda module: set_model_state_dict(module, copy.deepcopy(module.state_dict())),
}


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 5))


def _writers(rank, ranks):
    """For any writer: rotated and gathered layers refuse the second backward of one graph."""
    cases = Cases()
    for in_place, transport in VARIANTS:
        with rtp_ext.Ring(transport=transport, timeout=TIMEOUT) as ring:
            for label, write in WRITERS.items():
                plain = Subject(block, features(3, 6)).make()
                model = converted(copy.deepcopy(plain), ring, in_place)
                x = random(3, 6, dtype=torch.float64, seed=rank)
                for part, taken in ((model, x), (model[1], x.new_ones(2, 7)), (model[2], x.new_ones(2, 7))):
                    taken = taken.clone().requires_grad_()
                    loss = weighed(part(taken))
                    loss.backward(retain_graph=True)
                    write(model)
                    with cases.case(f"{label}, {type(part).__name__}, in_place={in_place}"):
                        assert attempt(loss) is not None, "expected an error, got a gradient"
                with cases.case(f"{label}, in_place={in_place}: what the error says"):
                    loss = weighed(model[0](x.clone().requires_grad_()))
                    loss.backward(retain_graph=True)
                    write(model)
                    assert str(attempt(loss)).startswith("0: one of the variables"), "expected the name of the layer"
    cases.finish()


def _renormalise(module: nn.Module, _: Any) -> None:
    with torch.no_grad():
        module.weight.mul_(1.0)


def _recomputed(rank, ranks):
    """A write within what activation checkpointing runs again is none in between; in place, shards travel and are
    still not written."""
    for in_place, transport in VARIANTS:
        with rtp_ext.Ring(transport=transport, timeout=TIMEOUT) as ring:
            plain = Subject(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), features(3, 6)).make()
            model = converted(copy.deepcopy(plain), ring, in_place)
            for each in (plain, model):
                each[0].register_forward_pre_hook(_renormalise)
            inputs = [random(3, 6, dtype=torch.float64, seed=other) for other in range(ranks)]
            for reentrant in (False, True):
                plain.zero_grad(), model.zero_grad()
                ours = checkpoint(model, inputs[rank].clone().requires_grad_(), use_reentrant=reentrant)
                weighed(ours).backward()
                (sum(weighed(plain(x)) for x in inputs) / ranks).backward()
                assert_same_model(model, plain, TOLERANCE, gradients=True)


@on_ranks(few([2], [2, 3]), timeout=240.0)
def test_weights_written_before_a_backward(rank, ranks):
    _written(rank, ranks)
    _writers(rank, ranks)
    _recomputed(rank, ranks)


def _penalty(module: nn.Module, batch: list[Tensor]) -> Tensor:
    """A loss that differentiates the output with respect to the input, or to the parameters where that is of ids."""
    wanted = [batch[0]] if batch[0].requires_grad else list(module.parameters())
    gradients = torch.autograd.grad(weighed(module(*batch).square()), wanted, create_graph=True)
    return sum(gradient.square().sum() for gradient in gradients)


def _twice(rank, ranks):
    cases = Cases()
    for in_place, transport in VARIANTS:
        with rtp_ext.Ring(transport=transport, timeout=TIMEOUT) as ring:
            for label, subject in SUBJECTS.items():
                plain = subject.make()
                module = subject.rotate(copy.deepcopy(plain), ring, in_place)
                batches = subject.batches(ranks, True)
                mine = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in batches[rank]]
                with cases.case(f"{label}, in_place={in_place}: a penalty"):
                    penalty = _penalty(module, mine)
                    if label == "norm":  # gathered, and torch's own from there on
                        penalty.backward()
                        (sum(_penalty(plain, batch) for batch in batches) / ranks).backward()
                        assert_same_model(module, plain, TOLERANCE, gradients=True)
                    else:
                        with pytest.raises(RuntimeError, match=TWICE):
                            penalty.backward()
                with cases.case(f"{label}, in_place={in_place}: one path of two"):
                    # torch would leave out what does not lead to the parameters
                    several = list(module.parameters())
                    total = full(_penalty(module, mine)) + sum(full(p).square().sum() for p in several)
                    if label != "norm":
                        with pytest.raises(RuntimeError, match=TWICE):
                            torch.autograd.grad(total, several, allow_unused=True)
                with cases.case(f"{label}, in_place={in_place}: a Hessian"):
                    loss = weighed(module(*mine).square())
                    first = torch.autograd.grad(loss, several, create_graph=True)
                    product = sum(gradient.full_tensor().sum() for gradient in first)
                    with pytest.raises(RuntimeError, match=TWICE):
                        torch.autograd.grad(product, several, allow_unused=True)
                with cases.case(f"{label}, in_place={in_place}: first derivatives"):
                    module.zero_grad(), plain.zero_grad()
                    weighed(module(*mine).square()).backward(create_graph=True)
                    (sum(weighed(plain(*batch).square()) for batch in batches) / ranks).backward()
                    for name, parameter in named(plain).items():
                        assert_same(full(named(module)[name].grad), parameter.grad, TOLERANCE, name)
                with cases.case(f"{label}, in_place={in_place}: first derivatives, checkpointed"):
                    module.zero_grad()
                    weighed(checkpoint(module, *mine, use_reentrant=False).square()).backward(create_graph=True)
                    for name, parameter in named(plain).items():
                        assert_same(full(named(module)[name].grad), parameter.grad, TOLERANCE, name)
    cases.finish()


def _frozen(rank, ranks):
    """Outputs without a dependency that requires a gradient have derivatives of zero, as in plain torch."""
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        layer = RotatedLinear.from_module(nn.Linear(6, 7).requires_grad_(False), ring)
        x = torch.ones(2, 6, requires_grad=True)
        (gradient,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        assert not gradient.requires_grad


@on_ranks([2, 3])
def test_second_derivatives(rank, ranks):
    _twice(rank, ranks)
    _frozen(rank, ranks)


def replicated(parameter: Tensor) -> Tensor:
    """The other way to a whole parameter."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.redistribute(placements=[Replicate()]).to_local()


class ByHand(nn.Module):
    """Computes with the whole weight of its head, which it gathers itself where it is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 5)

    def hidden(self, ids: Tensor) -> Tensor:
        return self.norm(self.embed(ids))

    def by_hand(self, hidden: Tensor) -> Tensor:
        weight, bias = full(self.head.weight), replicated(self.head.bias)
        return F.linear(hidden, weight, bias) * full(self.scale)

    def forward(self, ids: Tensor, inside: bool) -> Tensor:
        return self.by_hand(self.norm(self.embed(ids))) if inside else self.norm(self.embed(ids))


@on_ranks()
@pytest.mark.parametrize(("ranks", "tied"), [(2, False), (3, True)])
def test_whole_weights_outside_their_module(rank, ranks, tied):
    """The gradient of a gathered weight is averaged like every other; that of a penalty is not."""
    for in_place, transport in VARIANTS:
        with rtp_ext.Ring(transport=transport, timeout=TIMEOUT) as ring:
            plain = Subject(ByHand, features()).make()
            if tied:
                plain.head.weight = plain.embed.weight
            model = converted(copy.deepcopy(plain), ring, in_place)

            def losses(each, ids, targets, inside):
                y = each(ids, True) if inside else each.by_hand(each(ids, False))
                terms = sum(full(p).square().sum() + full(p.pow(3).sum()) for p in each.parameters())
                return F.cross_entropy(y.flatten(0, 1), targets.flatten()), terms

            batches = [(numbers(3, 4, seed=other), numbers(3, 4, seed=80 + other)) for other in range(ranks)]
            for inside in (True, False):
                model.zero_grad(), plain.zero_grad()
                for batch in batches[rank : rank + 1] * 2:  # twice: gradients accumulate
                    value, terms = losses(model, *batch, inside)
                    (value + terms).backward()
                    (sum(sum(losses(plain, *other, inside)) for other in batches) / ranks).backward()
                assert_same_model(model, plain, TOLERANCE, gradients=True)
                alone = copy.deepcopy(plain)
                alone.zero_grad()
                sum(2.0 * term for term in losses(alone, *batches[rank], inside)).backward()
                assert differs(full(model.head.weight.grad), alone.head.weight.grad, TOLERANCE), "control: not averaged"
            value = losses(model, *batches[rank], True)[0]
            with torch.no_grad():
                model.head.weight.mul_(2.0)
            assert attempt(value) is not None, "expected an error, got a gradient"
            frozen = model.head.requires_grad_(False).weight.full_tensor()
            assert not frozen.requires_grad
