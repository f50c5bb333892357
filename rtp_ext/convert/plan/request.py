"""The arguments of one call of fully_rotate or explain, and the ranks that its ring runs over."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from rtp_ext.convert.plan.traffic import RingFacts
from rtp_ext.convert.scopes import RotationState, is_inside, state_of
from rtp_ext.options import RingOptions
from rtp_ext.outer import OuterPolicy
from rtp_ext.ring import Ring, RotationDims
from rtp_ext.ring.mesh import RankGrid
from rtp_ext.words import (
    Budget,
    Bundle,
    EmbeddingWay,
    Format,
    GradientRoute,
    GradientTravel,
    LossHead,
    RecipeName,
    Route,
    Transport,
    Travel,
)

TIMEOUT = 600.0  # seconds

Parts = list[tuple[str, nn.Module]]


class ModuleGroup(nn.Module):
    """The modules of a list that is converted in one call, by their classes' names."""

    def __init__(self, members: list[nn.Module]) -> None:
        super().__init__()
        for member in members:
            kind, number = type(member).__name__, 1
            while (name := kind if number == 1 else f"{kind}_{number}") in self._modules:
                number += 1
            self._modules[name] = member


class RotateKeywords(TypedDict, total=False):
    """The keyword arguments of fully_rotate, which describes them, and of explain."""

    mesh: DeviceMesh | dist.ProcessGroup | Ring | None
    dims: RotationDims | None
    outer: OuterPolicy | None
    mp_policy: MixedPrecisionPolicy | None
    offload_policy: OffloadPolicy | None
    ignored_params: Iterable[nn.Parameter] | None
    gather: Iterable[str | nn.Module] | None
    in_place: bool
    bundle: bool | Bundle
    loss_head: LossHead | None
    frozen: Format | None
    recipe: RecipeName | None
    route: Route
    gradient_route: GradientRoute
    gradient_travel: GradientTravel | None
    buffers: Budget | int
    group: int | None
    collective: bool
    embedding: EmbeddingWay
    transport: Transport
    travel: Travel | None
    timeout: float | datetime.timedelta


@dataclass(frozen=True)
class Options:
    """The keyword arguments of one call. ring: those among them that are options of a Ring, as they were given."""

    mesh: DeviceMesh | dist.ProcessGroup | Ring | None = None
    dims: RotationDims | None = None
    outer: OuterPolicy | None = None
    mp_policy: MixedPrecisionPolicy | None = None
    offload_policy: OffloadPolicy | None = None
    ignored_params: Any = None
    gather: Any = None
    bundle: bool | Bundle = True
    loss_head: LossHead | None = None
    frozen: Format | None = None
    recipe: RecipeName | None = None
    ring: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Returns the options of a call with these keywords. Consumes iterators of ignored_params and gather."""
        own = {each.name: given[each.name] for each in fields(cls) if each.name in given}
        for name in ("ignored_params", "gather"):
            value = own.get(name)
            if isinstance(value, Iterable) and not isinstance(value, (torch.Tensor, str, nn.Module)):
                own[name] = tuple(value)
        return cls(**own, ring={name: value for name, value in given.items() if name not in own})


@dataclass(frozen=True)
class Place:
    """The ranks over which a model is sharded.

    Attributes:
        facts: the properties that decide routes and bytes.
        ring: the ring, if it exists already.
        tensor_mesh: the mesh of tensor parallelism; None: there is none.
        tensor: the name of the dimension of tensor parallelism.
        has_replicas: whether the mesh of parameters has a dimension of replicas, even of size one.
        members: equal for places over the same ranks.
        words: the description of the place for error messages.
        column: the ranks among which the experts are divided that this rank has a part of; None: dims have no expert.
    """

    facts: RingFacts
    ring: Ring | None
    tensor_mesh: DeviceMesh | None
    tensor: str | None
    has_replicas: bool
    members: tuple
    words: str
    column: tuple[int, ...] | None = None

    @property
    def device(self) -> str:
        return self.facts.device

    @property
    def in_place(self) -> bool:
        """Whether local shards themselves travel."""
        return self.facts.in_place


@dataclass(frozen=True)
class Request:
    """One call of fully_rotate: its options, and the modules, ranks and policies that follow."""

    options: Options
    members: list[nn.Module]
    root: nn.Module  # the one member, or the group of all
    parts: Parts  # its parts that were converted before
    ignored: frozenset[int]  # ids of parameters that this call ignores
    not_ours: frozenset[int]  # ids of these, and of those that the calls for the parts ignored
    place: Place
    outer: OuterPolicy
    offload: OffloadPolicy
    gathered: frozenset[int] = frozenset()  # ids of modules that must not rotate
    trains: bool = True  # False: no parameter gets a gradient, so that all count as frozen

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        return self.options.mp_policy or MixedPrecisionPolicy()

    @property
    def offloads(self) -> bool:
        return isinstance(self.offload, CPUOffloadPolicy)

    @property
    def keeps_on_host(self) -> bool:
        """Whether local shards stay in a memory other than the device's."""
        ring = self.place.ring
        return self.offloads and (self.place.device != "cpu" or (ring is not None and ring.host_memory is not None))

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules of the model that have not been converted."""
        return ((name, part) for name, part in self.root.named_modules() if not is_inside(part))


def state_in(part: nn.Module) -> RotationState:
    """Returns the state of a part."""
    state = state_of(part)
    assert state is not None, "a part has a state"
    return state


def ignored_in(parts: Parts) -> set[int]:
    """Returns the ids of the parameters that the calls for the parts ignored."""
    found: set[int] = set()
    for _, part in parts:
        names = dict(part.named_parameters(remove_duplicate=False))
        found.update(id(names[name]) for name in state_in(part).ignored if name in names)
    return found


def describe(where: Ring | DeviceMesh) -> str:
    """Returns the description of a ring or mesh for error messages."""
    mesh = where.parameter_mesh if isinstance(where, Ring) else where
    if mesh is None:
        assert isinstance(where, Ring)
        return f"an emulated ring of {where.size}"
    return _words(mesh.mesh_dim_names, mesh.mesh.tolist())


def _words(names: tuple[str, ...] | None, ranks: list[Any]) -> str:
    return f"a mesh{f' {names}' if names else ''} of ranks {ranks}"


def place_of_ring(ring: Ring) -> Place:
    """Returns the place of an existing ring."""
    mesh = ring.parameter_mesh
    if mesh is None:
        members: tuple = ("emulated", ring.device.type, ring.rank, ring.size)
    else:
        members = (mesh.device_type, tuple(mesh.shape), *mesh.mesh.flatten().tolist())
    experts = None if ring.experts is None else ring.experts.places
    names = None if ring.tensor_mesh is None else ring.tensor_mesh.mesh_dim_names
    return Place(
        facts=RingFacts.of(ring),
        ring=ring,
        tensor_mesh=ring.tensor_mesh,
        tensor=None if names is None else names[0],
        has_replicas=mesh is not None and mesh.ndim > (1 if ring.tensor_mesh is None else 2),
        members=members if experts is None else (*members, experts),
        words=describe(ring),
        column=ring.expert_ranks,
    )


def place_of_grid(grid: RankGrid, options: Options) -> Place:
    """Returns the place of a ring that does not exist yet. Raises ValueError for options that no ring takes."""
    RingOptions.of(options.ring)
    members: tuple = (grid.device_type, grid.shape, *grid.ranks)
    experts = None if grid.experts is None or max(grid.experts)[0] == 0 else grid.experts
    names = None if grid.tensor_mesh is None else grid.tensor_mesh.mesh_dim_names
    facts = RingFacts.expected(
        grid.device_type,
        grid.shape[-1],
        grid.place[-1],
        replicas=grid.shape[0] if grid.has_replicas else 1,
        replica=grid.place[0] if grid.has_replicas else 0,
        tensor_ranks=1 if grid.tensor_mesh is None else grid.tensor_mesh.size(),
        places=experts,
        **{name: value for name, value in options.ring.items() if name != "timeout"},
    )
    return Place(
        facts=facts,
        ring=None,
        tensor_mesh=grid.tensor_mesh,
        tensor=None if names is None else names[0],
        has_replicas=grid.has_replicas,
        members=members if experts is None else (*members, experts),
        words=_words(grid.names, grid.grid),
        column=_column(grid),
    )


def _column(grid: RankGrid) -> tuple[int, ...] | None:
    if grid.experts is None:
        return None
    size, (_, mine) = grid.shape[-1], grid.experts[grid.place[-1]]
    first = size * grid.place[0] if grid.has_replicas else 0
    ranks = zip(grid.experts, grid.ranks[first : first + size], strict=True)
    return tuple(rank for (_, place), rank in sorted(ranks) if place == mine)


def place_alone(ranks: int, rank: int, device: str, options: Options) -> Place:
    """Returns the place of rank `rank` of `ranks` without a process group."""
    return place_of_grid(RankGrid(device, (ranks,), tuple(range(ranks)), None, (rank,)), options)


def names_of(parameters: Collection[int], root: nn.Module) -> set[str]:
    """Returns all names in a model of parameters, given their ids."""
    return {name for name, p in root.named_parameters(remove_duplicate=False) if id(p) in parameters}
