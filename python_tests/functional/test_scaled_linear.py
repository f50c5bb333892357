"""Linear layers with products in 8 bits, against the same recipe in one process with plain torch."""

import copy
from collections import Counter
from itertools import product

import pytest
import torch
from code_reference import dequantized, numbers, scaled, scaled_product
from harness import on_ranks
from live_bytes import assert_pool
from reference import assert_same, chunk, differs, full, random
from torch import nn
from torch.profiler import ProfilerActivity, profile

import rtp_ext
from rtp_ext.functional import rotated_linear, rotated_linears
from rtp_ext.recipes import RECIPES, Codes, quantize, recipe
from rtp_ext.ring import Prepared

# Of the largest magnitude: sums have another order; in bfloat16 one more rounding.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
TOKENS = (33, 17, 0, 5)  # of each rank


def sizes(name, ranks):
    """Returns outputs of two layers and inputs: odd where the recipe takes any, and shards of other sizes."""
    align = recipe(name).align
    return (7 * ranks - 2, 5 * ranks, 43) if align == 1 else (2 * ranks * align, ranks * align, 2 * align)


def batch(name, rank, ranks, dtype):
    first, second, inputs = sizes(name, ranks)
    x = random(TOKENS[rank], inputs, dtype=dtype, seed=rank)
    return x, [random(len(x), out, dtype=dtype, seed=10 + rank + out) for out in (first, second)]


def layers(name, ranks, dtype):
    first, second, inputs = sizes(name, ranks)
    weights = [random(out, inputs, dtype=dtype, seed=100 + out) for out in (first, second)]
    return weights, random(second, dtype=dtype, seed=200)


def wrong_scales(codes):
    """A control: every block has its neighbour's scale, or, alone, another one."""
    scales = codes.scales.float()
    return Codes(codes.plane, codes.codes, (scales.roll(1, 0) if len(scales) > 1 else scales.roll(1, 1)) * 1.07)


def check(rank, ranks, ring, name, dtype, first=0):
    """first: of the layers whose outputs have gradients."""
    weights, bias = layers(name, ranks, dtype)
    mine = [chunk(weight, ranks, rank).clone().requires_grad_() for weight in weights]
    own_bias = chunk(bias, ranks, rank).clone().requires_grad_()
    x, dys = batch(name, rank, ranks, dtype)
    x = x.repeat_interleave(2, 1)[:, ::2].requires_grad_()  # strided, also without tokens
    ys = rotated_linears([x], mine, [None, own_bias], ring=ring, recipe=name)
    torch.autograd.backward(ys[first:], dys[first:])

    whole = [weight.clone().float().requires_grad_() for weight in weights]
    whole_bias = bias.clone().float().requires_grad_()
    for other in range(ranks):
        x_of, dys_of = batch(name, other, ranks, dtype)
        x_of = x_of.float().requires_grad_()
        expected = [scaled_product(name, x_of, weight, ranks) for weight in whole]
        expected[1] = expected[1] + whole_bias
        torch.autograd.backward(expected[first:], [dy.float() for dy in dys_of[first:]])
        if other == rank:
            for layer, (y, wanted) in enumerate(zip(ys, expected, strict=True)):
                assert_same(y.float(), wanted, TOLERANCE[dtype], f"y {layer}")
            if len(x):
                wrong = dequantized(wrong_scales(quantize(recipe(name).planes[0], whole[0].detach())))
                control = numbers(recipe(name).tokens, x_of) @ wrong.t()
                assert differs(ys[0].float(), control, 0.01), "control: other scales"
            assert_same(x.grad.float(), x_of.grad, TOLERANCE[dtype], "dx")
    for layer, weight in [*enumerate(whole)][first:]:
        assert_same(mine[layer].grad.float(), chunk(weight.grad / ranks, ranks, rank), TOLERANCE[dtype], f"dW {layer}")
    assert_same(own_bias.grad.float(), chunk(whole_bias.grad / ranks, ranks, rank), TOLERANCE[dtype], "db")


RINGS = ({"transport": "shm"}, {"transport": "c10d", "group": 2}, {"route": "gather"}, {"gradient_route": "direct"})


@on_ranks([1, 2, 3, 4])
def test_parity(rank, ranks, cases):
    for options in RINGS if ranks > 1 else RINGS[:1]:
        with rtp_ext.Ring(timeout=30.0, **options) as ring:
            for name in RECIPES:
                for dtype in TOLERANCE:
                    with cases.case(f"{name}, {dtype}, {options}"):
                        check(rank, ranks, ring, name, dtype)


@on_ranks(2)
def test_three_layers_with_biases(rank, ranks, cases):
    """Weights, biases and scales are nine tensors that travel together, and a checksum."""
    dtype = torch.float32
    weights = [random(64, 64, dtype=dtype, seed=seed) for seed in range(3)]
    biases = [random(64, dtype=dtype, seed=seed) for seed in range(3, 6)]
    x = random(5, 64, dtype=dtype, seed=10 + rank)
    for options in ({"transport": "shm"}, {"transport": "tcp"}, {"transport": "c10d"}, {"checksum": True}):
        with cases.case(f"{options}"), rtp_ext.Ring(timeout=30.0, **options) as ring:
            mine = [[chunk(whole, ranks, rank).clone() for whole in wholes] for wholes in (weights, biases)]
            found = rotated_linears([x], *mine, ring=ring, recipe="float8_rowwise")
            without = rotated_linears([x], mine[0], [None] * 3, ring=ring, recipe="float8_rowwise")
            for y, plain, bias in zip(found, without, biases, strict=True):
                assert torch.equal(y, plain + bias)


@on_ranks([2, 3, 4])
def test_groups_in_backward(rank, ranks, cases):
    """Of the recipe whose backward plane stacks; also where one output has no gradient."""
    rings = [{"group": group, "gradient_route": way} for group in range(2, ranks + 1) for way in ("chain", "direct")]
    for options in (*rings, {"group": ranks, "transport": "c10d", "collective": True}):
        with rtp_ext.Ring(timeout=30.0, **options) as ring:
            for first in (0, 1):
                with cases.case(f"{options}, from {first}"):
                    check(rank, ranks, ring, "float8_blockwise", torch.bfloat16, first)


def ran(ring, name, inputs, weights):
    """Returns how often operators ran in a backward of two layers with one input."""
    ys = rotated_linears([inputs], weights, ring=ring, recipe=name)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    return Counter(event.name for event in seen.events())


@pytest.mark.parametrize("group", (1, 2, 3, 4))
def test_products_of_a_backward(group):
    """Each adds to its sum. One for both layers and all shards of a group, where the planes stack; a control where
    they do not."""
    ranks, groups = 4, -(-4 // group)
    x, shards = torch.ones(128, 256), [torch.ones(128, 256), torch.ones(256, 256)]
    expected = {"float8_blockwise": (groups, groups), "float8_rowwise": (2 * ranks, ranks)}
    for name, (of_dx, of_dw) in (expected | {"float8_tensorwise": (2 * ranks, 2 * ranks)}).items():
        ring = rtp_ext.Ring.emulated(ranks, group=group, gradient_route="direct")
        found = ran(ring, name, x.clone().requires_grad_(), shards)
        assert found["aten::addmm"] == of_dx and not found["aten::add"] + found["aten::add_"] + found["aten::mm"]
        found = ran(ring, name, x, [shard.clone().requires_grad_() for shard in shards])
        assert found["aten::addmm"] == of_dw and not found["aten::mm"]


def test_the_pool_is_the_footprint():
    """To the byte, and a control: slots of groups in backward have other sizes."""
    native, ranks, seen = rtp_ext._native, 4, set()
    for name, group, gradients in product(RECIPES, (1, 2, 3, 4), ("chain", "direct")):
        ring = rtp_ext.Ring.emulated(ranks, group=group, gradient_route=gradients)
        layers = (nn.Linear(512, 512, bias=False) for _ in range(2))
        model = rtp_ext.fully_rotate(nn.Sequential(*layers), mesh=ring, recipe=name)
        for _ in range(4):
            model(torch.ones(3, 512, requires_grad=True)).sum().backward()
        planes = recipe(name).shard_planes()
        facts = native.OperationFacts("linear", [native.ParameterFacts((512, 512), codes=planes)])
        planned = native.footprint(
            [facts] * 2,
            **dict(ranks=ranks, in_place=False, sends_anywhere=True, receives_anywhere=True, slot_cap=0, cast=False),
            **dict(compute_bytes=4, reduce_bytes=4, gradient_route=gradients, gradients_apart=True),
            **dict(group=group, look_ahead=None),
        )
        assert_pool(ring, planned, f"{name}, group {group}, {gradients}")
        if group == 4 and gradients == "chain":
            seen.add((facts.takes_groups("backward"), planned.gradient.peak_bytes))
    assert len(seen) == 2, seen


@on_ranks(2)
def test_results_on_aligned_cuts_are_those_of_the_whole_weight(rank, ranks, ring, cases):
    """Bitwise, where no block reaches over a cut, and a control: with scales of shards they are not."""
    for name in RECIPES:
        (weight, _), _ = layers(name, ranks, torch.bfloat16)
        x, _ = batch(name, rank, ranks, torch.bfloat16)
        y = rotated_linears([x], [chunk(weight, ranks, rank)], ring=ring, recipe=name)[0]
        with cases.case(name):
            whole = scaled_product(name, x, weight, 1)
            assert torch.equal(y, whole) == (name != "float8_tensorwise")


@on_ranks(3)
def test_bytes(rank, ranks, cases):
    """Codes and scales travel in both passes, gradients in float32; the closed form, and 1 to 1.031 bytes a weight."""
    for name in RECIPES:
        align = recipe(name).align * 2 if recipe(name).align > 1 else 256
        weight = random(align * ranks, 512, dtype=torch.bfloat16, seed=1)
        mine = chunk(weight, ranks, rank).clone().requires_grad_()
        x = random(5, 512, dtype=torch.bfloat16, seed=rank).requires_grad_()
        for options in ({"prefetch": False}, {"prefetch": False, "group": 3, "transport": "c10d"}):
            with rtp_ext.Ring(timeout=30.0, **options) as ring, cases.case(f"{name}, {options}"):
                y = rotated_linears([x], [mine], ring=ring, recipe=name)[0]
                forward = ring.bytes_sent("weight")
                y.sum().backward()
                backward = ring.bytes_sent("weight") - forward
                shard, of_shard = (
                    (align, 512),
                    [recipe(name).travels(align, 512, backward=late) for late in (False, True)],
                )
                assert [forward, backward] == [(ranks - 1) * each for each in of_shard]
                for each in of_shard:
                    assert shard[0] * shard[1] < each <= 1.032 * shard[0] * shard[1]
                assert ring.bytes_sent("gradient") == (ranks - 1) * 4 * shard[0] * shard[1]
                assert ring.communicator.executor.codes()[0] == recipe(name).memory(*shard)


@on_ranks(2)
def test_codes_are_made_once_after_each_change(rank, ranks, ring, cases):
    """Also by hops that are sent ahead, before the layer that owns the codes is called. Of plain tensors, to which
    writes may show nowhere, once in each forward."""
    executor = ring.communicator.executor
    x = random(4, 32, dtype=torch.float32, seed=50 + rank).requires_grad_()
    for name in ("float8_rowwise", "float8_tensorwise"):
        planes = len(recipe(name).planes)
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(3)])
        plain = scaled(copy.deepcopy(model), name, ranks)
        rtp_ext.fully_rotate(model, mesh=ring, recipe=name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            with cases.case(f"{name}, step {step}"):
                before = executor.codes()[1]
                for _ in range(3):
                    y = model(x)
                    y.sum().backward()
                assert executor.codes()[1] - before == planes * len(model), "once for each plane of a weight"
                with torch.no_grad():
                    assert_same(y, plain(x), 6e-3, "y")
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                        theirs.copy_(full(ours))
                    assert differs(y, plain(x), 6e-3), "control: stale codes"
        weight = random(16, 32, dtype=torch.float32, seed=rank)
        with cases.case(f"{name}, plain tensors"):
            before, prepared = executor.codes()[1], Prepared()
            results = []
            for _ in range(2):
                results += rotated_linears([x], [weight], ring=ring, recipe=name, prepared=prepared)
                weight.data.mul_(2.0)
            assert executor.codes()[1] - before == 2 and torch.equal(results[1], 2 * results[0])
    mine, plans = [weight.requires_grad_()], [Prepared()]
    with cases.case("a step after a forward is an error in its backward"):
        h = rotated_linears([x], mine[:1], ring=ring, recipe="float8_rowwise", prepared=plans[0])[0]
        with torch.no_grad():
            mine[0].add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            h.sum().backward()


def test_refusals():
    ring = rtp_ext.Ring.emulated(2)
    x, weight = torch.ones(3, 64), torch.ones(32, 64)
    for error, given, options in (
        ("expected one of float8_tensorwise", {}, {"recipe": "float8"}),
        ("needs outputs in multiples of 128, got 64", {}, {"recipe": "float8_blockwise"}),
        ("of one input and not in blocks, for products in 8 bits", {"transposed": True}, {}),
        ("of one input and not in blocks", {"projections": [(0, 0, 0, 32), (0, 0, 32, 64)]}, {}),
    ):
        with pytest.raises(ValueError, match=error):
            rotated_linears([x], [weight], ring=ring, **{"recipe": "float8_rowwise", **given, **options})
    with pytest.raises(ValueError, match="expected shard_dim 0 with recipe float8_rowwise, got 1"):
        rotated_linear(x, weight, ring=ring, shard_dim=1, recipe="float8_rowwise")
    with pytest.raises(TypeError, match="at most 32 bits with recipe float8_rowwise, got float64"):
        rotated_linears([x.double()], [weight.double()], ring=ring, recipe="float8_rowwise")
    here = rtp_ext.Ring.emulated(2, in_place=True)
    with pytest.raises(ValueError, match="in_place=True cannot be combined with recipe float8_rowwise"):
        rotated_linears([x], [weight], ring=here, recipe="float8_rowwise")
