"""The ranks of a ring, and the DeviceMesh of its parameters."""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
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
    """The roles of the dimensions of a mesh, by name.

    Each field is a name or a tuple of names; the dimensions of a tuple are flattened into one, the last name varying
    fastest.

    Args:
        ring: shards rotate over it.
        replicate: rings along it hold the same shards, and the outer policy (rtp_ext.outer) combines their gradients;
            None: there is one ring.
        expert: the experts of a mixture are divided over it, and tokens travel to them; each rank's experts rotate over
            `ring`. All other shards rotate over `ring` and `expert` as one ring. None: all experts rotate.
        expert_capacity: the number of rows that each rank sends to each expert in a call. Choices fill them in the
            order of GShard (arXiv 2006.16668, algorithm 1): all first choices, by position, then all second ones. The
            rank drops further choices, and fills missing rows with zeros; no host waits for numbers of rows. None: one
            row for every choice.
    """

    ring: str | tuple[str, ...] = "ring"
    replicate: str | tuple[str, ...] | None = None
    expert: str | tuple[str, ...] | None = None
    expert_capacity: int | None = None

    def __post_init__(self) -> None:
        if (capacity := self.expert_capacity) is not None:
            if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
                raise ValueError(f"RotationDims: expected expert_capacity to be a positive integer, got {capacity!r}")
            if self.expert is None:
                raise ValueError(f"RotationDims: expected expert with expert_capacity, got {capacity} and no expert")
        for what, names in (("ring", self.ring), ("replicate", self.replicate), ("expert", self.expert)):
            if names is None and what != "ring":
                continue
            several = (names,) if isinstance(names, str) else names
            if not isinstance(several, tuple) or not several or not all(isinstance(name, str) for name in several):
                raise TypeError(f"RotationDims: expected {what} to be a name or a tuple of names, got {names!r}")
        twice = [name for name, count in Counter(self.names).items() if count > 1]
        if twice:
            raise ValueError(f"RotationDims: expected every dimension once, got {', '.join(twice)} more than once")

    @property
    def ring_names(self) -> tuple[str, ...]:
        return _names(self.ring)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _names(self.replicate)

    @property
    def expert_names(self) -> tuple[str, ...]:
        return _names(self.expert)

    @property
    def names(self) -> tuple[str, ...]:
        return self.ring_names + self.replicate_names + self.expert_names

    def over_all(self, mesh: DeviceMesh) -> RotationDims:
        """Returns the roles for all shards but those of experts: `ring` and `expert` are one ring, in the order of
        `mesh`."""
        spread = self.ring_names + self.expert_names
        return RotationDims(tuple(name for name in mesh.mesh_dim_names or () if name in spread), self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else given


@dataclass(frozen=True)
class ExpertMesh:
    """How a ring divides experts: `ranks`, the mesh over which tokens travel, `hops`, that of the rotation of one
    rank's experts, for each rank of the whole ring its coordinates (in `ranks`, in `hops`), and expert_capacity."""

    ranks: DeviceMesh
    hops: DeviceMesh
    places: tuple[tuple[int, int], ...]
    capacity: int | None


@dataclass(frozen=True)
class RingMesh:
    """The mesh of a ring's hops, and the mesh of its parameters: the same, or with more dimensions before the ring.

    `tensor`: the dimension of tensor parallelism, as a mesh of its own. The mesh of parameters is (replicas, tensor,
    ring): tensor parallelism shards a parameter first, and the ring shards each part. `experts`: how experts are
    divided; None: all rotate over the ring.
    """

    hops: DeviceMesh
    parameters: DeviceMesh
    tensor: DeviceMesh | None = None
    experts: ExpertMesh | None = None

    @property
    def replicas(self) -> int:
        return self.parameters.size() // self.hops.size() // (1 if self.tensor is None else self.tensor.size())


@dataclass(frozen=True)
class MeshRole:
    """The role of parameters on a mesh: the number of replicas that hold them, and whether tensor parallelism shards
    them."""

    replicas: int = 1
    tensor: bool = False


mesh_roles: dict[DeviceMesh, MeshRole] = {}  # of the meshes of parameters
rings_on: dict[DeviceMesh, list[weakref.ref[Any]]] = {}  # the rings with hops or parameters on each mesh


def role_of(mesh: DeviceMesh) -> MeshRole:
    """Returns the role of a mesh; one without replicas and tensor parallelism where no ring was made for the mesh."""
    return mesh_roles.get(mesh, _NO_ROLE)


_NO_ROLE = MeshRole()


def live_ring(mesh: DeviceMesh) -> Any:
    """Returns the newest usable Ring of the parameters on a mesh; None where there is none."""
    rings = (reference() for reference in reversed(rings_on.get(mesh, [])))
    return next((ring for ring in rings if ring is not None and ring.alive), None)


def piece_dim(spec: DTensorSpec) -> int | None:
    """Returns the dimension along which replicas split the shards with layout `spec`, so that each replica has a piece
    of its own; None where they do not. Replicas never split a parameter that tensor parallelism shards."""
    over_replicas: Any = spec.placements[0]
    if isinstance(over_replicas, Replicate) or spec.mesh.ndim == 1 or role_of(spec.mesh).tensor:
        return None
    return over_replicas.dim


def local_placements(spec: DTensorSpec) -> tuple[Placement, ...]:
    """Returns the placements of the whole shards, which are the same on every replica, of pieces with layout `spec`."""
    return spec.placements if piece_dim(spec) is None else (Replicate(), *spec.placements[1:])


def part_bounds(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Iterable[Placement], coordinate: Sequence[int]
) -> list[tuple[int, int]]:
    """Returns start and size, along each dimension of a whole tensor, of the part of the rank at `coordinate`.

    Splits once for each dimension of the mesh, in order; strided splits come last, since they split the parts that the
    others leave."""
    bounds = [(0, extent) for extent in shape]
    for index, placement in sorted(enumerate(placements), key=lambda cut: isinstance(cut[1], _StridedShard)):
        if isinstance(placement, (Shard, _StridedShard)):
            start, size = bounds[placement.dim]
            sizes = shard_sizes(size, mesh_shape[index])
            place = coordinate[index]
            bounds[placement.dim] = start + sum(sizes[:place]), sizes[place]
    return bounds


def own_bounds(shape: Sequence[int], mesh: DeviceMesh, placements: Iterable[Placement]) -> list[tuple[int, int]]:
    """Returns start and size, along each dimension, of this rank's part of a whole tensor."""
    coordinate = [mesh.get_local_rank(index) for index in range(mesh.ndim)]
    return part_bounds(shape, mesh.shape, placements, coordinate)


def own_part(whole: torch.Tensor, mesh: DeviceMesh, placements: Iterable[Placement]) -> torch.Tensor:
    """Returns this rank's part, a view, of a whole tensor under `placements` on `mesh`."""
    for dim, (start, size) in enumerate(own_bounds(whole.shape, mesh, placements)):
        whole = whole.narrow(dim, start, size)
    return whole


def ring_dim(parameter: torch.Tensor) -> int | None:
    """Returns the dimension along which the ring shards a parameter; None for plain and replicated tensors. The ring is
    the last dimension of the mesh of a parameter."""
    if not isinstance(parameter, DTensor):
        return None
    placement = parameter.placements[-1]
    return placement.dim if isinstance(placement, Shard) else None


def ring_shape(parameter: DTensor) -> tuple[int, ...]:
    """Returns the shape of the tensor that the ring shards: the whole parameter, or its part on this rank of tensor
    parallelism."""
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
    """Returns the meshes for a Ring's `mesh_or_group` and `dims`; `tensor` names the dimension of tensor parallelism.
    Collective where dimensions are flattened."""
    if isinstance(mesh_or_group, RingMesh):
        return mesh_or_group
    _check_mesh(mesh_or_group, dims)
    if dims is not None:
        mesh = _check_named(mesh_or_group, dims, tensor)
        found = _named(mesh, dims.over_all(mesh), tensor)
        return found if dims.expert is None else replace(found, experts=_divided(mesh, dims))
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
                "dims=RotationDims(ring=..., replicate=...), which names their roles, or one dimension, "
                'such as mesh["ring"]'
            )
    elif mesh_or_group is not None and not isinstance(mesh_or_group, dist.ProcessGroup):
        raise TypeError(f"Ring: expected a DeviceMesh or a process group, got {type(mesh_or_group).__name__}")


def _device_of(group: dist.ProcessGroup | None) -> str:
    """Returns `cuda` where the backend of a group for GPUs is NCCL. Where the caller named no backend, `get_backend`
    says `undefined`, and only the configuration has the one that torch chose for the accelerator of this machine."""
    backends = dict(pair.partition(":")[::2] for pair in dist.get_backend_config(group).split(","))
    return "cuda" if "nccl" in backends.get("cuda", "") and torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class RankGrid:
    """The ranks of the mesh of parameters, before the mesh exists.

    Attributes:
        device_type: the device type of the mesh.
        shape: sizes of the dimensions of the mesh: replicas, if named, tensor parallelism, if any, and last the ring.
        ranks: the ranks of the default process group, in the order of the mesh.
        names: the names of the dimensions; None: they are unnamed.
        place: this rank's coordinates.
        tensor_mesh: the mesh of tensor parallelism.
        experts: for each rank of the ring, where it stands among the ranks that experts are divided over, and in the
            rotation of its own; None: experts are not divided.
    """

    device_type: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    names: tuple[str, ...] | None
    place: tuple[int, ...]
    tensor_mesh: DeviceMesh | None = None
    has_replicas: bool = False
    experts: tuple[tuple[int, int], ...] | None = None

    @property
    def grid(self) -> list[Any]:
        """The ranks in nested lists, by dimension."""
        return torch.tensor(self.ranks).reshape(self.shape).tolist()


def lay_out_ranks(
    mesh_or_group: DeviceMesh | dist.ProcessGroup | None, dims: RotationDims | None, tensor: str | None
) -> RankGrid:
    """Returns the ranks of the meshes that `resolve_mesh` returns for the same arguments, and raises the same errors.
    Does not communicate, and creates no mesh or process group."""
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
    mesh, given = _check_named(mesh_or_group, dims, tensor), dims
    dims = given.over_all(mesh)
    several = [dims.replicate_names, () if tensor is None else (tensor,), dims.ring_names]
    every = [name for names in several for name in names]
    known: tuple[str, ...] = mesh.mesh_dim_names or ()
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    # Unnamed dimensions have one rank.
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
        None if given.expert is None else _places(mesh, given),
    )


def unnamed_dimension(mesh: Any, dims: Any) -> str | None:
    """Returns the dimension of a mesh that `dims` does not name, which is that of tensor parallelism where the rest of
    a call is valid; None where there is none, or several."""
    if not isinstance(mesh, DeviceMesh) or not isinstance(dims, RotationDims):
        return None
    left = _left_out(mesh, dims.names)
    return left[0] if len(left) == 1 else None


def _left_out(mesh: DeviceMesh, known: Collection[str | None]) -> list[str]:
    """Returns the names of the dimensions of a mesh with several ranks that are not among `known`."""
    names = mesh.mesh_dim_names or ()
    return [name for index, name in enumerate(names) if name not in known and mesh.size(index) > 1]


def _check_named(mesh: DeviceMesh | dist.ProcessGroup | None, dims: RotationDims, tensor: str | None) -> DeviceMesh:
    """Returns the mesh. Raises TypeError or ValueError where `dims` does not fit its dimensions."""
    if not isinstance(dims, RotationDims):
        raise TypeError(f"Ring: expected dims to be RotationDims, got {type(dims).__name__}")
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"Ring: dims names dimensions of a mesh: expected mesh to be a DeviceMesh, got {mesh!r:.100}")
    names: tuple[str, ...] = mesh.mesh_dim_names or ()
    asked = dims.names
    unknown = [name for name in asked if name not in names]
    if unknown:
        raise ValueError(
            f"Ring: expected names of dimensions of the mesh, which are {names or 'unnamed'}, got {', '.join(unknown)}"
        )
    known = (*asked, tensor)
    left = [f"{name} of {mesh.size(names.index(name))}" for name in _left_out(mesh, known)]
    if left:
        raise ValueError(
            f"Ring: expected every dimension of the mesh to be named, got {', '.join(left)} in neither ring "
            f"{dims.ring_names} nor replicate {dims.replicate_names}: parameters would be repeated along it and their "
            "gradients never brought together. Name it in one of them, pass a mesh without it, such as "
            f"mesh[{', '.join(map(repr, (name for name in names if name in known)))}], or have parallelize_module cut "
            "the model over it before"
        )
    if tensor is not None and dims.expert is not None:
        raise ValueError(
            f"Ring: dims that have expert cannot be combined with tensor parallelism (over {tensor!r}): expected a "
            "model that parallelize_module has not cut"
        )
    for several in (dims.ring_names, dims.replicate_names, dims.expert_names):
        order = [names.index(name) for name in several]
        if order != sorted(order):
            raise ValueError(f"Ring: expected names in the order of the mesh {names}, got {several}")
    return mesh


def _places(mesh: DeviceMesh, dims: RotationDims) -> tuple[tuple[int, int], ...]:
    """Returns ExpertMesh.places."""
    names: Any = mesh.mesh_dim_names
    spread = dims.over_all(mesh).ring_names
    found = []
    for coordinate in itertools.product(*(range(mesh.size(names.index(name))) for name in spread)):
        at = dict(zip(spread, coordinate, strict=True))
        place = []
        for several in (dims.expert_names, dims.ring_names):
            index = 0
            for name in several:
                index = index * mesh.size(names.index(name)) + at[name]
            place.append(index)
        found.append((place[0], place[1]))
    return tuple(found)


def _divided(mesh: DeviceMesh, dims: RotationDims) -> ExpertMesh:
    ranks, hops = _flattened(mesh, dims.expert_names), _flattened(mesh, dims.ring_names)
    if ranks.size() == 1 and dims.expert_capacity is not None:
        raise ValueError(
            f"Ring: expected expert_capacity=None where expert={dims.expert!r} has one rank, got "
            f"{dims.expert_capacity}: there no tokens travel, and none are dropped"
        )
    return ExpertMesh(ranks, hops, _places(mesh, dims), dims.expert_capacity)


def _named(mesh: DeviceMesh, dims: RotationDims, tensor: str | None) -> RingMesh:
    ring = _flattened(mesh, dims.ring_names)
    if tensor is not None:
        return RingMesh(ring, _with_tensor(mesh, dims, tensor, ring), mesh[tensor])
    if not dims.replicate_names:
        return RingMesh(ring, ring)
    # Slicing, flattening and concatenating use existing groups: ranks outside of this mesh need not take part.
    return RingMesh(ring, DeviceMesh._concatenate([_flattened(mesh, dims.replicate_names), ring]))


def _with_tensor(mesh: DeviceMesh, dims: RotationDims, tensor: str, ring: DeviceMesh) -> DeviceMesh:
    """Returns the mesh (replicas, tensor, ring), over existing process groups.

    This order, independent of that of `mesh`, makes each placement a plain Shard: a ring before tensor parallelism
    would need _StridedShard, with which torch 2.14 cannot split a whole tensor into unequal parts. The result is a mesh
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
