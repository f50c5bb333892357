"""Recipes of products in 8 bits: how shards of weights, tokens and gradients become codes and scales of 8-bit operands.

A recipe follows torchao's of the same name. The owner of a shard quantizes it once after each change; codes and scales
travel, and the shard that arrives is an operand of `torch._scaled_mm`. A weight [outputs, inputs] is cut by outputs.

    recipe                       forward plane        backward plane        tokens   gradient   weight gradient
    float8_tensorwise            one scale            the same              e4m3     e5m2       codes
    float8_rowwise               a scale a row        a scale a column      e4m3     e4m3       codes
    float8_rowwise_with_gw_hp    a scale a row        one scale             e4m3     e4m3       16 bits
    float8_blockwise             128 x 128            the same              e4m3     e4m3       codes
    mxfp8, mxfp8_rceil           32 along inputs      32 along outputs      e4m3     e4m3       codes

mxfp8 rounds exponents down (OCP MX, FLOOR of torchao), which saturates the largest numbers of some blocks: an error of
4.1 % rms of y on normal data. mxfp8_rceil rounds them up, as torchao's MXFP8 training: 3.7 %, as the other recipes.

Codes and scales of a shard are bitwise those of the whole weight where a block does not reach over a cut: rows always,
128 x 128 and 32 with cuts on multiples of 128 and 32. One scale, and a scale a column, are the shard's own, or the
whole weight's if `quantize` is given the largest magnitudes of all shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rtp_ext._native import CodePlane, CodePlanes, ScaledOperands, kernels

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# What torch._scaled_mm takes on a GPU: 16 codes are 16 bytes.
GPU_MULTIPLE = 16


@dataclass(frozen=True)
class Plane:
    """How a matrix becomes codes of 8 bits with a scale a block.

    block: rows and columns of a block; None is all of them.
    rule: "linear" and "power_of_two" give float32 scales, the latter from factors rounded down to powers of two, as
        torchao's rowwise recipes; "e8m0_floor" and "e8m0_ceil" give exponents in a byte, as torchao's MX with FLOOR and
        RCEIL.
    transposed: the codes lie in memory as the transposed matrix, because the product sums over rows.
    dtype: of the codes.
    """

    block: tuple[int | None, int | None]
    rule: str = "linear"
    transposed: bool = False
    dtype: torch.dtype = E4M3

    @property
    def exponents(self) -> bool:
        """Whether scales are exponents of one byte (float8_e8m0fnu); else they are float32."""
        return self.rule.startswith("e8m0")

    def native(self, *, gpu: bool = False) -> CodePlane:
        """Returns the plane as the engine knows it. gpu: scales lie as torch._scaled_mm takes them on a GPU."""
        high, wide = self.block
        codes = "e4m3" if self.dtype is E4M3 else "e5m2"
        return CodePlane(high or 0, wide or 0, self.rule, self.transposed, codes, gpu)

    def block_of(self, rows: int, columns: int) -> tuple[int, int]:
        """Returns the rows and columns of a block of a matrix."""
        high, wide = self.block
        return (high or max(rows, 1), wide or max(columns, 1))

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Returns how many blocks a matrix has, down and across: one scale each."""
        down, across = self.native().scale_shape(rows, columns)
        return down, across

    def bytes(self, rows: int, columns: int, *, gpu: bool = False) -> int:
        """Returns the bytes of the codes and scales of a matrix. gpu: with the padding of `quantize`'s."""
        return int(self.native(gpu=gpu).bytes(rows, columns))


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
    codes = torch.empty((columns, rows) if plane.transposed else (rows, columns), dtype=plane.dtype, device=device)
    dtype = torch.float8_e8m0fnu if plane.exponents else torch.float32
    down, across = plane.scale_shape(rows, columns)
    scales = torch.empty(plane.native(gpu=gpu).scale_memory(rows, columns), dtype=dtype, device=device)
    if gpu and plane.exponents:
        scales = scales.view(-1)
    else:
        scales = scales[:, :across] if scales.shape[0] == down else scales.t()
    return Codes(plane, codes.t() if plane.transposed else codes, scales)


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


@dataclass(frozen=True)
class Recipe:
    """The planes of a linear layer's operands, for y = x W^T, dx = dy W and dW = dy^T x.

    forward, backward: of a weight shard [outputs, inputs] in both passes. backward is None: the receiver transposes the
        codes of the forward plane.
    tokens, gradients: of x [tokens, inputs] for y, and of dy [tokens, outputs] for dx.
    weight_gradient: of dy and x for dW, both summed over their rows; None: 16 bits.
    align: what a cut of outputs is a multiple of, and both sizes of a weight.
    """

    name: str
    forward: Plane
    backward: Plane | None
    tokens: Plane
    gradients: Plane
    weight_gradient: tuple[Plane, Plane] | None
    align: int = 1

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The planes that the owner keeps of its shard: one, or one for each pass."""
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    def shard_planes(self, *, gpu: bool = False) -> CodePlanes:
        """Returns the planes of a weight in both passes as the engine knows them."""
        return CodePlanes(self.planes[0].native(gpu=gpu), self.planes[-1].native(gpu=gpu))

    def operands(self, *, gpu: bool = False) -> ScaledOperands:
        """Returns the planes of x and dy as the engine knows them."""
        of_dw = self.weight_gradient and tuple(plane.native(gpu=gpu) for plane in self.weight_gradient)
        return ScaledOperands(
            tokens=self.tokens.native(gpu=gpu),
            gradients=self.gradients.native(gpu=gpu),
            weight_gradients=of_dw,
            rows=max(self.align, GPU_MULTIPLE),
        )

    def travels(self, rows: int, columns: int, *, backward: bool = False, gpu: bool = False) -> int:
        """Returns the bytes of a shard [rows, columns] in a hop of one pass."""
        return self.planes[-1 if backward else 0].bytes(rows, columns, gpu=gpu)

    def memory(self, rows: int, columns: int, *, gpu: bool = False) -> int:
        """Returns the bytes of codes and scales that the owner of a shard [rows, columns] keeps beside it."""
        return sum(plane.bytes(rows, columns, gpu=gpu) for plane in self.planes)

    def refusal(self, outputs: int, inputs: int, cuts: tuple[int, ...] = (), *, gpu: bool = False) -> str | None:
        """Returns why a weight [outputs, inputs] stays wide, or None.

        cuts: the outputs of each shard, if they are known. gpu: the products run on a GPU.
        """
        align = max(self.align, GPU_MULTIPLE if gpu else 1)
        for what, size in (("outputs", outputs), ("inputs", inputs), *(("outputs of a shard", cut) for cut in cuts)):
            if size % align:
                return f"{self.name} needs {what} in multiples of {align}, got {size}"
        return None


def _of_rows(rule: str, count: int | None = None, dtype: torch.dtype = E4M3) -> Plane:
    return Plane((1, count), rule, dtype=dtype)


def _of_columns(rule: str, count: int | None = None) -> Plane:
    return Plane((count, 1), rule, transposed=True)


_WHOLE = Plane((None, None))
_TENSORWISE = Recipe(
    "float8_tensorwise",
    forward=_WHOLE,
    backward=None,
    tokens=_WHOLE,
    gradients=Plane((None, None), dtype=E5M2),
    weight_gradient=(Plane((None, None), transposed=True, dtype=E5M2), Plane((None, None), transposed=True)),
)
_ROWWISE = Recipe(
    "float8_rowwise",
    forward=_of_rows("power_of_two"),
    backward=_of_columns("power_of_two"),
    tokens=_of_rows("power_of_two"),
    gradients=_of_rows("power_of_two"),
    weight_gradient=(_of_columns("power_of_two"), _of_columns("power_of_two")),
)
_ROWWISE_WITH_GW_HP = Recipe(
    "float8_rowwise_with_gw_hp",
    forward=_of_rows("power_of_two"),
    backward=Plane((None, None), "power_of_two", transposed=True),
    tokens=_of_rows("power_of_two"),
    gradients=_of_rows("power_of_two"),
    weight_gradient=None,
)
_BLOCKWISE = Recipe(
    "float8_blockwise",
    forward=Plane((128, 128)),
    backward=None,
    tokens=_of_rows("linear", 128),
    gradients=_of_rows("linear", 128),
    weight_gradient=(_of_columns("linear", 128), _of_columns("linear", 128)),
    align=128,
)


def _mxfp8(name: str, rule: str) -> Recipe:
    rows, columns = _of_rows(rule, 32), _of_columns(rule, 32)
    return Recipe(name, rows, columns, rows, rows, (columns, columns), align=32)


_MXFP8 = _mxfp8("mxfp8", "e8m0_floor"), _mxfp8("mxfp8_rceil", "e8m0_ceil")
RECIPES: dict[str, Recipe] = {
    each.name: each for each in (_TENSORWISE, _ROWWISE, _ROWWISE_WITH_GW_HP, _BLOCKWISE, *_MXFP8)
}


def recipe(name: str) -> Recipe:
    """Returns the recipe of a name. Raises ValueError for others."""
    if name not in RECIPES:
        raise ValueError(f"recipe: expected one of {', '.join(RECIPES)}, got {name!r}")
    return RECIPES[name]
