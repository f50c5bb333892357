"""One scale of all shards of a weight: codes, results and gradients are those of one process that quantizes the whole
weight; the ranks exchange largest magnitudes in every forward, whatever each knows of its own shard."""

import copy

import pytest
import torch
from code_reference import numbers, scaled
from harness import on_ranks
from reference import assert_same, chunk, differs, full, local, random
from torch import nn
from torch.utils.checkpoint import checkpoint

import rtp_ext
from rtp_ext.functional import rotated_linear
from rtp_ext.nn import RotatedLinear
from rtp_ext.recipes import recipe

NAME, WIDTH = "float8_tensorwise_whole", 43
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
TOKENS = (5, 0, 3, 0)


class Net(nn.Module):
    """The last shards of its weights have the largest numbers."""

    def __init__(self, ranks, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.checkpointed = checkpointed
        self.first = nn.Linear(WIDTH, 7 * ranks - 2)
        self.last = nn.Linear(7 * ranks - 2, WIDTH, bias=False)
        with torch.no_grad():
            for layer in (self.first, self.last):
                layer.weight[-1] *= 3.3

    def both(self, x):
        return self.last(torch.nn.functional.gelu(self.first(x)))

    def forward(self, x):
        return checkpoint(self.both, x, use_reentrant=False) if self.checkpointed else self.both(x)


def batch(rank, step):
    return random(TOKENS[rank], WIDTH, dtype=torch.float32, seed=10 * step + rank)


def train(model, batches, ranks=1):
    """Two steps of two micro-batches. Returns the last outputs of the first batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        for micro in range(2):
            ys = [model(x) for x in batches(2 * step + micro)]
            sum(y.square().sum() / ranks for y in ys).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return model(batches(9)[0])


@on_ranks([1, 2, 3, 4])
def test_models_are_those_of_one_process(rank, ranks, cases):
    plain = scaled(Net(ranks), NAME, ranks)
    train(plain, lambda step: [batch(each, step) for each in range(ranks)], ranks)
    with torch.no_grad():
        expected = plain(batch(rank, 9))
    for checkpointed in (False, True):
        with cases.case(f"checkpointed {checkpointed}"):
            model = rtp_ext.fully_rotate(Net(ranks, checkpointed), recipe=NAME, timeout=30.0)
            executor = rtp_ext.ring_of(model).communicator.executor
            assert_same(train(model, lambda step: [batch(rank, step)]), expected, 6e-3, "after two steps")
            assert executor.codes()[1] == 3 * 2, "made once after each change"
            for name, parameter in model.named_parameters():
                assert_same(full(parameter), plain.get_parameter(name).detach(), 6e-3, name)
            rtp_ext.ring_of(model).close()
    other = scaled(Net(ranks), "float8_tensorwise", ranks)
    with torch.no_grad():
        same, x = scaled(Net(ranks), NAME, ranks), batch(0, 9)
        assert differs(other(x), same(x), 1e-3) == (ranks > 1), "control: scales of shards"


@on_ranks([2, 3])
def test_codes_follow_the_shards_of_others(rank, ranks, ring, cases):
    """A write to the shard of one rank alone makes codes of all ranks anew."""
    for kind in ("converted", "alone"):
        for dtype in TOLERANCE:
            with cases.case(f"{kind}, {dtype}"):
                torch.manual_seed(1)
                plain = nn.Linear(WIDTH, 5 * ranks, bias=False, dtype=dtype)
                if kind == "converted":
                    model = rtp_ext.fully_rotate(nn.Sequential(copy.deepcopy(plain)), mesh=ring, recipe=NAME)
                    layer = model[0]
                else:
                    model = layer = RotatedLinear.from_module(plain, ring, recipe=NAME)
                x = random(3 + rank, WIDTH, dtype=dtype, seed=rank)
                found = []
                for step in range(2):
                    y = model(x)
                    whole = full(layer.weight.detach())
                    wanted = (numbers(recipe(NAME).tokens, x) @ numbers(recipe(NAME).forward, whole).t()).to(dtype)
                    assert_same(y.float(), wanted.float(), TOLERANCE[dtype], f"step {step}")
                    found.append(y[:, :5].detach().float())
                    if step == 0 and rank == ranks - 1:
                        with torch.no_grad():
                            local(layer.weight)[-1] *= 7.7
                assert differs(found[1], found[0], TOLERANCE[dtype]), (
                    "the first rank's shard is as before, its codes new"
                )


@on_ranks(2)
def test_a_weight_that_is_written_during_a_forward_is_an_error(rank, ranks, ring):
    """Its largest magnitude was exchanged at the beginning: larger numbers would saturate."""
    model = rtp_ext.fully_rotate(Net(ranks), mesh=ring, recipe=NAME)
    model(batch(0, 0))

    def write(*_):
        with torch.no_grad():
            model.last.weight.mul_(9.0)

    model.first.register_forward_hook(write)
    with pytest.raises(ValueError, match="not written between the beginning of a forward"):
        model(batch(0, 1))


@on_ranks(2)
def test_plain_shards(rank, ranks, ring, cases):
    """Of functional forms: exchanged in each call, also without a Prepared and without tokens."""
    whole = random(10, WIDTH, dtype=torch.float32, seed=3)
    for step, scale in enumerate((1.0, 9.0, 0.25)):
        with cases.case(f"step {step}"):
            whole[-1] *= scale
            mine = chunk(whole, ranks, rank).clone().requires_grad_()
            x = batch(rank, step).requires_grad_()
            y = rotated_linear(x, mine, ring=ring, recipe=NAME)
            wanted = numbers(recipe(NAME).tokens, x.detach()) @ numbers(recipe(NAME).forward, whole).t()
            assert_same(y, wanted, TOLERANCE[torch.float32], "y")
            y.sum().backward()
            dx = numbers(recipe(NAME).gradients, torch.ones_like(y)) @ numbers(recipe(NAME).forward, whole)
            assert_same(x.grad, dx, TOLERANCE[torch.float32], "dx")


class Written(nn.Module):
    """Multiplies by a plain shard beside its layer, twice, and writes to it in between where no counter shows it."""

    def __init__(self, ring, shard):
        super().__init__()
        self.layer, self.others = nn.Linear(WIDTH, 5), (ring, shard)

    def forward(self, x):
        ring, shard = self.others
        found = [self.layer(x)]
        for scale in (50.0, 1.0):
            found.append(rotated_linear(x, shard, ring=ring, recipe=NAME))
            shard.data.mul_(scale)
        return found


@on_ranks(4)
def test_empty_shards_moved_models_and_plain_shards_of_one(rank, ranks, ring, cases):
    """The shards of 5 outputs have 2, 2, 1 and 0."""
    torch.manual_seed(2)
    whole = random(6, WIDTH, dtype=torch.float32, seed=5)
    plain = Written(ring, chunk(whole, ranks, rank).clone())
    weight = plain.layer.weight.detach().clone()
    model = rtp_ext.fully_rotate(plain, mesh=ring, recipe=NAME)
    x = random(3, WIDTH, dtype=torch.float32, seed=rank)
    inputs = numbers(recipe(NAME).tokens, x)
    for label in ("as converted", "moved"):
        if label == "moved":
            model.cpu()
        with torch.no_grad():
            y, before, after = model(x)
        for what, found, wanted in (
            ("layer", y - plain.layer.bias.full_tensor(), weight),
            ("before", before, whole),
            ("after", after, 50.0 * whole),
        ):
            with cases.case(f"{label}: {what}"):
                wanted = inputs @ numbers(recipe(NAME).forward, wanted).t()
                assert_same(found, wanted, TOLERANCE[torch.float32], what)
        whole = 50.0 * whole


def test_explain():
    plan = rtp_ext.explain(nn.Linear(64, 64), ranks=2, rank=0, device="cpu", recipe=NAME)
    own = rtp_ext.explain(nn.Linear(64, 64), ranks=2, rank=0, device="cpu", recipe="float8_tensorwise")
    assert [each.forward_bytes for each in plan.parameters] == [each.forward_bytes for each in own.parameters]
    assert plan.parameters[0].travel == NAME
    with pytest.raises(ValueError, match="expected one of float8_tensorwise, float8_tensorwise_whole"):
        recipe("float8_whole")
