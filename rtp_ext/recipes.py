"""Recipes of products in 8 bits: how shards of weights, tokens and gradients become codes and scales of 8-bit operands.

A recipe follows torchao's of the same name. The owner of a shard quantizes it once after each change; codes and scales
travel, and the shard that arrives is an operand of `torch._scaled_mm`. A weight [outputs, inputs] is cut by outputs.

    recipe                       forward plane        backward plane        tokens   gradient   weight gradient
    float8_tensorwise            one scale            the same              e4m3     e5m2       codes
    float8_tensorwise_whole      one of all shards    the same              e4m3     e5m2       codes
    float8_rowwise               a scale a row        a scale a column      e4m3     e4m3       codes
    float8_rowwise_with_gw_hp    a scale a row        one scale             e4m3     e4m3       16 bits
    float8_blockwise             128 x 128            the same              e4m3     e4m3       codes
    mxfp8, mxfp8_rceil           32 along inputs      32 along outputs      e4m3     e4m3       codes

mxfp8 rounds exponents down (OCP MX, FLOOR of torchao), which saturates the largest numbers of some blocks: an error of
4.1 % rms of y on normal data. mxfp8_rceil rounds them up, as torchao's MXFP8 training: 3.7 %, as the other recipes.

Codes and scales of a shard are bitwise those of the whole weight where a block does not reach over a cut: rows always,
128 x 128 and 32 with cuts on multiples of 128 and 32. One scale, and a scale a column, are the shard's own; with
float8_tensorwise_whole ranks exchange the largest magnitudes of their shards in each forward, for torchao's one scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rtp_ext._native import ScaledOperands, kernels
from rtp_ext.recipe_planes import GPU_MULTIPLE, RECIPES, Plane, Recipe, recipe

__all__ = [
    "CODES",
    "RECIPES",
    "Codes",
    "Plane",
    "Recipe",
    "amax",
    "dequantized",
    "empty",
    "lay_scales",
    "operands",
    "quantize",
    "quantize_into",
    "recipe",
    "scale_dtype",
]

CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Codes:
    """A matrix in 8 bits: about codes * scales, with the scale of its block for each code.

    codes: [rows, columns], float8_e4m3fn or float8_e5m2; a view t() where the plane is transposed.
    scales: [blocks down, blocks across], float32 or float8_e8m0fnu; or one dimension of swizzled exponents.
    """

    plane: Plane
    codes: Tensor
    scales: Tensor


def amax(plane: Plane, values: Tensor) -> Tensor:
    """Returns the largest magnitude of every block, float32, of plane.scale_shape; NaN with a NaN.

    values: [rows, columns], float32, bfloat16 or float16, with contiguous rows.
    """
    _check(values)
    largest = torch.empty(plane.scale_shape(*values.shape), dtype=torch.float32, device=values.device)
    kernels.block_amax(largest, values.detach(), plane.block_of(*values.shape))
    return largest


def empty(plane: Plane, rows: int, columns: int, device: torch.device | str, *, gpu: bool = False) -> Codes:
    """Returns room for the codes and scales of a matrix, in the layout of `quantize`."""
    shape = (columns, rows) if plane.transposed else (rows, columns)
    codes = torch.empty(shape, dtype=CODES[plane.codes], device=device)
    memory = torch.empty(plane.native(gpu=gpu).scale_memory(rows, columns), dtype=scale_dtype(plane), device=device)
    scales = lay_scales(plane, memory, rows, columns, gpu=gpu)
    return Codes(plane, codes.t() if plane.transposed else codes, scales)


def scale_dtype(plane: Plane) -> torch.dtype:
    """Returns the dtype of the scales of a plane."""
    return torch.float8_e8m0fnu if plane.exponents else torch.float32


def lay_scales(plane: Plane, memory: Tensor, rows: int, columns: int, *, gpu: bool = False) -> Tensor:
    """Returns the scales of a matrix that lie in memory of plane.native(gpu=gpu).scale_memory, as in `Codes`."""
    if gpu and plane.exponents:
        return memory.view(-1)
    return memory.t() if plane.native(gpu=gpu).by_columns else memory[:, : plane.scale_shape(rows, columns)[1]]


def dequantized(codes: Codes) -> Tensor:
    """Returns the numbers that codes stand for, float32 [rows, columns]: each code times the scale of its block."""
    plane, (rows, columns), scales = codes.plane, codes.codes.shape, codes.scales
    if scales.dim() == 1:
        scales = _unswizzled(scales, *plane.scale_shape(rows, columns), along_rows=plane.block[1] == 1)
    high, wide = plane.block_of(rows, columns)
    each = scales.float().repeat_interleave(high, 0).repeat_interleave(wide, 1)
    return codes.codes.float() * each[:rows, :columns]


def _unswizzled(scales: Tensor, down: int, across: int, *, along_rows: bool) -> Tensor:
    """Returns exponents [down, across] that lie in tiles of 128 rows x 4 columns, those along rows transposed."""
    if along_rows:
        return _unswizzled(scales, across, down, along_rows=False).t()
    tiles = scales.view(torch.uint8).view(-(-down // 128), -(-across // 4), 32, 4, 4)
    laid = tiles.permute(0, 3, 2, 1, 4).flatten(3).flatten(0, 2)
    return laid[:down, :across].contiguous().view(torch.float8_e8m0fnu)


def quantize_into(out: Codes, values: Tensor, largest: Tensor | None = None) -> None:
    """Writes the codes and scales of `values` into `out`, made by `empty`.

    largest: the largest magnitudes, of plane.scale_shape; those of `values` if not given.
    """
    block = out.plane.block_of(*values.shape)
    kernels.quantize_codes(out.codes, out.scales, values.detach(), largest, block, out.plane.rule)


def quantize(plane: Plane, values: Tensor, largest: Tensor | None = None, *, gpu: bool = False) -> Codes:
    """Returns `values` in 8 bits.

    values: [rows, columns], float32, bfloat16 or float16, with contiguous rows.
    largest: the largest magnitudes, float32, of plane.scale_shape; those of `values` if not given.
    gpu: lays scales out as torch._scaled_mm takes them on a GPU: exponents swizzled, those of 128 x 128 in rows of a
        multiple of four, those of 1 x 128 in the order of columns.
    """
    _check(values)
    rows, columns = values.shape
    out = empty(plane, rows, columns, values.device, gpu=gpu)
    quantize_into(out, values, largest)
    return out


def _check(values: Tensor) -> None:
    if values.dim() != 2:
        raise ValueError(f"expected a matrix to quantize to 8 bits, got shape {tuple(values.shape)}")


def operands(chosen: Recipe, *, gpu: bool = False) -> ScaledOperands:
    """Returns the planes of x and dy as the engine knows them."""
    of_dw = chosen.weight_gradient and tuple(plane.native(gpu=gpu) for plane in chosen.weight_gradient)
    return ScaledOperands(
        tokens=chosen.tokens.native(gpu=gpu),
        gradients=chosen.gradients.native(gpu=gpu),
        weight_gradients=of_dw,
        rows=max(chosen.align, GPU_MULTIPLE),
    )
