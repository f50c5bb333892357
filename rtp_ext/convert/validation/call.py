"""Refusals that follow from the arguments of a call, from the parts converted before, and from their rings."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Collection, Mapping
from types import NoneType
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from rtp_ext.convert.agreement import ConversionError
from rtp_ext.convert.plan.layers import own_parameters
from rtp_ext.convert.plan.request import (
    ModuleGroup,
    Options,
    Parts,
    Place,
    Request,
    describe,
    ignored_in,
    place_of_grid,
    place_of_ring,
    state_in,
)
from rtp_ext.convert.scopes import is_inside, state_of
from rtp_ext.convert.tensor_parallel import tensor_dimensions
from rtp_ext.options import DEFAULTS, check_gradients
from rtp_ext.outer import AllReduce, OuterPolicy
from rtp_ext.parameters.frozen import FORMATS
from rtp_ext.recipes import RECIPES
from rtp_ext.ring import Ring, RotationDims
from rtp_ext.ring.mesh import lay_out_ranks
from rtp_ext.words import Bundle, LossHead


def read_call(given: Any, options: Options, alone: Place | None = None) -> Request:
    """Reads a call of fully_rotate with a module or a list of them. Changes nothing, and sends nothing.

    `alone`: the ranks to plan for, without a process group.

    Raises TypeError, ValueError and RotationError as `fully_rotate` does, where the arguments cannot be combined or do
    not fit the model and its parts.
    """
    members = members_of(given)
    root = members[0] if len(members) == 1 else ModuleGroup(members)
    parts = _parts_of(members, root)
    if options.bundle not in (True, False, *get_args(Bundle)):
        raise ValueError(f"fully_rotate: expected bundle to be True, False or 'recompute', got {options.bundle!r}")
    if options.loss_head not in (None, *get_args(LossHead)):
        raise ValueError(f"fully_rotate: expected loss_head to be None or 'fused', got {options.loss_head!r}")
    if options.frozen not in (None, *FORMATS):
        raise ValueError(
            f"fully_rotate: expected frozen to be None, {', '.join(map(repr, FORMATS))}, got {options.frozen!r}"
        )
    if options.recipe is not None and options.recipe not in RECIPES:
        raise ValueError(
            f"fully_rotate: expected recipe to be None, {', '.join(map(repr, RECIPES))}, got {options.recipe!r}"
        )
    if not isinstance(options.mp_policy, (MixedPrecisionPolicy, NoneType)):
        raise TypeError(f"fully_rotate: expected mp_policy to be a MixedPrecisionPolicy, got {options.mp_policy!r}")
    if isinstance(options.ignored_params, torch.Tensor):
        raise TypeError("fully_rotate: expected ignored_params to be several parameters, got a single tensor")
    given_parameters = list(options.ignored_params or ())
    for parameter in given_parameters:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(
                f"fully_rotate: expected ignored_params to be parameters, got {parameter!r:.100} among them"
            )
    ignored = frozenset(map(id, given_parameters))
    not_ours = ignored | ignored_in(parts)
    _refuse_uninitialized(root, not_ours)
    place = alone or _place_of(options, parts, _tensor_dimension(root, options, not_ours))
    if options.ring.get("in_place"):  # forwarded to the ring, where there is one
        place = dataclasses.replace(place, facts=dataclasses.replace(place.facts, in_place=True))
    policy = _policy_of(options.outer, parts, place)
    if place.in_place and not policy.allows_in_place:
        raise ValueError(
            f"fully_rotate: in_place=True cannot be combined with {type(policy).__name__}, whose shards are made of "
            "the pieces of all replicas: expected in_place=False, or another outer policy"
        )
    offload = _offload_of(options.offload_policy, place)
    if isinstance(offload, CPUOffloadPolicy):
        _refuse_offload(place, policy)
    if place.ring is not None:
        _check_options(place.ring, options.ring)
        _check_in_place(place.ring, options.ring.get("in_place"))
    return Request(
        options=options,
        members=members,
        root=root,
        parts=parts,
        ignored=ignored,
        not_ours=not_ours,
        place=place,
        outer=policy,
        offload=offload,
        gathered=_gathered_by(options.gather, root),
    )


# -- the modules of a call -------------------------------------------------------------------------------------------


def members_of(given: Any) -> list[nn.Module]:
    """Returns the modules in the argument of fully_rotate: one, or those of a list."""
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


def _parts_of(members: list[nn.Module], root: nn.Module) -> Parts:
    """Returns the outermost modules in the members of `root` that were converted before, by name. Raises
    ConversionError where a member itself was."""
    for member in members:
        if is_inside(member):
            how = "already was" if state_of(member) is not None else "is a part of one that already was"
            raise ConversionError(
                f"fully_rotate: expected a model that has not been converted, got a {type(member).__name__} that "
                f"{how}; parts are converted before the model around them"
            )
    found: Parts = []
    below: set[int] = set()
    for name, part in root.named_modules():
        if id(part) not in below and state_of(part) is not None:
            found.append((name, part))
            below.update(map(id, part.modules()))
    return found


def _gathered_by(given: Any, root: nn.Module) -> frozenset[int]:
    """Returns the ids of the modules that the option `gather` names, and of all modules in them."""
    if given is None:
        return frozenset()
    if not isinstance(given, tuple):
        raise TypeError(f"fully_rotate: expected gather to be several modules or names of them, got {given!r:.100}")
    by_name = dict(root.named_modules())
    inside = {id(part): part for part in by_name.values()}
    found: set[int] = set()
    for each in given:
        if not isinstance(each, (str, nn.Module)):
            raise TypeError(
                f"fully_rotate: expected gather to be modules or names of them, got {each!r:.100} among them"
            )
        part = by_name.get(each) if isinstance(each, str) else inside.get(id(each))
        what = repr(each) if isinstance(each, str) else f"a {type(each).__name__} that is not in it"
        if part is None:
            raise ValueError(
                f"fully_rotate: expected gather to be modules of {type(root).__name__}, or their names in "
                f"named_modules(), got {what}"
            )
        for below in part.modules():
            if is_inside(below):
                raise ValueError(
                    f"fully_rotate: expected gather to be modules that have not been converted, got {what}: give it to "
                    "the call that converts this part"
                )
        found.update(map(id, part.modules()))
    return frozenset(found)


def _refuse_uninitialized(root: nn.Module, ignored: Collection[int]) -> None:
    for name, part in root.named_modules():
        for key, parameter in own_parameters(part).items():
            if nn.parameter.is_lazy(parameter) and id(parameter) not in ignored:
                raise ValueError(
                    f"fully_rotate: expected parameters with a shape, got the uninitialized {key} of "
                    f"{name or 'the model'} ({type(part).__name__}): call the plain model with a batch before"
                )


# -- the ranks -------------------------------------------------------------------------------------------------------


def _tensor_dimension(root: nn.Module, options: Options, ignored: frozenset[int]) -> str | None:
    """Returns the name of the dimension of tensor parallelism. Raises ValueError where there are several."""
    if not isinstance(options.mesh, DeviceMesh) or not isinstance(options.dims, RotationDims):
        return None
    found = tensor_dimensions(root, options.mesh, options.dims, ignored)
    if len(found) > 1:
        where = ", ".join(f"{dimension} ({name})" for dimension, name in found.items())
        raise ValueError(f"fully_rotate: expected tensor parallelism over one dimension of the mesh, got {where}")
    return next(iter(found), None)


def _place_of(options: Options, parts: Parts, tensor: str | None) -> Place:
    """Returns the ranks of the ring for a model: those of the ring of its first part, if it has parts.

    Raises ValueError for parts over other ranks than `mesh`, on another ring than a given one, or on rings that differ
    in their options.
    """
    mesh, dims = options.mesh, options.dims
    if dims is not None and (mesh is None or isinstance(mesh, Ring)):
        raise ValueError(
            f"fully_rotate: dims names dimensions of a mesh: expected mesh to be a DeviceMesh, got {mesh!r}; a Ring, "
            "and the ring of parts that were converted before, have their dimensions"
        )

    def given() -> Place:
        if isinstance(mesh, Ring):
            return place_of_ring(mesh)
        return place_of_grid(lay_out_ranks(mesh, dims, tensor), options)

    rings = [(name, state_in(part).ring) for name, part in parts]
    if not rings:
        return given()
    first, ring = rings[0]
    if isinstance(mesh, Ring) and mesh is not ring:
        raise ValueError(f"fully_rotate: expected mesh={ring!r}, the ring of module {first}, or None, got {mesh!r}")
    place = place_of_ring(ring)
    asked = place if mesh is None or isinstance(mesh, Ring) else given()
    if asked.members != place.members:
        raise ValueError(
            f"fully_rotate: expected {place.words}, as module {first} was converted with, got {asked.words}"
        )
    for name, other in rings:
        if other is not ring and (place_of_ring(other).members, _options(other)) != (place.members, _options(ring)):
            raise ValueError(
                f"fully_rotate: expected all parts of a model on one ring, got module {first} on {describe(ring)} "
                f"with {_options(ring)}, and module {name} on {describe(other)} with {_options(other)}"
            )
    return place


def _options(ring: Ring) -> dict[str, Any]:
    """Returns the options of a ring as it has resolved them."""
    compared = {name: value for name, value in vars(ring.options).items() if name not in ("graphs", "checksum")}
    return {name: getattr(ring, name, value) for name, value in compared.items()} | {"offload": ring.offload_policy}


def _check_options(ring: Ring, asked: Mapping[str, Any]) -> None:
    """Raises ValueError where options of a ring in a call differ from those of the ring that exists already. Their
    defaults accept any, and so does the value that the ring was made with."""
    route, travel = ({**DEFAULTS, **asked}[name] for name in ("gradient_route", "gradient_travel"))
    check_gradients("Ring", route, travel, ring.hop_route, ring.options.gradient_halves)
    for name, value in asked.items():
        if value == DEFAULTS[name] or name == "in_place":
            continue
        made = getattr(ring.options, name)
        actual = getattr(ring, name, made)
        given = value
        if name == "timeout" and not isinstance(value, datetime.timedelta):
            given = datetime.timedelta(seconds=value)
        if given not in (actual, made):
            expected, got = (str(each) if name == "timeout" else repr(each) for each in (actual, given))
            raise ValueError(
                f"fully_rotate: expected {name} {expected}, that of the ring, or none, got {got}: a ring gets its "
                "options when it is made"
            )


def _check_in_place(ring: Ring, asked: bool | None) -> None:
    """Raises ValueError where a call asks for another in_place than that of its ring. It may switch a ring on that has
    no model yet: other models may have layers or policies whose shards cannot travel themselves."""
    if asked is None or asked == ring.in_place:
        return
    if not asked:
        raise ValueError("fully_rotate: expected in_place=True, that of the ring, or none, got False")
    if ring.has_models:
        raise ValueError(
            "fully_rotate: expected in_place=False beside other models of the ring, whose shards do not travel "
            "themselves, got True: make the ring by Ring(in_place=True)"
        )
    ring.route_plan.expect_in_place("fully_rotate")


# -- policies --------------------------------------------------------------------------------------------------------


def _policy_of(outer: OuterPolicy | None, parts: Parts, place: Place) -> OuterPolicy:
    """Returns the outer policy for a model: the given one, the one of its first part, or a new one."""
    if outer is not None and not isinstance(outer, OuterPolicy):
        raise TypeError(f"fully_rotate: expected outer to be a policy of rtp_ext.outer, got {outer!r:.100}")
    if outer is not None and not place.has_replicas:
        raise ValueError(
            f"fully_rotate: {type(outer).__name__} acts between replicas: expected a mesh of several dimensions "
            "and dims=RotationDims(ring=..., replicate=...), got one ring"
        )
    known = [(name, state.outer_policy) for name, part in parts if (state := state_of(part)) is not None]
    for name, theirs in known:
        if theirs is not None and not theirs.requires_all_reduce:
            raise ValueError(
                f"fully_rotate: expected parts whose gradients are reduced, got module {name} after "
                "set_requires_all_reduce(part, False): call set_requires_all_reduce(part, True) before, and then "
                "set_requires_all_reduce(model, False)"
            )
    first = known[0][1] if known else None
    if outer is not None and first is not None and outer is not first:
        raise ValueError(
            f"fully_rotate: module {parts[0][0]} was converted with another outer policy, a {type(first).__name__}: "
            f"expected outer=None, or that one (outer_of the part), got a {type(outer).__name__}"
        )
    policy = outer or first or AllReduce()
    policy.expect_free(place.ring)
    if place.tensor_mesh is not None and not policy.allows_tensor_parallel:
        raise ValueError(
            f"fully_rotate: {type(policy).__name__} cannot be combined with tensor parallelism (over "
            f"{place.tensor_mesh.mesh_dim_names}), which it does not support: expected outer=outer.AllReduce(), "
            "or a model that parallelize_module has not cut"
        )
    return policy


def _offload_of(given: OffloadPolicy | None, place: Place) -> OffloadPolicy:
    """Returns the offload policy: the requested one, or that of the other models of the ring. Raises TypeError for
    other objects, ValueError where the ring has another policy."""
    if given is not None and type(given) not in (OffloadPolicy, CPUOffloadPolicy):
        raise TypeError(
            "fully_rotate: expected offload_policy to be a CPUOffloadPolicy or OffloadPolicy of "
            f"torch.distributed.fsdp, or None, got {given!r:.100}"
        )
    known = None if place.ring is None else place.ring.offload_policy
    if given is not None and known is not None and given != known:
        raise ValueError(
            f"fully_rotate: expected offload_policy {known}, that of the ring's other models and parts, or None, got "
            f"{given}"
        )
    return given or known or OffloadPolicy()


OFFLOAD = "fully_rotate: offload_policy=CPUOffloadPolicy() cannot be combined with"


def _refuse_offload(place: Place, outer: OuterPolicy) -> None:
    """Raises ValueError where local shards cannot stay on the host."""
    if place.in_place:
        raise ValueError(
            f"{OFFLOAD} in_place=True, by which the shards themselves travel: expected in_place=False, since copies on "
            "the device travel, or no offload_policy"
        )
    if not outer.allows_offload:
        raise ValueError(
            f"{OFFLOAD} {type(outer).__name__}, which keeps the shards that rotate on the device: expected "
            "outer=outer.AllReduce(), or no offload_policy"
        )
    if place.tensor_mesh is not None:
        raise ValueError(
            f"{OFFLOAD} tensor parallelism: expected a model that parallelize_module has not cut, or no offload_policy"
        )
    if place.facts.emulated:
        raise ValueError(f"{OFFLOAD} an emulated ring: expected a ring of processes, or no offload_policy")
    if place.ring is not None:
        place.ring.graphs.expect_not_required("offload_policy=CPUOffloadPolicy")
