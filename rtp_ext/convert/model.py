"""fully_rotate: one call that converts a model."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from rtp_ext.convert.admission import (
    ModuleGroup,
    Parts,
    adopt,
    check_options,
    check_travels,
    ignored_in,
    members_of,
    offload_of,
    parts_of,
    place_of,
    refuse_ddp,
    refuse_foreign,
    refuse_offload,
    refuse_whole_tables,
)
from rtp_ext.convert.agreement import checksums, compare_weights
from rtp_ext.convert.methods.fully_shard import answer_for_fully_shard
from rtp_ext.convert.methods.generate import let_it_generate
from rtp_ext.convert.methods.save_pretrained import let_it_save
from rtp_ext.convert.modules.gathered import GatheredRNN
from rtp_ext.convert.optimizers import mark_replaced, watch_optimizers, weak_parameters
from rtp_ext.convert.rewrite import Rewriter
from rtp_ext.convert.scopes import RotationState, install, is_inside, state_of
from rtp_ext.convert.tensor_parallel import tensor_dimension
from rtp_ext.outer import AllReduce, OuterPolicy
from rtp_ext.outer.policy import Unit
from rtp_ext.ring import Ring, RotationDims
from rtp_ext.ring.mesh import RingMesh

logger = logging.getLogger("rtp_ext")

_TIMEOUT = 600.0  # seconds
_Given = TypeVar("_Given", nn.Module, list[nn.Module])


def fully_rotate(
    module: _Given,
    *,
    mesh: DeviceMesh | dist.ProcessGroup | Ring | None = None,
    dims: RotationDims | None = None,
    outer: OuterPolicy | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    in_place: bool = False,
    bundle: bool | str = True,
    loss_head: str | None = None,
    route: str = "auto",
    gradient_route: str = "auto",
    gradient_travel: str | None = None,
    transport: str = "auto",
    travel: str | None = None,
    timeout: float | datetime.timedelta = _TIMEOUT,
) -> _Given:
    """Spreads every parameter of a model over a ring, in place, and returns the same module, or the same list.

    Linear, embedding, convolution and attention layers and experts rotate: their shards visit every rank while it
    computes, and no rank ever holds a whole one. So do subclasses of torch's layers that compute as these do, and keep
    their class; the parameters of all modules that do not rotate are sharded too, and gathered while their module needs
    them. Every rank keeps its own batch; gradients are averaged over the ring. Parameters become DTensors sharded over
    the mesh, under unchanged names. Build the model alike on every rank (the same seed), or load the plain model's
    weights afterwards: load_safetensors, or torch.distributed.checkpoint.state_dict.set_model_state_dict with
    full_state_dict=True. Build the optimizer after that.

    Parts of a model may be converted before it, one by one, as with fully_shard: each keeps its own mp_policy (and
    in_place, bundle, ignored_params), which applies inside it, and is called on its own or within the model. All end up
    on one ring, the one of the first part; to make no other, pass a Ring to every call.

    A list of modules, none inside another, is one part with several members: they may share parameters
    (fully_rotate([model.embed, model.head], mp_policy=...), then fully_rotate(model)), and have one policy. Each member
    may be called on its own; inputs and outputs are cast at the border of each.

    Args:
        module: the model, its parameters on the device of the mesh or on the meta device; or a list of modules.
        mesh: a one-dimensional DeviceMesh, one of more dimensions with `dims`, a process group, a Ring, or None: the
            ring of parts that were converted before, else the default process group.
        dims: RotationDims(ring=..., replicate=...): which dimensions of the mesh are what, by name. Along replicate,
            rings hold the same shards and have batches of their own. Parameters are then DTensors on the mesh of both,
            Replicate() over the one and Shard over the other; on the ring's alone where replicas train apart
            (outer.LocalSGD, DiLoCo, Gossip). A dimension that is named in neither is the one of tensor
            parallelism, where parallelize_module has cut the model over it before: every part rotates over a ring of
            its own, and parameters lie on (replicate, tensor parallelism, ring).
        outer: what happens between replicas, see rtp_ext.outer; default outer.AllReduce(): gradients are averaged over
            all ranks.
        mp_policy: param_dtype is what shards compute in, and travel in unless `travel` says less; reduce_dtype what
            gradients travel in (default float32); cast_forward_inputs and output_dtype apply to the whole model, or to
            each module of the list.
        offload_policy: CPUOffloadPolicy(): parameters, gradients and optimizer state stay on the host, in pinned memory
            unless pin_memory is False. The device borrows the shards of a layer while it runs, and gradients are on the
            host when backward returns. The model may then be on the host before, and no first hop is sent ahead. On a
            CPU ring, where host and device are one, it changes nothing. None and OffloadPolicy(): no offload.
        ignored_params: left as they are, with the modules that own them: the same objects, plain and not averaged, so
            that they may differ between ranks. clip_grad_norm_ takes them in a call of their own, and foreach and fused
            optimizers in a parameter group of their own.
        in_place: the local shards themselves travel, with one slot instead of two.
        bundle: rotate MLP blocks (torch's transformer layers, nn.Sequential of linear, activation, linear, and the
            blocks of transformers' GPT-2, Llama, Mistral, Mixtral, Qwen, BERT and ViT) as bundles, and the q, k and v
            projections of attention together; "recompute": bundled MLPs and experts keep no hidden value for backward.
            One log line for each kind of module says what became of it.
        loss_head: "fused": causal language models of the transformers package compute vocabulary head and loss as one
            where labels are given; their output then has no logits.
        route, gradient_route, gradient_travel, transport, travel, timeout: see Ring. Of a model with parts: those of
            their ring, or left out. What is gathered travels as it is, whatever `travel` says.

    Raises ValueError, and changes nothing, where dims do not fit the mesh; where the model was converted before, itself
    or as a part of another (a RotationError as well); for a list that is empty, or has a module twice or inside
    another; where parts are on other ranks or differ in the options of their rings; where parameters
    are DTensors of somebody else (another mesh, styles of tensor parallelism other than colwise, rowwise and
    replicated) or managed by FSDP or DDP; where shards cannot stay on the host (outer.ZeroOuter, in_place, tensor
    parallelism, Flyweight); and where loss_head="fused" finds no model that it knows. Ranks of a ring whose models have
    different values get a warning; replicas that differ are a ValueError in the first backward. Collective: makes a
    ring.
    Source: RTP, arXiv 2311.01635.
    """
    members = members_of(module)
    whole = members[0] if len(members) == 1 else ModuleGroup(members)
    parts = parts_of(members, whole)
    if bundle not in (True, False, "recompute"):
        raise ValueError(f"fully_rotate: expected bundle to be True, False or 'recompute', got {bundle!r}")
    if loss_head not in (None, "fused"):
        raise ValueError(f"fully_rotate: expected loss_head to be None or 'fused', got {loss_head!r}")
    if isinstance(ignored_params, torch.Tensor):
        raise TypeError("fully_rotate: expected ignored_params to be several parameters, got a single tensor")
    ignored = {id(parameter) for parameter in ignored_params or ()}
    not_ours = ignored | ignored_in(parts)
    place = place_of(mesh, dims, parts, tensor_dimension(whole, mesh, dims, not_ours))
    policy = _policy_of(outer, parts, place)
    if in_place and not policy.allows_in_place:
        raise ValueError(
            f"fully_rotate: in_place=True cannot be combined with {type(policy).__name__}, whose shards are made of "
            "the pieces of all replicas: expected in_place=False, or another outer policy"
        )
    offload = offload_of(offload_policy, place)
    if isinstance(offload, CPUOffloadPolicy):
        refuse_offload(whole, place, policy, in_place, not_ours)
    tensor = place.tensor_mesh if isinstance(place, Ring) else place.tensor
    refuse_whole_tables(whole, not_ours, place.replicas, tensor is not None)
    refuse_foreign(whole, place, not_ours)
    device = place.device.type if isinstance(place, Ring) else place.hops.device_type
    _check_device(whole, device, offload)
    if isinstance(place, Ring):
        check_travels(place, travel, gradient_route, gradient_travel)
    if isinstance(place, Ring) and not isinstance(mesh, Ring):
        check_options(place, transport, route, None if timeout == _TIMEOUT else timeout)
    requested: dict[str, Any] = {"transport": transport, "route": route, "travel": travel, "timeout": timeout}
    requested |= {"gradient_route": gradient_route, "gradient_travel": gradient_travel}
    ring = place if isinstance(place, Ring) else Ring(place, **requested)
    if in_place:
        ring.expect_in_place("fully_rotate")
    if ring.offload_policy is None:
        ring.offload(offload)
    mp_policy = mp_policy or MixedPrecisionPolicy()
    unit = Unit(mp_policy.reduce_dtype)
    states = [RotationState(ring, mp_policy, member, unit) for member in members]
    scopes = {id(part): state for state, member in zip(states, members, strict=True) for part in member.modules()}
    for state, member in zip(states, members, strict=True):
        state.outer_policy, state.ignored = policy, _names_of(not_ours, member)
    before, values = weak_parameters(whole), checksums(whole, _names_of(not_ours, whole), ring)
    converting: dict[str, Any] = {"ignored": ignored, "in_place": in_place, "bundle": bundle, "loss_head": loss_head}
    rewriter = Rewriter(whole, ring, scopes, mp_policy, **converting)
    policy.connect(ring)  # after all refusals: the policy of a model that was refused is free for another
    adopt(parts, scopes)
    rewriter.run()
    for state, member in zip(states, members, strict=True):
        install(member, state)
        answer_for_fully_shard(member)
    policy.cut(whole)
    for part in whole.modules():
        if isinstance(part, GatheredRNN):
            part.list_registered()
    for state, member in zip(states, members, strict=True):
        state.handle_gradients(member)
        if ring.mesh is not None:
            refuse_ddp(member)
    mark_replaced(whole, before)
    watch_optimizers()
    let_it_save(whole, ring)
    let_it_generate()
    compare_weights(values, ring)
    if in_place:
        _say_what_in_place_means(ring, mp_policy)
    return module


def ring_of(module: nn.Module) -> Ring:
    """The ring of a model that `fully_rotate` converted. Raises ValueError for any other."""
    return _converted(module, "ring_of").ring


def outer_of(module: nn.Module) -> OuterPolicy:
    """The outer policy of a model that `fully_rotate` converted. Raises ValueError for any other."""
    policy = _converted(module, "outer_of").outer_policy
    assert policy is not None, "set by fully_rotate"
    return policy


def _converted(module: nn.Module, what: str) -> RotationState:
    state = state_of(module)
    if state is None:
        inside = ", which is in such a model: pass the model, or call fully_rotate with this part before the model"
        raise ValueError(
            f"{what}: expected a model converted by fully_rotate, got a {type(module).__name__}"
            f"{inside if is_inside(module) else ''}"
        )
    return state


def _policy_of(outer: OuterPolicy | None, parts: Parts, place: Ring | RingMesh) -> OuterPolicy:
    """The outer policy that a model gets: the given one, the one of its first part, or a new one."""
    if outer is not None and not isinstance(outer, OuterPolicy):
        raise TypeError(f"fully_rotate: expected outer to be a policy of rtp_ext.outer, got {outer!r:.100}")
    mesh = place.parameter_mesh if isinstance(place, Ring) else place.parameters
    tensor = place.tensor_mesh if isinstance(place, Ring) else place.tensor
    if outer is not None and (mesh is None or mesh.ndim == (1 if tensor is None else 2)):
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
    if tensor is not None and not policy.allows_tensor_parallel:
        raise ValueError(
            f"fully_rotate: {type(policy).__name__} cannot be combined with tensor parallelism (over "
            f"{tensor.mesh_dim_names}), of whose parts it knows nothing: expected outer=outer.AllReduce(), or a model "
            "that parallelize_module has not cut"
        )
    return policy


def _names_of(parameters: Collection[int], root: nn.Module) -> set[str]:
    """All names in a model of parameters that are given by their ids."""
    return {name for name, p in root.named_parameters(remove_duplicate=False) if id(p) in parameters}


def _check_device(module: nn.Module, expected: str, offload: OffloadPolicy) -> None:
    host = {"cpu"} if isinstance(offload, CPUOffloadPolicy) else set()
    for name, parameter in module.named_parameters():
        if parameter.device.type not in {expected, "meta"} | host:
            raise TypeError(
                f"fully_rotate: expected {name} on {expected} (the ring's device) or meta, got {parameter.device}"
            )


def _say_what_in_place_means(ring: Ring, mp_policy: MixedPrecisionPolicy) -> None:
    if ring.transport.startswith("shm"):
        logger.info("fully_rotate: in_place: transport shm receives in its own slots, so that copies travel")
    elif mp_policy.param_dtype is not None:
        logger.info("fully_rotate: in_place: shards are cast to %s, so that copies travel", mp_policy.param_dtype)
    elif ring.hop_route == "direct":
        logger.info("fully_rotate: in_place: every hop of a weight goes to the neighbour, whatever the route")
