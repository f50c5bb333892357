"""Tensor subclasses without memory, where native code would read it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from harness import Cases, on_ranks
from reference import assert_same, random, whole_gradients
from subclasses import Named, Pair, Wrapped
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard

import rtp_ext
from rtp_ext import functional as RF


class ToPair(torch.autograd.Function):
    """The identity, whose gradient is a pair."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return Pair(gradient.contiguous(), gradient.contiguous())


def expect(cases: Cases, what: str, call: Callable[[], object], name: str) -> None:
    with cases.case(what), pytest.raises(TypeError, match=name):
        call()


@on_ranks(2)
def test_operands_without_memory_are_refused(rank, ranks, ring, cases):
    x, w, b = torch.randn(3, 4), torch.randn(2, 4), torch.randn(2)
    table, ids, targets = torch.randn(5, 2), torch.tensor([1, 2]), torch.tensor([0, 1, 1])
    kernel, image = torch.randn(2, 4, 1), torch.randn(3, 4, 6)
    with FakeTensorMode():
        fake = torch.randn(2, 4)
    wrappers = {"Pair": lambda t: Pair(t, t.clone()), "Wrapped": Wrapped, "FakeTensor": lambda t: fake}
    for name, wrap in wrappers.items():
        sharded = DTensor.from_local(
            wrap(w), ring.mesh, [Shard(0)], run_check=False, shape=(2 * ranks, 4), stride=(4, 1)
        )
        calls: dict[str, Callable[[], object]] = {
            "weight": lambda wrap=wrap: RF.rotated_linear(x, wrap(w), ring=ring),
            "weight that is cut otherwise": lambda wrap=wrap: RF.rotated_linear(x, wrap(w), ring=ring, shard_dim=1),
            "shard of a DTensor": lambda sharded=sharded: RF.rotated_linear(x, sharded, ring=ring),
            "bias": lambda wrap=wrap: RF.rotated_linear(x, w, wrap(b), ring=ring),
            "input": lambda wrap=wrap: RF.rotated_linear(wrap(x), w, ring=ring),
            "MLP": lambda wrap=wrap: RF.rotated_mlp(x, wrap(w), w.T.contiguous(), ring=ring),
            "rotate": lambda wrap=wrap: next(iter(ring.rotate(wrap(w)))),
            "rotate of several": lambda wrap=wrap: next(iter(ring.rotate([w, wrap(w)]))),
            "rotate of a DTensor": lambda sharded=sharded: next(iter(ring.rotate(sharded))),
            "collect": lambda wrap=wrap: ring.collect(lambda owner, partial: None, wrap(w)),
        }
        if name != "FakeTensor":
            calls["ids"] = lambda wrap=wrap: RF.rotated_embedding(wrap(ids), table, ring=ring)
            calls["table"] = lambda wrap=wrap: RF.rotated_embedding(ids, wrap(table), ring=ring)
            calls["kernel"] = lambda wrap=wrap: RF.rotated_convolution(image, wrap(kernel), ring=ring)
        for what, call in calls.items():
            expect(cases, f"{what} {name}", call, name)
    loss = functools.partial(RF.rotated_linear_cross_entropy, x, w, Wrapped(targets), ring=ring)
    expect(cases, "targets", loss, "Wrapped")
    layer = rtp_ext.fully_rotate(nn.Sequential(nn.Linear(4, 2)), mesh=ring)
    expect(cases, "a gradient", lambda: ToPair.apply(layer(x)).sum().backward(), "0: .*Pair")
    with cases.case("the ring still works"):
        layer(x).sum().backward()
        y = RF.rotated_linear(x.as_subclass(Named), w, ring=ring)
        assert torch.equal(y[:, 2 * rank : 2 * rank + 2], x @ w.T), "an input that is memory"
        (mine, *_) = [shard.clone() for _, shard in ring.rotate(nn.Parameter(w))]
        assert torch.equal(mine, w)


class Summed(torch.autograd.Function):
    """The identity, whose gradient is the sum over all ranks, on its way."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return funcol.all_reduce(gradient, "sum", dist.group.WORLD)


@on_ranks(2)
def test_what_functional_collectives_return_is_waited_for(rank, ranks, cases):
    """Functional collectives return a wrapper without memory until torch computes with it."""
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    with torch.no_grad():
        for number, parameter in enumerate(plain.parameters()):
            parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=number))
    model = rtp_ext.fully_rotate(copy.deepcopy(plain), timeout=30.0)
    summed = sum(random(3, 4, dtype=torch.float64, seed=each) for each in range(ranks))
    arriving = funcol.all_reduce(random(3, 4, dtype=torch.float64, seed=rank), "sum", dist.group.WORLD)
    assert type(arriving) is funcol.AsyncCollectiveTensor, "control: it is one"
    with cases.case("an input"):
        y = model(arriving)
        assert_same(y.detach(), plain(summed).detach(), 1e-12, "output")
    with cases.case("a gradient"):
        Summed.apply(y).square().sum().backward()
        (plain(summed).square().sum() * ranks).backward()  # the same batch on all ranks, its gradient from each
        for found, expected in zip(whole_gradients(model).values(), plain.parameters(), strict=True):
            assert_same(found, expected.grad, 1e-12, "gradient")
    with cases.case("a shard"):
        shards = [each.clone() for _, each in rtp_ext.ring_of(model).rotate(arriving)]
        assert all(torch.equal(each, summed) for each in shards)
