"""fully_rotate: one call that converts a model."""

from __future__ import annotations

import datetime
import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from rtp_ext._autograd import expect_own_shard
from rtp_ext.nn.adapters import let_adapters_merge
from rtp_ext.nn.bundled import OWN_HOOKS
from rtp_ext.nn.gathered import ForwardScope, GatheredModule, average_gradient
from rtp_ext.rewrite import Rewriter
from rtp_ext.ring import Ring

logger = logging.getLogger("rtp_ext")

_STATE = "_rotation_state"


class RotationState(ForwardScope):
    """What a converted model's root keeps: the ring, the policy, and what the ranks have agreed on."""

    def __init__(self, ring: Ring, mp_policy: MixedPrecisionPolicy, root: nn.Module | None = None) -> None:
        super().__init__(ring, mp_policy)
        self.root = None if root is None else weakref.ref(root)
        self.agreed: list[tuple[int, torch.dtype, bool]] | None = None
        self.ignored: set[str] = set()  # names of parameters that are not averaged

    def __deepcopy__(self, memo: dict) -> RotationState:
        twin = super().__deepcopy__(memo)
        assert isinstance(twin, RotationState)
        twin.ignored = set(self.ignored)
        copied = memo.get(id(self.root())) if self.root is not None else None
        twin.root = None if copied is None else weakref.ref(copied)
        return twin

    def enter(self) -> None:
        super().enter()
        # A part may be called without the model around it; activation checkpointing calls parts in backward.
        if self.depth == 1 and self.root is not None and torch._C._current_graph_task_id() == -1:
            root = self.root()
            if root is not None:
                self.ring.check_alive(f"{type(root).__name__} forward")
                self.check_agreement(root)

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
        self._average_newcomers(named)
        let_adapters_merge(root)
        self.agreed = now

    def _average_newcomers(self, named: list[tuple[str, nn.Parameter]]) -> None:
        """Parameters that were added after conversion, such as adapters', stay whole, and are averaged."""
        if self.ring.mesh is None:
            return
        added = [
            name
            for name, parameter in named
            if parameter.requires_grad
            and not isinstance(parameter, DTensor)
            and name not in self.ignored
            and average_gradient(parameter, self.ring)
        ]
        if added:
            logger.info(
                "%d parameters were added after fully_rotate (%s, ...): they stay whole on every rank, and their "
                "gradients are averaged",
                len(added),
                added[0],
            )


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
    bundle: bool | str = True,
    loss_head: str | None = None,
    route: str = "auto",
    transport: str = "auto",
    timeout: float | datetime.timedelta = 600.0,
) -> nn.Module:
    """Spreads every parameter of a model over a ring, in place, and returns the same module.

    Linear, embedding, convolution and attention layers and experts rotate: their shards visit every rank while it
    computes, and no rank ever holds a whole one. Subclasses of torch's layers are not touched; the parameters of all
    modules that do not rotate are sharded too, and gathered while their module needs them. Every rank
    keeps its own batch; gradients are averaged over the ring. Parameters become DTensors sharded over the mesh, under
    unchanged names. Build the model alike on every rank (the same seed), or load the plain model's weights afterwards:
    load_safetensors, or torch.distributed.checkpoint.state_dict.set_model_state_dict with full_state_dict=True.

    Args:
        module: the model, its parameters on the device of the mesh or on the meta device.
        mesh: a one-dimensional DeviceMesh, a process group, a Ring, or None for the default process group.
        mp_policy: param_dtype is what shards travel and compute in, reduce_dtype what gradients travel in (default
            float32); cast_forward_inputs and output_dtype apply to the whole model.
        ignored_params: left as they are, with the modules that own them. They are not averaged.
        in_place: the home shards themselves travel, with one slot instead of two.
        bundle: rotate MLP blocks (torch's transformer layers, nn.Sequential of linear, activation, linear, and the
            blocks of transformers' GPT-2, Llama, Mistral, Mixtral, Qwen, BERT and ViT) as bundles, and the q, k and v
            projections of attention together; "recompute": bundled MLPs and experts keep no hidden value for backward.
            One log line for each kind of module says what became of it.
        loss_head: "fused": causal language models of the transformers package compute vocabulary head and loss as one
            where labels are given; their output then has no logits.
        route, transport, timeout: see Ring.

    Raises ValueError where the model, or part of it, was converted before, or where loss_head="fused" finds no model
    that it knows. Collective: makes a ring.
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
    if bundle not in (True, False, "recompute"):
        raise ValueError(f"fully_rotate: expected bundle to be True, False or 'recompute', got {bundle!r}")
    if loss_head not in (None, "fused"):
        raise ValueError(f"fully_rotate: expected loss_head to be None or 'fused', got {loss_head!r}")
    ring = mesh if isinstance(mesh, Ring) else Ring(mesh, transport=transport, route=route, timeout=timeout)
    state = RotationState(ring, mp_policy or MixedPrecisionPolicy(), module)
    ignored = {id(parameter) for parameter in ignored_params or ()}
    _check_device(module, ring)
    state.ignored = {name for name, p in module.named_parameters(remove_duplicate=False) if id(p) in ignored}
    Rewriter(module, ring, state, ignored=ignored, in_place=in_place, bundle=bundle, loss_head=loss_head).run()
    _open_scopes(module)
    if in_place:
        _say_what_in_place_means(ring, state.mp_policy)
    object.__setattr__(module, _STATE, state)
    module.register_forward_pre_hook(_open_root, with_kwargs=True, prepend=True)
    module.register_forward_hook(_close_root, always_call=True)
    module.register_load_state_dict_pre_hook(_expect_own_shards)
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


def _say_what_in_place_means(ring: Ring, mp_policy: MixedPrecisionPolicy) -> None:
    if ring.transport == "shm":
        logger.info("fully_rotate: in_place: transport shm receives in its own slots, so that copies travel")
    elif mp_policy.param_dtype is not None:
        logger.info("fully_rotate: in_place: shards are cast to %s, so that copies travel", mp_policy.param_dtype)
    elif ring.hop_route == "direct":
        logger.info("fully_rotate: in_place: every hop of a weight goes to the neighbour, whatever the route")


# A module below the root may be called on its own, or by activation checkpointing in backward. Every module with
# gathered parameters in it therefore opens a scope around its forward.
def _open_scopes(root: nn.Module) -> None:
    for part in root.modules():
        if part is not root and any(isinstance(inner, GatheredModule) for inner in part.modules()):
            part.register_forward_pre_hook(_open_scope, prepend=True)
            part.register_forward_hook(_close_scope, always_call=True)


def _scope_of(part: nn.Module) -> ForwardScope:
    inner = next(inner for inner in part.modules() if "scope" in inner.__dict__)
    return inner.scope  # type: ignore[return-value]


def _open_scope(part: nn.Module, _arguments: Any) -> None:
    _scope_of(part).enter()


def _close_scope(part: nn.Module, _arguments: Any, _output: Any) -> None:
    _scope_of(part).leave()


for _hook in (_open_scope, _close_scope):
    setattr(_hook, OWN_HOOKS, True)


def _expect_own_shards(root: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in root.named_parameters(remove_duplicate=False):
        expect_own_shard(state_dict.get(prefix + name), parameter, f"load_state_dict of {prefix}{name}")


def _open_root(root: nn.Module, arguments: tuple, keywords: dict) -> tuple[tuple, dict] | None:
    state: RotationState = root.__dict__[_STATE]
    state.root_depth += 1
    if state.root_depth == 1 and torch._C._current_graph_task_id() == -1:
        state.ring.begin_forward()
    state.enter()
    state.ring.check_alive(f"{type(root).__name__} forward")
    policy = state.mp_policy
    if policy.param_dtype is None or not policy.cast_forward_inputs:
        return None
    return tree_map(_caster(policy.param_dtype), (arguments, keywords))


def _close_root(root: nn.Module, _arguments: Any, output: Any) -> Any:
    state: RotationState = root.__dict__[_STATE]
    state.leave()
    state.root_depth = max(state.root_depth - 1, 0)
    if state.root_depth == 0:
        state.ring.end_forward()
    dtype = state.mp_policy.output_dtype
    return output if dtype is None else tree_map(_caster(dtype), output)


def _caster(dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return cast
