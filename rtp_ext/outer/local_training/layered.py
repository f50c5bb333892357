"""How tensors lie of which every replica has its own: on its ring alone, and for checkpoints as one with a leading
dimension, the number of the replica."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from rtp_ext.parameters.sharding import held
from rtp_ext.ring.dtensor_parameters import expect_own_shard


def lay_on_ring(tensor: torch.Tensor, ring: DeviceMesh) -> None:
    """Has a DTensor on (replicas, ring), Replicate() over the replicas, lie on this rank's ring alone, in place, with
    the same shard. Operations on DTensors of different values then communicate within the ring only."""
    if isinstance(tensor, DTensor) and tensor.device_mesh.ndim > ring.ndim:
        spec = tensor._spec
        tensor._spec = DTensorSpec(ring, spec.placements[-ring.ndim :], tensor_meta=spec.tensor_meta)


def layered(tensor: DTensor, mesh: DeviceMesh) -> DTensor:
    """[K, *shape] on `mesh` (replicas, ring), Shard(0) over the replicas, of a tensor [*shape] on a ring.

    Shares its memory. Checkpoints then hold what every replica has. Raises ValueError for a tensor of which the ranks
    of a ring hold terms of a sum: a checkpoint would hold one of them.
    """
    (over_ring,) = tensor.placements
    if isinstance(over_ring, Partial):
        raise ValueError(
            f"expected state of an optimizer that is sharded or the same on all ranks of a ring, got a DTensor of "
            f"shape {tuple(tensor.shape)} with placements {tensor.placements}, of which a checkpoint cannot hold the "
            "terms: have the optimizer keep redistribute(placements=[Replicate()]) of it"
        )
    shape = torch.Size((mesh.size(0), *tensor.shape))
    over_ring = Shard(over_ring.dim + 1) if isinstance(over_ring, Shard) else over_ring
    return _laid_out(held(tensor).detach().unsqueeze(0), mesh, (Shard(0), over_ring), shape)


def own_layer(value: Any, like: DTensor, mesh: DeviceMesh, what: str) -> torch.Tensor:
    """This replica's part of what `layered(like, mesh)` gave, a view. Raises ValueError for anything else."""
    expected = layered(like, mesh)
    expect_own_shard(value, expected, what)
    found = _looks(value) if isinstance(value, DTensor) else type(value).__name__
    if found != _looks(expected):
        raise ValueError(
            f"{what}: expected {_looks(expected)}, a layer for each replica as state_dict() of the policy gives it, "
            f"got {found}: load it on as many replicas as it was saved on, or save a plain state dict after average()"
        )
    return held(value)[0]


def flattened(value: DTensor, ring: DeviceMesh) -> DTensor:
    """The tensor that `layered` was given, on the ring; a copy of this replica's."""
    over_ring = value.placements[-1]
    over_ring = Shard(over_ring.dim - 1) if isinstance(over_ring, Shard) else over_ring
    return _laid_out(held(value)[0].clone(), ring, (over_ring,), value.shape[1:])


def _looks(tensor: DTensor) -> str:
    return f"{tuple(tensor.shape)} with {tensor.placements} on {tuple(tensor.device_mesh.shape)} ranks"


def _laid_out(local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
