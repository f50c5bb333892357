"""rotate_for_inference: one call that converts a model for forwards only."""

from __future__ import annotations

import dataclasses
import datetime
import logging
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from rtp_ext.convert.adapters import UnmergedAdapter, extend_adapters, follow_adapters
from rtp_ext.convert.agreement import Mode, agree_on_model, checksums, compare_weights
from rtp_ext.convert.apply_plan import apply_plan, log_shares
from rtp_ext.convert.methods.save_pretrained import install_save_pretrained
from rtp_ext.convert.plan.inspect_model import inspect_model
from rtp_ext.convert.plan.layers import own_parameters
from rtp_ext.convert.plan.request import TIMEOUT, Options, Request
from rtp_ext.convert.plan.rotation_plan import ROTATED, RotationPlan
from rtp_ext.convert.scopes import INFERENCE, is_inside, ring_of_module
from rtp_ext.convert.validation import read_call, validate
from rtp_ext.inference.forwards import mark_forwards
from rtp_ext.inference.ring import TRANSPORTS, InferenceRing
from rtp_ext.nn import Flyweight
from rtp_ext.parameters.frozen import FORMATS
from rtp_ext.recipes import RECIPES
from rtp_ext.ring.autograd import as_parameter
from rtp_ext.ring.bootstrap import refused_together
from rtp_ext.words import Format, InferenceTransport, RecipeName

logger = logging.getLogger("rtp_ext")

_Model = TypeVar("_Model", bound=nn.Module)


def rotate_for_inference(
    model: _Model,
    *,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    transport: InferenceTransport = "auto",
    weights: Format | RecipeName | None = None,
    gather: Iterable[str | nn.Module] | None = None,
    offload: bool = False,
    timeout: float | datetime.timedelta = TIMEOUT,
) -> _Model:
    """Spreads the weights of a model over ranks for forwards only, in place, and returns the model.

    Each rank keeps 1/R of the weights of linear, embedding, convolution and attention layers and of experts. A forward
    takes the shards of all ranks one after the other, its own first, and writes each product into its part of the
    output. No rank waits for another one's calls: ranks may run different numbers of forwards of different lengths,
    with caches of their own. Parameters of other modules (norms, stray ones) stay whole on every rank. Conversion and
    `update_weights` are collective; nothing else is, `close` of the ring included, except over `ce`. Names in
    state_dict and classes of layers are unchanged; `rtp_ext.ring_of(model)` is the ring, whose repr states the bytes.

    Over `shm` all ranks map all shards, so that the host holds the weights once: products read the shard of another
    rank where it lies, experts that no token chose are not read, and a rank may end while others go on. Over `tcp` a
    thread of the owner sends a shard on request, into one of two slots, while the rank computes with the shard before,
    also across layers; without the owner, forwards fail. `shm+tcp` is the first inside hosts and the second between
    them; ranks of a host that are in the same layer share what comes from other hosts. Over `ce` copy engines copy
    shards between GPUs of one host; it has not run on a GPU yet. docs/inference.md compares them.

    Parameters may be on the meta device, so that no rank holds the whole model: they are zero until load_safetensors
    (and a barrier after it) or `update_weights` fills them. Under torch.autocast each forward casts every shard on
    every rank: convert a model in the dtype that it computes in.

    >>> model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).requires_grad_(False)
    >>> x = torch.ones(3, 8)
    >>> expected = model(x)
    >>> torch.allclose(rtp_ext.rotate_for_inference(model)(x), expected)
    True
    >>> rtp_ext.ring_of(model).close()

    Args:
        model: the same on every rank.
        mesh: a one-dimensional DeviceMesh, or a process group of CPU ranks; None: the default group.
        transport: for CPUs `shm` (ranks of one host), `shm+tcp` (hosts with equally many neighbouring ranks), `tcp` (of
            any hosts); for GPUs `ce` (of one host), with offload `shm`; or `auto`: the first of these that works.
        weights: None, "int8", "nf4" or "mxfp4": weights of linear layers and experts are stored and read in blocks of
            codes with a scale, and are widened where a product needs them; see docs/frozen.md for the formats and for
            weights that keep their dtype. `Linear4bit` layers of bitsandbytes keep their bits, with and without it. Or
            the name of a recipe of products in 8 bits ("float8_rowwise", ...): they are stored and read as its codes
            and scales, which are operands of the products; see docs/float8.md. Not "float8_tensorwise_whole". Layers
            that torchao computes by a recipe are stored so without it.
        gather: modules, or their names in named_modules(), that stay whole on every rank, with all modules in them: see
            fully_rotate.
        offload: for GPUs: shards lie in pinned memory of the host, once for all of its ranks, and copy engines copy
            each one, this rank's own too, into one of two slots while the product before runs. The model may be on the
            host. Parameters that stay whole, and buffers, go to the GPU. It has not run on a GPU yet. On CPUs, where
            shards lie in memory of the host already, a ValueError.
        timeout: seconds (or a timedelta) after which a rank that does not take part in a collective is an error.

    Raises ValueError for a model that was converted before, for arguments that are not made yet, for a model without a
    layer that can be cut, or with `weights` without a weight that can be stored in blocks, for buffers on the meta
    device, and on every rank where models differ or one refuses its arguments; RotationError where ranks cannot map
    each other's memory. Backward through a layer raises ValueError: `fully_rotate` is for training.
    """
    policy = CPUOffloadPolicy(pin_memory=False) if offload else None
    given = {"mesh": mesh, "gather": gather, "timeout": timeout, "offload_policy": policy}
    of_ring: dict[str, Any] = {"transport": transport, "timeout": timeout, "offload": offload}
    with refused_together(mesh, timeout=timeout):
        _check_arguments(model, transport, weights)
        options = Options.of(given | {"recipe" if weights in RECIPES else "frozen": weights})
        request = dataclasses.replace(read_call(model, options), trains=False)
        planned = inspect_model(request)
        plan = _rotating(planned, model)
        kind = type(model).__name__
        if not plan.modules:
            raise ValueError(f"rotate_for_inference: expected a layer that can be cut, got none in a {kind}")
        if weights is not None and not any(module.in_blocks or module.in_codes for module in plan.modules):
            raise ValueError(
                f"rotate_for_inference: weights={weights!r} expected weights of linear layers, got none in a {kind} "
                "that could be stored so"
            )
        validate(plan, request)
    shards = InferenceRing(mesh, **of_ring)
    with shards.communicator.released_on_error():
        _convert(model, plan, request, shards)
    log_shares("rotate_for_inference", planned, plan, "whole on every rank")
    return model


def _check_arguments(model: Any, transport: str, weights: str | None) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"rotate_for_inference: expected a torch.nn.Module, got {type(model).__name__}")
    if transport not in TRANSPORTS:
        raise ValueError(f"rotate_for_inference: expected transport {', '.join(TRANSPORTS)}, got {transport!r}")
    known = (*FORMATS, *(name for name, recipe in RECIPES.items() if not recipe.forward.whole))
    if weights not in (None, *known):
        raise ValueError(f"rotate_for_inference: expected weights None, {', '.join(map(repr, known))}, got {weights!r}")
    for name, part in model.named_modules():
        label = f"{name or 'the model'} ({type(part).__name__})"
        if is_inside(part) or ring_of_module(part) is not None:
            raise ValueError(f"rotate_for_inference: expected a plain model, got {label}, which was converted before")
        if isinstance(part, Flyweight):
            raise ValueError(f"rotate_for_inference: expected no Flyweight, got {label}: it is not made for inference")
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"rotate_for_inference: expected buffers with values, got {name} on the meta device: make parameters "
                "alone on it, or compute the buffers before"
            )


def _rotating(plan: RotationPlan, model: nn.Module) -> RotationPlan:
    """Returns the plan of the layers that are cut; all others stay whole, as they are."""
    attention = {module.name for module in plan.modules if module.layer == "attention"}
    gathers = {module.name for module in plan.modules if any(owned.moved != ROTATED for owned in module.parameters)}
    kept = {module.name for module in plan.modules if module.moved == ROTATED} - gathers
    own = [(name, id(p)) for name, part in model.named_modules() for p in part._parameters.values() if p is not None]
    count = None
    while count != len(kept):
        count = len(kept)
        # New values come under one name of a parameter, so that it is cut for all of its modules, or for none.
        whole = {key for name, key in own if name not in kept}
        shared = {name for name, key in own if name in kept and key in whole}
        for name in sorted(shared):
            logger.warning("rotate_for_inference: %s stays whole: it shares a parameter with a module that does", name)
        kept -= shared
        for name in attention:  # its forward reads the weight of its output projection
            if not {name, f"{name}.out_proj".lstrip(".")} <= kept:
                kept -= {name, f"{name}.out_proj".lstrip(".")}
    return dataclasses.replace(
        plan,
        modules=tuple(module for module in plan.modules if module.name in kept),
        bundles=tuple(bundle for bundle in plan.bundles if kept.issuperset(bundle.layers)),
    )


def _convert(model: nn.Module, plan: RotationPlan, request: Request, shards: InferenceRing) -> None:
    ring = shards.ring
    cuts = [(f"conversion of {each.label}", f"{each.layer} {each.cuts} {each.recipe}") for each in plan.modules]
    agree_on_model(model, ring, Mode.now(ring), allow_meta=True, settings=cuts)
    values = checksums(model, (), ring)
    apply_plan(plan, request, ring, {})
    old: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    cut = {key: parameter for key, parameter in old.items() if isinstance(parameter, DTensor)}
    new = dict(zip(cut, shards.share([*cut.values()]), strict=True))
    for key, parameter in old.items():
        if parameter.is_meta and key not in cut:
            new[key] = torch.zeros_like(parameter, device=ring.device)
        elif parameter.device != ring.device and key not in cut:  # offload takes a model on the host
            new[key] = parameter.detach().to(ring.device)
    made = {key: as_parameter(tensor, old[key].requires_grad) for key, tensor in new.items()}
    for key, parameter in made.items():
        parameter.__dict__.update(old[key].__dict__)
    for part in model.modules():
        for name, parameter in own_parameters(part).items():
            if id(parameter) in made:
                part._parameters[name] = made[id(parameter)]
        if request.offloads:
            part._buffers.update({n: b.to(ring.device) for n, b in part._buffers.items() if b is not None})
    shards.whole_bytes = sum(p.nbytes for p in model.parameters() if not isinstance(p, DTensor))
    model.__dict__[INFERENCE] = shards
    extend_adapters(model, UnmergedAdapter)
    follow_adapters(_reads_shards, UnmergedAdapter)
    install_save_pretrained(model, ring)
    mark_forwards(model, ring)
    compare_weights(values, ring)
    logger.info("rotate_for_inference: %s: %s", type(model).__name__, repr(shards))  # a record keeps no ring alive


def _reads_shards(layer: nn.Module) -> bool:
    ring = ring_of_module(layer)
    return ring is not None and ring.pulls_from is not None
