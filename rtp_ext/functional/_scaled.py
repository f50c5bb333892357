"""What operations with products in 8 bits have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from rtp_ext.functional._call import Call
from rtp_ext.recipes import Recipe


def expect_takes_recipe(call: Call, recipe: Recipe) -> None:
    """Raises ValueError on a ring in place, and TypeError where products are computed in float64."""
    if call.ring.in_place:
        raise ValueError(f"{call.name}: in_place=True cannot be combined with recipe {recipe.name}, whose codes travel")
    if call.compute_dtype == torch.float64:
        raise TypeError(
            f"{call.name}: expected a compute dtype of at most 32 bits with recipe {recipe.name}, got float64"
        )


def expect_fits(call: Call, reason: str | None) -> None:
    """Raises ValueError where there is a reason why sizes do not fit a recipe."""
    if reason is not None:
        raise ValueError(f"{call.name}: expected sizes that fit the recipe: {reason}")


def forget_codes(call: Call, shards: Sequence[torch.Tensor]) -> None:
    """Drops the codes of plain tensors, to which a write through `.data` shows nowhere."""
    if call.ring.mesh is None:  # all shards of an emulated ring are plain tensors
        return
    for given, shard in zip(call.watched, shards, strict=True):
        if not isinstance(given, DTensor):
            call.ring.communicator.executor.forget_codes(shard)
