"""fully_rotate: one call that converts a model."""

from __future__ import annotations

import datetime
import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from rtp_ext.convert.agreement import checksums, compare_weights
from rtp_ext.convert.apply_plan import apply_plan
from rtp_ext.convert.methods.fully_shard import answer_for_fully_shard, refuse_others
from rtp_ext.convert.methods.generate import let_it_generate
from rtp_ext.convert.methods.save_pretrained import let_it_save
from rtp_ext.convert.modules.gathered import GatheredRNN
from rtp_ext.convert.optimizers import mark_replaced, watch_optimizers, weak_parameters
from rtp_ext.convert.plan.inspect_model import inspect_model
from rtp_ext.convert.plan.request import TIMEOUT, Options, Parts, Request, names_of, state_in
from rtp_ext.convert.plan.rotation_plan import RotationPlan
from rtp_ext.convert.scopes import RotationState, install, is_inside, mark_inside, state_of
from rtp_ext.convert.validation import read_call, validate
from rtp_ext.outer import OuterPolicy
from rtp_ext.outer.policy import Unit
from rtp_ext.ring import Ring, RotationDims
from rtp_ext.ring.mesh import resolve_mesh

logger = logging.getLogger("rtp_ext")

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
    timeout: float | datetime.timedelta = TIMEOUT,
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
    request = read_call(module, Options.of(locals()))
    plan = inspect_model(request)
    validate(plan, request)
    ring = _ring_for(request)
    _convert(plan, request, ring)
    return module


def _ring_for(request: Request) -> Ring:
    """The ring that a model gets. Collective where it is made."""
    options, place = request.options, request.place
    ring = place.ring
    if ring is None:
        ring = Ring(resolve_mesh(options.mesh, options.dims, place.tensor), **options.of_ring)  # type: ignore[arg-type]
        if options.in_place:
            ring.expect_in_place("fully_rotate")  # ranks on several hosts may have made it one of two levels
    if ring.offload_policy is None:
        ring.offload(request.offload)
    return ring


def _convert(plan: RotationPlan, request: Request, ring: Ring) -> None:
    """Applies a validated plan, and makes everything around the modules fit. Collective."""
    root, members, mp_policy = request.root, request.members, request.mp_policy
    unit = Unit(mp_policy.reduce_dtype)
    states = [RotationState(ring, mp_policy, member, unit) for member in members]
    scopes = {id(part): state for state, member in zip(states, members, strict=True) for part in member.modules()}
    for state, member in zip(states, members, strict=True):
        state.outer_policy, state.ignored = request.outer, names_of(request.not_ours, member)
    before = [known for member in members for known in weak_parameters(member)]
    values = checksums(root, names_of(request.not_ours, root), ring)
    request.outer.connect(ring)
    _adopt(request.parts, scopes)
    apply_plan(plan, request, ring, scopes)
    for state, member in zip(states, members, strict=True):
        install(member, state)
        answer_for_fully_shard(member)
    request.outer.cut(root)
    for part in root.modules():
        if isinstance(part, GatheredRNN):
            part.list_registered()
    for state, member in zip(states, members, strict=True):
        state.handle_gradients(member)
        if ring.mesh is not None:
            refuse_others(member)
    mark_replaced(root, before)
    watch_optimizers()
    let_it_save(root, ring)
    let_it_generate()
    compare_weights(values, ring)
    if request.options.in_place:
        _say_what_in_place_means(ring, mp_policy)


def _adopt(parts: Parts, scopes: Mapping[int, RotationState]) -> None:
    """Makes parts that were converted one by one, each perhaps with a ring of its own, parts of one model.

    `scopes`: the state of the model around each, by id of the part.
    """
    for name, part in parts:
        state, around = state_in(part), scopes[id(part)]
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


def _say_what_in_place_means(ring: Ring, mp_policy: MixedPrecisionPolicy) -> None:
    if ring.transport.startswith("shm"):
        logger.info("fully_rotate: in_place: transport shm receives in its own slots, so that copies travel")
    elif mp_policy.param_dtype is not None:
        logger.info("fully_rotate: in_place: shards are cast to %s, so that copies travel", mp_policy.param_dtype)
    elif ring.hop_route == "direct":
        logger.info("fully_rotate: in_place: every hop of a weight goes to the neighbour, whatever the route")
