"""Tensors of which every replica has its own, as one: with a leading dimension, the number of the replica."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from rtp_ext.parameters.sharding import held
from rtp_ext.ring.autograd import expect_own_shard


def layered(tensor: DTensor) -> DTensor:
    """[K, *shape], Shard(0) over the replicas, of a tensor [*shape] that lies as Replicate() over them and yet differs.

    Shares its memory. Checkpoints then hold what every replica has, where they would hold a mixture.
    """
    over_ring = tuple(Shard(p.dim + 1) if isinstance(p, Shard) else p for p in tensor.placements[1:])
    return _laid_out(
        held(tensor).detach().unsqueeze(0),
        tensor,
        (Shard(0), *over_ring),
        torch.Size((tensor.device_mesh.size(0), *tensor.shape)),
    )


def own_layer(value: Any, like: DTensor, what: str) -> torch.Tensor:
    """This replica's part of what `layered(like)` gave, a view. Raises ValueError for anything else."""
    expected = layered(like)
    expect_own_shard(value, like, what)
    found = _looks(value) if isinstance(value, DTensor) else type(value).__name__
    if found != _looks(expected):
        raise ValueError(
            f"{what}: expected {_looks(expected)}, a layer for each replica as state_dict() of the policy gives it, "
            f"got {found}: load it on as many replicas as it was saved on, or save a plain state dict after average()"
        )
    return held(value)[0]


def flattened(value: DTensor) -> DTensor:
    """The tensor that `layered` was given, laid out as it was; a copy of this replica's."""
    over_ring = tuple(Shard(p.dim - 1) if isinstance(p, Shard) else p for p in value.placements[1:])
    return _laid_out(held(value)[0].clone(), value, (Replicate(), *over_ring), value.shape[1:])


def _looks(tensor: DTensor) -> str:
    return f"{tuple(tensor.shape)} with {tensor.placements} on {tuple(tensor.device_mesh.shape)} ranks"


def _laid_out(local: torch.Tensor, like: DTensor, placements: tuple[Placement, ...], shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, like.device_mesh, placements, run_check=False, shape=shape, stride=stride)
