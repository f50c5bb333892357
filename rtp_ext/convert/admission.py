"""Before anything is converted: what is refused, and which ring a model gets."""

from __future__ import annotations

import datetime
import logging
import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rtp_ext.convert.agreement import ConversionError
from rtp_ext.convert.modules.gathered import ForwardScope
from rtp_ext.convert.optimizers import REPLACED
from rtp_ext.convert.scopes import RotationState, is_inside, mark_inside, state_of
from rtp_ext.convert.tensor_parallel import on_tensor_mesh
from rtp_ext.nn import Flyweight, RotatedEmbedding
from rtp_ext.outer import OuterPolicy
from rtp_ext.ring import Ring
from rtp_ext.ring.mesh import RingMesh, RotationDims, resolve_mesh
from rtp_ext.ring.routes.gradient_routes import check_requested

logger = logging.getLogger("rtp_ext")

_MANAGERS = (FSDPModule, FullyShardedDataParallel, DistributedDataParallel)

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


def members_of(given: Any) -> list[nn.Module]:
    """The modules that fully_rotate is called with: one, or those of a list."""
    if isinstance(given, nn.Module):
        return [given]
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"fully_rotate: expected a torch.nn.Module or a list of them, got {type(given).__name__}")
    if not given:
        raise ValueError("fully_rotate: expected a module or several, got an empty list")
    places: dict[int, int] = {}
    for place, member in enumerate(given):
        if not isinstance(member, nn.Module):
            raise TypeError(f"fully_rotate: expected a list of torch.nn.Module, got {type(member).__name__} at {place}")
        if id(member) in places:
            raise ValueError(
                f"fully_rotate: expected every module of a list once, got the same {type(member).__name__} at "
                f"{places[id(member)]} and {place}"
            )
        places[id(member)] = place
    for place, member in enumerate(given):
        for name, part in member.named_modules():
            if name and id(part) in places:
                raise ValueError(
                    "fully_rotate: expected a list of modules of which none is inside another, got "
                    f"{type(part).__name__} at {places[id(part)]}, which is {name} of {type(member).__name__} at "
                    f"{place}: leave it out"
                )
    return list(given)


def parts_of(members: list[nn.Module], whole: nn.Module) -> Parts:
    """The outermost modules in the members of `whole` that were converted before, by name. Raises ConversionError where
    a member was."""
    for member in members:
        if is_inside(member):
            how = "already was" if state_of(member) is not None else "is a part of one that already was"
            raise ConversionError(
                f"fully_rotate: expected a model that has not been converted, got a {type(member).__name__} that "
                f"{how}; parts are converted before the model around them"
            )
    found: Parts = []
    below: set[int] = set()
    for name, part in whole.named_modules():
        if id(part) not in below and state_of(part) is not None:
            found.append((name, part))
            below.update(map(id, part.modules()))
    return found


def _state(part: nn.Module) -> RotationState:
    state = state_of(part)
    assert state is not None, "a part has a state"
    return state


# -- parameters that are not ours to cut -----------------------------------------------------------------------------


def refuse_foreign(root: nn.Module, where: Ring | RingMesh, ignored: Collection[int]) -> None:
    """Raises ValueError where somebody else shards or manages parameters: another mesh or ring, FSDP, DDP.

    `ignored`: ids of parameters that the caller answers for.
    """
    inside = {id(m) for flyweight in root.modules() if isinstance(flyweight, Flyweight) for m in flyweight.modules()}
    for name, part in root.named_modules():
        label = f"{name or 'the root'} ({type(part).__name__})"
        manager = next((cls.__name__ for cls in _MANAGERS if isinstance(part, cls)), None)
        if manager is not None:
            below = [id(parameter) for parameter in part.parameters()]
            if not below or any(parameter not in ignored for parameter in below):
                raise ValueError(
                    f"fully_rotate: expected plain modules, got {label}, whose parameters {manager} manages; use one "
                    "of the two, or pass its parameters as ignored_params"
                )
        ring = ring_of_module(part)
        if ring is not None and _members(ring) != _members(where):
            raise ValueError(
                f"fully_rotate: {label} is sharded over {_describe(ring)}: expected {_describe(where)}, the ring of "
                "this call"
            )
        if ring is not None or id(part) in inside:
            continue
        for key, parameter in part._parameters.items():
            if isinstance(parameter, DTensor) and id(parameter) not in ignored and not on_tensor_mesh(parameter, where):
                raise ValueError(
                    f"fully_rotate: expected plain parameters, which become DTensors on {_describe(where)}; got "
                    f"{key} of {label}, a DTensor with placements {tuple(parameter.placements)} on "
                    f"{_describe(parameter.device_mesh)}. Tensor parallelism goes with rotation over another dimension "
                    "of the same mesh: mesh=mesh, dims=RotationDims(ring=...) for a model that was parallelized over "
                    'mesh["tp"]. Other sharding cannot be combined with it'
                )
            if parameter is not None and REPLACED in parameter.__dict__ and id(parameter) not in ignored:
                raise ValueError(
                    f"fully_rotate: {key} of {label} was shared with {parameter.__dict__[REPLACED]}, which has been "
                    "converted without it: modules that share a parameter have to be converted in one call, "
                    "fully_rotate(model) or fully_rotate([module, other module])"
                )


class _NothingForDDP:
    """In the place of the names that DistributedDataParallel is to leave alone, for which it asks a model first."""

    def __iter__(self) -> Any:
        raise ValueError(
            "DistributedDataParallel: expected a plain model, got one that fully_rotate has converted: its parameters "
            "are shards of a ring, and its gradients are averaged by its own backward. Train the model as it is; in "
            "training loops of others take RotationTrainer instead of Trainer, RotationAccelerator instead of "
            "Accelerator, RotationStrategy instead of strategy='ddp' (rtp_ext.integrations, docs/frameworks.md)"
        )


def refuse_ddp(root: nn.Module) -> None:
    """Has DistributedDataParallel of a converted model raise ValueError, which stock trainers wrap it in."""
    root.__dict__.setdefault("_ddp_params_and_buffers_to_ignore", _NothingForDDP())


def refuse_whole_tables(root: nn.Module, ignored: Collection[int], replicas: int, tensor: bool) -> None:
    """Raises ValueError where an embedding depends on what all ranks look up, and replicas do not tell each other; and
    where its table is no DTensor, which tensor parallelism compares."""
    for name, part in root.named_modules():
        if not isinstance(part, (nn.Embedding, nn.EmbeddingBag)) or id(part.weight) in ignored:
            continue
        if tensor and part.sparse:
            raise ValueError(
                f"fully_rotate: {name or 'the model'} ({type(part).__name__}): sparse gradients cannot be combined "
                "with tensor parallelism: expected an embedding with sparse=False, or its parameters in ignored_params"
            )
        if replicas > 1:
            problem = RotatedEmbedding.refusal(part)
            if problem is not None:
                raise ValueError(
                    f"fully_rotate: {name or 'the model'} ({type(part).__name__}): {problem}, which cannot be combined "
                    "with replicas: expected a mesh of one ring, an embedding without it, or its parameters in "
                    "ignored_params"
                )


def offload_of(given: OffloadPolicy | None, place: Ring | RingMesh) -> OffloadPolicy:
    """Whether local shards stay on the host: what was asked for, or what the models of the ring have. Raises TypeError
    for what is no policy, ValueError where the ring has another."""
    if given is not None and type(given) not in (OffloadPolicy, CPUOffloadPolicy):
        raise TypeError(
            "fully_rotate: expected offload_policy to be a CPUOffloadPolicy or OffloadPolicy of "
            f"torch.distributed.fsdp, or None, got {given!r:.100}"
        )
    known = place.offload_policy if isinstance(place, Ring) else None
    if given is not None and known is not None and given != known:
        raise ValueError(
            f"fully_rotate: expected offload_policy {known}, that of the ring's other models and parts, or None, got "
            f"{given}"
        )
    return given or known or OffloadPolicy()


def refuse_offload(
    root: nn.Module, place: Ring | RingMesh, outer: OuterPolicy, in_place: bool, ignored: Collection[int]
) -> None:
    """Raises ValueError where local shards cannot stay on the host. `ignored`: as in `refuse_foreign`."""
    label = "fully_rotate: offload_policy=CPUOffloadPolicy() cannot be combined with"
    if in_place:
        raise ValueError(
            f"{label} in_place=True, by which the shards themselves travel: expected in_place=False, since copies on "
            "the device travel, or no offload_policy"
        )
    if not outer.allows_offload:
        raise ValueError(
            f"{label} {type(outer).__name__}, which keeps the shards that rotate on the device: expected "
            "outer=outer.AllReduce(), or no offload_policy"
        )
    if (place.tensor_mesh if isinstance(place, Ring) else place.tensor) is not None:
        raise ValueError(
            f"{label} tensor parallelism: expected a model that parallelize_module has not cut, or no offload_policy"
        )
    if isinstance(place, Ring) and place.mesh is None:
        raise ValueError(f"{label} an emulated ring: expected a ring of processes, or no offload_policy")
    for name, part in root.named_modules():
        what = None
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and id(part.weight) not in ignored:
            what = RotatedEmbedding.refusal(part)
        elif isinstance(part, Flyweight):
            what = "copies of a module"
        if what is not None:
            raise ValueError(
                f"{label} {what}, of {name or 'the model'} ({type(part).__name__}): expected a model without it, "
                "or no offload_policy"
            )


def ring_of_module(part: nn.Module) -> Ring | None:
    """The ring that a module's own parameters are on."""
    scope = part.__dict__.get("_rtp_scope")
    ring = scope.ring if isinstance(scope, ForwardScope) else part.__dict__.get("ring")
    return ring if isinstance(ring, Ring) else None


def _mesh_of(where: Ring | RingMesh | DeviceMesh) -> DeviceMesh | None:
    if isinstance(where, Ring):
        return where.parameter_mesh
    return where.parameters if isinstance(where, RingMesh) else where


def _members(where: Ring | RingMesh) -> tuple:
    """What two rings, or a ring and a mesh, over the same ranks have in common."""
    mesh = _mesh_of(where)
    if mesh is None:
        assert isinstance(where, Ring)
        return "emulated", where.device.type, where.rank, where.size
    return mesh.device_type, tuple(mesh.shape), *mesh.mesh.flatten().tolist()


def _describe(where: Ring | RingMesh | DeviceMesh) -> str:
    mesh = _mesh_of(where)
    if mesh is None:
        assert isinstance(where, Ring)
        return f"an emulated ring of {where.size}"
    names = f" {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
    return f"a mesh{names} of ranks {mesh.mesh.tolist()}"


# -- the ring --------------------------------------------------------------------------------------------------------


def place_of(
    mesh: DeviceMesh | dist.ProcessGroup | Ring | None, dims: RotationDims | None, parts: Parts, tensor: str | None
) -> Ring | RingMesh:
    """The ring that a model gets, or the meshes to make one over: the ring of its first part, where it has parts.
    `tensor`: the dimension of tensor parallelism.

    Raises ValueError for parts over other ranks than `mesh`, on another ring than a given one, or on rings that differ
    in their options.
    """
    if dims is not None and (mesh is None or isinstance(mesh, Ring)):
        raise ValueError(
            f"fully_rotate: dims names dimensions of a mesh: expected mesh to be a DeviceMesh, got {mesh!r}; a Ring, "
            "and the ring of parts that were converted before, have their dimensions"
        )
    rings = [(name, _state(part).ring) for name, part in parts]
    if not rings:
        return mesh if isinstance(mesh, Ring) else resolve_mesh(mesh, dims, tensor)
    first, ring = rings[0]
    if isinstance(mesh, Ring) and mesh is not ring:
        raise ValueError(f"fully_rotate: expected mesh={ring!r}, the ring of module {first}, or None, got {mesh!r}")
    given = ring if mesh is None or isinstance(mesh, Ring) else resolve_mesh(mesh, dims, tensor)
    if _members(given) != _members(ring):
        raise ValueError(
            f"fully_rotate: expected {_describe(ring)}, as module {first} was converted with, got {_describe(given)}"
        )
    for name, other in rings:
        if other is not ring and (_members(other), _options(other)) != (_members(ring), _options(ring)):
            raise ValueError(
                f"fully_rotate: expected all parts of a model on one ring, got module {first} on {_describe(ring)} "
                f"with {_options(ring)}, and module {name} on {_describe(other)} with {_options(other)}"
            )
    return ring


def _options(ring: Ring) -> dict[str, Any]:
    return {
        "transport": ring.transport,
        "route": ring.route,
        "travel": ring.travel,
        "timeout": ring.timeout,
        "slot_cap": ring.slot_cap,
        "prefetch": ring.prefetch,
        "gradient_halves": ring.gate.gradient_halves,
        "late_gradients": ring.late_gradients,
        "gradient_route": ring.gradient_route,
        "gradient_travel": ring.gradient_travel,
        "transport_options": ring.transport_options,
        "offload_policy": ring.offload_policy,
    }


def check_options(ring: Ring, transport: str, route: str, timeout: float | datetime.timedelta | None) -> None:
    """Raises ValueError where a model asks for something else than the ring of its parts has; None: for nothing."""
    if isinstance(timeout, (int, float)):
        timeout = datetime.timedelta(seconds=timeout)
    for what, asked, actual in (
        ("transport", None if transport == "auto" else transport, ring.transport),
        ("route", None if route == "auto" else route, ring.route),
        ("timeout", timeout, ring.timeout),
    ):
        if asked is not None and asked != actual:
            raise ValueError(
                f"fully_rotate: expected {what} {actual}, that of the ring of the parts converted before, got {asked}"
            )


def check_travels(ring: Ring, travel: str | None, gradient_route: str, gradient_travel: str | None) -> None:
    """The same of what weights and gradients travel in, on a ring that was made before; None and `auto`: as they do
    there."""
    check_requested(gradient_route, gradient_travel, ring.hop_route, ring.gate.gradient_halves)
    wished = {"travel": travel, "gradient_route": gradient_route, "gradient_travel": gradient_travel}
    for what, asked in wished.items():
        actual = getattr(ring, what)
        if asked not in (None, "auto", actual):
            raise ValueError(f"fully_rotate: expected {what} {actual!r}, that of the ring, or none, got {asked!r}")


def ignored_in(parts: Parts) -> set[int]:
    """Ids of the parameters that parts were told to leave alone."""
    found: set[int] = set()
    for _, part in parts:
        names = dict(part.named_parameters(remove_duplicate=False))
        found.update(id(names[name]) for name in _state(part).ignored if name in names)
    return found


def adopt(parts: Parts, scopes: Mapping[int, RotationState]) -> None:
    """Makes parts that were converted one by one, each perhaps with a ring of its own, parts of one model.

    `scopes`: the state of the model around each, by id of the part.
    """
    for name, part in parts:
        state, around = _state(part), scopes[id(part)]
        before = state.ring
        for module in part.modules():
            if module.__dict__.get("ring") is before:
                module.__dict__["ring"] = around.ring
            inner = state_of(module)
            if inner is not None and inner.ring is before:
                inner.ring, inner.outer_policy = around.ring, around.outer_policy
        state.around.append(weakref.ref(around))
        mark_inside(part)
        logger.info("fully_rotate: %s (%s) was converted before, and keeps its policy", name, type(part).__name__)
