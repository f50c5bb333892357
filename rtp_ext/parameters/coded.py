"""Weights that are stored as codes of 8 bits with scales: those of models that compute forwards only.

A parameter of such a weight is uint8 [ranks, bytes of the largest shard], Shard(0): a row for each rank. A row has the
codes of the rank's shard in the forward plane of a recipe (`rtp_ext.recipes`), of a stack of matrices one after the
other, and behind them their scales. Both lie as products take them; the engine has their places (`ParameterFacts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rtp_ext._native import ParameterFacts
from rtp_ext.parameters.frozen import FrozenWeight
from rtp_ext.recipes import CODES, RECIPES, Codes, Recipe, dequantized, lay_scales, quantize_into, scale_dtype

_BLOCKS = list(dict.fromkeys(recipe.forward.block for recipe in RECIPES.values()))  # of forward planes


@dataclass(frozen=True)
class CodedWeight(FrozenWeight):
    """A weight in codes: [O, I], or [E, O, I] of stacked experts, which are cut between experts.

    Attributes:
        format: the name of the recipe.
        ranks: that the ring cuts it for. A row of another number has other places.
        gpu: whether scales lie as torch._scaled_mm takes them on a GPU.
        inputs_first: whether a matrix is [I, O].
    """

    ranks: int = 1
    gpu: bool = False
    inputs_first: bool = False

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.format]

    @property
    def facts(self) -> Any:
        codes = self.recipe.shard_planes(gpu=self.gpu)
        return ParameterFacts(self.shape, 0, trained=False, codes=codes, inputs_first=self.inputs_first)

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """As in FrozenWeight: extents of 1 tell layouts apart."""
        mark = 2 * _BLOCKS.index(self.recipe.forward.block) + self.gpu
        return (self.ranks, self.facts.stored_bytes(self.ranks), *(1,) * mark)

    def rows_of(self, first: int, groups: int) -> tuple[int, int]:
        sizes = self.shard_rows(self.ranks)
        return sum(sizes[:first]), sum(sizes[: first + groups])

    def encode(self, values: torch.Tensor, groups: int) -> torch.Tensor:
        """Returns the bytes of all ranks for a whole weight, or those of one rank for its shard. Values are rounded to
        the dtype of the weight before, as a shard of it would be."""
        packed = torch.zeros(groups, *self.packed_shape[1:], dtype=torch.uint8, device=values.device)
        if packed.is_meta:
            return packed
        sizes = [len(values)] if groups == 1 else self.shard_rows(groups)
        for row, shard in zip(packed.flatten(1), values.to(self.dtype).split(sizes), strict=True):
            matrices = shard if shard.dim() > 2 else shard[None]
            for codes, matrix in zip(self._codes(row, len(shard)), matrices, strict=True):
                quantize_into(codes, matrix.t().contiguous() if self.inputs_first else matrix.contiguous())
        return packed

    def decode(self, packed: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        sizes = self.shard_rows(self.ranks)
        rows = packed.view(self.ranks, -1)
        return torch.cat([self._values(row, size, dtype) for row, size in zip(rows, sizes, strict=True)])

    def decode_part(self, packed: torch.Tensor, extent: int) -> torch.Tensor:
        return self._values(packed.view(-1), extent, None)

    def _values(self, row: torch.Tensor, size: int, dtype: torch.dtype | None) -> torch.Tensor:
        """Returns the values of the `size` rows, or experts, of one rank, on the CPU."""
        found = torch.empty(size, *self.shape[1:], dtype=dtype or self.dtype)
        matrices = found if found.dim() > 2 else found[None]
        for codes, matrix in zip(self._codes(row.cpu(), size), matrices, strict=True):
            matrix.copy_(dequantized(codes).t() if self.inputs_first else dequantized(codes))
        return found

    def _codes(self, row: torch.Tensor, size: int) -> Iterator[Codes]:
        """Yields the codes of each matrix of a rank that has `size` rows, or experts: views of its bytes."""
        plane, shard = self.recipe.forward, (size, *self.shape[1:])
        outputs, inputs = shard[:-3:-1] if self.inputs_first else shard[-2:]
        count = size if len(shard) > 2 else 1
        codes = row[: count * outputs * inputs].view(CODES[plane.codes]).view(count, outputs, inputs)
        memory = plane.native(gpu=self.gpu).scale_memory(outputs, inputs)
        dtype = scale_dtype(plane)
        end = count * memory[0] * memory[1] * dtype.itemsize
        scales = row[self.facts.scales_at(shard) :][:end].view(dtype).view(count, *memory)
        for matrix in range(count):
            yield Codes(plane, codes[matrix], lay_scales(plane, scales[matrix], outputs, inputs, gpu=self.gpu))


def stored_codes(name: str, weights: Sequence[Any], recipe: Recipe | None) -> bool:
    """Returns whether the weights of an operation, FrozenWeights or None, are stored as codes of its recipe. Raises
    ValueError where they are codes of another one, or only some are."""
    stored = {each.format if isinstance(each, CodedWeight) else None for each in weights}
    if stored <= {None}:
        return False
    if stored != {recipe and recipe.name}:
        found = ", ".join(sorted(each or "others" for each in stored))
        raise ValueError(f"{name}: expected weights in codes of {recipe and recipe.name}, got {found}")
    return True
