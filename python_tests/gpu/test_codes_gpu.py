"""Codes of 8 bits on a GPU: bitwise those of a CPU, and operands of its products."""

import pytest
import torch
from code_reference import scaled_experts, scaled_product
from reference import assert_same, differs, random
from test_recipes import matrices, same_codes, same_scales

import rtp_ext
from rtp_ext.functional import rotated_experts, rotated_linear, rotated_linears
from rtp_ext.recipes import RECIPES, Plane, amax, quantize, recipe

ON_H100 = ("float8_tensorwise", "float8_rowwise")  # with scales of float32, of whole rows or a whole matrix


def planes():
    found = {}
    for each in RECIPES.values():
        for plane in (*each.planes, each.tokens, each.gradients, *(each.weight_gradient or ())):
            found[plane] = None
    return list(found)


@pytest.mark.parametrize("plane", planes(), ids=str)
def test_codes_are_those_of_a_cpu(plane):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for values in matrices(160, 288, dtype):
            expected, found = quantize(plane, values), quantize(plane, values.cuda())
            assert same_codes(found.codes.cpu(), expected.codes), dtype
            assert same_scales(found.scales.cpu(), expected.scales), dtype
            if values.float().abs().sum() > 1 and values.isfinite().all():
                other = quantize(plane, 1.3 * values)
                assert not same_codes(other.codes, expected.codes) or not same_scales(other.scales, expected.scales)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("codes", ("e4m3", "e5m2"))
def test_conversions_are_those_of_a_cpu(dtype, codes):
    """Of every number of 16 bits with many factors, infinities and NaNs with their signs too, in all layouts."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(256, 256)
    values = every.view(torch.float16 if dtype == torch.float16 else torch.bfloat16).to(dtype)
    for exponent in range(-16, 17, 4):
        for block, transposed in (((1, None), False), ((None, 1), True), ((None, None), False)):
            plane = Plane(block, transposed=transposed, codes=codes)
            largest = torch.full(plane.scale_shape(256, 256), 1.7 * 2.0**exponent)
            expected, found = quantize(plane, values, largest), quantize(plane, values.cuda(), largest.cuda())
            numbers = ~values.isnan()  # a conversion to float32 may lose the sign of a NaN
            left, right = (each.codes.cpu().view(torch.uint8) for each in (expected, found))
            assert torch.equal(left[numbers], right[numbers]), (plane, exponent)
            assert same_codes(found.codes.cpu(), expected.codes), (plane, exponent)
            assert not torch.equal(left, quantize(plane, values, 2 * largest).codes.view(torch.uint8)), "control"


@pytest.mark.parametrize("plane", planes(), ids=str)
def test_given_magnitudes_and_large_matrices(plane):
    """Magnitudes that are given or found in the same kernel, of more tiles than run at once; the other kernels."""
    for rows, columns in ((2064, 4104), (300, 20000), (129, 1000), (45, 77)):
        values = random(rows, columns, dtype=torch.bfloat16, seed=rows).cuda()
        found, given = quantize(plane, values), quantize(plane, values, amax(plane, values))
        expected = quantize(plane, values.cpu())
        for each in (found, given):
            assert same_codes(each.codes.cpu(), expected.codes) and same_scales(each.scales.cpu(), expected.scales)
        assert torch.equal(amax(plane, values).cpu(), amax(plane, values.cpu()))


def dequantized(codes):
    rows, columns = codes.codes.shape
    high, wide = codes.plane.block_of(rows, columns)
    scales = codes.scales.double().repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    return codes.codes.double() * scales


@pytest.mark.parametrize("name", ON_H100)
@pytest.mark.real_gpu("a CPU has no fast accumulation")
def test_products_of_codes(name):
    chosen = recipe(name)
    weight = random(256, 384, dtype=torch.bfloat16, seed=1).cuda()
    x, dy = (random(144, size, dtype=torch.bfloat16, seed=size).cuda() for size in (384, 256))
    forward, backward = (quantize(plane, weight, gpu=True) for plane in (chosen.forward, chosen.planes[-1]))
    tokens, gradients = quantize(chosen.tokens, x, gpu=True), quantize(chosen.gradients, dy, gpu=True)
    operands = {"y": (tokens, forward.codes.t(), forward.scales.t(), dequantized(forward).t())}
    if backward.plane.transposed:  # else the receiver transposes the codes
        operands["dx"] = (gradients, backward.codes, backward.scales, dequantized(backward))
    for what, (left, codes, scales, right) in operands.items():
        for fast in (False, True):
            result = torch._scaled_mm(
                left.codes, codes, left.scales, scales, out_dtype=torch.bfloat16, use_fast_accum=fast
            )
            exact = dequantized(left) @ right
            error = float((result.double() - exact).norm() / exact.norm())
            assert error < (2e-2 if fast else 4e-3), f"{what}, fast {fast}: {error}"
            assert float((1.5 * result.double() - exact).norm() / exact.norm()) > 0.1, "control"


@pytest.mark.parametrize("name", [*ON_H100, "float8_rowwise_with_gw_hp"])
@pytest.mark.parametrize("group", [1, 4])
def test_linear_layers(name, group):
    """An emulated ring, whose shards are all this rank's own, against the same recipe on a CPU."""
    ranks, dtype, tolerance = 4, torch.bfloat16, 1e-2  # of the largest magnitude: partial sums are rounded once each
    shard = random(48, 96, dtype=dtype, seed=1)
    bias = random(48, dtype=dtype, seed=2)
    for tokens in (33, 64, 0):
        x, dy = random(tokens, 96, dtype=dtype, seed=3), random(tokens, 48 * ranks, dtype=dtype, seed=4)
        ring = rtp_ext.Ring.emulated(ranks, device="cuda", group=group)
        mine = [each.cuda().requires_grad_() for each in (shard, bias, x)]
        rotated_linear(mine[2], mine[0], mine[1], ring=ring, recipe=name).backward(dy.cuda())
        y = rotated_linear(mine[2], mine[0], mine[1], ring=ring, recipe=name)
        whole = [each.clone().requires_grad_() for each in (shard.repeat(ranks, 1), bias.repeat(ranks), x)]
        expected = scaled_product(name, whole[2], whole[0], ranks) + whole[1]
        expected.backward(dy)
        assert_same(y.float().cpu(), expected.float(), tolerance, "y")
        assert_same(mine[2].grad.float().cpu(), whole[2].grad.float(), tolerance, "dx")
        for what, ours, theirs in (("dW", mine[0], whole[0]), ("db", mine[1], whole[1])):
            mean = theirs.grad.float().view(ranks, 48, *theirs.shape[1:]).mean(0)
            assert_same(ours.grad.float().cpu(), mean, tolerance, what)
        if tokens:
            other = scaled_product(name, whole[2], 1.05 * whole[0], ranks) + whole[1]
            assert differs(y.float().cpu(), other.float(), tolerance), "control"


@pytest.mark.parametrize("name", [*ON_H100, "float8_rowwise_with_gw_hp"])
def test_layers_of_equal_sizes_with_one_input(name):
    """Their shards are one operand of a product, with the scales of each."""
    ranks, dtype = 2, torch.bfloat16
    shards = [random(48, 96, dtype=dtype, seed=seed, scale=10.0**seed) for seed in (0, 1)]
    x = random(33, 96, dtype=dtype, seed=3)
    ring = rtp_ext.Ring.emulated(ranks, device="cuda")
    found = rotated_linears([x.cuda()], [shard.cuda() for shard in shards], ring=ring, recipe=name)
    expected = [scaled_product(name, x, shard.repeat(ranks, 1), ranks).float() for shard in shards]
    for layer, y in enumerate(found):
        assert_same(y.float().cpu(), expected[layer], 1e-2, f"y {layer}")
        assert differs(y.float().cpu(), expected[1 - layer], 1e-2), "control"


@pytest.mark.parametrize("name", [*ON_H100, "float8_rowwise_with_gw_hp"])
@pytest.mark.parametrize("inputs_first", (False, True))
def test_experts(name, inputs_first):
    """An emulated ring of two shards of three experts, of which some have few tokens, against the same on a CPU."""
    ranks, dtype, tolerance = 2, torch.bfloat16, 3e-2  # activations that are rounded otherwise become other codes
    shapes = {"up": (3, 96, 64), "down": (3, 64, 48)}
    shards = {key: random(*shape, dtype=dtype, seed=len(key)) for key, shape in shapes.items()}
    if inputs_first:
        shards = {key: shard.transpose(1, 2).contiguous() for key, shard in shards.items()}
    x, dy = (random(37, 64, dtype=dtype, seed=seed) for seed in (3, 4))
    index = torch.stack([torch.arange(37) % 6, torch.full((37,), 4)], 1)
    weights = random(37, 2, dtype=torch.float32, seed=5)
    ring = rtp_ext.Ring.emulated(ranks, device="cuda")
    mine = {key: each.cuda().requires_grad_() for key, each in {**shards, "x": x}.items()}
    options = {"transposed": inputs_first, "activation": "reglu", "recipe": name, "ring": ring}
    y = rotated_experts(mine["x"], index.cuda(), weights.cuda(), mine["up"], mine["down"], **options)
    y.backward(dy.cuda())
    whole = {key: shard.repeat(ranks, 1, 1).requires_grad_() for key, shard in shards.items()}
    given = x.clone().requires_grad_()

    def gate(pre):
        return pre[:, :48].relu() * pre[:, 48:]

    expected = scaled_experts(recipe(name), given, index, weights, whole, gate, inputs_first)
    expected.backward(dy)
    assert_same(y.float().cpu(), expected.float(), tolerance, "y")
    assert_same(mine["x"].grad.float().cpu(), given.grad.float(), tolerance, "dx")
    for key, stack in whole.items():
        mean = stack.grad.float().view(ranks, *shards[key].shape).mean(0)
        assert_same(mine[key].grad.float().cpu(), mean, tolerance, f"d{key}")
    other = scaled_experts(recipe(name), x, index.roll(1, 0), weights, whole, gate, inputs_first)
    assert differs(y.float().cpu(), other.float(), tolerance), "control"
