"""Modules whose parameters are too small or too special to rotate: norms, stray parameters, unknown modules.

The registered Parameter is a DTensor shard and stays registered. While a forward of the converted model runs, the
module sees the gathered parameter instead, through a property of its subclass; autograd's backward of the gather
averages the gradient over the ring. Outside, the module shows the Parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from rtp_ext._native import shard_sizes
from rtp_ext.nn._base import LiveModule
from rtp_ext.ring import Ring
from rtp_ext.sharding import local_shard, shard_dim_of, shard_parameter

_ALIGNMENT = 16  # bytes, of a parameter inside the flat buffer


class ForwardScope:
    """How deep one converted model is inside forwards, and what was gathered for the outermost one."""

    def __init__(self, ring: Ring, mp_policy: MixedPrecisionPolicy) -> None:
        self.ring = ring
        self.mp_policy = mp_policy
        self.depth = 0
        self.gathered: dict[int, tuple[Any, dict[str, torch.Tensor]]] = {}  # by id of the owner

    def enter(self) -> None:
        self.depth += 1

    def leave(self) -> None:
        self.depth = max(self.depth - 1, 0)
        if self.depth == 0:
            self.gathered.clear()

    def __deepcopy__(self, memo: dict) -> ForwardScope:
        twin = ForwardScope(self.ring, self.mp_policy)
        memo[id(self)] = twin
        return twin

    def parameter(self, owner: GatheredModule, name: str) -> Any:
        """The parameter `name` of `owner`: gathered inside a forward, the registered one outside."""
        registered = owner._parameters[name]  # type: ignore[attr-defined]
        if self.depth == 0 or registered is None or name not in owner.gathered_names:
            return registered
        own = {key: owner._parameters[key] for key in owner.gathered_names}  # type: ignore[attr-defined]
        state = tuple((p.to_local().data_ptr(), p._version, p.dtype, p.requires_grad) for p in own.values())
        key = (torch.is_grad_enabled(), state)
        known = self.gathered.get(id(owner))
        if known is None or known[0] != key:
            known = (key, dict(zip(own, gather(list(own.values()), self.ring, self.mp_policy), strict=True)))
            self.gathered[id(owner)] = known
        return known[1][name]


class GatheredModule(LiveModule):
    """Mixin of modules whose own parameters are gathered. Made by `make_gathered`."""

    scope: ForwardScope
    gathered_names: tuple[str, ...]


_CLASSES: dict[tuple[type, tuple[str, ...]], type] = {}


def make_gathered(
    module: nn.Module, ring: Ring, scope: ForwardScope, memo: dict[int, nn.Parameter]
) -> None:
    """Shards the module's own parameters along their first dimension and shows them gathered in forwards."""
    names = tuple(name for name, parameter in module._parameters.items() if parameter is not None)
    for name in names:
        parameter = module._parameters[name]
        if id(parameter) not in memo:
            memo[id(parameter)] = shard_parameter(parameter, ring, 0)
        module._parameters[name] = memo[id(parameter)]
    base = type(module)
    if (base, names) not in _CLASSES:
        properties = {name: property(lambda self, name=name: self.scope.parameter(self, name)) for name in names}
        _CLASSES[base, names] = type(f"Gathered{base.__name__}", (GatheredModule, base), properties)
    module.__class__ = _CLASSES[base, names]
    module.scope = scope  # type: ignore[assignment]
    module.gathered_names = names  # type: ignore[assignment]


def gather(parameters: list[torch.Tensor], ring: Ring, mp_policy: MixedPrecisionPolicy) -> list[torch.Tensor]:
    """Whole parameters from their shards: one flat all-gather; in backward one flat, averaging reduction. Collective."""
    locals_ = []
    for parameter in parameters:
        local = local_shard(parameter)
        if mp_policy.param_dtype is not None and local.is_floating_point():
            local = local.to(mp_policy.param_dtype)
        locals_.append(local)
    if ring.mesh is None:
        raise ValueError("gather: parameters of an emulated ring stay whole")
    layout = [(tuple(p.shape), shard_dim_of(p)) for p in parameters]
    return list(_Gather.apply(ring, layout, mp_policy.reduce_dtype, *locals_))


class _Gather(torch.autograd.Function):
    """Shards along dimension 0 are gathered as bytes; replicated ones (layout dim None) are whole already."""

    @staticmethod
    def forward(ctx, ring: Ring, layout: list[tuple[tuple[int, ...], int | None]], reduce_dtype, *locals_):
        ctx.ring, ctx.layout, ctx.reduce_dtype = ring, layout, reduce_dtype
        ctx.dtypes = [local.dtype for local in locals_]
        sharded = [i for i, (_, dim) in enumerate(layout) if dim is not None]
        sizes, offsets, total = {}, {}, 0
        for i in sharded:
            shape, dim = layout[i]
            largest = shard_sizes(shape[dim], ring.size)[0]
            sizes[i] = _elements(shape) // max(shape[dim], 1) * largest
            offsets[i] = total
            total += -(-sizes[i] * locals_[i].element_size() // _ALIGNMENT) * _ALIGNMENT
        flat = torch.zeros(total, dtype=torch.uint8, device=ring.device)
        for i in sharded:
            count = locals_[i].numel()
            section = flat.narrow(0, offsets[i], count * locals_[i].element_size())
            section.view(locals_[i].dtype).copy_(locals_[i].reshape(-1))
        every = ring.all_gather(flat) if total else flat.unsqueeze(0)
        whole = []
        for i, local in enumerate(locals_):
            shape, dim = layout[i]
            if dim is None:
                whole.append(local.clone())
                continue
            pieces = []
            for owner, extent in enumerate(shard_sizes(shape[dim], ring.size)):
                piece_shape = [*shape[:dim], extent, *shape[dim + 1 :]]
                count = _elements(piece_shape)
                section = every[owner].narrow(0, offsets[i], count * local.element_size())
                pieces.append(section.view(local.dtype).view(piece_shape))
            whole.append(torch.cat(pieces, dim))
        return tuple(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        ring, layout = ctx.ring, ctx.layout
        wanted = [i for i in range(len(layout)) if ctx.needs_input_grad[3 + i]]
        result: list[torch.Tensor | None] = [None] * len(layout)
        if wanted:
            double = any(gradients[i].dtype == torch.float64 for i in wanted)
            dtype = ctx.reduce_dtype or (torch.float64 if double else torch.float32)
            flat = torch.cat([gradients[i].reshape(-1).to(dtype) for i in wanted])
            ring.all_reduce(flat).div_(ring.size)
            for i, summed in zip(wanted, flat.split([gradients[i].numel() for i in wanted]), strict=True):
                shape, dim = layout[i]
                averaged = summed.view(shape)
                if dim is not None:
                    sizes = shard_sizes(shape[dim], ring.size)
                    averaged = averaged.narrow(dim, sum(sizes[: ring.rank]), sizes[ring.rank])
                # a copy: the gradient must not keep the whole buffer alive
                result[i] = averaged.to(ctx.dtypes[i], copy=True, memory_format=torch.contiguous_format)
        return None, None, None, *result


def _elements(shape: Any) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether a parameter already lives on a mesh."""
    return isinstance(parameter, DTensor)
