"""fully_rotate: one call that converts a model."""

from __future__ import annotations

import datetime
import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from rtp_ext.nn import RotatedEmbedding, RotatedLinear
from rtp_ext.nn._base import RotatedModule
from rtp_ext.nn.gathered import ForwardScope, make_averaged, make_gathered
from rtp_ext.ring import Ring

logger = logging.getLogger("rtp_ext")

_STATE = "_rotation_state"


class RotationState(ForwardScope):
    """What a converted model's root keeps: the ring, the policy, and what the ranks have agreed on."""

    def __init__(self, ring: Ring, mp_policy: MixedPrecisionPolicy) -> None:
        super().__init__(ring, mp_policy)
        self.agreed: list[tuple[int, torch.dtype, bool]] | None = None

    def check_agreement(self, root: nn.Module) -> None:
        """Before the first forward, and whenever the set of parameters changes, all ranks compare their models."""
        named = list(root.named_parameters())
        now = [(id(parameter), parameter.dtype, parameter.requires_grad) for _, parameter in named]
        if now == self.agreed:
            return
        mine = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in named]
        told = self.ring.exchange(mine)
        for rank, theirs in enumerate(told):
            if theirs != told[0]:
                raise ValueError(f"{type(root).__name__}: {_first_difference(told[0], theirs, rank)}")
        self.agreed = now


def _first_difference(expected: list[tuple], actual: list[tuple], rank: int) -> str:
    for left, right in zip(expected, actual, strict=False):
        if left != right:
            return (
                f"the model differs between ranks: expected {_entry(left)} (rank 0), got {_entry(right)} on rank {rank}"
            )
    longer, where = (expected, 0) if len(expected) > len(actual) else (actual, rank)
    extra = longer[min(len(expected), len(actual))]
    return (
        f"ranks have different models: expected {len(expected)} parameters (rank 0), got {len(actual)} on rank "
        f"{rank}; {_entry(extra)} is on rank {where} only"
    )


def _entry(entry: tuple) -> str:
    name, shape, dtype, requires_grad = entry
    return f"{name} {list(shape)} {dtype}{'' if requires_grad else ' frozen'}"


def fully_rotate(
    module: nn.Module,
    *,
    mesh: DeviceMesh | dist.ProcessGroup | Ring | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    in_place: bool = False,
    route: str = "auto",
    transport: str = "auto",
    timeout: float | datetime.timedelta = 600.0,
) -> nn.Module:
    """Spreads every parameter of a model over a ring, in place, and returns the same module.

    Linear and embedding layers rotate: their shards visit every rank while it computes, and no rank ever holds a whole
    one. The parameters of all other modules are sharded too and gathered while their module needs them. Every rank
    keeps its own batch; gradients are averaged over the ring. Parameters become DTensors sharded over the mesh, under
    unchanged names. Build the model alike on every rank (the same seed), or load the plain model's state dict afterwards
    with torch.distributed.checkpoint.state_dict.set_model_state_dict and full_state_dict=True.

    Args:
        module: the model, its parameters on the device of the mesh or on the meta device.
        mesh: a one-dimensional DeviceMesh, a process group, a Ring, or None for the default process group.
        mp_policy: param_dtype is what shards travel and compute in, reduce_dtype what gradients travel in (default
            float32); cast_forward_inputs and output_dtype apply to the whole model.
        ignored_params: left as they are, with the modules that own them. They are not averaged.
        in_place: the home shards themselves travel, with one slot instead of two.
        route, transport, timeout: see Ring.

    Raises ValueError where the model, or part of it, was converted before. Collective: makes a ring.
    Source: RTP, arXiv 2311.01635.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_rotate: expected a torch.nn.Module, got {type(module).__name__}")
    for name, part in module.named_modules():
        if _STATE in part.__dict__:
            raise ValueError(
                f"fully_rotate: expected a model that has not been converted, got one whose "
                f"{f'module {name}' if name else 'root'} ({type(part).__name__}) already was"
            )
    ring = mesh if isinstance(mesh, Ring) else Ring(mesh, transport=transport, route=route, timeout=timeout)
    state = RotationState(ring, mp_policy or MixedPrecisionPolicy())
    ignored = {id(parameter) for parameter in ignored_params or ()}
    _check_device(module, ring)
    _convert(module, ring, state, ignored, in_place)
    object.__setattr__(module, _STATE, state)
    module.register_forward_pre_hook(_open_root, with_kwargs=True, prepend=True)
    module.register_forward_hook(_close_root, always_call=True)
    return module


def ring_of(module: nn.Module) -> Ring:
    """The ring of a model that `fully_rotate` converted. Raises ValueError for any other."""
    state = module.__dict__.get(_STATE)
    if state is None:
        raise ValueError(f"ring_of: expected a model converted by fully_rotate, got a {type(module).__name__}")
    return state.ring


def _check_device(module: nn.Module, ring: Ring) -> None:
    for name, parameter in module.named_parameters():
        if parameter.device.type not in (ring.device.type, "meta"):
            raise TypeError(
                f"fully_rotate: expected {name} on {ring.device.type} (the ring's device) or meta, got "
                f"{parameter.device}"
            )


def _convert(root: nn.Module, ring: Ring, state: RotationState, ignored: set[int], in_place: bool) -> None:
    options: dict[str, Any] = {"in_place": in_place, "mp_policy": state.mp_policy}
    memo: dict[int, nn.Parameter] = {}
    counts: Counter[str] = Counter()
    modules = list(root.named_modules())
    tied = _tied_parameters(modules)
    _check_ties(modules, ignored)
    leftovers = []
    for name, part in modules:
        own = [parameter for parameter in part._parameters.values() if parameter is not None]
        if not own:
            continue
        label = name or type(part).__name__
        kind = type(part).__name__
        if isinstance(part, RotatedModule) or all(isinstance(parameter, DTensor) for parameter in own):
            counts[f"{kind}: already sharded, left alone"] += 1
        elif any(id(parameter) in ignored for parameter in own):
            counts[f"{kind}: ignored"] += 1
        elif type(part) is nn.Linear:
            part.__class__ = RotatedLinear
            part._rotate(ring, name=label, memo=memo, **options)  # type: ignore[operator]
            counts["Linear: rotated"] += 1
        elif type(part) is nn.Embedding and (problem := RotatedEmbedding.refusal(part)) is not None:
            make_averaged(part, ring)
            logger.warning("fully_rotate: %s stays whole on every rank: %s; its gradient is averaged", label, problem)
        elif type(part) is nn.Embedding:
            part.__class__ = RotatedEmbedding
            # a tied table is also somebody's weight [vocabulary, features], cut along its outputs
            shard_dim = 0 if id(part.weight) in tied else 1
            part._rotate(ring, shard_dim=shard_dim, name=label, memo=memo, **options)  # type: ignore[operator]
            counts["Embedding: rotated"] += 1
        else:
            leftovers.append((part, kind))
    for part, kind in leftovers:
        if ring.mesh is None:
            counts[f"{kind}: left whole (emulated ring)"] += 1
        else:
            make_gathered(part, ring, state, memo)
            counts[f"{kind}: sharded, gathered while in use"] += 1
    _open_scopes(root, [part for part, _ in leftovers])
    if in_place:
        _say_what_in_place_means(ring, state.mp_policy)
    for line, count in counts.items():
        logger.info("fully_rotate: %d x %s", count, line)


def _say_what_in_place_means(ring: Ring, mp_policy: MixedPrecisionPolicy) -> None:
    if ring.transport == "shm":
        logger.info("fully_rotate: in_place: transport shm receives in its own slots, so that copies travel")
    elif mp_policy.param_dtype is not None:
        logger.info("fully_rotate: in_place: shards are cast to %s, so that copies travel", mp_policy.param_dtype)
    elif ring.route == "direct":
        logger.info("fully_rotate: in_place: every hop of a weight goes to the neighbour, whatever the route")


def _check_ties(modules: list[tuple[str, nn.Module]], ignored: set[int]) -> None:
    """A parameter cannot stay whole for one of its owners and be sharded for another."""
    whole: dict[int, str] = {}
    sharded: dict[int, str] = {}
    for name, part in modules:
        own = [id(parameter) for parameter in part._parameters.values() if parameter is not None]
        refused = type(part) is nn.Embedding and RotatedEmbedding.refusal(part) is not None
        (whole if refused or ignored.intersection(own) else sharded).update(dict.fromkeys(own, name))
    for parameter in whole.keys() & sharded.keys():
        raise ValueError(
            f"fully_rotate: {sharded[parameter]} shares a parameter with {whole[parameter]}, whose parameters stay "
            "whole: expected all modules that share it to be rotated, or the parameter in ignored_params"
        )


def _tied_parameters(modules: list[tuple[str, nn.Module]]) -> set[int]:
    """Ids of parameters that more than one module owns."""
    owners = Counter(
        id(parameter) for _, part in modules for parameter in part._parameters.values() if parameter is not None
    )
    return {parameter for parameter, count in owners.items() if count > 1}


# A module below the root may be called on its own, or by activation checkpointing in backward. Every module with
# gathered parameters in it therefore opens a scope around its forward.
def _open_scopes(root: nn.Module, leftovers: list[nn.Module]) -> None:
    wanted = {id(part) for part in leftovers}
    for part in root.modules():
        if part is not root and any(id(inner) in wanted for inner in part.modules()):
            part.register_forward_pre_hook(_open_scope, prepend=True)
            part.register_forward_hook(_close_scope, always_call=True)


def _scope_of(part: nn.Module) -> ForwardScope:
    inner = next(inner for inner in part.modules() if "scope" in inner.__dict__)
    return inner.scope  # type: ignore[return-value]


def _open_scope(part: nn.Module, _arguments: Any) -> None:
    _scope_of(part).enter()


def _close_scope(part: nn.Module, _arguments: Any, _output: Any) -> None:
    _scope_of(part).leave()


def _open_root(root: nn.Module, arguments: tuple, keywords: dict) -> tuple[tuple, dict] | None:
    state: RotationState = root.__dict__[_STATE]
    state.enter()
    state.root_depth += 1
    state.ring.check_alive(f"{type(root).__name__} forward")
    if state.depth == 1:
        state.check_agreement(root)
    policy = state.mp_policy
    if policy.param_dtype is None or not policy.cast_forward_inputs:
        return None
    return tree_map(_caster(policy.param_dtype), (arguments, keywords))


def _close_root(root: nn.Module, _arguments: Any, output: Any) -> Any:
    state: RotationState = root.__dict__[_STATE]
    state.leave()
    state.root_depth = max(state.root_depth - 1, 0)
    dtype = state.mp_policy.output_dtype
    return output if dtype is None else tree_map(_caster(dtype), output)


def _caster(dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return cast
