"""Codes of 8 bits on a GPU: bitwise those of a CPU, and operands of its products."""

import pytest
import torch
from reference import random
from test_recipes import matrices, same_codes, same_scales

from rtp_ext.recipes import RECIPES, quantize, recipe

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
