"""Which ranks a ring is made of, and the mesh that its parameters lie on."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from rtp_ext._native import RotationError, shard_sizes


@dataclass(frozen=True)
class RotationDims:
    """Which dimensions of a mesh are what, by their names.

    Each is a name or a tuple of names, whose dimensions count as one, the last name turning fastest.

    Args:
        ring: shards rotate over it.
        replicate: rings along it hold the same shards, and what becomes of their gradients is the outer policy's matter
            (rtp_ext.outer); None: there is one ring.
    """

    ring: str | tuple[str, ...] = "ring"
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for what, names in (("ring", self.ring), ("replicate", self.replicate)):
            if names is None and what == "replicate":
                continue
            several = (names,) if isinstance(names, str) else names
            if not isinstance(several, tuple) or not several or not all(isinstance(name, str) for name in several):
                raise TypeError(f"RotationDims: expected {what} to be a name or a tuple of names, got {names!r}")
        twice = [name for name, count in Counter(self.ring_names + self.replicate_names).items() if count > 1]
        if twice:
            raise ValueError(f"RotationDims: expected every dimension once, got {', '.join(twice)} more than once")

    @property
    def ring_names(self) -> tuple[str, ...]:
        return _names(self.ring)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else given


@dataclass(frozen=True)
class RingMesh:
    """The mesh of a ring's hops, and the one of its parameters: the same, or with more dimensions before the ring.

    `tensor`: the dimension of tensor parallelism, as a mesh of its own. Parameters lie on (replicas, tensor, ring): a
    parameter is cut for tensor parallelism first, and each part is cut for the ring.
    """

    hops: DeviceMesh
    parameters: DeviceMesh
    tensor: DeviceMesh | None = None

    @property
    def replicas(self) -> int:
        return self.parameters.size() // self.hops.size() // (1 if self.tensor is None else self.tensor.size())


@dataclass(frozen=True)
class MeshRole:
    """What parameters on a mesh are: how many replicas hold them, whether tensor parallelism cuts them, and the rings
    that rotate them."""

    replicas: int = 1
    tensor: bool = False
    rings: list[weakref.ref[Any]] = field(default_factory=list, compare=False)


mesh_roles: dict[DeviceMesh, MeshRole] = {}  # of the meshes of rings


def role_of(mesh: DeviceMesh) -> MeshRole:
    """The role of a mesh; without replicas and tensor parallelism where no ring was made for it."""
    return mesh_roles.get(mesh, _NO_ROLE)


_NO_ROLE = MeshRole()


def live_ring(mesh: DeviceMesh) -> Any:
    """A Ring, made for the parameters on a mesh, that can be used; None where there is none."""
    rings = (reference() for reference in reversed(role_of(mesh).rings))
    return next((ring for ring in rings if ring is not None and ring.alive), None)


def piece_dim(spec: DTensorSpec) -> int | None:
    """The dimension along which replicas cut the shards laid out as `spec`, so that each has a piece of its own; None
    where they do not. Nobody cuts over replicas what tensor parallelism cuts."""
    over_replicas: Any = spec.placements[0]
    if isinstance(over_replicas, Replicate) or spec.mesh.ndim == 1 or role_of(spec.mesh).tensor:
        return None
    return over_replicas.dim


def local_placements(spec: DTensorSpec) -> tuple[Placement, ...]:
    """How the shards lie that pieces laid out as `spec` belong to, the same ones on every replica."""
    return spec.placements if piece_dim(spec) is None else (Replicate(), *spec.placements[1:])


def own_part(whole: torch.Tensor, mesh: DeviceMesh, placements: Iterable[Placement]) -> torch.Tensor:
    """This rank's part, a view, of a whole tensor that is to lie on `mesh`: cut once for each dimension, in order, and
    last where a cut is one of what the others leave."""
    for index, placement in sorted(enumerate(placements), key=lambda cut: isinstance(cut[1], _StridedShard)):
        if isinstance(placement, (Shard, _StridedShard)):
            sizes = shard_sizes(whole.shape[placement.dim], mesh.size(index))
            whole = whole.split(sizes, placement.dim)[mesh.get_local_rank(index)]
    return whole


def ring_dim(parameter: torch.Tensor) -> int | None:
    """The dimension along which the ring cuts a parameter; None for plain and replicated tensors. In the mesh of a
    parameter the ring comes last."""
    if not isinstance(parameter, DTensor):
        return None
    placement = parameter.placements[-1]
    return placement.dim if isinstance(placement, Shard) else None


def ring_shape(parameter: DTensor) -> tuple[int, ...]:
    """The shape of what the ring cuts: the whole parameter, or what tensor parallelism leaves of it on this rank."""
    shape, mesh = [*parameter.shape], parameter.device_mesh
    for index, placement in enumerate(local_placements(parameter._spec)[:-1]):
        if isinstance(placement, Shard):
            shape[placement.dim] = shard_sizes(shape[placement.dim], mesh.size(index))[mesh.get_local_rank(index)]
    return tuple(shape)


def resolve_mesh(
    mesh_or_group: DeviceMesh | dist.ProcessGroup | RingMesh | None,
    dims: RotationDims | None = None,
    tensor: str | None = None,
) -> RingMesh:
    """The meshes that a Ring's `mesh_or_group` and `dims` stand for; `tensor` names the dimension of tensor
    parallelism. Collective where names are flattened."""
    if isinstance(mesh_or_group, RingMesh):
        return mesh_or_group
    _check_mesh(mesh_or_group, dims)
    if dims is not None:
        return _named(_check_named(mesh_or_group, dims, tensor), dims, tensor)
    if isinstance(mesh_or_group, DeviceMesh):
        return RingMesh(mesh_or_group, mesh_or_group)
    device_type = _device_of(mesh_or_group)
    if mesh_or_group is None:
        mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    else:
        mesh = DeviceMesh.from_group(mesh_or_group, device_type)
    return RingMesh(mesh, mesh)


def _check_mesh(mesh_or_group: DeviceMesh | dist.ProcessGroup | None, dims: RotationDims | None) -> None:
    if not dist.is_initialized():
        raise RotationError("Ring: torch.distributed is not initialised; call init_process_group, or use Ring.emulated")
    if dims is not None:
        return
    if isinstance(mesh_or_group, DeviceMesh):
        if mesh_or_group.ndim != 1:
            raise ValueError(
                f"Ring: expected a one-dimensional mesh, got one with dimensions {mesh_or_group.mesh_dim_names}; pass "
                "dims=RotationDims(ring=..., replicate=...), which says what they are by name, or one of them, "
                'such as mesh["ring"]'
            )
    elif mesh_or_group is not None and not isinstance(mesh_or_group, dist.ProcessGroup):
        raise TypeError(f"Ring: expected a DeviceMesh or a process group, got {type(mesh_or_group).__name__}")


def _device_of(group: dist.ProcessGroup | None) -> str:
    return "cuda" if "nccl" in str(dist.get_backend(group)) and torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class RankGrid:
    """The ranks that parameters are to lie on, before any mesh is made of them.

    Attributes:
        device_type: of the mesh.
        shape: sizes of the dimensions of the mesh of parameters: replicas, where they are named, tensor parallelism,
            where there is some, and last the ring.
        ranks: of the default process group, in the order of that mesh.
        names: of these dimensions; None: they have none.
        place: this rank's coordinates.
        tensor_mesh: of tensor parallelism.
    """

    device_type: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    names: tuple[str, ...] | None
    place: tuple[int, ...]
    tensor_mesh: DeviceMesh | None = None
    has_replicas: bool = False

    @property
    def grid(self) -> list[Any]:
        """The ranks in nested lists, by dimension."""
        return torch.tensor(self.ranks).reshape(self.shape).tolist()


def lay_out_ranks(
    mesh_or_group: DeviceMesh | dist.ProcessGroup | None, dims: RotationDims | None, tensor: str | None
) -> RankGrid:
    """The ranks of what `resolve_mesh` makes of the same arguments, and the same refusals. No communication, and no
    mesh or process group is made."""
    _check_mesh(mesh_or_group, dims)
    if dims is None:
        if isinstance(mesh_or_group, DeviceMesh):
            kind, ranks = mesh_or_group.device_type, mesh_or_group.mesh.flatten().tolist()
            names: tuple[str, ...] | None = mesh_or_group.mesh_dim_names
        else:
            kind, names = _device_of(mesh_or_group), None
            ranks = dist.get_process_group_ranks(mesh_or_group or dist.group.WORLD)
        place = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else 0
        return RankGrid(kind, (len(ranks),), tuple(ranks), names, (place,))
    mesh = _check_named(mesh_or_group, dims, tensor)
    several = [dims.replicate_names, () if tensor is None else (tensor,), dims.ring_names]
    every = [name for names in several for name in names]
    known: tuple[str, ...] = mesh.mesh_dim_names or ()
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    # dimensions that are not named have one rank
    order = [known.index(name) for name in every]
    rest = [at for at in range(mesh.ndim) if at not in order]
    ranks = mesh.mesh.permute([*order, *rest]).flatten().tolist()
    shape, place_in = [], []
    for names in several:
        if names:
            sizes = [mesh.size(known.index(name)) for name in names]
            at = 0
            for name, size in zip(names, sizes, strict=True):
                at = at * size + coordinate[known.index(name)]
            shape.append(math.prod(sizes))
            place_in.append(at)
    return RankGrid(
        mesh.device_type,
        tuple(shape),
        tuple(ranks),
        tuple("_".join(names) for names in several if names),
        tuple(place_in),
        None if tensor is None else mesh[tensor],
        bool(dims.replicate_names),
    )


def _check_named(mesh: DeviceMesh | dist.ProcessGroup | None, dims: RotationDims, tensor: str | None) -> DeviceMesh:
    """The mesh. Raises where `dims` cannot name its dimensions."""
    if not isinstance(dims, RotationDims):
        raise TypeError(f"Ring: expected dims to be RotationDims, got {type(dims).__name__}")
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"Ring: dims names dimensions of a mesh: expected mesh to be a DeviceMesh, got {mesh!r:.100}")
    names: tuple[str, ...] = mesh.mesh_dim_names or ()
    asked = dims.ring_names + dims.replicate_names
    unknown = [name for name in asked if name not in names]
    if unknown:
        raise ValueError(
            f"Ring: expected names of dimensions of the mesh, which are {names or 'unnamed'}, got {', '.join(unknown)}"
        )
    known = (*asked, tensor)
    left = [f"{name} of {mesh.size(i)}" for i, name in enumerate(names) if name not in known and mesh.size(i) > 1]
    if left:
        raise ValueError(
            f"Ring: expected every dimension of the mesh to be named, got {', '.join(left)} in neither ring "
            f"{dims.ring_names} nor replicate {dims.replicate_names}: parameters would be repeated along it and their "
            "gradients never brought together. Name it in one of them, pass a mesh without it, such as "
            f"mesh[{', '.join(map(repr, (name for name in names if name in known)))}], or have parallelize_module cut "
            "the model over it before"
        )
    for several in (dims.ring_names, dims.replicate_names):
        order = [names.index(name) for name in several]
        if order != sorted(order):
            raise ValueError(f"Ring: expected names in the order of the mesh {names}, got {several}")
    return mesh


def _named(mesh: DeviceMesh, dims: RotationDims, tensor: str | None) -> RingMesh:
    ring = _flattened(mesh, dims.ring_names)
    if tensor is not None:
        return RingMesh(ring, _with_tensor(mesh, dims, tensor, ring), mesh[tensor])
    if not dims.replicate_names:
        return RingMesh(ring, ring)
    # sliced, flattened and put together of groups that exist: ranks outside of this mesh need not take part
    return RingMesh(ring, DeviceMesh._concatenate([_flattened(mesh, dims.replicate_names), ring]))


def _with_tensor(mesh: DeviceMesh, dims: RotationDims, tensor: str, ring: DeviceMesh) -> DeviceMesh:
    """The mesh (replicas, tensor, ring), over process groups that exist.

    In this order whatever the order of `mesh`, so that each cut is a plain Shard: for a ring before tensor parallelism
    DTensor has _StridedShard, and torch 2.14 cannot cut a whole tensor that way where sizes do not divide. It is a mesh
    of its own, since torch does not redistribute on a slice whose dimensions are in another order than its root's.
    """
    replicas = [_flattened(mesh, dims.replicate_names)] if dims.replicate_names else []
    parts = [*replicas, mesh[tensor], ring]
    names = [*dims.replicate_names, tensor, *dims.ring_names]
    in_order: tuple[str, ...] = tuple(name for name in mesh.mesh_dim_names or () if name in names)
    ranks = mesh[in_order].mesh.permute([in_order.index(name) for name in names])
    return DeviceMesh.from_group(
        [part.get_group() for part in parts],
        mesh.device_type,
        mesh=ranks.reshape([part.size() for part in parts]),
        mesh_dim_names=tuple(part.mesh_dim_names[0] for part in parts),  # type: ignore[index]
    )


def _flattened(mesh: DeviceMesh, names: Iterable[str]) -> DeviceMesh:
    names = tuple(names)
    if len(names) == 1:
        return mesh[names[0]]
    return mesh[names]._flatten("_".join(names))
