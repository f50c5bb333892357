"""Products in 8 bits with plain torch: codes and scales of a matrix, and what they are numbers for."""

from __future__ import annotations

from typing import Any

import torch
from reference import chunk
from torch import Tensor, nn
from torch.nn import functional

from rtp_ext.recipes import CODES, Codes, Plane, Recipe, quantize, recipe


def expanded(blocks: Tensor, plane: Plane, rows: int, columns: int) -> Tensor:
    """Gives every number of a matrix what its block has."""
    high, wide = plane.block_of(rows, columns)
    return blocks.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :columns]


def reference_amax(plane: Plane, values: Tensor) -> Tensor:
    (rows, columns), (high, wide) = values.shape, plane.block_of(*values.shape)
    down, across = plane.scale_shape(rows, columns)
    padded = functional.pad(values.float(), (0, across * wide - columns, 0, down * high - rows))
    return padded.view(down, high, across, wide).abs().amax((1, 3))


def reference_factors(plane: Plane, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what the numbers of each block are multiplied by, and the scales."""
    most = torch.finfo(CODES[plane.codes]).max
    if not plane.exponents:
        factor = (most / largest.double().clamp(min=1e-12)).float()
        if plane.rule == "power_of_two":
            factor = torch.exp2(factor.log2().floor())
        factor = torch.where(largest.isfinite(), factor, torch.nan)
        return factor, 1 / factor
    if plane.rule == "e8m0_floor":
        exponent = (largest.view(torch.int32) >> 23) - {448: 8, 57344: 15}[most]
        exponent = exponent.clamp(min=0)
        factor = torch.exp2((127 - exponent.clamp(min=1)).double())
    else:
        fraction, exponent = torch.frexp((largest / most).double())
        exponent = torch.where(fraction == 0.5, exponent - 1, exponent) + 127
        exponent = torch.where(fraction == 0, 0, exponent.clamp(min=0))
        exponent = torch.where(largest.isinf(), 254, exponent)
        factor = torch.exp2((127 - exponent).double())
        factor = torch.where(exponent == 0, 1.0, factor)
    exponent = torch.where(largest.isnan(), 255, exponent)
    factor = torch.where(largest.isnan(), torch.nan, factor).float()
    return factor, exponent.to(torch.uint8).view(torch.float8_e8m0fnu)


def reference_codes(plane: Plane, values: Tensor, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns codes [rows, columns] and scales [blocks down, blocks across] of a matrix."""
    factor, scales = reference_factors(plane, reference_amax(plane, values) if largest is None else largest)
    most = torch.finfo(CODES[plane.codes]).max
    scaled = values.float() * expanded(factor, plane, *values.shape)
    return scaled.clamp(-most, most).to(CODES[plane.codes]), scales


def unswizzled(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Returns exponents [rows, columns] from tiles of 128 rows x 4 columns, as cuBLAS takes them."""
    high, wide = -(-rows // 128), -(-columns // 4)
    tiles = scales.view(torch.uint8).view(high, wide, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(high * 128, wide * 4)[:rows, :columns].contiguous().view(torch.float8_e8m0fnu)


def dequantized(codes: Codes) -> Tensor:
    """Returns float32 [rows, columns]: each code times its scale, rounded once."""
    rows, columns = codes.codes.shape
    scales, shape = codes.scales, codes.plane.scale_shape(rows, columns)
    if scales.dim() == 1:
        along_rows = codes.plane.block[1] == 1
        scales = unswizzled(scales, *(shape[::-1] if along_rows else shape))
        scales = scales.t() if along_rows else scales
    return codes.codes.float() * expanded(scales.float(), codes.plane, rows, columns)


# -- linear layers in one process --------------------------------------------------------------------------------------


def numbers(plane: Plane, values: Tensor) -> Tensor:
    """Returns the numbers that the codes of a matrix stand for."""
    return dequantized(quantize(plane, values))


def of_shards(plane: Plane, weight: Tensor, ranks: int) -> Tensor:
    """Returns the numbers of the codes of a weight whose shards are quantized one by one, but for one scale of all."""
    if plane.whole:
        return numbers(plane, weight)
    return torch.cat([numbers(plane, chunk(weight, ranks, owner)) for owner in range(ranks)])


def weight_gradient(chosen: Recipe, dy: Tensor, x: Tensor) -> Tensor:
    """Returns dy^T x in float32, of one rank's tokens."""
    if chosen.weight_gradient is None:
        return dy.float().t() @ x.float()
    left, right = chosen.weight_gradient
    return numbers(left, dy).t() @ numbers(right, x)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, chosen: Recipe, ranks: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.chosen, ctx.ranks = chosen, ranks
        return (numbers(chosen.tokens, x) @ of_shards(chosen.planes[0], weight, ranks).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x, weight), chosen = ctx.saved_tensors, ctx.chosen
        dx = numbers(chosen.gradients, dy.contiguous()) @ of_shards(chosen.planes[-1], weight, ctx.ranks)
        return dx.to(x.dtype), weight_gradient(chosen, dy.contiguous(), x).to(weight.dtype), None, None


def scaled_product(name: str, x: Tensor, weight: Tensor, ranks: int) -> Tensor:
    """Returns x W^T by a recipe, differentiable, of a weight whose shards are quantized one by one."""
    return _Product.apply(x, weight, recipe(name), ranks)


class ScaledLinear(nn.Linear):
    """A plain linear layer that computes as on a ring of `ranks` ranks."""

    recipe: str
    ranks: int

    def forward(self, input: Tensor) -> Tensor:
        y = scaled_product(self.recipe, input.flatten(0, -2), self.weight, self.ranks)
        y = y if self.bias is None else y + self.bias
        return y.view(*input.shape[:-1], y.shape[-1])


def scaled(model: nn.Module, name: str, ranks: int, wide: tuple[str, ...] = ()) -> nn.Module:
    """Makes the linear layers of a plain model compute so, but for those with these names."""
    for path, part in model.named_modules():
        if type(part) is nn.Linear and path not in wide:
            part.__class__, part.recipe, part.ranks = ScaledLinear, name, ranks
    return model


# -- experts in one process --------------------------------------------------------------------------------------------


class _Weighted(torch.autograd.Function):
    """The output of an expert's last layer times the router's weights, whose gradient is a product with the hidden
    values, in 8 bits too."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, down: Tensor, bias: Tensor | None, weights: Tensor, chosen: Recipe) -> Tensor:
        ctx.save_for_backward(hidden, down, weights, bias)
        ctx.chosen = chosen
        y = (numbers(chosen.tokens, hidden) @ numbers(chosen.planes[0], down).t()).to(hidden.dtype)
        return (y if bias is None else y + bias).float() * weights.float()[:, None]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (hidden, down, weights, bias), chosen = ctx.saved_tensors, ctx.chosen
        dy, factors = gradient.to(hidden.dtype), weights.float()[:, None]
        of_output = (dy.float() * factors).to(hidden.dtype)
        used = torch.where(factors.abs() < 2**-10, 2**-10, factors)
        of_hidden = numbers(chosen.gradients, (dy.float() * used).to(dy.dtype)) @ numbers(chosen.planes[-1], down)
        of_weights = (of_hidden / used * hidden.float()).sum(1)
        of_hidden = of_hidden * (factors / used)
        of_bias = None
        if bias is not None:
            of_weights, of_bias = of_weights + (dy.float() * bias.float()).sum(1), of_output.sum(0)
        of_down = weight_gradient(chosen, of_output, hidden).to(down.dtype)
        return of_hidden.to(hidden.dtype), of_down, of_bias, of_weights.to(weights.dtype), None


def scaled_experts(
    chosen: Recipe, x: Tensor, index: Tensor, weights: Tensor, stacks: dict[str, Tensor], gate: Any, inputs_first: bool
) -> Tensor:
    """Returns what experts [E, outputs, inputs], or [E, inputs, outputs], compute by a recipe, differentiable.

    stacks: `up`, `down`, and `up_bias` and `down_bias` if there are any. gate: of up(x), the hidden values.
    """
    y = x.new_zeros(x.shape, dtype=torch.float32)
    for expert in range(len(stacks["up"])):
        token, choice = (index == expert).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        own = {name: stack[expert] for name, stack in stacks.items()}
        up, down = (own[name].t() if inputs_first else own[name] for name in ("up", "down"))
        pre = _Product.apply(x[token], up.contiguous(), chosen, 1)
        pre = pre if "up_bias" not in own else pre + own["up_bias"]
        rows = _Weighted.apply(gate(pre), down.contiguous(), own.get("down_bias"), weights[token, choice], chosen)
        y = y.index_add(0, token, rows)
    return y.to(x.dtype)
