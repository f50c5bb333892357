"""Codes of a local shard are those of its values at the time, and are made once after each change."""

import pytest
import torch
from harness import on_ranks
from reference import random
from torch import nn
from torch.distributed.tensor import DTensor

import rtp_ext
from rtp_ext.functional._codes import ShardCodes
from rtp_ext.parameters.sharding import held
from rtp_ext.recipes import RECIPES, amax, quantize, recipe


def same(codes, values):
    """Whether codes and scales are those of the values."""
    fresh = [quantize(each.plane, values.detach()) for each in codes]
    pairs = [
        (x, y) for each, other in zip(codes, fresh, strict=True) for x, y in zip(parts(each), parts(other), strict=True)
    ]
    return all(torch.equal(x, y) for x, y in pairs)


def parts(codes):
    return [each.contiguous().view(torch.uint8).clone() for each in (codes.codes, codes.scales)]


def changes(layer):
    """What changes the weight of a layer, by name."""
    weight = layer.weight
    optimizers = {
        "AdamW": torch.optim.AdamW(layer.parameters(), lr=0.1),
        "foreach SGD": torch.optim.SGD(layer.parameters(), lr=0.1, foreach=True),
    }
    if isinstance(weight, DTensor):  # of plain parameters, fused steps raise no version counter
        optimizers["fused AdamW"] = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    yield from ((name, optimizer.step) for name, optimizer in optimizers.items())
    saved = {name: value.detach().clone() * 2 for name, value in layer.state_dict().items()}
    yield "load_state_dict", lambda: layer.load_state_dict(saved)

    def write():
        with torch.no_grad():
            weight.mul_(1.5)

    yield "an operator in place", write


@pytest.mark.parametrize("name", RECIPES)
def test_codes_follow_every_change_and_are_made_once(name):
    layer = nn.Linear(64, 32, bias=False)
    made = ShardCodes(recipe(name))
    first = made.current(layer.weight, torch.float32)
    places = [part.data_ptr() for each in first for part in (each.codes, each.scales)]
    layer(random(3, 64, dtype=torch.float32, seed=1)).sum().backward()
    for what, change in changes(layer):
        stale = [parts(each) for each in made.current(layer.weight, torch.float32)]
        count = made.made
        change()
        codes = made.current(layer.weight, torch.float32)
        assert same(codes, layer.weight), what
        assert made.current(layer.weight, torch.float32) is codes and made.made == count + 1, what
        pairs = zip(stale, codes, strict=True)
        assert not all(torch.equal(x, y) for old, new in pairs for x, y in zip(old, parts(new), strict=True)), (
            f"control: {what} changes codes or scales"
        )
    assert places == [part.data_ptr() for each in codes for part in (each.codes, each.scales)], "the same memory"
    assert made.nbytes == recipe(name).memory(32, 64)
    layer.weight.data = layer.weight.data.clone() * 3  # other memory
    assert same(made.current(layer.weight, torch.float32), layer.weight)
    count = made.made
    assert same(made.current(layer.weight, torch.bfloat16), layer.weight.bfloat16()) and made.made == count + 1
    with pytest.raises(ValueError, match=rf"{name}: expected a matrix as shard, got shape \(2, 16, 64\)"):
        made.current(layer.weight.detach().view(2, 16, 64), torch.float32)
    with torch.inference_mode():
        inference = torch.ones(32, 64)
        made.current(inference, torch.float32)
        inference.mul_(2)
        assert same(made.current(inference, torch.float32), inference), "no version counter tells of the write"


@on_ranks(2)
def test_codes_follow_optimizers_of_shards(rank, ranks, cases):
    layer = rtp_ext.fully_rotate(nn.Linear(64, 48 * ranks, bias=False))
    made = ShardCodes(recipe("float8_rowwise"))
    x = random(3, 64, dtype=torch.float32, seed=rank)
    for what, change in changes(layer):
        with cases.case(what):
            layer(x).sum().backward()
            made.current(layer.weight, torch.float32)
            count = made.made
            change()
            codes = made.current(layer.weight, torch.float32)
            assert codes[0].codes.shape == (48, 64)
            assert same(codes, held(layer.weight))
            made.current(layer.weight, torch.float32)
            assert made.made == count + 1
    with cases.case("one scale of all shards"):

        def largest(plane, values):
            most = amax(plane, values)
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
            return most

        with torch.no_grad():
            held(layer.weight)[0, 0] = 10.0 + rank
        torch.autograd.graph.increment_version(layer.weight)
        (codes,) = ShardCodes(recipe("float8_tensorwise"), largest=largest).current(layer.weight, torch.float32)
        whole = quantize(codes.plane, layer.weight.full_tensor())
        assert torch.equal(codes.scales, whole.scales)
        part = whole.codes.view(torch.uint8)[48 * rank : 48 * (rank + 1)]
        assert torch.equal(codes.codes.view(torch.uint8), part)
        own = quantize(codes.plane, held(layer.weight))
        assert torch.equal(own.scales, whole.scales) == (rank == ranks - 1), "control: a scale a shard"
