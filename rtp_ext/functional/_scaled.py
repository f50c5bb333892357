"""What operations with products in 8 bits have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from rtp_ext._native import kernels
from rtp_ext.functional._call import Call
from rtp_ext.parameters.sharding import held
from rtp_ext.recipes import Recipe
from rtp_ext.ring import Ring


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


# By the shard of a parameter: a version of the parameter, and the largest magnitude of the shard then. Parameters
# themselves, referred to weakly, could not be swapped by nn.Module.to.
_own: Any = WeakIdKeyDictionary()


def exchange_amaxes(ring: Ring, weights: Sequence[torch.Tensor]) -> None:
    """Gives the engine the largest magnitude of each whole weight [outputs, inputs], for one scale of all its shards.

    Collective: in every forward each rank sends the largest magnitudes of all its shards, changed or not.
    weights: DTensors, whose largest magnitudes are found once for each version, or plain shards.
    """
    versions = [None if weight.is_inference() else weight._version for weight in weights]
    mine, unknown = [0.0] * len(weights), []
    for place, (weight, version) in enumerate(zip(weights, versions, strict=True)):
        known = _own.get(held(weight)) if isinstance(weight, DTensor) else None
        if known is not None and version is not None and known[0] == version:
            mine[place] = known[1]
        else:
            unknown.append(place)
    if unknown:
        found = torch.zeros(len(unknown), 1, 1, device=ring.device)
        for largest, place in zip(found, unknown, strict=True):
            shard = held(weights[place]).detach()
            if shard.numel() > 0:
                kernels.block_amax(largest, shard, tuple(shard.shape))
        for place, value in zip(unknown, found.flatten().tolist(), strict=True):
            mine[place] = value
            if isinstance(weights[place], DTensor):
                _own[held(weights[place])] = versions[place], value
    every = torch.tensor(ring.exchange(mine), dtype=torch.float32, device="cpu").amax(0)
    phase, executor = ring.agreement.forward_phase, ring.communicator.executor
    for weight, version, value in zip(weights, versions, every.tolist(), strict=True):
        executor.set_amax(held(weight).detach(), value, version, phase)


def expect_amaxes(call: Call, shards: Sequence[torch.Tensor]) -> None:
    """Has the engine know the largest magnitudes of the whole weights of an operation: the forward of a converted model
    has exchanged those of its layers. Collective elsewhere and for plain shards, but in a recomputation, which has
    those of its forward."""
    matrices = [place for place, shard in enumerate(shards) if shard.dim() == 2]
    plain = any(not isinstance(call.watched[place], DTensor) for place in matrices)
    phase, executor = call.ring.agreement.forward_phase, call.ring.communicator.executor
    if torch._C._current_graph_task_id() != -1:
        return
    if phase == 0 or plain or not all(executor.has_amax(shards[place], phase) for place in matrices):
        exchange_amaxes(call.ring, [call.watched[place] for place in matrices])
