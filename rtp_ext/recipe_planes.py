"""The planes of recipes of products in 8 bits: blocks, scales, bytes on the wire, and which layers fit.

`rtp_ext.recipes` explains them, and makes codes. This module needs no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rtp_ext._rules import CodePlane, CodePlanes

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
    codes: their format, "e4m3" or "e5m2".
    whole: of shards of one matrix: all have one scale, for the largest magnitude of the whole, which ranks exchange.
    """

    block: tuple[int | None, int | None]
    rule: str = "linear"
    transposed: bool = False
    codes: str = "e4m3"
    whole: bool = False

    @property
    def exponents(self) -> bool:
        """Whether scales are exponents of one byte (float8_e8m0fnu); else they are float32."""
        return self.rule.startswith("e8m0")

    def native(self, *, gpu: bool = False) -> CodePlane:
        """Returns the plane as the engine knows it. gpu: scales lie as torch._scaled_mm takes them on a GPU."""
        high, wide = self.block
        return CodePlane(high or 0, wide or 0, self.rule, self.transposed, self.codes, gpu, self.whole)

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

    def travels(self, *shard: int, backward: bool = False, gpu: bool = False) -> int:
        """Returns the bytes of a shard in a hop of one pass: [outputs, inputs], or a stack of them, one by one."""
        *stack, rows, columns = shard
        return math.prod(stack) * self.planes[-1 if backward else 0].bytes(rows, columns, gpu=gpu)

    def memory(self, *shard: int, gpu: bool = False) -> int:
        """Returns the bytes of codes and scales that the owner of a shard, as of `travels`, keeps beside it."""
        return sum(self.travels(*shard, backward=late, gpu=gpu) for late in (False, True)[: len(self.planes)])

    def apart(self, *, backward: bool, gpu: bool = False) -> str | None:
        """Returns why a product of one pass has one shard; None: it takes several."""
        plane = self.planes[-1 if backward else 0]
        if plane.native(gpu=gpu).stacks(backward):
            return None
        if plane.block[0] is None:
            return "a shard has one scale" if plane.block[1] is None else "each column of a shard has a scale"
        return "columns of a shard lie together" if plane.transposed else "exponents of a shard lie in tiles"

    def joins(self, product: str, *, gpu: bool = False) -> bool:
        """Whether layers with one input are one operand of a product: "forward", "dgrad" or "wgrad"."""
        if product == "wgrad":
            return self.weight_gradient is not None and bool(self.weight_gradient[0].native(gpu=gpu).joins())
        return self.apart(backward=product == "dgrad", gpu=gpu) is None

    def refusal(self, outputs: int, inputs: int, cuts: tuple[int, ...] = (), *, gpu: bool = False) -> str | None:
        """Returns why a weight [outputs, inputs] stays wide, or None.

        cuts: the outputs of each shard, if they are known. gpu: the products run on a GPU.
        """
        align = max(self.align, GPU_MULTIPLE if gpu else 1)
        for what, size in (("outputs", outputs), ("inputs", inputs), *(("outputs of a shard", cut) for cut in cuts)):
            if size % align:
                return f"{self.name} needs {what} in multiples of {align}, got {size}"
        return None


def _of_rows(rule: str, count: int | None = None) -> Plane:
    return Plane((1, count), rule)


def _of_columns(rule: str, count: int | None = None) -> Plane:
    return Plane((count, 1), rule, transposed=True)


_WHOLE = Plane((None, None))
_TENSORWISE = Recipe(
    "float8_tensorwise",
    forward=_WHOLE,
    backward=None,
    tokens=_WHOLE,
    gradients=Plane((None, None), codes="e5m2"),
    weight_gradient=(Plane((None, None), transposed=True, codes="e5m2"), Plane((None, None), transposed=True)),
)
_TENSORWISE_WHOLE = replace(_TENSORWISE, name="float8_tensorwise_whole", forward=replace(_WHOLE, whole=True))
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
    each.name: each for each in (_TENSORWISE, _TENSORWISE_WHOLE, _ROWWISE, _ROWWISE_WITH_GW_HP, _BLOCKWISE, *_MXFP8)
}


def recipe(name: str) -> Recipe:
    """Returns the recipe of a name. Raises ValueError for others."""
    if name not in RECIPES:
        raise ValueError(f"recipe: expected one of {', '.join(RECIPES)}, got {name!r}")
    return RECIPES[name]
