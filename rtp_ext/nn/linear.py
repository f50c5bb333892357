"""RotatedLinear."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rtp_ext.functional._operation import Operation, rotate
from rtp_ext.functional.linear import Linears, PartialLinear
from rtp_ext.nn._base import RotatedModule
from rtp_ext.parameters.initial import construct
from rtp_ext.recipes import Recipe
from rtp_ext.recipes import recipe as recipe_of
from rtp_ext.ring import Ring
from rtp_ext.words import RecipeName


class RotatedLinear(RotatedModule, nn.Linear):
    """nn.Linear whose weight and bias shards rotate.

    Args: those of nn.Linear, and
        ring: the ranks to shard the parameters over. Collective: use the same seed on every rank.
        shard_dim: cut the weight [out_features, in_features] along its output (0) or input (1) features.
        recipe: of products in 8 bits; see functional.rotated_linear.

    Input [..., in_features], this rank's own batch; output [..., out_features]. See functional.rotated_linear.
    """

    recipe: Recipe | None = None
    together: Any = None  # the SharedInput that computes this layer and others with the same input

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        ring: Ring,
        shard_dim: int = 0,
        recipe: RecipeName | None = None,
    ) -> None:
        values = construct(self, super().__init__, in_features, out_features, bias, device, dtype)
        self._rotate(ring, shard_dim=shard_dim, recipe=recipe and recipe_of(recipe))
        values.fill(ring)

    @classmethod
    def from_module(
        cls, module: nn.Linear, ring: Ring, *, shard_dim: int = 0, recipe: RecipeName | None = None
    ) -> RotatedLinear:
        """Returns a rotated copy of `module` (meta device included), which does not change."""
        twin = cls._from(module, nn.Linear)
        twin._rotate(ring, shard_dim=shard_dim, recipe=recipe and recipe_of(recipe))
        return twin

    def _rotate(self, ring: Ring, *, shard_dim: int = 0, recipe: Recipe | None = None, **options: Any) -> None:
        if shard_dim not in (0, 1):
            raise ValueError(f"RotatedLinear: expected shard_dim 0 or 1, got {shard_dim}")
        if shard_dim == 1 and recipe is not None:
            raise ValueError(f"RotatedLinear: expected shard_dim 0 with recipe {recipe.name}, got 1")
        self.recipe = recipe
        ring.has_one_scale = ring.has_one_scale or (recipe is not None and recipe.forward.whole)
        self._adopt(ring, {"weight": shard_dim, "bias": 0}, **options)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.together is not None and (output := self.together.output(self, input)) is not None:
            return output
        return rotate(self._operation(), [self._cast(input)], self)[0]

    def _operation(self, key: str = "") -> Operation:
        return _use_of(self, self.shard_dims["weight"], transposed=False)

    def extra_repr(self) -> str:
        recipe = "" if self.recipe is None else f", recipe={self.recipe.name}"
        return f"{super().extra_repr()}, ring={self.ring.size}, shard_dim={self.shard_dims['weight']}{recipe}"


class RotatedTransposedLinear(RotatedModule):
    """Mixin of linear layers whose weight is stored as [in_features, out_features], such as GPT-2's `Conv1D`.

    `fully_rotate` makes them; the layer's own class is the second base. As for RotatedLinear, `shard_dim` is the
    dimension that is cut of the weight as [out_features, in_features].
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def _rotate(self, ring: Ring, *, shard_dim: int = 0, **options: Any) -> None:
        self._adopt(ring, {"weight": 1 - shard_dim, "bias": 0}, **options)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return rotate(self._operation(), [self._cast(input)], self)[0]

    def _operation(self, key: str = "") -> Operation:
        return _use_of(self, 1 - self.shard_dims["weight"], transposed=True)


def _use_of(layer: Any, shard_dim: int, transposed: bool) -> Operation:
    """Returns the operation of a layer whose weight [out_features, in_features] is cut along `shard_dim`."""
    registered = layer._parameters  # read without nn.Module's __getattr__, but for a parametrization
    plain = "weight" in registered and "bias" in registered
    weight, bias = (registered["weight"], registered["bias"]) if plain else (layer.weight, layer.bias)
    if shard_dim == 1:
        return PartialLinear(layer._options(), weight, bias, transposed)
    recipe = None if transposed else layer.recipe
    return Linears(layer._options(), [weight], [bias], transposed=transposed, recipe=recipe)
