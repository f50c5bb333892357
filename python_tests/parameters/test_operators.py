"""Operators of torch on parameters of a ring, as loops for plain models use them: penalties, norms, logged numbers."""

import math

import pytest
import torch
from harness import on_ranks
from models import batch_loss, make_model, mean_loss, train
from reference import assert_same, full, whole_gradients, whole_parameters
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import rtp_ext

EXACT = 1e-9


def _square(model: nn.Module) -> Tensor:
    return sum(parameter.pow(2).sum() for parameter in model.parameters())


def _in_place(loss: Tensor, model: nn.Module) -> Tensor:
    penalty = torch.zeros((), dtype=loss.dtype)
    for parameter in model.parameters():
        penalty += parameter.pow(2).sum()
    loss = loss * 1.0
    loss += 0.05 * penalty
    return loss


def _one_by_one(loss: Tensor, model: nn.Module) -> Tensor:
    for parameter in model.parameters():
        loss = 0.05 * parameter.abs().sum() + loss
    return loss


# How a penalty joins a loss. The last ones make its gradient depend on the batch of a rank.
WAYS = {
    "a sum": lambda loss, model: loss + 0.05 * _square(model),
    "a difference": lambda loss, model: loss - (-0.05 * _square(model)),
    "the difference of a penalty": lambda loss, model: -(-0.05 * _square(model) - loss),
    "alpha": lambda loss, model: torch.add(loss, _square(model), alpha=0.05),
    "one by one": _one_by_one,
    "in place": _in_place,
    "stack": lambda loss, model: torch.stack([loss, 0.05 * _square(model)]).sum(),
    "cat": lambda loss, model: torch.cat([loss[None], 0.05 * _square(model)[None]]).sum(),
    "with full_tensor": lambda loss, model: loss + 0.05 * sum(full(p.pow(2).sum()) for p in model.parameters()),
    "norms": lambda loss, model: loss + 0.05 * sum(p.norm() for p in model.parameters()),
    "the square of the sum": lambda loss, model: (loss + 0.05 * _square(model)).pow(2),
    "a penalty twice": lambda loss, model: (lambda p: (loss + p).exp() + p)(0.05 * _square(model)),
}


class _Small(nn.Module):
    """A model with parameters that have fewer rows than ranks, which may compute its penalty itself."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.model, self.scale, self.inside = (
            make_model(blocks=1),
            nn.Parameter(torch.full((1, 2), 0.7).double()),
            inside,
        )

    def forward(self, ids: Tensor) -> Tensor:
        out = self.model(ids) * self.scale.sum()
        return out + 0.01 * _square(self) + self.model.blocks[0].up.weight.norm() if self.inside else out


def _of_all(way, plain, ranks, step):
    """Each rank has the penalty in its own loss."""
    return sum(way(batch_loss(plain, rank, step), plain) for rank in range(ranks)) / ranks


@on_ranks(3)
def test_penalties_are_those_of_the_plain_model(rank, ranks, cases):
    for name, way in WAYS.items():
        with cases.case(name):
            plain, model = _Small(False), rtp_ext.fully_rotate(_Small(False), timeout=30.0)
            own = way(batch_loss(model, rank, 0), model)
            assert_same(full(own), way(batch_loss(plain, rank, 0), plain), EXACT, "the loss of this rank")
            assert not isinstance(own, DTensor)
            train(model, lambda step, way=way, model=model: way(batch_loss(model, rank, step), model), 2)
            train(plain, lambda step, way=way, plain=plain: _of_all(way, plain, ranks, step), 2)
            found = whole_parameters(model)
            for each, parameter in plain.named_parameters():
                assert_same(found[each], parameter.detach(), EXACT, each)
            without = _Small(False)
            train(without, lambda step, without=without: mean_loss(without, ranks, step), 2)
            pairs = zip(without.parameters(), plain.parameters(), strict=True)
            assert not all(torch.allclose(one, other, atol=1e-5) for one, other in pairs), "control"
        rtp_ext.ring_of(model).close()
    with cases.case("within the forward, two micro-batches"):
        plain, model = _Small(True), rtp_ext.fully_rotate(_Small(True), timeout=30.0)
        for step in range(2):
            batch_loss(model, rank, step).backward()
            sum(batch_loss(plain, other, step) for other in range(ranks)).div(ranks).backward()
        found = whole_gradients(model)
        for each, parameter in plain.named_parameters():
            assert_same(found[each], parameter.grad, EXACT, each)
    with cases.case("what a sum cannot be made of"):
        for refused in (
            lambda loss: loss * model.scale.sum(),
            lambda loss: (loss * model.model.head.weight).sum(),
            lambda loss: loss + model.model.temperature,
        ):
            with pytest.raises(ValueError, match=r"requires a gradient together with a DTensor.*full_tensor"):
                refused(batch_loss(model, rank, 0))
    with cases.case("a number of a part"):
        for value in (model.scale.sum(), model.model.head.weight.norm(), model.scale[:, :1]):
            with pytest.raises(ValueError, match="item: expected a whole value"):
                value.item()
        assert model.scale.sum().full_tensor().item() == plain.scale.sum().item()
        with torch.no_grad():
            own = (batch_loss(model, rank, 0) + _square(model)).item()
        expected = batch_loss(plain, rank, 0) + _square(plain)
        assert_same(torch.tensor(own, dtype=torch.float64), expected.detach(), EXACT, "without gradients")


@on_ranks(3)
def test_norms_and_extremes_where_ranks_have_no_rows(cases):
    """Parameters of four rows on three ranks, the last of which has none, and of one row."""
    orders = (math.inf, -math.inf, -1.0, 0.5, 2.0)
    ways = {f"vector_norm {order}": lambda w, o=order: torch.linalg.vector_norm(w, o) for order in orders}
    ways |= {f"norms {order}": lambda w, o=order: torch._foreach_norm([w], o)[0] for order in (math.inf, 2.0)}
    for name in ("max", "min", "amax", "amin", "argmax", "argmin"):
        ways[name] = lambda w, name=name: getattr(w, name)()
    for name, dim in (("amax", 0), ("amin", (0, 1)), ("amax", 1), ("argmax", 0)):
        ways[f"{name} {dim}"] = lambda w, name=name, dim=dim: getattr(w, name)(dim=dim)
    ways |= {
        "maxima": lambda w: torch._foreach_max([w])[0],
        "aminmax": lambda w: torch.stack([*torch.aminmax(w)]),
        "norm over rows": lambda w: torch.linalg.vector_norm(w, math.inf, dim=0),
        "the largest magnitude": lambda w: w.abs().max(),
    }
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 1, bias=False)).double()
    weights = [weight.detach().clone() for weight in plain.parameters()]
    model = rtp_ext.fully_rotate(plain, timeout=30.0)
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        for sign, (name, way) in ((s, w) for s in (1.0, -1.0) for w in ways.items()):
            with cases.case(f"{name} of {sign} {tuple(weight.shape)}"):
                found = full(way(sign * parameter.detach().abs()))
                assert_same(found, way(sign * weight.abs()), EXACT, name)
    for order in (math.inf, 2.0):
        for foreach in (True, False):
            with cases.case(f"clip_grad_norm_ {order} {foreach}"):
                for each in (parameters := [*model.parameters()]):
                    each.grad = each.detach().clone()
                expected = nn.utils.get_total_norm(weights, order)
                norm = nn.utils.clip_grad_norm_(parameters, 0.1, order, foreach=foreach)
                assert_same(full(norm), expected, EXACT, "norm")
                for each, weight in zip(parameters, weights, strict=True):
                    assert_same(full(each.grad), weight * 0.1 / (expected + 1e-6), EXACT, "clipped")
