"""Gathers whole parameters, many in one collective: for parameters that do not rotate."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from rtp_ext._native import shard_sizes, share_version
from rtp_ext.parameters.extensions import Extended, agree, is_extended, parts_of_gradient, summed_inside
from rtp_ext.parameters.sharding import held, inner_tensors, local_shard, type_name, with_inner
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import first_order_only, gradient_handler_of, rounded, summing_dtype, unseen, wanted
from rtp_ext.ring.cpu_offload import on_device
from rtp_ext.ring.mesh import ring_dim

_ALIGNMENT = 16  # bytes; of a parameter among those that travel together
# bytes of parameters or gradients, of all owners together, that travel at once
_BUCKET = {"cpu": 4 << 20, "cuda": 32 << 20}


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

    Forward: all-gathers. Backward: reduce-scatters, which average over the ring. Both in buckets.

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
            layouts = _layouts(parameters, ring, names_of(owners))
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
        how += [layout] if special is None else [_Layout.stacked(shapes, layout.name) for shapes in special.shapes]
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
    """The cut of one parameter."""

    shape: tuple[int, ...]
    dim: int | None  # None: replicated
    sizes: tuple[int, ...]  # extents of the owners' shards along dim
    name: str

    @classmethod
    def of(cls, parameter: torch.Tensor, ring: Ring, name: str) -> _Layout:
        shape, dim = tuple(parameter.shape), ring_dim(parameter)
        return cls(shape, dim, () if dim is None else tuple(shard_sizes(shape[dim], ring.size)), name)

    @classmethod
    def stacked(cls, shapes: list[tuple[int, ...]], name: str) -> _Layout:
        """Returns the layout of the concatenation of one tensor of each rank, with any numbers of rows."""
        sizes = tuple(shape[0] for shape in shapes)
        return cls((sum(sizes), *shapes[0][1:]), 0, sizes, name)

    @property
    def largest(self) -> tuple[int, ...]:
        """The shape of the largest shard; that of no numbers for a replicated parameter, which does not travel."""
        if self.dim is None:
            return (0,)
        return (*self.shape[: self.dim], max(self.sizes), *self.shape[self.dim + 1 :])

    def shard_shape(self, owner: int) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.sizes[owner], *self.shape[self.dim + 1 :])

    def take(self, whole: torch.Tensor, owner: int) -> torch.Tensor:
        """Returns the shard of `owner`, a view of the whole parameter."""
        if self.dim is None:
            return whole
        return whole.narrow(self.dim, sum(self.sizes[:owner]), self.sizes[owner])


def names_of(owners: Sequence[tuple[str, nn.Module]]) -> list[str]:
    """Returns the names of parameters within the model, from their names in their modules."""
    return [f"{getattr(owner, 'qualified_name', type(owner).__name__)}.{name}" for name, owner in owners]


def _layouts(parameters: Sequence[torch.Tensor], ring: Ring, names: Sequence[str]) -> list[_Layout]:
    return [_Layout.of(parameter, ring, name) for parameter, name in zip(parameters, names, strict=True)]


def _together(layouts: list[_Layout]) -> str:
    """Returns a name of parameters that travel together; other ones have another name."""
    names = [layout.name for layout in layouts]
    others = f" and {len(names) - 1} more [{zlib.crc32(chr(0).join(names).encode()):08x}]"
    return names[0] + (others if len(names) > 1 else "")


class _Piece(NamedTuple):
    """Some rows of the shards of one parameter, and their place among the values that travel."""

    parameter: int
    rows: slice
    at: int
    size: int  # of the largest shard


def _in_buckets(shards: Sequence[tuple[int, int]], room: int, align: int = 1, begin: int = 0) -> list[list[_Piece]]:
    """Cuts the largest shards of parameters, given as rows and size of a row, into pieces, and lists those that travel
    together: at most `room`, but for a single row. The first bucket has other values up to `begin`."""
    buckets: list[list[_Piece]] = [[]]
    at = begin
    for parameter, (rows, width) in enumerate(shards):
        first = 0
        while first < rows:
            count = min(rows - first, max((room - at) // max(width, 1), 0 if at else 1))
            if count <= 0:
                buckets.append([])
                at = 0
                continue
            size = -(-count * width // align) * align
            buckets[-1].append(_Piece(parameter, slice(first, first + count), at, size))
            first, at = first + count, at + size
    return buckets


def _length(bucket: list[_Piece], begin: int = 0) -> int:
    return bucket[-1].at + bucket[-1].size if bucket else begin


def _gather_flat(
    ring: Ring, layouts: list[_Layout], shards: list[torch.Tensor], sent: list[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Gathers all shards, in buckets. They travel as bytes, so that their dtypes may differ."""
    ring.settle_in_backward()
    wholes = [
        shard.clone() if layout.dim is None else torch.empty(layout.shape, dtype=shard.dtype, device=ring.device)
        for layout, shard in zip(layouts, shards, strict=True)
    ]
    if sent is not None:
        sent += [shard.clone(memory_format=torch.contiguous_format) for shard in shards]
    widths = [
        (layout.largest[0], math.prod(layout.largest[1:]) * shard.element_size())
        for layout, shard in zip(layouts, shards, strict=True)
    ]
    buckets = _in_buckets(widths, _BUCKET[ring.device.type] // ring.size, _ALIGNMENT)
    # for all buckets: a process group may keep tensors alive for a while after it has sent them
    longest = max(map(_length, buckets))
    flat, every = _buffers(ring, torch.uint8, longest, ring.size * longest)
    for bucket in filter(None, buckets):
        mine = flat[: _length(bucket)]
        for piece in bucket:
            own = shards[piece.parameter][piece.rows]
            mine[piece.at : piece.at + own.nbytes].view(own.dtype).view(own.shape).copy_(own)
        rows = ring.all_gather(mine, _together(layouts), every)
        for piece, (owner, row) in product(bucket, enumerate(rows)):
            target = layouts[piece.parameter].take(wholes[piece.parameter], owner)[piece.rows]
            target.copy_(row[piece.at : piece.at + target.nbytes].view(target.dtype).view(target.shape))
    return wholes


def _buffers(ring: Ring, dtype: torch.dtype, mine: int, every: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns memory of so many numbers for what leaves and for what arrives."""
    leaving = torch.zeros(mine, dtype=dtype, device=ring.device)
    return leaving, torch.empty(every, dtype=dtype, device=ring.device)


def _reduce_flat(
    ring: Ring,
    layouts: list[_Layout],
    reduce_dtype: torch.dtype | None,
    computed: list[torch.dtype],
    gradients: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Returns this rank's shards of the gradients, averaged over the ring; None for a parameter that no rank has used.

    All ranks reduce the same parameters, used or not. Flags before the values count the users of each.
    """
    if not layouts:
        return []
    double = any(dtype in (torch.float64, torch.complex128) for dtype in computed)
    dtype = reduce_dtype or (torch.float64 if double else torch.float32)
    # of a complex number, the real and the imaginary part
    pairs = [(2,) if of.is_complex else () for of in computed]
    given = [None if each is None else _as_real(each) for each in gradients]
    name = f"the gradient of {_together(layouts)}"
    # On CUDA reading the flags would synchronise: there a parameter that no rank used gets zeros.
    flags = [float(each is not None) for each in given] if ring.device.type == "cpu" else []
    found = [
        torch.zeros(layout.shard_shape(ring.rank) + pair, dtype=dtype, device=ring.device)
        for layout, pair in zip(layouts, pairs, strict=True)
    ]
    widths = [
        (layout.largest[0], math.prod(layout.largest[1:] + pair)) for layout, pair in zip(layouts, pairs, strict=True)
    ]
    buckets = _in_buckets(widths, _BUCKET[ring.device.type] // (ring.size * dtype.itemsize), begin=len(flags))
    longest = max(_length(bucket, len(flags)) for bucket in buckets)
    buffer, arrived = _buffers(ring, dtype, ring.size * longest, ring.size * longest)
    for number, bucket in enumerate(buckets):
        length = _length(bucket, len(flags))
        rows = buffer[: ring.size * length].view(ring.size, length)
        if number == 0:
            rows[:, : len(flags)] = torch.tensor(flags, dtype=dtype, device=ring.device)
        for piece, (owner, row) in product(bucket, enumerate(rows)):
            _fill(row, piece, layouts[piece.parameter].take, owner, given[piece.parameter])
        mine = ring.reduce_scatter(rows, name, arrived) if length else buffer
        if number == 0:
            unused = (mine[: len(flags)] == 0).tolist() or [False] * len(layouts)
        for piece in bucket:
            own = found[piece.parameter][piece.rows]
            own.copy_(mine[piece.at : piece.at + own.numel()].view(own.shape)).div_(ring.size)
    _reduce_replicated(ring, layouts, found, given, name)
    return [
        None if none else torch.view_as_complex(mine.to(summing_dtype(dtype))) if pair else mine
        for mine, pair, none in zip(found, pairs, unused, strict=True)
    ]


def _as_real(gradient: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def _fill(
    row: torch.Tensor,
    piece: _Piece,
    take: Callable[[torch.Tensor, int], torch.Tensor],
    owner: int,
    whole: torch.Tensor | None,
) -> None:
    section = row[piece.at : piece.at + piece.size]
    if whole is None:
        section.zero_()
        return
    part = take(whole, owner)[piece.rows]
    section[: part.numel()].view(part.shape).copy_(part)


def _reduce_replicated(
    ring: Ring,
    layouts: list[_Layout],
    found: list[torch.Tensor],
    given: list[torch.Tensor | None],
    name: str,
) -> None:
    """Averages gradients of scalars, of which ranks need the same bits: a reduce-scatter may add in other orders."""
    places = [place for place, layout in enumerate(layouts) if layout.dim is None]
    for place in places:
        if (whole := given[place]) is not None:
            found[place].copy_(whole)
    if places:
        total = ring.all_reduce(torch.cat([found[place].reshape(-1) for place in places]), name).div_(ring.size)
        sizes = [found[place].numel() for place in places]
        for place, mine in zip(places, total.split(sizes), strict=True):
            found[place].copy_(mine.view(found[place].shape))


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
            return _gather_flat(self.ring, _layouts(self.parameters, self.ring, self.names), cast)

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
        layouts = _layouts(parameters, self.ring, names)
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
