"""Operators on DTensors of a ring: sums with plain tensors, gradients that are placed otherwise, empty shards."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from rtp_ext._native import shard_sizes
from rtp_ext.dtensor_hooks import patch_mixing, patch_operators
from rtp_ext.ring.autograd import as_gradient, gradient_handler_of, run_collective, summing_dtype
from rtp_ext.ring.mesh import mesh_roles

_aten = torch.ops.aten


@functools.cache
def correct_operators() -> None:
    """Has DTensor operators on the meshes of rings return what the plain tensors would, or raise on every rank."""
    rules: list[tuple[Any, Any]] = [
        (_aten._local_scalar_dense.default, _item),
        (_aten.linalg_vector_norm.default, _norm),
        (_aten._foreach_norm.Scalar, _norms),
    ]
    for name in ("add.Tensor", "sub.Tensor", "add_.Tensor", "sub_.Tensor", "stack.default", "cat.default"):
        operator = _named(name)
        rules.append((operator, functools.partial(_sum, operator)))
    for name in ("mul", "div", "maximum", "minimum"):
        operator = _named(f"{name}.default" if name.endswith("imum") else f"{name}.Tensor")
        rules.append((operator, functools.partial(_product, operator)))
    for name, least in (("max", True), ("amax", True), ("min", False), ("amin", False)):
        rules.append((_named(f"{name}.default"), functools.partial(_extreme, least)))
    rules.append((_named("_foreach_max.default"), _maxima))
    rules += [(_named(f"{name}.default"), _on_whole) for name in ("argmax", "argmin", "aminmax")]
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if packet.startswith("_foreach_") and packet.endswith("_"):
            rules.append((_named(f"{packet}.{overload or 'default'}"), _counted))
    patch_operators(tuple(rules))
    patch_mixing(_refuse_mixing)


def _named(name: str) -> Any:
    packet, overload = name.split(".")
    return getattr(getattr(_aten, packet, None), overload, None)


def _is_ours(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and tensor.device_mesh in mesh_roles


def _counted(stock: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    stock(*args, **kwargs)
    torch.autograd.graph.increment_version([each for each in args[0] if _is_ours(each) and not each.is_inference()])


# -- sums ----------------------------------------------------------------------------------------------------------


def _sum(operator: Any, stock: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """A sum of plain tensors and DTensors of one number, such as a loss and a penalty, is a plain tensor. An addition
    in place to a shard adds the part of this rank."""
    if operator._schema.is_mutable and isinstance(args[0], DTensor) and isinstance(args[1], DTensor):
        return _sum_in_place(operator, stock, args, kwargs)
    listed = isinstance(args[0], (list, tuple))
    terms = args[0] if listed else args[:2]
    ours = [term for term in terms if isinstance(term, DTensor)]
    plain = [term for term in terms if isinstance(term, torch.Tensor) and not isinstance(term, DTensor)]
    if not plain:
        return stock(*args, **kwargs)
    in_place = operator._schema.is_mutable
    if (in_place and isinstance(terms[0], DTensor)) or not _makes_plain(ours, plain, in_place):
        _expect_constants(operator, plain, ours)
        return stock(*args, **kwargs)
    whole = [_whole(term) if isinstance(term, DTensor) else term for term in terms]
    return operator(whole, *args[1:], **kwargs) if listed else operator(*whole, *args[2:], **kwargs)


def _sum_in_place(operator: Any, stock: Callable[..., Any], args: tuple, kwargs: dict) -> DTensor:
    mine, other, *rest = args
    if not _is_ours(mine) or any(placement.is_partial() for placement in mine.placements):
        return stock(*args, **kwargs)
    if mine.shape == other.shape and mine.device_mesh == other.device_mesh:
        if mine.placements != other.placements:
            other = other.redistribute(mine.device_mesh, mine.placements)
        operator(mine._local_tensor, other._local_tensor, *rest, **kwargs)  # sooner than by rules of DTensor
        return mine
    return stock(*args, **kwargs)


def _makes_plain(ours: list[DTensor], plain: list[torch.Tensor], in_place: bool) -> bool:
    differentiable = torch.is_grad_enabled()
    for term in ours:
        if not _is_ours(term) or term.numel() != 1 or term.device_mesh.ndim != 1:
            return False
        if differentiable and term.requires_grad and term.is_leaf:  # a hook would stay at the parameter
            return False
    if in_place or (differentiable and any(term.requires_grad for term in plain)):
        return True
    graph = differentiable and any(term.requires_grad for term in ours)
    return not graph and any(placement.is_partial() for term in ours for placement in term.placements)


def _whole(term: DTensor) -> torch.Tensor:
    """Returns the value of a term. In backward its gradient, which ranks compute from batches of their own, becomes a
    DTensor with the average."""
    if torch.is_grad_enabled() and term.requires_grad:
        term.register_hook(functools.partial(_average, term.device_mesh))
    value: Any = term.detach()
    with torch.no_grad():
        return value.full_tensor()


def _average(mesh: DeviceMesh, gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    own = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    mean = own.to(summing_dtype(own.dtype), copy=True, memory_format=torch.contiguous_format)
    run_collective(mesh, None, "the gradient of a term", dist.all_reduce, mean, group=mesh.get_group())
    mean = mean.div_(mesh.size()).to(own.dtype)
    return DTensor.from_local(mean, mesh, [Replicate()], run_check=False)


def _product(operator: Any, stock: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """torch keeps the layout of a product, and calls `patch_mixing` the first time alone."""
    if torch.is_grad_enabled():
        plain = [term for term in args[:2] if isinstance(term, torch.Tensor) and not isinstance(term, DTensor)]
        if plain:
            _expect_constants(operator, plain, [term for term in args[:2] if isinstance(term, DTensor)])
    return stock(*args, **kwargs)


def _expect_constants(operator: Any, plain: list[torch.Tensor], ours: list[DTensor]) -> None:
    for scalar in plain:
        _refuse_mixing(operator, scalar, ours[0].device_mesh)


def _refuse_mixing(operator: Any, scalar: torch.Tensor, mesh: Any) -> None:
    if mesh in mesh_roles and scalar.requires_grad and torch.is_grad_enabled():
        raise ValueError(  # of a TypeError Python would say "unsupported operand type(s)"
            f"{operator}: expected DTensors alone, or a sum of one number each, got a plain tensor of shape "
            f"{tuple(scalar.shape)} that requires a gradient together with a DTensor of a converted model: the values "
            "of all ranks are needed, call full_tensor() of the parameter, whose gradient is averaged over the ring"
        )


def _item(stock: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    value = args[0]
    if _is_ours(value) and value.device_mesh.size() > 1 and not all(p.is_replicate() for p in value.placements):
        raise ValueError(
            f"item: expected a whole value, got a DTensor of a converted model with placements {value.placements}, of "
            "which this rank has a part: call full_tensor() before, on every rank"
        )
    return stock(*args, **kwargs)


def gradient_as_placed(parameter: Any) -> None:
    """Gives the gradient of a parameter the placements of the parameter, which torch's operators may have changed. May
    be collective, over all ranks alike. A policy between replicas places gradients by rules of its own."""
    gradient = parameter.grad
    if (
        gradient_handler_of(parameter) is None
        and isinstance(gradient, DTensor)
        and gradient.placements != parameter.placements
    ):
        parameter.grad = gradient.redistribute(parameter.device_mesh, parameter.placements)


# -- empty shards --------------------------------------------------------------------------------------------------


def _norm(stock: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    order, dims = _argument(args, kwargs, 1, "ord", 2), _argument(args, kwargs, 2, "dim", None)
    return stock(_filled(args[0], _of_norm(order), dims), *args[1:], **kwargs)


def _norms(stock: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    neutral = _of_norm(_argument(args, kwargs, 1, "ord", 2))
    return stock([_filled(each, neutral) for each in args[0]], *args[1:], **kwargs)


def _extreme(least: bool, stock: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    dims = _argument(args, kwargs, 1, "dim", None)
    return stock(_filled(args[0], -math.inf if least else math.inf, dims), *args[1:], **kwargs)


def _maxima(stock: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    return stock([_filled(each, -math.inf) for each in args[0]], *args[1:], **kwargs)


def _argument(args: tuple, kwargs: dict, place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _of_norm(order: Any) -> float | None:
    """Returns the number that changes no norm of this order, where torch refuses one of no numbers."""
    if order < 0:
        return math.inf
    return 0.0 if order == math.inf else None


def _filled(tensor: Any, neutral: float | None, dims: Any = None) -> Any:
    """Returns a DTensor whose empty shard on this rank is one of neutral numbers; of others, the DTensor itself.

    dims: the dimensions that are reduced; None or empty: all.
    """
    if neutral is None or not _is_ours(tensor) or tensor._local_tensor.numel() or not tensor.numel():
        return tensor
    local = tensor._local_tensor
    reduced = range(local.ndim) if not dims and dims != 0 else [dims] if isinstance(dims, int) else dims
    kept = {*range(local.ndim)} - {dim % local.ndim for dim in reduced}
    if any(local.shape[dim] == 0 for dim in kept):
        return tensor
    if not local.is_floating_point():
        limits = torch.iinfo(local.dtype)
        neutral = limits.min if neutral < 0 else limits.max
    return as_gradient(local.new_full([max(extent, 1) for extent in local.shape], neutral), tensor._spec)


def _on_whole(stock: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Runs an operator that needs every shard to have numbers on the whole tensor, where some have none."""
    tensor = args[0]
    if _is_ours(tensor):
        cuts = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        if any(isinstance(cut, Shard) and shard_sizes(tensor.shape[cut.dim], ranks)[-1] == 0 for cut, ranks in cuts):
            with torch.no_grad():
                whole = tensor.detach().redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
            return stock(whole, *args[1:], **kwargs)
    return stock(*args, **kwargs)
