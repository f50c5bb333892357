"""Functions that compilers trace in place of the eager functions of rotated layers; they call operators.

They run once, while a graph is traced. They return None (or False) for calls that operators do not support; the layer
then calls the eager function, at which the graph breaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from rtp_ext.compilers import outermost
from rtp_ext.functional.torch_compile.library import register_effects


def _effects() -> bool:
    register_effects()
    return True


_effects._dynamo_marked_constant = True  # type: ignore[attr-defined]  # runs while a graph is traced


def tracing(ring: Any) -> bool:
    """Returns whether operations of the ring become part of the traced graph. Requires
    torch.compiler.is_dynamo_compiling."""
    return ring.traceable and outermost() and _effects()


# -- whether the traced graph writes to a tensor -----------------------------------------------------------------------

_watched = WeakTensorKeyDictionary()  # versions, by fake tensor
_unchanged = [False]  # result of the last `_compare`


def _note(context: Any) -> None:
    fake = context.get_local("x").as_fake()
    _watched[fake] = fake._version


def _compare(context: Any) -> None:
    fake = context.get_local("x").as_fake()
    _unchanged[0] = _watched.get(fake) == fake._version


def _answer() -> bool:
    return _unchanged[0]


_answer._dynamo_marked_constant = True  # type: ignore[attr-defined]


def watch(x: Tensor) -> None:
    from torch._dynamo.comptime import comptime  # imports the compiler

    comptime(_note)


def unchanged(x: Tensor) -> bool:
    """Returns whether the traced graph has not written to `x` since `watch(x)`."""
    from torch._dynamo.comptime import comptime

    comptime(_compare)
    return _answer()


# -- operations --------------------------------------------------------------------------------------------------------


def local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def compute_dtype(
    asked: torch.dtype | None, weight: Tensor, device: torch.device, autocasts: bool = True
) -> torch.dtype:
    """Returns the compute dtype by the rule of Call.of."""
    if autocasts and torch.is_autocast_enabled(device.type) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(device.type)
    return asked or weight.dtype


def operand(x: Any, dtype: torch.dtype, features: int, device: torch.device) -> Tensor | None:
    """Returns [..., features] as [rows, features] in the compute dtype; None if the eager function would refuse it."""
    if not isinstance(x, Tensor) or isinstance(x, DTensor) or x.dim() < 1 or x.device.type != device.type:
        return None
    if x.dtype != dtype and x.is_floating_point() and torch.is_autocast_enabled(device.type):
        x = x.to(dtype)
    if x.dtype != dtype or x.shape[-1] != features:
        return None
    return x if x.dim() == 2 else x.reshape(-1, features)


def rotate(
    owner: Any,
    ring: Any,
    operation: str,
    inputs: list[Tensor],
    parameters: Sequence[Tensor],
    sizes: list[int],
    dtype: torch.dtype,
) -> list[Tensor]:
    grad = torch.is_grad_enabled()
    needs = [grad and tensor.requires_grad for tensor in [*inputs, *parameters]]
    params = [local(parameter) for parameter in parameters]
    found = torch.ops.rtp_ext.forward_2(owner._rtp_number, ring.name, operation, inputs, params, sizes, needs, dtype)
    return found[:-1] if any(needs) else found  # the last one is the stamp for the backward


def shaped(y: Tensor, like: Tensor) -> Tensor:
    """Returns [rows, features] with the leading dimensions of `like`."""
    return y if like.dim() == 2 else y.reshape(*like.shape[:-1], y.shape[-1])


def linears(owner: Any, layers: list[Any], x: Tensor, transposed: bool) -> list[Tensor] | None:
    """Computes layers that share one input and are cut along their outputs. `owner` is the registered object."""
    first = layers[0]
    device = first.ring.device
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    dtype = compute_dtype(first.mp_policy.param_dtype, weights[0], device)
    outputs, inputs = (1, 0) if transposed else (0, 1)
    rows = operand(x, dtype, weights[0].shape[inputs], device)
    if rows is None or first.in_place:
        return None
    parameters = []
    for weight, bias in zip(weights, biases, strict=True):
        parameters.append(weight)
        if bias is not None:
            parameters.append(bias)
    sizes = [weights[0].shape[inputs], *[weight.shape[outputs] for weight in weights]]
    return [shaped(y, x) for y in rotate(owner, first.ring, "linears", [rows], parameters, sizes, dtype)]


def linear(layer: Any, x: Tensor, by_inputs: bool, transposed: bool) -> Tensor | None:
    """One layer; `by_inputs`: cut along its input features."""
    if not by_inputs:
        found = linears(layer, [layer], x, transposed)
        return None if found is None else found[0]
    weight, bias = layer.weight, layer.bias
    device = layer.ring.device
    dtype = compute_dtype(layer.mp_policy.param_dtype, weight, device)
    outputs, inputs = (1, 0) if transposed else (0, 1)
    rows = operand(x, dtype, weight.shape[inputs], device)
    if rows is None or layer.in_place:
        return None
    sizes = [weight.shape[inputs], weight.shape[outputs]]
    parameters = [weight] if bias is None else [weight, bias]
    return shaped(rotate(layer, layer.ring, "partial linear", [rows], parameters, sizes, dtype)[0], x)


def mlp(block: Any, up: Any, down: Any, gate: Any, x: Tensor, recompute: bool, transposed: bool) -> Tensor | None:
    """Computes an MLP. `block` is the registered object; up, down and gate (or None) are its layers."""
    device = up.ring.device
    dtype = compute_dtype(up.mp_policy.param_dtype, up.weight, device)
    outputs, inputs = (1, 0) if transposed else (0, 1)
    features, hidden = up.weight.shape[inputs], up.weight.shape[outputs]
    rows = operand(x, dtype, features, device)
    if rows is None or up.in_place:
        return None
    layers = [up, down] if gate is None else [gate, up, down]
    parameters = []
    for layer in layers:
        parameters.append(layer.weight)
        if layer.bias is not None:
            parameters.append(layer.bias)
    keep = not recompute and torch.is_grad_enabled() and any([tensor.requires_grad for tensor in [rows, *parameters]])
    kept = ([hidden] if gate is None else [hidden, hidden]) if keep else []
    sizes = [features, down.weight.shape[outputs], *kept]
    return shaped(rotate(block, up.ring, "mlp", [rows], parameters, sizes, dtype)[0], x)


def embedding(layer: Any, ids: Any) -> Tensor | None:
    device = layer.ring.device
    if not isinstance(ids, Tensor) or isinstance(ids, DTensor) or ids.dtype not in (torch.int32, torch.int64):
        return None
    if ids.device.type != device.type or layer.in_place:
        return None
    dtype = compute_dtype(layer.mp_policy.param_dtype, layer.weight, device, autocasts=False)
    flat = ids.reshape(-1).to(torch.int64)
    features = layer.weight.shape[1]
    (y,) = rotate(layer, layer.ring, "embedding", [flat], [layer.weight], [features], dtype)
    return y.reshape(*ids.shape, features)


def cross_entropy(layer: Any, x: Tensor, targets: Any, ignore_index: int, reduction: str) -> Tensor | None:
    """Computes the loss of a vocabulary head; `layer` is the head."""
    device = layer.ring.device
    dtype = compute_dtype(layer.mp_policy.param_dtype, layer.weight, device)
    features = layer.weight.shape[1]
    rows = operand(x, dtype, features, device)
    if rows is None or layer.in_place or not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    if targets.shape != x.shape[:-1] or targets.dtype == torch.bool:
        return None
    flat = targets.reshape(-1).to(torch.int64)
    parameters = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    loss = rotate(layer, layer.ring, "linear cross-entropy", [flat, rows], parameters, [features], dtype)[0]
    if reduction == "none":
        return loss.view(targets.shape)
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / flat.ne(ignore_index).sum()


def gather(owner: Any, ring: Any, parameters: list[Tensor], policy: Any) -> list[Tensor]:
    """Gathers whole parameters of `owner`, the registered object."""
    shapes, dtypes = [], []
    for parameter in parameters:
        shapes += [parameter.dim(), *parameter.shape]
        floating = parameter.is_floating_point()
        dtypes.append(policy.param_dtype if floating and policy.param_dtype is not None else parameter.dtype)
    shards = [local(parameter) for parameter in parameters]
    return torch.ops.rtp_ext.gather_2(owner._rtp_number, ring.name, shards, shapes, dtypes)


def scope(state: Any, event: str, split: bool = False) -> None:
    """Marks the begin or end of a scope in the forward of a model."""
    kind = state.ring.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    torch.ops.rtp_ext.scope_2(state._rtp_number, state.ring.name, event, split, autocast)
