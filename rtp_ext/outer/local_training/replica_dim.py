"""Layout of tensors that differ between replicas: on the mesh of one ring in memory, and with a leading replica
dimension in checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from rtp_ext.parameters.sharding import held
from rtp_ext.ring.parameters_in_use import expect_own_shard


def place_on_ring(tensor: torch.Tensor, ring: DeviceMesh) -> None:
    """Moves a DTensor on (replicas, ring), Replicate() over the replicas, to the mesh of this rank's ring, in place and
    with the same shard. Operations on DTensors of different values then communicate within the ring only."""
    if isinstance(tensor, DTensor) and tensor.device_mesh.ndim > ring.ndim:
        spec = tensor._spec
        tensor._spec = DTensorSpec(ring, spec.placements[-ring.ndim :], tensor_meta=spec.tensor_meta)


def with_replica_dim(tensor: DTensor, mesh: DeviceMesh) -> DTensor:
    """Returns [K, *shape] on `mesh` (replicas, ring), Shard(0) over the replicas, for a tensor [*shape] on a ring.

    Shares memory with `tensor`; a checkpoint then holds the values of every replica. Raises ValueError for a Partial
    tensor: a checkpoint would hold one term of its sum.
    """
    (over_ring,) = tensor.placements
    if isinstance(over_ring, Partial):
        raise ValueError(
            f"expected state of an optimizer that is sharded or the same on all ranks of a ring, got a DTensor of "
            f"shape {tuple(tensor.shape)} with placements {tensor.placements}: a checkpoint cannot hold the "
            "terms of its sum. The optimizer has to keep redistribute(placements=[Replicate()]) of it"
        )
    shape = torch.Size((mesh.size(0), *tensor.shape))
    over_ring = Shard(over_ring.dim + 1) if isinstance(over_ring, Shard) else over_ring
    return _laid_out(held(tensor).detach().unsqueeze(0), mesh, (Shard(0), over_ring), shape)


def own_replica_slice(value: Any, like: DTensor, mesh: DeviceMesh, what: str) -> torch.Tensor:
    """Returns this replica's slice of `value`, a view. Raises ValueError unless `value` has the layout of
    `with_replica_dim(like, mesh)`."""
    expected = with_replica_dim(like, mesh)
    expect_own_shard(value, expected, what)
    found = _describe(value) if isinstance(value, DTensor) else type(value).__name__
    if found != _describe(expected):
        raise ValueError(
            f"{what}: expected {_describe(expected)}, a layer for each replica as state_dict() of the policy gives it, "
            f"got {found}: load it on as many replicas as it was saved on, or save a plain state dict after average()"
        )
    return held(value)[0]


def without_replica_dim(value: DTensor, ring: DeviceMesh) -> DTensor:
    """Inverts `with_replica_dim`: returns a copy of this replica's slice, on the ring."""
    over_ring = value.placements[-1]
    over_ring = Shard(over_ring.dim - 1) if isinstance(over_ring, Shard) else over_ring
    return _laid_out(held(value)[0].clone(), ring, (over_ring,), value.shape[1:])


def _describe(tensor: DTensor) -> str:
    return f"{tuple(tensor.shape)} with {tensor.placements} on {tuple(tensor.device_mesh.shape)} ranks"


def _laid_out(local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
