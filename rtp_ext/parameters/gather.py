"""Gathers whole parameters with one flat collective: for parameters that do not rotate."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from rtp_ext._native import shard_sizes, share_version
from rtp_ext.parameters.extensions import Extended, agree, is_extended, parts_of_gradient, summed_inside
from rtp_ext.parameters.sharding import held, local_shard
from rtp_ext.parameters.wrappers import inner_tensors, type_name, with_inner
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import first_order_only, gradient_handler_of, rounded, summing_dtype, unseen, wanted
from rtp_ext.ring.cpu_offload import on_device
from rtp_ext.ring.mesh import ring_dim

_ALIGNMENT = 16  # bytes; of a parameter inside the flat buffer


@unseen
def gather(
    parameters: list[torch.Tensor],
    ring: Ring,
    mp_policy: MixedPrecisionPolicy,
    owners: Sequence[tuple[str, nn.Module]],
    reduced_together: Sequence[int] | None = None,
    sent: list[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Returns whole parameters gathered from their shards, differentiable. Collective.

    Forward: one flat all-gather. Backward: one flat all-reduce, which averages over the ring.

    Args:
        owners: name and module of each parameter.
        reduced_together: numbers of consecutive parameters whose gradients share one reduction; None: all share one.
        sent: gets this rank's part of each parameter as it travelled; stays empty if some are tensor subclasses.
    """
    with on_device(parameters):
        shards = [local_shard(parameter) for parameter in parameters]
        with torch.no_grad():  # casts for travel; gradients of shards have the dtype of the shards
            extended = _extended(parameters, shards, ring, mp_policy, owners)
            cast = [
                shard if place in extended else _cast(shard, mp_policy.param_dtype)
                for place, shard in enumerate(shards)
            ]
            layouts = _layouts(parameters, cast, ring, names_of(owners))
            every = (
                _gather_extended(ring, layouts, cast, extended) if extended else _gather_flat(ring, layouts, cast, sent)
            )
    likes = [
        shard.detach() if place in extended and summed_inside(shard, every[place]) else None
        for place, shard in enumerate(shards)
    ]
    _expect_plain_gradients(parameters, likes, owners)
    gathered: list[torch.Tensor] = []
    for count in reduced_together or [len(parameters)]:
        these = slice(len(gathered), len(gathered) + count)
        gathered += _Gather.apply(
            ring, layouts[these], mp_policy.reduce_dtype, every[these], likes[these], *shards[these]
        )
    for parameter, whole in zip(parameters, gathered, strict=True):
        share_version(whole, parameter)  # autograd detects a write to the parameter before a backward that reads it
    return gathered


def _extended(
    parameters: list[torch.Tensor],
    shards: list[torch.Tensor],
    ring: Ring,
    mp_policy: MixedPrecisionPolicy,
    owners: Sequence[tuple[str, nn.Module]],
) -> dict[int, Extended]:
    """Returns, by position, the parameters that travel by the extensions of their classes. Collective if one is new."""
    places = [place for place, parameter in enumerate(parameters) if is_extended(parameter)]
    found = {place: Extended(*owners[place], parameters[place], shards[place], ring, mp_policy) for place in places}
    agree([*found.values()])
    return found


def _gather_extended(
    ring: Ring, layouts: list[_Layout], shards: list[torch.Tensor], extended: dict[int, Extended]
) -> list[torch.Tensor]:
    """Calls `_gather_flat` with the tensors of `extended` parameters (any number of them, also none) in their place."""
    travels: list[torch.Tensor] = []
    how: list[_Layout] = []
    counts: list[int] = []
    for place, (layout, shard) in enumerate(zip(layouts, shards, strict=True)):
        special = extended.get(place)
        travels += [shard] if special is None else special.inputs
        how += [layout] if special is None else [_Layout.stacked(*sent, layout.name) for sent in special.sent()]
        counts.append(len(how) - sum(counts))
    arrived = iter(_gather_flat(ring, how, travels))
    whole = []
    for place, count in enumerate(counts):
        these = [next(arrived) for _ in range(count)]
        whole.append(extended[place].whole(these) if place in extended else these[0])
    return whole


def _expect_plain_gradients(
    parameters: list[torch.Tensor], likes: list[Any], owners: Sequence[tuple[str, nn.Module]]
) -> None:
    """Raises TypeError, on every rank, if gradients are wrappers and replicas would have to average them."""
    for place, (parameter, like) in enumerate(zip(parameters, likes, strict=True)):
        handler = gradient_handler_of(parameter) if isinstance(parameter, DTensor) and parameter.requires_grad else None
        if like is None or handler is None or handler.alone:
            continue
        name, owner = owners[place]
        raise TypeError(
            f"{type(owner).__name__}.{name}: expected plain gradients of a parameter that replicas share, got one "
            f"whose gradients are {type_name(like)}: freeze it, use one ring, or return a plain tensor from "
            "fsdp_post_all_gather"
        )


def _cast(shard: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return shard if dtype is None or not shard.is_floating_point() else shard.to(dtype)


@dataclass(frozen=True)
class _Layout:
    """The cut of one parameter, and its size in the flat buffer."""

    shape: tuple[int, ...]
    dim: int | None  # None: replicated
    sizes: tuple[int, ...]  # extents of the owners' shards along dim
    flat_bytes: int  # aligned bytes of the largest shard
    name: str

    @classmethod
    def of(cls, parameter: torch.Tensor, shard: torch.Tensor, ring: Ring, name: str) -> _Layout:
        shape, dim = tuple(parameter.shape), ring_dim(parameter)
        if dim is None:
            return cls(shape, None, (), 0, name)
        sizes = tuple(shard_sizes(shape[dim], ring.size))
        largest = math.prod((*shape[:dim], sizes[0], *shape[dim + 1 :])) * shard.element_size()
        return cls(shape, dim, sizes, -(-largest // _ALIGNMENT) * _ALIGNMENT, name)

    @classmethod
    def stacked(cls, shapes: list[tuple[int, ...]], itemsize: int, name: str) -> _Layout:
        """Returns the layout of the concatenation of one tensor of each rank, with any numbers of rows."""
        sizes, rest = tuple(shape[0] for shape in shapes), shapes[0][1:]
        largest = max(sizes) * math.prod(rest) * itemsize
        return cls((sum(sizes), *rest), 0, sizes, -(-largest // _ALIGNMENT) * _ALIGNMENT, name)

    def shard_shape(self, owner: int) -> tuple[int, ...]:
        assert self.dim is not None
        return (*self.shape[: self.dim], self.sizes[owner], *self.shape[self.dim + 1 :])

    def take(self, whole: torch.Tensor, owner: int) -> torch.Tensor:
        """Returns the shard of `owner`, a view of the whole parameter."""
        if self.dim is None:
            return whole
        return whole.narrow(self.dim, sum(self.sizes[:owner]), self.sizes[owner])


def names_of(owners: Sequence[tuple[str, nn.Module]]) -> list[str]:
    """Returns the names of parameters within the model, from their names in their modules."""
    return [f"{getattr(owner, 'qualified_name', type(owner).__name__)}.{name}" for name, owner in owners]


def _layouts(
    parameters: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], ring: Ring, names: Sequence[str]
) -> list[_Layout]:
    every = zip(parameters, shards, names, strict=True)
    return [_Layout.of(parameter, shard, ring, name) for parameter, shard, name in every]


def _together(layouts: list[_Layout]) -> str:
    """Returns a name of parameters that travel together; other ones have another name."""
    names = [layout.name for layout in layouts]
    others = f" and {len(names) - 1} more [{zlib.crc32(chr(0).join(names).encode()):08x}]"
    return names[0] + (others if len(names) > 1 else "")


def _gather_flat(
    ring: Ring, layouts: list[_Layout], shards: list[torch.Tensor], sent: list[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Gathers all shards in one collective. They travel as bytes, so that their dtypes may differ."""
    ring.settle_in_backward()
    sections = [layout.flat_bytes for layout in layouts]
    flat = torch.zeros(sum(sections), dtype=torch.uint8, device=ring.device)
    for shard, layout, section in zip(shards, layouts, flat.split(sections), strict=True):
        if layout.dim is not None:
            section[: shard.nbytes].view(shard.dtype).copy_(shard.reshape(-1))
        if sent is not None:
            sent.append(shard.clone() if layout.dim is None else section[: shard.nbytes])
    # [R, bytes], split below into one [R, bytes of a parameter] for each parameter
    gathered = ring.all_gather(flat, _together(layouts)) if flat.numel() else flat.expand(ring.size, -1)
    return [
        shard.clone() if layout.dim is None else _assemble(layout, part, shard.dtype)
        for shard, layout, part in zip(shards, layouts, gathered.split(sections, dim=1), strict=True)
    ]


def _reduce_flat(
    ring: Ring,
    layouts: list[_Layout],
    reduce_dtype: torch.dtype | None,
    computed: list[torch.dtype],
    gradients: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Returns this rank's shards of the gradients, averaged over the ring; None for a parameter that no rank has used.

    All ranks reduce the same parameters, used or not. A flag for each parameter, after the values, counts its users.
    """
    if not layouts:
        return []
    double = any(dtype in (torch.float64, torch.complex128) for dtype in computed)
    dtype = reduce_dtype or (torch.float64 if double else torch.float32)
    # of a complex number, the real and the imaginary part
    shapes = [
        (*layout.shape, 2) if of.is_complex else layout.shape for layout, of in zip(layouts, computed, strict=True)
    ]
    counts = [math.prod(shape) for shape in shapes]
    flat = torch.zeros(sum(counts) + len(layouts), dtype=dtype, device=ring.device)
    *values, used = flat.split([*counts, len(layouts)])
    for place, gradient in enumerate(gradients):
        if gradient is not None:
            real = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
            values[place].copy_(real.reshape(-1))
            used[place] = 1
    ring.all_reduce(flat, f"the gradient of {_together(layouts)}").div_(ring.size)
    # On CUDA reading the flags would synchronise: there a parameter that no rank used gets zeros.
    unused = (used == 0).tolist() if ring.device.type == "cpu" else [False] * len(layouts)
    found: list[torch.Tensor | None] = []
    for layout, shape, of, value, is_unused in zip(layouts, shapes, computed, values, unused, strict=True):
        if is_unused:
            found.append(None)
            continue
        # a copy: the gradient must not keep the whole buffer alive
        mine = layout.take(value.view(shape), ring.rank).clone(memory_format=torch.contiguous_format)
        found.append(torch.view_as_complex(mine.to(summing_dtype(dtype))) if of.is_complex else mine)
    return found


class GatherPlan:
    """Gathering and reducing as two separate operations, for operators in compiled graphs.

    Args:
        owners: name and module of each registered parameter.
    """

    def __init__(self, owners: Sequence[tuple[str, nn.Module]], ring: Ring, mp_policy: MixedPrecisionPolicy) -> None:
        self.parameters: list[Any] = [owner._parameters[name] for name, owner in owners]
        self.names, self.ring, self.mp_policy = names_of(owners), ring, mp_policy

    def gather(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns whole parameters from the shards of all ranks. Collective."""
        self.ring.check_alive("gather")
        with torch.no_grad():
            cast = [_cast(shard, self.mp_policy.param_dtype) for shard in shards]
            return _gather_flat(self.ring, _layouts(self.parameters, cast, self.ring, self.names), cast)

    def reduce(
        self,
        gradients: list[torch.Tensor],
        places: Sequence[int],
        wanted: Sequence[int],
    ) -> list[torch.Tensor]:
        """Returns this rank's averaged gradient shards of the parameters `wanted`; zeros if no rank used one.

        places: indices of the parameters that `gradients` belong to. Collective.
        """
        self.ring.check_alive("reduce")
        parameters, names = [self.parameters[i] for i in wanted], [self.names[i] for i in wanted]
        shards = [held(parameter) for parameter in parameters]
        computed = [_cast(shard, self.mp_policy.param_dtype) for shard in shards]
        given = dict(zip(places, gradients, strict=True))
        layouts = _layouts(parameters, computed, self.ring, names)
        with torch.no_grad():
            found = _reduce_flat(
                self.ring,
                layouts,
                self.mp_policy.reduce_dtype,
                [shard.dtype for shard in computed],
                [given.get(place) for place in wanted],
            )
            return [
                torch.zeros_like(shard) if mine is None else mine.to(shard.dtype)
                for mine, shard in zip(found, shards, strict=True)
            ]


class _Gather(torch.autograd.Function):
    """Returns whole parameters, gathered before, as functions of their shards; backward reduces the gradients."""

    @staticmethod
    def forward(
        ctx,
        ring: Ring,
        layouts: list[_Layout],
        reduce_dtype: torch.dtype | None,
        whole: list[torch.Tensor],
        likes: list[torch.Tensor | None],
        *shards: torch.Tensor,
    ):
        ctx.ring, ctx.layouts, ctx.reduce_dtype, ctx.likes = ring, layouts, reduce_dtype, likes
        ctx.dtypes, ctx.computed = [shard.dtype for shard in shards], [tensor.dtype for tensor in whole]
        ctx.set_materialize_grads(False)  # an unused parameter gets no gradient, as in the plain model
        # A frozen parameter requires no gradient, whichever parameters share the gather: activation checkpointing
        # compares the tensors that autograd saves in forward and in recomputation, where other parameters share it.
        ctx.mark_non_differentiable(
            *(tensor for tensor, needed in zip(whole, ctx.needs_input_grad[5:], strict=True) if not needed)
        )
        return tuple(whole)

    @staticmethod
    @first_order_only
    def backward(ctx, *gradients: torch.Tensor | None):
        ring, layouts = ctx.ring, ctx.layouts
        reduced = [i for i, needed in enumerate(wanted(ctx)[5:]) if needed]
        result: list[torch.Tensor | None] = [None] * len(layouts)
        parts = [_parts(gradients[i], ctx.likes[i]) for i in reduced]
        places = [i for i, several in zip(reduced, parts, strict=True) for _ in several]
        found = iter(
            _reduce_flat(
                ring,
                [layouts[i] for i in places],
                ctx.reduce_dtype,
                [ctx.computed[i] for i in places],
                [part for several in parts for part in several],
            )
        )
        for i, several in zip(reduced, parts, strict=True):
            mine = [None if part is None else rounded(part, ctx.dtypes[i]) for part in islice(found, len(several))]
            like = ctx.likes[i]
            result[i] = mine[0] if like is None or mine[0] is None else with_inner(like, mine)  # type: ignore[arg-type]
        return None, None, None, None, None, *result


def _parts(gradient: torch.Tensor | None, like: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    """Returns the parts of one gradient that are reduced separately; the same number of Nones without a gradient."""
    if gradient is not None:
        return parts_of_gradient(gradient, like)
    return [None] * (1 if like is None else len(inner_tensors(like) or ()))


def _assemble(layout: _Layout, every: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the whole parameter from every owner's bytes [R, flat_bytes]."""
    assert layout.dim is not None
    pieces = []
    for owner, row in enumerate(every):
        shape = layout.shard_shape(owner)
        pieces.append(row[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
    return torch.cat(pieces, layout.dim)
