"""Cases at the edge: empty shards, ranks that disagree or fall out of step, views, ties, sums that lack a part."""

import copy
from itertools import product

import pytest
import torch
from harness import on_ranks
from reference import assert_same, full
from torch import nn
from torch.nn.utils import prune

import rtp_ext
from rtp_ext.functional import Prepared, rotated_linear
from rtp_ext.nn import (
    RotatedConv1d,
    RotatedEmbedding,
    RotatedExperts,
    RotatedLinear,
    RotatedLinearCrossEntropy,
    RotatedMLP,
)
from rtp_ext.parameters.sharding import take_shard

TIMEOUT = 20.0


@on_ranks([2, 3])
def test_fewer_columns_than_ranks():
    """The weight part of a bundle is empty on some ranks, its bias part is not."""
    torch.manual_seed(0)
    plain = nn.Linear(1, 5).double()
    x = torch.randn(3, 1, dtype=torch.float64)
    for transport in ("shm", "c10d"):
        for in_place in (False, True):
            with rtp_ext.Ring(transport=transport, timeout=TIMEOUT) as ring:
                ring.in_place = in_place
                rotated = RotatedLinear.from_module(plain, ring, shard_dim=1)
                y = rotated(x)
                assert torch.allclose(y, plain(x), atol=1e-12)
                y.square().sum().backward()
                plain.zero_grad()
                plain(x).square().sum().backward()
                assert torch.allclose(rotated.bias.grad.full_tensor(), plain.bias.grad, atol=1e-12)
                assert torch.allclose(rotated.weight.grad.full_tensor(), plain.weight.grad, atol=1e-12)


class _Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.LayerNorm(4, bias=False)
        self.b = nn.LayerNorm(4, bias=False)
        self.never = nn.LayerNorm(4, bias=False)

    def forward(self, x, branch):
        return self.a(x) if branch == 0 else self.b(x)


@on_ranks(2)
def test_different_branches(rank, ranks):
    """Ranks that use different left-over parameters average each with the zeros of the others."""
    torch.manual_seed(0)
    plain = _Branches().double()
    inputs = torch.randn(ranks, 3, 4, dtype=torch.float64)
    expected = []
    for branch in range(2):
        plain.zero_grad()
        plain(inputs[branch], branch).pow(3).sum().backward()
        expected.append((plain.a if branch == 0 else plain.b).weight.grad / ranks)
    model = rtp_ext.fully_rotate(_Branches().double(), timeout=TIMEOUT)
    model(inputs[rank], rank).pow(3).sum().backward()
    assert torch.allclose(model.a.weight.grad.full_tensor(), expected[0], atol=1e-12)
    assert torch.allclose(model.b.weight.grad.full_tensor(), expected[1], atol=1e-12)
    assert not torch.allclose(expected[0], expected[1], atol=1e-3), "control: the branches have different gradients"
    assert model.never.weight.grad is None
    rtp_ext.ring_of(model).close()


@on_ranks(2)
def test_ties_to_what_stays_whole_are_refused():
    """A table that stays whole cannot be tied to a layer that is sharded."""
    model = nn.ModuleDict({"table": nn.Embedding(8, 4, scale_grad_by_freq=True), "head": nn.Linear(4, 8, bias=False)})
    model.head.weight = model.table.weight
    with pytest.raises(ValueError, match=r"head shares a parameter with table"):
        rtp_ext.fully_rotate(model, timeout=TIMEOUT)


class _Transposed(nn.Module):
    """A linear layer [outputs, inputs] and one [inputs, outputs] with the same weight, in either order."""

    def __init__(self, first: str) -> None:
        super().__init__()
        Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
        made = {"linear": nn.Linear(6, 6), "conv": Conv1D(6, 6)}
        for name in sorted(made, reverse=first == "linear"):
            setattr(self, name, made[name].double())
        self.conv.weight = self.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(torch.tanh(self.linear(x)))


@on_ranks(2)
def test_ties_of_layers_that_cut_their_weight_otherwise(rank, ranks):
    for first in ("linear", "conv"):
        torch.manual_seed(0)
        plain = _Transposed(first)
        assert next(name for name, _ in plain.named_children()) == first
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), timeout=TIMEOUT)
        inputs = torch.randn(ranks, 3, 6, dtype=torch.float64)
        model(inputs[rank]).pow(2).sum().backward()
        (sum(plain(each).pow(2).sum() for each in inputs) / ranks).backward()
        assert_same(model.linear.weight.grad.full_tensor(), plain.linear.weight.grad, 1e-10, f"{first} first")
        assert model.conv.weight is model.linear.weight
        plan = str(rtp_ext.explain(model))
        assert plan.count("with which it shares its weight") == 1, plan


@on_ranks(2)
def test_late_ties_are_refused_with_a_remedy():
    """A tie of layers that cut their weights otherwise, made after the conversion."""
    model = nn.ModuleDict({"table": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    rtp_ext.fully_rotate(model, timeout=TIMEOUT)
    model.head.weight = model.table.weight
    with pytest.raises(ValueError, match=r"head: expected a weight cut along 0.* share it before fully_rotate"):
        model.head(model.table(torch.arange(3)))


def test_in_place_never_writes_beyond_its_shard():
    """The last of 7 rows on 3 ranks is alone in its shard; the shards that visit have 3."""
    ring = rtp_ext.Ring.emulated(3, rank=2, in_place=True)
    flat = torch.full((20,), 7.0)
    with pytest.raises(ValueError, match=r"rotated_linear: in_place .* storage of its own"):
        rotated_linear(torch.ones(1, 2), flat[:2].view(1, 2), ring=ring)
    assert torch.equal(flat, torch.full((20,), 7.0))


@on_ranks(2)
def test_plain_parameters_in_place_of_shards(cases):
    """A whole parameter put in the place of a shard is refused: each rank would take it for its own part."""
    made = {
        "linear": nn.Sequential(nn.Linear(4, 4, bias=False)),
        "embedding": nn.Sequential(nn.Embedding(4, 4)),
        "bundle": nn.Sequential(nn.Linear(4, 4, bias=False), nn.GELU(), nn.Linear(4, 4, bias=False)),
    }
    for name, plain in made.items():
        model = rtp_ext.fully_rotate(plain, timeout=TIMEOUT)
        x = torch.zeros(2, dtype=torch.long) if name == "embedding" else torch.ones(2, 4)
        model(x)
        for each in (model, copy.deepcopy(model)):
            each[0].weight = nn.Parameter(torch.ones(4, 4))
            with cases.case(name), pytest.raises(ValueError, match=r"expected a .*weight that is a DTensor .*\(4, 4\)"):
                each(x)
        rtp_ext.ring_of(model).close()
    with cases.case("alone"), rtp_ext.Ring(timeout=TIMEOUT) as ring:
        layer = RotatedLinear(4, 4, bias=False, ring=ring)
        layer.weight = nn.Parameter(torch.ones(4, 4))
        with pytest.raises(ValueError, match="plain tensor"):
            layer(torch.ones(2, 4))


@on_ranks(2, ring_timeout=4.0)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_out_of_step(rank, ring, transport):
    """A rank that is one layer ahead of its neighbours gets an error, not the weights of another layer."""
    first, second = (take_shard(torch.full((4, 4), float(value)), ring, 0) for value in (1, 2))
    x, layers = torch.ones(1, 4), {"first": (first, Prepared()), "second": (second, Prepared())}
    for name, (weight, prepared) in layers.items():
        rotated_linear(x, weight, ring=ring, name=name, prepared=prepared)  # in step, and agreed on
    name = "first" if rank == 0 else "second"
    weight, prepared = layers[name]
    with pytest.raises(rtp_ext.RotationError):
        rotated_linear(x, weight, ring=ring, name=name, prepared=prepared)


@on_ranks(2, ring_timeout=TIMEOUT)
def test_sums_that_lack_a_part_are_nan(rank, ring):
    """If a rank could not add its part, the owners get NaN and not a plausible sum."""

    def add(owner, partial):
        if rank == 0:
            raise FloatingPointError("made up")
        partial += 1

    if rank == 0:
        with pytest.raises(FloatingPointError):
            ring.collect(add, torch.zeros(2))
    else:
        assert ring.collect(add, torch.zeros(2)).isnan().all()
    assert torch.equal(ring.collect(lambda owner, partial: partial.add_(1), torch.zeros(2)), torch.full((2,), 2.0))


@on_ranks(2)
def test_options_that_differ_between_ranks_are_refused(rank):
    with pytest.raises(ValueError, match=r"route ring.*route direct.* on rank 1"):
        rtp_ext.Ring(route="ring" if rank == 0 else "direct", timeout=TIMEOUT)
    with pytest.raises(ValueError, match=r"in_place True.*in_place False.* on rank 1"):
        rtp_ext.Ring(in_place=rank == 0, timeout=TIMEOUT)
    with rtp_ext.Ring(transport="c10d", timeout=TIMEOUT) as ring:  # which gets the option of a call
        model = rtp_ext.fully_rotate(nn.Linear(4, 4, bias=False), mesh=ring, in_place=True)
        model(torch.ones(1, 4))
        assert ring.in_place and ring.hops("weight") == ring.size, "control: one hop less where copies travel"
    with rtp_ext.Ring(transport="c10d", timeout=TIMEOUT) as ring:
        with pytest.raises(ValueError, match=r"in_place True.*in_place False.* on rank 1"):
            rtp_ext.fully_rotate(nn.Linear(4, 4, bias=False), mesh=ring, in_place=rank == 0)
        model = rtp_ext.fully_rotate(nn.Linear(4, 4, bias=False), mesh=ring)
        with pytest.raises(ValueError, match="beside other models of the ring"):
            rtp_ext.fully_rotate(nn.Linear(4, 4, bias=False), mesh=ring, in_place=True)
        model(torch.ones(1, 4))
        assert not ring.in_place and ring.hops("weight") == ring.size - 1, "the ring goes on as it was"
    with (
        rtp_ext.Ring(in_place=True, timeout=TIMEOUT) as ring,
        pytest.raises(ValueError, match="expected in_place=True, that of the ring"),
    ):
        rtp_ext.fully_rotate(nn.Linear(4, 4, bias=False), mesh=ring, in_place=False)


@on_ranks(2)
def test_reset_parameters_is_that_of_the_plain_module():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 7))
    rtp_ext.fully_rotate(model, timeout=TIMEOUT)
    plain = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 7))
    for mine, other in zip(model, plain, strict=True):
        torch.manual_seed(3)
        mine.reset_parameters()
        torch.manual_seed(3)
        other.reset_parameters()
        for name, parameter in other.named_parameters():
            assert torch.equal(mine.get_parameter(name).full_tensor(), parameter), name
    rtp_ext.ring_of(model).close()


@on_ranks(2)
def test_layers_with_parameters_of_their_own_are_gathered(rank, ranks):
    """A pruned layer computes its weight from its own parameter and a mask: it is gathered, and trains the same."""

    def build():
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()
        return prune.random_unstructured(model[0], "weight", amount=0.5) and model

    torch.manual_seed(6)
    batches = [torch.randn(4, 5, dtype=torch.float64) for _ in range(ranks)]
    plain, model = build(), rtp_ext.fully_rotate(build(), timeout=TIMEOUT)
    assert not isinstance(model[0], RotatedLinear) and isinstance(model[2], RotatedLinear)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for _ in range(3):
        (sum(plain(batch).square().mean() for batch in batches) / ranks).backward()
        model(batches[rank]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in plain.named_parameters():
        assert torch.allclose(model.get_parameter(name).full_tensor(), parameter, rtol=1e-10, atol=1e-12), name
    rtp_ext.ring_of(model).close()


def _linear(inputs, outputs, bias=True):
    return nn.Linear(inputs, outputs, bias, dtype=torch.float64)


def _layers(*sizes):
    return nn.Sequential(_linear(*sizes[:2]), nn.GELU(), _linear(*sizes[1:]))


def _pass(module, x):
    """The output, the gradient of the input, and the gradients of the parameters, by their order."""
    x = x.clone().requires_grad_() if x.is_floating_point() else x
    y = module(x)
    y.square().sum().backward()
    return [y, x.grad, *(p.grad if p.grad is None else full(p.grad) for p in module.parameters())]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@on_ranks([2, 3])
def test_empty_dimensions(rank, ranks, cases):
    """Tests every layer, new and converted: it gives torch's results, or an error that names the empty dimension."""

    def check(name, plain, module, x):
        with cases.case(f"{name} rank {rank} of {ranks}"):
            for number, (mine, right) in enumerate(zip(_pass(module, x), _pass(plain, x), strict=True)):
                assert_same(mine, right, 1e-12, f"tensor {number}")

    def made(kind, *arguments, **options):
        torch.manual_seed(0)
        return kind(*arguments, **options)

    for transport, in_place in (("shm", False), ("c10d", True)):
        with rtp_ext.Ring(transport=transport, in_place=in_place, timeout=TIMEOUT) as ring:
            rotated = {"ring": ring, "dtype": torch.float64}
            for inputs, outputs, bias, shard_dim in product((0, 5), (0, 4), (True, False), (0, 1)):
                plain = made(_linear, inputs, outputs, bias)
                name, x = f"{plain} {transport} cut along {shard_dim}", torch.ones(3, inputs, dtype=torch.float64)
                module = made(RotatedLinear, inputs, outputs, bias, **rotated, shard_dim=shard_dim)
                check(f"{name}, made", plain, module, x)
                twin = RotatedLinear.from_module(made(_linear, inputs, outputs, bias), ring, shard_dim=shard_dim)
                check(f"{name}, cut", made(_linear, inputs, outputs, bias), twin, x)
            for sizes in ((0, 6, 3), (4, 0, 3), (4, 6, 0)):
                x = torch.ones(2, sizes[0], dtype=torch.float64)
                check(f"mlp {sizes}", made(_layers, *sizes), made(RotatedMLP, *sizes, **rotated), x)
            for rows, features in ((5, 0), (0, 5)):
                ids = torch.arange(min(rows, 2))
                plain = made(nn.Embedding, rows, features, dtype=torch.float64)
                check(f"{plain}", plain, made(RotatedEmbedding, rows, features, **rotated), ids)
            x, targets = torch.ones(2, 0, dtype=torch.float64), torch.tensor([1, 2])
            loss = made(RotatedLinearCrossEntropy, 0, 4, True, **rotated)(x, targets)
            right = nn.functional.cross_entropy(made(_linear, 0, 4)(x), targets)
            assert_same(loss, right, 1e-12, "cross-entropy of no features")
            index, ones = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1, dtype=torch.float64)
            for features, hidden in ((0, 4), (4, 0)):
                x = torch.ones(2, features, dtype=torch.float64)
                y = RotatedExperts(3, features, hidden, **rotated)(x, index, ones)
                assert_same(y, torch.zeros(2, features, dtype=torch.float64), 0.0, "experts")
            for inputs, outputs in ((0, 4), (4, 0)):
                module = RotatedConv1d(inputs, outputs, 3, **rotated)
                with pytest.raises(ValueError, match=rf"no empty dimension, got shape \({outputs}, {inputs}, 3\)"):
                    module(torch.ones(2, inputs, 7, dtype=torch.float64))

    def build():
        return nn.Sequential(nn.LayerNorm(0, dtype=torch.float64), *_layers(0, 4, 0), _linear(0, 3))

    for bundle in (True, False):
        model = rtp_ext.fully_rotate(made(build), bundle=bundle, timeout=TIMEOUT)
        check(f"model, bundle {bundle}", made(build), model, torch.ones(2, 0, dtype=torch.float64))
        rtp_ext.ring_of(model).close()
