"""fully_rotate: one call that converts a model."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from rtp_ext.convert.adapters import follow_adapters
from rtp_ext.convert.agreement import checksums, compare_weights
from rtp_ext.convert.apply_plan import apply_plan
from rtp_ext.convert.methods.fully_shard import explain_fsdp_methods, explain_options, refuse_others
from rtp_ext.convert.methods.generate import synchronize_generate
from rtp_ext.convert.methods.save_pretrained import install_save_pretrained
from rtp_ext.convert.modules.gathered import GatheredRNN
from rtp_ext.convert.optimizers import mark_replaced, watch_optimizers, weak_parameters
from rtp_ext.convert.plan.inspect_model import inspect_model
from rtp_ext.convert.plan.request import Options, Parts, Request, RotateKeywords, names_of, state_in
from rtp_ext.convert.plan.rotation_plan import RotationPlan
from rtp_ext.convert.scopes import INFERENCE, RotationState, install, is_inside, state_of
from rtp_ext.convert.validation import read_call, validate
from rtp_ext.options import RingOptions, takes
from rtp_ext.outer import OuterPolicy
from rtp_ext.outer.policy import Unit
from rtp_ext.ring import Ring
from rtp_ext.ring.bootstrap import compare_calls, refused_together
from rtp_ext.ring.mesh import resolve_mesh

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("rtp_ext")

_Given = TypeVar("_Given", nn.Module, list[nn.Module])


@explain_options
@takes(RotateKeywords, Options, RingOptions)
def fully_rotate(module: _Given, **keywords: Unpack[RotateKeywords]) -> _Given:
    """Spreads every parameter of a model over a ring, in place, and returns the same module, or the same list.

    Linear, embedding, convolution and attention layers and experts rotate: their shards visit every rank while it
    computes, and no rank ever holds a whole layer. Subclasses of torch's layers that compute as these do rotate too,
    and keep their class. The parameters of all other modules are sharded, and gathered while their module runs. Every
    rank keeps its own batch; gradients are averaged over the ring. Parameters become DTensors sharded over the mesh,
    under unchanged names. Build the same model on every rank (with the same seed), or load the plain model's weights
    afterwards: load_safetensors, or torch.distributed.checkpoint.state_dict.set_model_state_dict with
    full_state_dict=True. Build the optimizer after that.

    >>> model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    >>> rtp_ext.fully_rotate(model) is model  # on every rank; the process group has one here
    True
    >>> model[0].weight.placements, model[2].weight.placements  # the bundle is cut along the hidden features
    ((Shard(dim=0),), (Shard(dim=1),))
    >>> optimizer = torch.optim.AdamW(model.parameters())

    Parts of a model may be converted before it, one by one, as with fully_shard: each keeps its own mp_policy (and
    bundle and ignored_params), which applies inside it, and is called on its own or within the model. All move
    to one ring, that of the first part; to create only one ring, pass a Ring to every call.

    A list of modules, none inside another, is one part with several members: they may share parameters
    (fully_rotate([model.embed, model.head], mp_policy=...), then fully_rotate(model)), and have one policy. Each member
    may be called on its own; inputs and outputs are cast at the border of each.

    Args:
        module: the model, its parameters on the device of the mesh or on the meta device; or a list of modules.
        mesh: a one-dimensional DeviceMesh, one of more dimensions with `dims`, a process group, a Ring, or None: the
            ring of parts that were converted before, else the default process group.
        dims: RotationDims(ring=..., replicate=...): the roles of the dimensions of the mesh, by name. Along replicate,
            rings hold the same shards and have batches of their own. Parameters are then DTensors on the mesh of both,
            Replicate() over the one and Shard over the other; with local training (outer.LocalSGD, DiLoCo, Gossip) on
            the ring's mesh alone. With expert=..., experts are divided over that dimension, tokens travel to them, and
            each part rotates over ring; all else rotates over both as one ring, on whose mesh all parameters are
            DTensors. A dimension that is named in none is that of tensor parallelism, if
            parallelize_module has sharded the model over it before: every part rotates over a ring of its own, and
            parameters lie on (replicate, tensor parallelism, ring).
        outer: the policy between replicas, see rtp_ext.outer; default outer.AllReduce(): gradients are averaged over
            all ranks.
        mp_policy: param_dtype is the dtype of computes with shards, in which they also travel unless `travel` is set;
            reduce_dtype the dtype in which gradients travel (default float32); cast_forward_inputs and output_dtype
            apply to the whole model, or to each module of the list.
        offload_policy: CPUOffloadPolicy(): parameters, gradients and optimizer state stay on the host, in pinned memory
            unless pin_memory is False. The device has a copy of a layer's shards while the layer runs, and gradients
            are on the host when backward returns. The model may be on the host before the call, and the ring does not
            prefetch. On a CPU ring, where host and device share memory, it changes nothing. None and OffloadPolicy():
            no offload.
        ignored_params: parameters that stay unchanged, with the modules that own them: the same objects, plain and not
            averaged, so that they may differ between ranks. `clip_grad_norm_` needs a separate call for them, foreach
            and fused optimizers a separate parameter group.
        gather: modules, or their names in named_modules(), that are gathered while in use instead of rotated, with all
            modules in them: for code that reads the weight of a layer without calling it. Where a forward does so by
            names (F.linear(x, self.proj.weight)), it is found without this option.
        in_place: see Ring. True: a Ring that is given and has no other models gets the option; a ring that has it keeps
            it, without the argument.
        bundle: rotate MLP blocks (torch's transformer layers, nn.Sequential of linear, activation, linear, and modules
            of transformers that compute an MLP) as bundles, and layers that its modules call with one input, such as
            the q, k and v projections of attention, together; "recompute": bundled MLPs and experts keep no hidden
            value for backward. The log has one line for each kind of module with its conversion.
        loss_head: "fused": causal language models of the transformers package compute vocabulary head and loss in one
            operation when labels are given; their output then has no logits.
        frozen: "nf4", "mxfp4" or "int8": weights of linear layers and experts that require no gradient are stored, and
            travel, in blocks of codes with a scale, and are widened where a product needs them; rtp_ext.frozen_weights
            returns their values. Frozen weights of other modules, tied ones, those of linear layers stored [in, out],
            experts that do not fill whole blocks, and vocabulary heads of transformers' models without
            loss_head="fused" stay in their dtype: explain and the log name them. Not with in_place, route="gather",
            offload_policy, tensor parallelism, emulated rings, and outer policies other than AllReduce.
        recipe: "float8_tensorwise", "float8_tensorwise_whole", "float8_rowwise", "float8_rowwise_with_gw_hp",
            "float8_blockwise", "mxfp8" or "mxfp8_rceil": products in 8 bits of linear layers and experts, whose weights
            travel as they are multiplied: the owner of a shard quantizes it once after each change. MLPs rotate layer
            by layer then. Heads, embeddings, norms, routers, attention of torch, linear layers stored [in, out],
            experts with bundle="recompute" and layers whose sizes do not fit the blocks stay wide: explain and the log
            name them. Not with in_place, offload_policy and outer.ZeroOuter, nor where the user captures CUDA graphs.
            See docs/float8.md.
        route, gradient_route, gradient_travel, buffers, group, collective, embedding, transport, travel, timeout: see
            Ring. Beside a Ring, and for a model with converted parts: the values of their ring, or the defaults.
            `travel` does not apply to gathered parameters.

    Raises ValueError, and changes nothing, where another rank refuses its arguments; where dims do not fit the mesh;
    where the model was converted before, itself or as a part of another (a RotationError as well); for a list that is
    empty, or has a module twice or inside another; where parts are on other ranks or differ in the options of their
    rings; where parameters are DTensors of other code (another mesh, styles of tensor parallelism other than colwise,
    rowwise and replicated) or managed by FSDP or DDP; where `frozen` finds no frozen weight, or infinities and NaNs in
    one; where shards cannot stay on the host (outer.ZeroOuter, in_place, tensor parallelism, Flyweight); and where
    loss_head="fused" finds no supported model. Logs a warning if ranks of a ring have models with different values;
    replicas that differ raise ValueError in the first backward. Collective: creates a ring.
    Source: RTP, arXiv 2311.01635.
    """
    options = Options.of(keywords)
    known, timeout = _known_ring(module, options.mesh), options.ring.get("timeout")
    new = refused_together(options.mesh, options.dims, timeout)  # type: ignore[arg-type]  # mesh is no Ring where it is entered
    with new if known is None else _refused_on(known):
        request = read_call(module, options)
        plan = inspect_model(request)
        validate(plan, request)
    ring = _ring_for(request)
    if known is not None:
        compare_calls(known.communicator, options=f"in_place {request.place.in_place}")
    _convert(plan, request, ring)
    return module


def _known_ring(module: Any, mesh: Any) -> Ring | None:
    """Returns the ring that the arguments of a call give: `mesh`, or that of a part; None where it makes one."""
    if isinstance(mesh, Ring):
        return mesh
    members = module if isinstance(module, (list, tuple)) else [module]
    parts = (part for member in members if isinstance(member, nn.Module) for part in member.modules())
    return next((state.ring for part in parts if (state := state_of(part)) is not None), None)


@contextlib.contextmanager
def _refused_on(ring: Ring) -> Iterator[None]:
    """Has every rank of an existing ring raise where one refuses the call, which is a TypeError or ValueError within;
    the ring stays alive. Collective where it raises, except for a ring that has ended."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if ring.alive:
            compare_calls(ring.communicator, refusal=error)
        raise


def _ring_for(request: Request) -> Ring:
    """Returns the ring for a model. Collective if it creates one."""
    options, place = request.options, request.place
    ring = place.ring
    if ring is None:
        ring = Ring(resolve_mesh(options.mesh, options.dims, place.tensor), **options.ring)  # type: ignore[arg-type]
    if ring.offload_policy is None:
        ring.offload(request.offload)
    return ring


def _convert(plan: RotationPlan, request: Request, ring: Ring) -> None:
    """Applies a validated plan, and installs scopes, hooks and methods around the modules. Collective."""
    root, members, mp_policy = request.root, request.members, request.mp_policy
    ring.in_place, ring.has_models = request.place.in_place or ring.in_place, True
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
        explain_fsdp_methods(member)
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
    follow_adapters(is_inside)
    install_save_pretrained(root, ring)
    synchronize_generate()
    compare_weights(values, ring)
    if ring.in_place:
        _log_in_place(ring, mp_policy)


def _adopt(parts: Parts, scopes: Mapping[int, RotationState]) -> None:
    """Moves parts that were converted before, possibly on rings of their own, to the ring of the model.

    `scopes`: the state of the model around each part, by id of the part.
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
        logger.info("fully_rotate: %s (%s) was converted before, and keeps its policy", name, type(part).__name__)


def ring_of(module: nn.Module) -> Ring:
    """Returns the ring of a model that `fully_rotate` or `rotate_for_inference` converted. Raises ValueError for any
    other."""
    if INFERENCE in module.__dict__:
        return module.__dict__[INFERENCE]
    return _converted(module, "ring_of").ring


def outer_of(module: nn.Module) -> OuterPolicy:
    """Returns the outer policy of a model that `fully_rotate` converted. Raises ValueError for any other."""
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


def _log_in_place(ring: Ring, mp_policy: MixedPrecisionPolicy) -> None:
    if ring.transport.startswith("shm"):
        logger.info("fully_rotate: in_place: transport shm receives in its own slots, so that copies travel")
    elif mp_policy.param_dtype is not None:
        logger.info("fully_rotate: in_place: shards are cast to %s, so that copies travel", mp_policy.param_dtype)
    elif ring.hop_route == "direct":
        logger.info("fully_rotate: in_place: every hop of a weight goes to the neighbour, whatever the route")
