"""Linear layers in 8 bits, against the layers of torchao in one process. Skipped where torchao is not installed."""

import dataclasses
import importlib.util

import pytest
import torch
from harness import on_ranks
from reference import assert_same, full, random
from torch import nn

from rtp_ext.nn import RotatedLinear
from rtp_ext.recipes import RECIPES

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs the package torchao")

INPUTS, OUTPUTS, TOKENS = 160, 192, 64
# Of the largest magnitude, where the scales are the same; in bfloat16 of results that are rounded at most twice.
SAME = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7}
WITHIN = 1.02  # times torchao's root mean square error, where they are not


def layer(dtype):
    torch.manual_seed(0)
    plain = nn.Linear(INPUTS, OUTPUTS, dtype=dtype)
    with torch.no_grad():
        plain.weight[OUTPUTS // 2 :] *= 3.3  # scales of shards differ
    return plain


def batch(rank, dtype):
    """Tokens and gradients of results, some of them large, as in transformers."""
    x, dy = (random(TOKENS, size, dtype=torch.float32, seed=2 * rank + size) for size in (INPUTS, OUTPUTS))
    x[:, 7] *= 20
    return x.to(dtype), (dy * random(TOKENS, 1, dtype=torch.float32, seed=rank).exp() * 1e-3).to(dtype)


def float8_linear(plain, name, emulate):
    """emulate: numbers of the codes are multiplied in float32."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig.from_recipe_name(name.removeprefix("float8_").removesuffix("_whole"))
    return Float8Linear.from_float(plain, dataclasses.replace(config, emulate=emulate))


def mx_linear(plain, name):
    """Products of torchao's layers for training, with its casts that are written in torch."""
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats.config import (
        MXFP8Dim0CastKernelChoice,
        MXFP8Dim1CastKernelChoice,
        ScaleCalculationMode,
    )
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    casts = (MXFP8Dim0CastKernelChoice.TORCH, MXFP8Dim1CastKernelChoice.TORCH)
    mode = ScaleCalculationMode.RCEIL if name == "mxfp8_rceil" else ScaleCalculationMode.FLOOR
    codes = [torch.float8_e4m3fn] * 3

    def forward(x):
        y = mx_mm.apply(x, plain.weight, *codes, 32, KernelPreference.EMULATED, *casts, mode, False)
        return y + plain.bias.to(y.dtype)

    return forward


def measured(forward, weight, bias, x, dy):
    """Returns y, dx, dW and db."""
    x = x.clone().requires_grad_()
    y = forward(x)
    return [y.detach(), *torch.autograd.grad(y, [x, weight, bias], dy)]


def rms(numbers):
    return numbers.double().square().mean().sqrt().item()


def same_scales(name, ranks, what):
    """Whether scales are those of the whole weight: not the one of a shard, nor those of its columns."""
    by_shards = {"float8_tensorwise": ("y", "dx"), "float8_rowwise": ("dx",), "float8_rowwise_with_gw_hp": ("dx",)}
    return ranks == 1 or what not in by_shards.get(name, ())


def check(rank, ranks, ring, name, dtype):
    plain, wide = layer(dtype), layer(dtype).double()
    theirs = mx_linear(plain, name) if name.startswith("mxfp8") else float8_linear(plain, name, dtype == torch.float32)
    model = RotatedLinear.from_module(plain, ring, recipe=name)
    x, dy = batch(rank, dtype)
    x.requires_grad_()
    y = model(x)
    y.backward(dy)
    found = [y.detach(), x.grad, full(model.weight.grad), full(model.bias.grad)]

    batches = [batch(each, dtype) for each in range(ranks)]
    every = [measured(theirs, plain.weight, plain.bias, *each) for each in batches]
    exact = [measured(wide, wide.weight, wide.bias, *(part.double() for part in each)) for each in batches]
    for place, what in enumerate(("y", "dx", "dW", "db")):
        if what in ("y", "dx"):
            expected, truth = every[rank][place], exact[rank][place]
        else:
            expected, truth = (sum(each[place].double() for each in kind) / ranks for kind in (every, exact))
        label = f"{what} of {name}, {dtype}"
        if same_scales(name, ranks, what):
            assert_same(found[place].double(), expected.double(), SAME[dtype], label)
        if dtype == torch.bfloat16 and what in ("y", "dx") and same_scales(name, ranks, what):
            assert (found[place] != expected).float().mean() < 0.01, f"{label}: sums of float32, rounded once"
        rounded = torch.finfo(dtype).eps / 2 * rms(truth)
        assert rms(found[place].double() - truth) < WITHIN * rms(expected.double() - truth) + rounded, label
        codes = what != "db" and (what != "dW" or name != "float8_rowwise_with_gw_hp")
        assert (rms(expected.double() - truth) > 0.01 * rms(truth)) == codes, f"{label}: control: wide products"


@on_ranks([1, 2, 3])
def test_products(rank, ranks, ring, cases):
    for name in [name for name in RECIPES if name != "float8_blockwise"]:
        for dtype in (torch.float32, torch.bfloat16):
            with cases.case(f"{name}, {dtype}"):
                check(rank, ranks, ring, name, dtype)
