"""Experts with products in 8 bits, against the same recipe in one process with plain torch."""

import dataclasses
from itertools import product

import pytest
import torch
from code_reference import scaled_experts
from harness import on_ranks
from live_bytes import assert_pool
from reference import assert_same, chunk, differs, full, random
from torch import nn

import rtp_ext
from rtp_ext.functional import rotated_experts
from rtp_ext.nn import RotatedExperts
from rtp_ext.recipes import RECIPES, recipe
from rtp_ext.ring import Prepared

# Of the largest magnitude: sums have another order; in bfloat16 a sum of the hidden gradients is another code.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
TOKENS = (17, 9, 0)  # of each rank
EXPERTS, CHOICES = 5, 2
# Of the first feature's weights: only scales of rows keep its outputs, and those of columns its gradients.
SMALL = 2.0**-20
RINGS = ({"transport": "shm"}, {"transport": "c10d", "group": 2}, {"route": "gather", "gradient_route": "direct"})


def gate_first(pre):
    gate, up = pre.chunk(2, -1)
    return gate.relu() * up


def gate_between(pre):
    return pre[:, ::2].relu() * pre[:, 1::2]


def sizes(name):
    """Features and hidden features: odd where the recipe takes any."""
    align = recipe(name).align
    return (11, 7) if align == 1 else (2 * align, align)


def stacks(name, dtype, inputs_first, biases, experts=EXPERTS):
    features, hidden = sizes(name)
    shapes = {"up": (experts, 2 * hidden, features), "down": (experts, features, hidden)}
    made = {key: random(*shape, dtype=dtype, seed=len(key)) for key, shape in shapes.items()}
    made["up"][..., 0] *= SMALL
    made["down"][:, 0] *= SMALL
    if inputs_first:
        made = {key: stack.transpose(1, 2).contiguous() for key, stack in made.items()}
    if biases:
        made |= {"up_bias": random(experts, 2 * hidden, dtype=dtype, seed=20)}
        made |= {"down_bias": random(experts, features, dtype=dtype, seed=21)}
        made["down_bias"][:, 0] *= SMALL
    return made


def batch(name, rank, dtype, experts=EXPERTS):
    """Some tokens choose no expert, and nobody chooses the last but one."""
    features, tokens = sizes(name)[0], TOKENS[rank]
    x = random(tokens, features, dtype=dtype, seed=30 + rank)
    generator = torch.Generator().manual_seed(rank)
    index = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :CHOICES]
    index = torch.where(index == experts - 2, experts, index)
    weights = random(tokens, CHOICES, dtype=torch.float32, seed=40 + rank)
    weights[:2, 0] = torch.tensor([0.0, 1e-30])[: len(weights)]
    return x, index, weights, random(tokens, features, dtype=dtype, seed=50 + rank)


def differentiable(tensors):
    return {key: tensor.detach().clone().requires_grad_() for key, tensor in tensors.items()}


def rolled(stack):
    """A control: every expert has its neighbour's scales, nearly."""
    return stack * stack.roll(1, 0).abs().amax((1, 2), keepdim=True) / stack.abs().amax((1, 2), keepdim=True)


def check(rank, ranks, ring, name, dtype, inputs_first, biases):
    whole = stacks(name, dtype, inputs_first, biases)
    mine = differentiable({key: chunk(stack, ranks, rank) for key, stack in whole.items()})
    x, index, weights, dy = batch(name, rank, dtype)
    operands = differentiable({"x": x, "weights": weights})
    options = {"transposed": inputs_first, "interleaved": inputs_first, "activation": "reglu", "recipe": name}
    options |= {key: mine[key] for key in mine if key.endswith("bias")}
    y = rotated_experts(operands["x"], index, operands["weights"], mine["up"], mine["down"], ring=ring, **options)
    y.backward(dy)

    gate = gate_between if inputs_first else gate_first
    plain = differentiable(whole)
    for other in range(ranks):
        x, index, weights, dy = batch(name, other, dtype)
        if len(x) == 0:
            assert other != rank or y.shape == x.shape == operands["x"].grad.shape
            continue
        given = differentiable({"x": x, "weights": weights})
        expected = scaled_experts(recipe(name), given["x"], index, given["weights"], plain, gate, inputs_first)
        expected.backward(dy)
        if other != rank:
            continue
        if name.startswith("float8_tensorwise"):  # torch multiplies by both scales at last
            assert_same(y, expected, TOLERANCE[dtype], "y")
        else:
            assert torch.equal(y, expected), "y, bitwise, with two experts a token"
        for what in given:
            assert_same(operands[what].grad, given[what].grad, TOLERANCE[dtype], f"d{what}")
        first = operands["x"].grad[:, :1]
        assert_same(first, given["x"].grad[:, :1], TOLERANCE[dtype], "dx of the first feature")
        own = differentiable({"x": x, "weights": weights})
        other_scales = whole | {"up": rolled(whole["up"])}
        control = scaled_experts(recipe(name), x, index, weights, other_scales, gate, inputs_first)
        assert differs(y, control, 5e-3), "control: scales of other experts"
        if recipe(name).backward is not None:
            swapped = dataclasses.replace(recipe(name), forward=recipe(name).backward, backward=recipe(name).forward)
            control = scaled_experts(swapped, own["x"], index, own["weights"], whole, gate, inputs_first)
            control.backward(dy)
            if recipe(name).backward.block[0] != recipe(name).backward.block[1]:  # not one scale
                assert differs(first, own["x"].grad[:, :1], 0.5), "control: swapped planes"
            assert differs(y[:, :1], control[:, :1], 0.5), "control: swapped planes"
    for key, stack in plain.items():
        assert_same(mine[key].grad.float(), chunk(stack.grad.float() / ranks, ranks, rank), TOLERANCE[dtype], f"d{key}")


@on_ranks([1, 2, 3])
def test_parity(rank, ranks, cases):
    forms = {"stored [out, in]": (False, False), "[in, out], with biases": (True, True)}
    for options in RINGS if ranks > 1 else RINGS[:1]:
        with rtp_ext.Ring(timeout=30.0, **options) as ring:
            for name, dtype, form in product(RECIPES, TOLERANCE, forms):
                with cases.case(f"{name}, {dtype}, {form}, {options}"):
                    check(rank, ranks, ring, name, dtype, *forms[form])


@on_ranks([2, 3])
def test_bytes_and_freshness(rank, ranks, cases):
    """Codes travel in both passes, gradients in float32. They are made once after each change; of plain tensors, to
    which writes may show nowhere, once in each forward."""
    experts, made = 2 * ranks, {}
    for name in RECIPES:
        features, hidden = sizes(name)
        whole, chosen = stacks(name, torch.float32, False, False, experts), recipe(name)
        x, index, weights, dy = batch(name, 0, torch.float32, experts)
        index = index.clamp(max=experts - 1)
        with rtp_ext.Ring(timeout=30.0, prefetch=False) as ring, cases.case(name):
            executor, plans = ring.communicator.executor, Prepared()
            layer = RotatedExperts(experts, features, hidden, activation="reglu", recipe=name, ring=ring)
            rtp_ext.init_weights(
                layer, lambda part, of=whole: part.load_state_dict({"gate_up_proj": of["up"], "down_proj": of["down"]})
            )
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            shards = ((2, 2 * hidden, features), (2, features, hidden))
            for _ in range(2):
                before = executor.codes()[1]
                for _ in range(2):
                    sent = ring.bytes_sent("weight"), ring.bytes_sent("gradient")
                    y = layer(x.clone().requires_grad_(), index, weights)
                    forward = ring.bytes_sent("weight") - sent[0]
                    y.backward(dy)
                    backward = ring.bytes_sent("weight") - sent[0] - forward
                    for found, late in ((forward, False), (backward, True)):
                        assert found == (ranks - 1) * sum(chosen.travels(*each, backward=late) for each in shards)
                    assert ring.bytes_sent("gradient") - sent[1] == (ranks - 1) * 4 * 2 * 3 * hidden * features
                assert executor.codes()[0] == sum(chosen.memory(*each) for each in shards)
                assert executor.codes()[1] - before == 2 * len(chosen.planes), "once for each plane of a weight"
                now = {"up": full(layer.gate_up_proj), "down": full(layer.down_proj)}
                expected = scaled_experts(chosen, x, index, weights, now, gate_first, False)
                assert torch.equal(y, expected) or name.startswith("float8_tensorwise")
                optimizer.step()
                now = {"up": full(layer.gate_up_proj), "down": full(layer.down_proj)}
                fresh = scaled_experts(chosen, x, index, weights, now, gate_first, False)
                assert differs(y, fresh, 5e-3), "control: stale codes"
            mine = {key: chunk(stack, ranks, rank).clone() for key, stack in whole.items()}
            before, results = executor.codes()[1], []
            for _ in range(2):
                results.append(
                    rotated_experts(
                        x, index, weights, **mine, activation="reglu", ring=ring, recipe=name, prepared=plans
                    )
                )
                mine["down"].data.mul_(2.0)
            assert executor.codes()[1] - before == 4 and torch.equal(results[1], 2 * results[0])
            made[name] = results[0]
    assert len({tuple(y[0, :3].tolist()) for y in made.values()}) > 3, "recipes differ"


class Stack(nn.ModuleList):
    def forward(self, x):
        for layer in self:
            x = layer(x, torch.tensor([[0], [1], [7]]), torch.ones(3, 1))
        return x


def test_the_pool_is_the_footprint():
    native, ranks, seen = rtp_ext._native, 4, set()
    ways = [(*way, False) for way in product(RECIPES, (1, 3, 4), ("chain", "direct"))]
    for name, group, gradients, halves in [*ways, ("float8_rowwise", 1, "chain", True)]:
        ring = rtp_ext.Ring.emulated(ranks, group=group, gradient_route=gradients, gradient_halves=halves)
        model = rtp_ext.fully_rotate(
            Stack([RotatedExperts(8, 256, 128, recipe=name, ring=ring) for _ in range(2)]), mesh=ring
        )
        for _ in range(4):
            model(torch.ones(3, 256, requires_grad=True)).sum().backward()
        planes = recipe(name).shard_planes()
        shapes = ((8, 256, 256), (8, 256, 128))
        facts = native.OperationFacts("experts", [native.ParameterFacts(shape, codes=planes) for shape in shapes])
        planned = native.footprint(
            [facts] * 2,
            **dict(ranks=ranks, in_place=False, sends_anywhere=True, receives_anywhere=True, slot_cap=0, cast=False),
            **dict(compute_bytes=4, reduce_bytes=4, gradient_route=gradients, gradients_apart=True),
            **dict(group=group, halves=halves, look_ahead=None),
        )
        assert_pool(ring, planned, f"{name}, group {group}, {gradients}")
        told = [row for row in rtp_ext.explain(model).parameters]
        assert {row.travel for row in told} == {name} and all(row.apart is None for row in told)
        seen.add(planned.weight.peak_bytes)
    assert len(seen) > 2, seen


def test_refusals():
    ring = rtp_ext.Ring.emulated(2)
    x, index, weights = torch.ones(3, 64), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    up, down = torch.ones(2, 64, 64), torch.ones(2, 64, 32)
    for error, given in (
        ("expected one of float8_tensorwise", {"recipe": "float8"}),
        ("needs outputs in multiples of 128, got 64", {"recipe": "float8_blockwise"}),
        ("recompute=True cannot be combined with recipe float8_rowwise", {"recompute": True}),
        ("in_place=True cannot be combined with recipe", {"ring": rtp_ext.Ring.emulated(2, in_place=True)}),
    ):
        with pytest.raises(ValueError, match=error):
            rotated_experts(x, index, weights, up, down, **{"ring": ring, "recipe": "float8_rowwise", **given})
    with pytest.raises(TypeError, match="at most 32 bits with recipe float8_rowwise, got float64"):
        rotated_experts(x.double(), index, weights, up.double(), down.double(), ring=ring, recipe="float8_rowwise")
