"""Codes of a local shard for products in 8 bits, made once after each change of the shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rtp_ext.parameters.sharding import local_shard
from rtp_ext.recipes import Codes, Plane, Recipe, empty, quantize_into


class ShardCodes:
    """The codes and scales of one weight's local shard, in every plane of a recipe.

    They are valid as long as neither the version counter nor the memory of the shard changes: all micro-batches, passes
    and recomputations between two optimizer steps share them. Gradients, optimizers and checkpoints know the wide shard
    alone. Writes through `.data`, and fused steps of optimizers on plain tensors, raise no version counter and do not
    show, as with hops that are sent ahead; fused steps on parameters of rings do (`dtensor_hooks.count_writes`).

    New codes take the place of old ones in the same memory, which passes and peers may know by its address. The caller
    orders this after the passes that read the old codes; a backward whose forward read other codes raises by the
    version of the parameter (see Call).

    recipe: whose planes are made.
    gpu: lays scales out as products on a GPU take them.
    largest: returns the largest magnitudes of blocks that reach over cuts, given a plane and the matrix; those of the
        shard alone if not given. Collective if it exchanges them: all ranks see the same changes.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        gpu: bool = False,
        largest: Callable[[Plane, torch.Tensor], torch.Tensor | None] | None = None,
    ) -> None:
        self.recipe, self.gpu, self.largest = recipe, gpu, largest
        self.made = 0  # how often codes were made
        self._codes: tuple[Codes, ...] = ()
        self._state: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and scales that are kept."""
        return sum(each.codes.nbytes + each.scales.untyped_storage().nbytes() for each in self._codes)

    def current(self, parameter: torch.Tensor, dtype: torch.dtype) -> tuple[Codes, ...]:
        """Returns the codes of the local shard of a weight [outputs, inputs], one for each plane of the recipe.

        dtype: in which the product would be computed without 8 bits; the shard is rounded to it first.

        Raises:
            ValueError: the shard is no matrix.
        """
        with torch.no_grad():
            shard = local_shard(parameter)
            # Inference tensors have no version counter.
            version = None if shard.is_inference() else shard._version
            place = (shard.data_ptr(), shard.device, shard.dtype, tuple(shard.shape), shard.stride(), dtype)
            if version is None or self._state != (version, place):
                self._state = None  # until all planes are made
                self._make(shard.to(dtype))
                self._state = version, place
        return self._codes

    def _make(self, values: torch.Tensor) -> None:
        if values.dim() != 2:
            raise ValueError(f"{self.recipe.name}: expected a matrix as shard, got shape {tuple(values.shape)}")
        if (
            not self._codes
            or self._codes[0].codes.shape != values.shape
            or self._codes[0].codes.device != values.device
        ):
            rows, columns = values.shape
            self._codes = tuple(
                empty(plane, rows, columns, values.device, gpu=self.gpu) for plane in self.recipe.planes
            )
        for each in self._codes:
            quantize_into(each, values, self.largest and self.largest(each.plane, values))
        self.made += 1
