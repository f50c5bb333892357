"""Parameters that are also cut over replicas: every replica holds one piece of the shard that rotates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from rtp_ext._native import shard_sizes
from rtp_ext.dtensor_hooks import patch_state_dicts
from rtp_ext.ring.autograd import as_parameter
from rtp_ext.ring.mesh import local_placements, own_part, piece_dim, ring_dim, ring_shape


def is_piece(tensor: Any) -> bool:
    """Returns whether a tensor is a DTensor that is cut over replicas."""
    return isinstance(tensor, DTensor) and piece_dim(tensor._spec) is not None


def piece_placement(shape: Sequence[int], dim: int, replicas: int, ranks: int) -> Placement | None:
    """Returns the placement over the replicas of a parameter that the ring cuts along `dim`; None if no dimension is
    suitable.

    The pieces are cut along the dimension that the ring cuts, if DTensor's arithmetic for uneven sizes gives the same
    cut for the shards of all rings: it cuts over the replicas first and then over the ring, by the chunk rule each
    time. Otherwise they are cut along the largest other dimension.
    """
    pieces = [shard_sizes(shard, replicas) for shard in shard_sizes(shape[dim], ranks)]
    if all(list(of_one) == list(shard_sizes(sum(of_one), ranks)) for of_one in zip(*pieces, strict=True)):
        return _StridedShard(dim, split_factor=ranks)
    others = [other for other in range(len(shape)) if other != dim]
    return Shard(max(others, key=lambda other: shape[other])) if others else None


def piece_placements(parameter: DTensor) -> tuple[Placement, Placement] | None:
    """Returns placements that cut a parameter's shard over the replicas; None if no dimension is suitable."""
    over_ring = parameter.placements[-1]
    assert isinstance(over_ring, Shard), "a shard"
    replicas, ranks = parameter.device_mesh.shape
    over_replicas = piece_placement(parameter.shape, over_ring.dim, replicas, ranks)
    return None if over_replicas is None else (over_replicas, over_ring)


def local_spec(spec: DTensorSpec) -> DTensorSpec:
    """Returns the spec of the shards, replicated over replicas, whose pieces have the layout `spec`."""
    return DTensorSpec(spec.mesh, local_placements(spec), tensor_meta=spec.tensor_meta)


def local_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of this rank's shard of a parameter, which may be cut over the replicas."""
    if not isinstance(parameter, DTensor):
        return tuple(parameter.shape)
    shape, dim, mesh = list(ring_shape(parameter)), ring_dim(parameter), parameter.device_mesh
    if dim is not None:
        shape[dim] = shard_sizes(shape[dim], mesh.size(mesh.ndim - 1))[mesh.get_local_rank(mesh.ndim - 1)]
    return tuple(shape)


def cut_local(shard: torch.Tensor, dim: int, replicas: int) -> tuple[torch.Tensor, ...]:
    """Returns the pieces of a shard as views, by the chunk rule of DTensor's Shard."""
    return shard.split(shard_sizes(shard.shape[dim], replicas), dim)


def own_piece(shard: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Returns this rank's piece, a view, of a shard for the layout `spec`."""
    dim = piece_dim(spec)
    return shard if dim is None else cut_local(shard, dim, spec.mesh.size(0))[spec.mesh.get_local_rank(0)]


def as_pieces(parameter: DTensor, placements: tuple[Placement, Placement]) -> nn.Parameter:
    """Returns a parameter, whose shard every replica holds, cut over the replicas, in new memory."""
    spec = DTensorSpec(parameter.device_mesh, placements, tensor_meta=parameter._spec.tensor_meta)
    local = own_piece(parameter._local_tensor.detach(), spec).clone(memory_format=torch.contiguous_format)
    data = DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg]
    cut = as_parameter(data, parameter.requires_grad)
    cut.__dict__.update(parameter.__dict__)
    return cut


_meshes: set[DeviceMesh] = set()


def let_state_dicts_fit(mesh: DeviceMesh) -> None:
    """Patches torch so that whole state dicts (full_state_dict=True) are cut like the parameters on `mesh`."""
    _meshes.add(mesh)
    patch_state_dicts(_holds_pieces, _piece_of)


def _holds_pieces(mesh: DeviceMesh, placements: Sequence[Placement]) -> bool:
    return isinstance(placements[0], _StridedShard) and mesh in _meshes


def _piece_of(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    spec = DTensorSpec(mesh, tuple(placements), TensorMeta(whole.shape, whole.stride(), whole.dtype))
    piece = own_part(whole.detach(), mesh, placements).clone(memory_format=torch.contiguous_format)
    return DTensor(piece, spec, requires_grad=False)  # type: ignore[call-arg]


def gather_local(parameter: DTensor) -> torch.Tensor:
    """Returns this rank's shard, gathered from the pieces of all replicas, detached. Collective over the replicas."""
    spec, dim = parameter._spec, piece_dim(parameter._spec)
    assert dim is not None, "pieces"
    local = parameter._local_tensor.detach().contiguous()
    shard = local.new_empty(local_shape(parameter))
    for replica, place in enumerate(cut_local(shard, dim, spec.mesh.size(0))):
        if place.numel():
            piece = local if replica == spec.mesh.get_local_rank(0) else local.new_empty(place.shape)
            dist.broadcast(piece.view(-1).view(torch.uint8), group=spec.mesh.get_group(0), group_src=replica)
            place.copy_(piece)
    return shard
