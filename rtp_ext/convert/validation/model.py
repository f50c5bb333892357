"""Refusals that follow from the modules and parameters of a model."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rtp_ext.convert.adapters import reading_adapter
from rtp_ext.convert.modules.gathered import foreign_hooks
from rtp_ext.convert.modules.whole_embedding import WholeEmbedding
from rtp_ext.convert.optimizers import REPLACED
from rtp_ext.convert.plan.frozen_blocks import is_taken, refusal_of_package
from rtp_ext.convert.plan.layers import extended_parameters, own_parameters, table_problem
from rtp_ext.convert.plan.request import (
    Request,
    describe,
    place_of_ring,
)
from rtp_ext.convert.plan.rotation_plan import GATHERED, IGNORED, ROTATED, ModulePlan, RotationPlan
from rtp_ext.convert.plan.scaled_products import conflict
from rtp_ext.convert.scopes import ring_of_module
from rtp_ext.convert.tensor_parallel import check_style, is_divided, on_tensor_mesh
from rtp_ext.convert.validation.call import OFFLOAD
from rtp_ext.families import blocks
from rtp_ext.families.recognised import is_experts
from rtp_ext.families.same_forward import has_same_forward
from rtp_ext.nn import Flyweight, RotatedEmbedding
from rtp_ext.outer import AllReduce, ZeroOuter
from rtp_ext.parameters.extensions import is_extended, refusal
from rtp_ext.parameters.sharded_module import ShardedModule
from rtp_ext.parameters.sharding import type_name
from rtp_ext.ring.expert_ring import in_order

_MANAGERS = (FSDPModule, FullyShardedDataParallel, DistributedDataParallel)

PLAIN_OR_EXTENDED = (
    "expected a plain parameter, or one whose class has fsdp_pre_all_gather and fsdp_post_all_gather, which say how "
    "its shards travel; or pass it in ignored_params"
)


def validate(plan: RotationPlan, request: Request) -> None:
    """Raises where a plan cannot be applied: ValueError for modules and parameters that cannot be converted or combined
    with the options, TypeError for parameters on another device. Changes nothing, and sends nothing."""
    if request.offloads and request.trains:
        _refuse_offload(request)
    _refuse_foreign(request)
    _check_divided(plan, request)
    if request.place.facts.places is not None:
        _check_experts(plan, request)
    _refuse_whole_tables(request)
    if request.trains:
        _refuse_scripts(request)
    _check_devices(request)
    _check_extended(plan, request)
    modules = list(request.modules())
    for name, part in modules:
        check_style(name, part, request.place.tensor_mesh, request.ignored)
    _check_hooks(request, modules)
    _check_tables(request, modules)
    _check_ties(request, modules)
    _check_dtypes(plan, dict(modules))
    if (dora := reading_adapter(request.root)) is not None:
        name = next(name for name, part in request.root.named_modules() if part is dora)
        raise ValueError(
            f"fully_rotate: expected adapters that add to outputs, got DoRA around {name} ({type(dora).__name__}), "
            "which computes norms of the whole weight in each forward: no rank holds one; pass use_dora=False"
        )
    if request.options.frozen is not None or any(module.is_new and module.in_blocks for module in plan.modules):
        _check_frozen(plan, request, dict(modules))
    _check_recipe(plan, request, dict(modules))
    if request.options.loss_head is not None:
        _check_heads(plan, request, modules)


def _check_experts(plan: RotationPlan, request: Request) -> None:
    """Raises ValueError where experts cannot be divided, or divided experts combined with the other options, and where
    there are none."""
    place, other = request.place, None
    if place.in_place:
        other = "in_place=True"
    elif request.offloads:
        other = "offload_policy=CPUOffloadPolicy()"
    elif type(request.outer) not in (AllReduce, ZeroOuter):
        other = f"{type(request.outer).__name__}: outer.AllReduce() and outer.ZeroOuter() take it"
    if other is not None:
        raise ValueError(f"fully_rotate: dims that have expert cannot be combined with {other}")
    found = [module for module in plan.modules if module.layer == "experts"]
    for module in plan.modules:
        if (
            module.moved == GATHERED
            and module.notice == "refused"
            and is_experts(request.root.get_submodule(module.name))
        ):
            raise ValueError(
                f"fully_rotate: dims have expert, but {module.label} ({module.kind}): its experts cannot rotate: "
                f"{module.reason}"
            )
    if not found and place.ring is None:
        stacks = (module for module in plan.modules if is_experts(request.root.get_submodule(module.name)))
        why = next((f"; {module.label} ({module.kind}): {module.reason}" for module in stacks), "")
        raise ValueError(
            "fully_rotate: dims have expert: expected a model with experts that rotate (stacked weights in a module of "
            f"transformers, or nn.RotatedExperts), got none in a {type(request.root).__name__}{why}; a part without "
            "any takes mesh=Ring(mesh, dims=dims), as all parts of its model"
        )


def _check_divided(plan: RotationPlan, request: Request) -> None:
    """Raises ValueError where experts that other code has divided cannot rotate."""
    place, dims = request.place, request.options.dims
    modules, column = dict(request.modules()), place.column
    for planned in plan.modules:
        part = modules.get(planned.name)
        if part is None or planned.moved == IGNORED or not is_divided(part, column):
            continue
        assert column is not None, "it is divided among these ranks"
        ranks, experts = place.facts.ranks, planned.parameters[0].shape[0]
        places, ring = place.facts.places, place.ring
        capacity = dims.expert_capacity if dims is not None else ring and ring.experts and ring.experts.capacity
        problem = planned.reason
        if problem is None and experts % ranks:
            problem = f"expected a multiple of {ranks} experts, as many on every rank of the ring, got {experts}"
        elif problem is None and capacity:
            problem = f"expected no expert_capacity, since other code dispatches its tokens, got {capacity}"
        elif problem is None and places is not None and not in_order(places) and not part._forward_pre_hooks:
            problem = (
                "expected hooks that dispatch its tokens (ExpertParallel), or a mesh whose dimension of experts comes "
                "before the ring, got no forward_pre_hook"
            )
        if problem is not None:
            raise ValueError(
                f"fully_rotate: {planned.label} ({planned.kind}), whose experts other code has divided over ranks "
                f"{list(column)}: {problem}"
            )


def _check_frozen(plan: RotationPlan, request: Request, modules: dict[str, nn.Module]) -> None:
    """Raises ValueError where weights in blocks cannot be combined with the other options, and where there is none."""
    place, options = request.place, request.options
    what = "weights in 4 bits of another package" if options.frozen is None else f"frozen={options.frozen!r}"
    other = None
    if place.in_place or (place.ring is None and options.ring.get("route") == "gather") or place.facts.gathers:
        other = "in_place=True" if place.in_place else "route='gather'"
    elif request.keeps_on_host and request.trains:
        other = "offload_policy=CPUOffloadPolicy()"
    elif place.tensor_mesh is not None:
        other = "tensor parallelism"
    elif place.facts.emulated:
        other = "an emulated ring"
    elif type(request.outer) is not AllReduce:
        other = f"{type(request.outer).__name__}: of the outer policies only outer.AllReduce() takes it"
    if other is not None:
        raise ValueError(f"fully_rotate: {what} cannot be combined with {other}")
    found = [module for module in plan.modules if module.is_new and module.in_blocks]
    if not found:
        raise ValueError(
            f"fully_rotate: frozen={options.frozen!r} expected weights of nn.Linear layers or experts with "
            f"requires_grad=False, got none in a {type(request.root).__name__} that could be stored in blocks"
        )
    for module in found:
        part = modules[module.name]
        for key in (each.key for each in module.parameters if each.frozen is not None):
            weight: Any = part._parameters[key]
            label = f"fully_rotate: {module.label}.{key}"
            if place.device == "cuda" and module.compute_dtype == torch.float64:
                raise ValueError(f"{label}: {what} expected a compute dtype of 16 or 32 bits on a GPU")
            if not is_taken(part) and weight.device.type != "meta" and not bool(torch.isfinite(weight).all()):
                raise ValueError(f"{label}: expected finite numbers for frozen={options.frozen!r}, got others")


def _check_recipe(plan: RotationPlan, request: Request, modules: dict[str, nn.Module]) -> None:
    """Raises ValueError where products in 8 bits cannot be combined with the other options, where there is none, and
    where a layer has another recipe already."""
    option, given = "recipe" if request.trains else "weights", request.options.recipe
    what = f"{option}={given!r}"
    if given is not None and (other := conflict(request)) is not None:
        raise ValueError(f"fully_rotate: {what} cannot be combined with {other}")
    scaled = [module for module in plan.modules if module.is_new and module.recipe is not None]
    for module in scaled:
        if given is not None and module.recipe != given:
            raise ValueError(
                f"fully_rotate: {module.label}: expected {what}, got a {type(modules[module.name]).__name__}, which "
                f"torchao computes by {module.recipe}: leave out {option}, or torchao's conversion"
            )
    if not scaled and given is not None:
        wide = ((module.label, each) for module in plan.modules for each in module.parameters if each.wide is not None)
        why = next((f"; {label}.{each.key}: {each.wide}" for label, each in wide), "")
        raise ValueError(
            f"fully_rotate: {what} expected linear layers whose sizes fit it, or experts, got none in a "
            f"{type(request.root).__name__}{why}: rtp_ext.explain without it shows the layers"
        )
    for module in scaled:
        if module.compute_dtype == torch.float64:
            raise ValueError(
                f"fully_rotate: {module.label}: recipe={module.recipe!r} expected a compute dtype of 16 or 32 bits, "
                "got float64"
            )


def _refuse_offload(request: Request) -> None:
    for name, part in request.root.named_modules():
        problem = None
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and id(part.weight) not in request.not_ours:
            problem = RotatedEmbedding.refusal(part)
        elif isinstance(part, Flyweight):
            problem = "it calls copies of a module"
        if problem is not None:
            raise ValueError(
                f"{OFFLOAD} {name or 'the model'} ({type(part).__name__}): {problem}; expected a model without it, or "
                "no offload_policy"
            )


def _check_dtypes(plan: RotationPlan, modules: dict[str, nn.Module]) -> None:
    """Raises ValueError for layers that would rotate or stay whole, and whose weights are no floating-point numbers."""
    for module in plan.modules:
        if not module.is_new or (module.moved != ROTATED and module.layer != "whole embedding"):
            continue
        for key, parameter in modules[module.name]._parameters.items():
            if key == "weight" and module.in_blocks:
                continue
            if parameter is not None and not parameter.is_floating_point():
                raise ValueError(
                    "fully_rotate: expected floating-point parameters of layers that rotate or stay whole, got "
                    f"{parameter.dtype} for {module.name + '.' if module.name else ''}{key} of a {module.kind}: pass "
                    "it in ignored_params"
                )


def _refuse_whole_tables(request: Request) -> None:
    """Raises ValueError where an embedding depends on the ids of all ranks, which replicas do not exchange; and
    where its table is no DTensor, which tensor parallelism compares."""
    for name, part in request.root.named_modules():
        if not isinstance(part, (nn.Embedding, nn.EmbeddingBag)) or id(part.weight) in request.not_ours:
            continue
        if request.place.tensor_mesh is not None and part.sparse:
            raise ValueError(
                f"fully_rotate: {name or 'the model'} ({type(part).__name__}): sparse gradients cannot be combined "
                "with tensor parallelism: expected an embedding with sparse=False, or its parameters in ignored_params"
            )
        if request.place.facts.replicas > 1:
            problem = RotatedEmbedding.refusal(part)
            if problem is not None:
                raise ValueError(
                    f"fully_rotate: {name or 'the model'} ({type(part).__name__}): {problem}, which cannot be combined "
                    "with replicas: expected a mesh of one ring, an embedding without it, or its parameters in "
                    "ignored_params"
                )


def _refuse_foreign(request: Request) -> None:
    """Raises ValueError where other code shards or manages parameters: another mesh or ring, FSDP, DDP."""
    place, ignored = request.place, request.not_ours
    copies = (part for part in request.root.modules() if isinstance(part, Flyweight))
    inside = {id(m) for flyweight in copies for m in flyweight.modules()}
    for name, part in request.root.named_modules():
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
        if ring is not None and ring.pulls_from is not None:
            raise ValueError(
                f"fully_rotate: expected a model that can train, got {label}, which rotate_for_inference has converted"
            )
        if ring is not None and place_of_ring(ring).members != place.members:
            raise ValueError(
                f"fully_rotate: {label} is sharded over {describe(ring)}: expected {place.words}, the ring of this call"
            )
        if ring is not None or id(part) in inside:
            continue
        own = own_parameters(part)
        divided = is_divided(part, place.column) and not any(id(each) in ignored for each in own.values())
        for key, parameter in own.items():
            if id(parameter) in ignored:
                continue
            known = divided or on_tensor_mesh(parameter, place.tensor_mesh)
            if not known and is_divided(part, place.column):
                raise ValueError(
                    f"fully_rotate: {label}, whose experts other code has divided: expected all of its parameters in "
                    f"ignored_params, or none, got {key} outside of them"
                )
            if isinstance(parameter, DTensor) and not known:
                raise ValueError(
                    f"fully_rotate: expected plain parameters, which become DTensors on {place.words}; got "
                    f"{key} of {label}, a DTensor with placements {tuple(parameter.placements)} on "
                    f"{describe(parameter.device_mesh)}. Tensor parallelism goes with rotation over another dimension "
                    "of the same mesh: mesh=mesh, dims=RotationDims(ring=...) for a model that was parallelized over "
                    'mesh["tp"], and experts that are Shard(0) over mesh["ep"] with RotationDims(ring=..., '
                    'expert="ep"). Other sharding cannot be combined with it'
                )
            if REPLACED in parameter.__dict__:
                raise ValueError(
                    f"fully_rotate: {key} of {label} was shared with {parameter.__dict__[REPLACED]}, which has been "
                    "converted without it: modules that share a parameter have to be converted in one call, "
                    "fully_rotate(model) or fully_rotate([module, other module])"
                )


def _refuse_scripts(request: Request) -> None:
    """Raises ValueError for parameters that a graph of torch.jit holds, which is no Python code that could gather
    them."""
    for name, part in request.modules():
        if isinstance(part, torch.jit.ScriptModule) and not request.ignored.issuperset(
            map(id, own_parameters(part).values())
        ):
            raise ValueError(
                f"fully_rotate: expected modules of Python code, got {name or 'the model'} ({part.original_name}) of "
                "torch.jit, whose parameters can be neither rotated nor gathered: convert the plain module, or pass "
                "these in ignored_params"
            )


def _check_devices(request: Request) -> None:
    expected = {request.place.device, "meta"} | ({"cpu"} if request.offloads else set())
    for name, parameter in request.root.named_parameters():
        if parameter.device.type not in expected:
            raise TypeError(
                f"fully_rotate: expected {name} on {request.place.device} (the ring's device) or meta, got "
                f"{parameter.device}"
            )


def _check_extended(plan: RotationPlan, request: Request) -> None:
    """Raises ValueError for tensor subclasses that can be neither sharded nor gathered, and where parameters that are
    gathered through extensions of their class cannot be combined with the rest."""
    in_8_bits = {module.name for module in plan.modules if module.recipe is not None}
    for name, part in request.modules():
        if isinstance(part, ShardedModule) or name in in_8_bits:
            continue
        for key, parameter in own_parameters(part).items():
            if id(parameter) in request.ignored:
                continue
            label = f"fully_rotate: {name + '.' if name else ''}{key} of a {type(part).__name__}"
            if key == "weight" and is_taken(part):
                continue
            if key == "weight" and (problem := refusal_of_package(part, parameter)) is not None:
                raise ValueError(f"{label}: {problem}; or pass it in ignored_params")
            problem = refusal(parameter)
            if problem is not None:
                raise ValueError(f"{label} is {problem}: {PLAIN_OR_EXTENDED}")
            if is_extended(parameter) and (other := _not_with_extended(request)) is not None:
                raise ValueError(
                    f"{label} is a {type_name(parameter)}, gathered through the extensions of its class, which "
                    f"cannot be combined with {other}: expected a plain parameter, or pass it in ignored_params"
                )


def _not_with_extended(request: Request) -> str | None:
    if request.place.facts.emulated:
        return None  # on an emulated ring they stay whole
    if request.place.tensor_mesh is not None:
        return "tensor parallelism"
    if request.keeps_on_host:
        return "offload_policy=CPUOffloadPolicy()"
    if type(request.outer) is not AllReduce:
        return f"{type(request.outer).__name__}: of the outer policies only outer.AllReduce() takes it"
    return None


def _check_hooks(request: Request, modules: list[tuple[str, nn.Module]]) -> None:
    """Raises ValueError for hooks of tensors: a parameter becomes a shard, whose gradient they do not expect."""
    for name, part in modules:
        if isinstance(part, ShardedModule) or not request.trains:
            continue
        for key, parameter in own_parameters(part).items():
            hooks = [] if id(parameter) in request.ignored else foreign_hooks(parameter)
            if hooks:
                called = ", ".join(getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks)
                raise ValueError(
                    f"fully_rotate: {name + '.' if name else ''}{key} of a {type(part).__name__}: expected a parameter "
                    f"without hooks of register_hook, got {len(hooks)} ({called}): register them after fully_rotate, "
                    "where gradients are DTensors (a mask then has to be one too: distribute_tensor(mask, "
                    "p.device_mesh, p.placements)), or pass the parameter in ignored_params. Hooks of "
                    "register_post_accumulate_grad_hook stay"
                )


def _check_tables(request: Request, modules: list[tuple[str, nn.Module]]) -> None:
    """Raises ValueError for embeddings whose writes and counts a gathered copy of their table would lose."""
    extended = extended_parameters(modules, request.ignored)
    inside = {id(part) for _, f in modules if isinstance(f, Flyweight) for part in f.modules()}
    for name, part in modules:
        several = part.modules() if has_same_forward(part, nn.MultiheadAttention) else [part]
        own = [parameter for each in several for parameter in own_parameters(each).values()]
        if id(part) in inside or all(id(p) in request.ignored or isinstance(p, DTensor) for p in own):
            continue
        problem = table_problem(part)
        special = any(id(parameter) in extended for parameter in own)
        if problem is not None and (special or not WholeEmbedding.fits(part)):
            raise ValueError(
                f"fully_rotate: {name or 'the model'} ({type(part).__name__}): {problem}: expected an nn.Embedding "
                "with the forward of torch and no parameters but a plain weight, or these in ignored_params"
            )


def _check_ties(request: Request, modules: list[tuple[str, Any]]) -> None:
    """Raises ValueError where a parameter would stay whole for one of its owners and be sharded for another."""
    whole: dict[int, str] = {}
    sharded: dict[int, str] = {}
    for name, part in modules:
        own = list(map(id, own_parameters(part).values()))
        stays = table_problem(part) is not None or request.ignored.intersection(own)
        (whole if stays else sharded).update(dict.fromkeys(own, name))
    for parameter in whole.keys() & sharded.keys():
        raise ValueError(
            f"fully_rotate: {sharded[parameter]} shares a parameter with {whole[parameter]}, whose parameters stay "
            "whole: expected all modules that share it to be rotated, or the parameter in ignored_params"
        )


def _check_heads(plan: RotationPlan, request: Request, modules: list[tuple[str, nn.Module]]) -> None:
    planned: dict[str, ModulePlan] = {module.name: module for module in plan.modules}
    extended: Collection[int] = extended_parameters(modules, request.ignored)
    found = [(name, part) for name, part in modules if blocks.causal_model(part)]
    for name, part in found:
        head: Any = part.lm_head
        kind = type(part).__name__
        if not blocks.is_linear(head) or blocks.is_transposed_linear(head):
            raise ValueError(
                f"fully_rotate: loss_head='fused' expected {kind}.lm_head to be a linear layer that has not been "
                f"converted, got a {type(head).__name__}"
            )
        layer = planned.get(f"{name}.lm_head" if name else "lm_head")
        if layer is not None and layer.style is not None:
            raise ValueError(
                f"fully_rotate: loss_head='fused' expected {kind}.lm_head to be a layer that tensor parallelism has "
                "not cut, got DTensors: leave out loss_head, or the head from the plan of parallelize_module"
            )
        if request.ignored.intersection(map(id, head.parameters())):
            raise ValueError(
                f"fully_rotate: loss_head='fused' expected the parameters of {kind}.lm_head to rotate, got some of "
                "them in ignored_params"
            )
        if any(id(parameter) in extended for parameter in head.parameters()):
            raise ValueError(
                f"fully_rotate: loss_head='fused' expected plain parameters of {kind}.lm_head, got a "
                f"{type_name(head.weight)}: leave out loss_head"
            )
    if not found:
        raise ValueError(
            "fully_rotate: loss_head='fused' expected a causal language model of the transformers package that "
            f"computes lm_head and then its own loss, with nothing in between, got a {type(request.root).__name__}; "
            "other models can use nn.RotatedLinearCrossEntropy"
        )
