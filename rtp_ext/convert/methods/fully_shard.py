"""Methods of converted models that run within a forward's scope; errors for methods of FSDPModule and options of
fully_shard."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import nn

from rtp_ext.convert.scopes import OpenScope, close_root, is_inside, open_root, state_of
from rtp_ext.dtensor_hooks import refuse_ddp, refuse_fully_shard
from rtp_ext.parameters.sharded_module import ShardedModule, extended_class

_FORWARD_METHOD = "_rtp_forward_method"  # attribute of methods that register_forward_method has wrapped


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes a method of a converted model, or of a module in it, run as its forward does.

    A call from outside opens the same scope: the ranks compare their models, parameters of modules that do not rotate
    are gathered, and, if `module` was the argument of fully_rotate, inputs and outputs are cast by its policy. Calls
    from within a forward are valid. Copies of the module keep the method.

    Raises ValueError where the module has not been converted, or has no such method, or where the method returns before
    its body has run (generators and coroutines). Counterpart of torch.distributed.fsdp.register_fsdp_forward_method.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"register_forward_method: expected a torch.nn.Module, got {type(module).__name__}")
    kind = type(module).__name__
    if not is_inside(module):
        raise ValueError(f"register_forward_method: expected a model converted by fully_rotate, got a {kind}")
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"register_forward_method: expected the name of a method of {kind}, got {method_name!r}")
    if hasattr(method, _FORWARD_METHOD):
        return
    function = getattr(method, "__func__", None) if getattr(method, "__self__", None) is module else None
    if any(test(function or method) for test in _LATE):
        raise ValueError(
            f"register_forward_method: expected a method that has run when it returns, got {kind}.{method_name}, a "
            "generator or coroutine"
        )

    @functools.wraps(method)
    def run_as_forward(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        call = method if function is None else functools.partial(function, self)
        return _in_scope(self, call, arguments, keywords)

    setattr(run_as_forward, _FORWARD_METHOD, True)
    setattr(module, method_name, types.MethodType(run_as_forward, module))  # deepcopy binds it to the copy


_LATE = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def _in_scope(module: nn.Module, call: Any, arguments: tuple, keywords: dict) -> Any:
    """Calls a method within the scopes that the forward of its module opens."""
    if state_of(module) is not None:
        output = None
        try:
            cast = open_root(module, arguments, keywords)
            arguments, keywords = cast or (arguments, keywords)
            output = call(*arguments, **keywords)
        finally:
            output = close_root(module, arguments, output)
        return output
    opened = []
    try:
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, OpenScope):
                hook.scope.enter()
                opened.append(hook.scope)
        return call(*arguments, **keywords)
    finally:
        for scope in opened:
            scope.leave()


# -- methods of torch's FSDPModule -----------------------------------------------------------------------------------

_READY = "leave it out: every backward ends with gradients that are ready for use"
_NOTHING_WHOLE = "leave it out: a weight is never whole, so that there is nothing to free and nothing to keep"
_LEARNED = "leave it out: what to send ahead is learned from the pass before; `Ring(prefetch=False)` turns it off"
_TRANSPORT = "choose what shards travel by: `fully_rotate(model, transport=...)`"
_FACTOR = "call `rtp_ext.set_gradient_divide_factor(model, factor)`, and for each part that was converted before"

# Methods of FSDPModule, and their replacements. docs/migration.md has the same table.
INSTEAD = {
    "unshard": "leave it out: a weight is never whole; `parameter.full_tensor()` gathers one",
    "reshard": _NOTHING_WHOLE,
    "set_reshard_after_forward": _NOTHING_WHOLE,
    "set_reshard_after_backward": _NOTHING_WHOLE,
    "set_keep_unsharded_storage": _NOTHING_WHOLE,
    "set_unshard_in_backward": "leave it out: the weights of an embedding do not travel in backward",
    "set_modules_to_forward_prefetch": _LEARNED,
    "set_modules_to_backward_prefetch": _LEARNED,
    "set_post_optim_event": "leave it out: a forward reads shards on the current stream, after what was written there",
    "set_is_last_backward": _READY,
    "set_manual_backward_finalization": _READY,
    "finalize_backward": _READY,
    "set_requires_gradient_sync": "call `rtp_ext.set_requires_gradient_sync(model, ...)` or `rtp_ext.no_sync(model)`",
    "set_requires_all_reduce": "call `rtp_ext.set_requires_all_reduce(model, ...)`",
    "set_gradient_divide_factor": _FACTOR,
    "set_reduce_scatter_divide_factor": _FACTOR,
    "set_all_reduce_hook": "pass a policy of `rtp_ext.outer` as `outer`, or register hooks of parameters",
    "set_custom_all_gather": _TRANSPORT,
    "set_custom_reduce_scatter": _TRANSPORT,
    "set_symm_mem_for_comm": _TRANSPORT,
    "set_allocate_memory_from_process_group_for_comm": "leave it out: hops have slots that the transport allocates",
    "set_force_sum_reduction_for_comms": "leave it out: collectives sum, and the scale is applied beside them",
    "set_reduce_scatter_unused_params": "leave it out: every rank has to call the same layers",
    "set_reduce_scatter_max_input_buffers": "leave it out: at most two partial gradients are in flight",
    "set_separate_reduce_scatter_group": "leave it out: weights and gradients travel on links of their own",
    "reset_iter_state": "leave it out: after an exception the next forward starts afresh; call `zero_grad`",
}


def explain_fsdp_methods(module: nn.Module) -> None:
    """Makes methods of FSDPModule on a module raise an AttributeError that names the replacement, so that `hasattr`
    stays False. Classes with a `__getattr__` of their own keep it."""
    if type(module).__getattr__ is nn.Module.__getattr__:
        module.__class__ = extended_class(type(module), {"__getattr__": _look_up})


def _look_up(self: Any, name: str) -> Any:
    # This also looks up parameters, buffers and modules, in the same time as nn.Module's own lookup.
    own = self.__dict__
    if "_modules" in own and name in own["_modules"]:
        return own["_modules"][name]
    if "_parameters" in own and name in own["_parameters"]:
        return own["_parameters"][name]
    if "_buffers" in own and name in own["_buffers"]:
        return own["_buffers"][name]
    if name in INSTEAD:
        kind = type(self).__name__
        raise AttributeError(
            f"{kind!r} object has no attribute {name!r}: fully_rotate has converted this {kind}, not fully_shard; "
            f"{INSTEAD[name]}"
        )
    return nn.Module.__getattr__(self, name)


# -- options of torch's fully_shard and FSDP ---------------------------------------------------------------------------

_WHOLE_MODEL = "leave it out: one call with the model converts all of it, whose layers rotate one by one"
_ALIKE = "build the same model on every rank (with the same seed), or load a checkpoint"

# Options of fully_shard and of FullyShardedDataParallel, and the equivalent ones.
OPTIONS = {
    "reshard_after_forward": f"{_NOTHING_WHOLE}; route='gather' gathers each layer while it runs",
    "shard_placement_fn": "leave it out: the cut of each parameter is chosen; modules of rtp_ext.nn have shard_dim",
    "dp_mesh_dims": "pass dims=RotationDims(ring=..., replicate=...)",
    "auto_wrap_policy": _WHOLE_MODEL,
    "backward_prefetch": _LEARNED,
    "forward_prefetch": _LEARNED,
    "cpu_offload": "pass offload_policy=CPUOffloadPolicy()",
    "device_id": "move the model to the device of the mesh first, or build it on the meta device",
    "device_mesh": "pass mesh=...",
    "ignored_modules": "pass ignored_params=..., their parameters",
    "ignored_states": "pass ignored_params=...",
    "limit_all_gathers": "leave it out: a ring has two slots for each channel",
    "mixed_precision": "pass mp_policy=MixedPrecisionPolicy(...)",
    "param_init_fn": "call to_empty(device=...) and rtp_ext.init_weights(model, fn) after the conversion",
    "process_group": "pass mesh=..., which may be a process group",
    "sharding_strategy": "pass dims=RotationDims(ring=..., replicate=...) for replicas of a ring",
    "sync_module_states": _ALIKE,
    "use_orig_params": "leave it out: parameters keep their names, and are DTensors",
}
_P = ParamSpec("_P")
_T = TypeVar("_T")


def explain_options(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Makes an option of fully_shard or FSDP that a function does not have a TypeError that names the equivalent."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*arguments: _P.args, **options: _P.kwargs) -> _T:
        for name in options:
            if name not in known and name in OPTIONS:
                raise TypeError(f"{function.__name__}: {name} is an option of fully_shard or FSDP; {OPTIONS[name]}")
        return function(*arguments, **options)

    return call


# -- other data parallelism of torch -----------------------------------------------------------------------------------


_REFUSED_DDP = (
    "DistributedDataParallel: expected a plain model, got one that fully_rotate has converted: its parameters are "
    "shards of a ring, and its gradients are averaged by its own backward. Train the model as it is; in training "
    "loops of others take RotationTrainer instead of Trainer, RotationAccelerator instead of Accelerator, "
    "RotationStrategy instead of strategy='ddp' (rtp_ext.integrations, docs/frameworks.md)"
)
_REFUSED_FULLY_SHARD = (
    "fully_shard: expected a plain module, got one that fully_rotate has converted: its parameters are shards of a "
    "ring already, and are never whole. Leave out fully_shard, or convert the plain model by one of the two"
)


def refuse_others(root: nn.Module) -> None:
    """Makes DistributedDataParallel and fully_shard of a converted model raise ValueError, before they change it."""
    refuse_ddp(root, _REFUSED_DDP)
    for part in root.modules():
        if part is root or isinstance(part, ShardedModule):
            refuse_fully_shard(part, _REFUSED_FULLY_SHARD)
