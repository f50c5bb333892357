"""Whole parameters out of their shards, by one flat collective: for what is too small or too special to rotate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from rtp_ext._native import shard_sizes, share_version
from rtp_ext.parameters.sharding import held, local_shard
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import first_order_only, rounded, unseen, wanted
from rtp_ext.ring.mesh import ring_dim
from rtp_ext.ring.offload import lent

_ALIGNMENT = 16  # bytes, of a parameter inside the flat buffer


@unseen
def gather(
    parameters: list[torch.Tensor],
    ring: Ring,
    mp_policy: MixedPrecisionPolicy,
    reduced_together: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """Whole parameters from their shards, differentiable. Collective.

    One flat all-gather; in backward one flat reduction, which averages over the ring; or several, of as many parameters
    each as `reduced_together` says.
    """
    with lent(parameters):
        shards = [local_shard(parameter) for parameter in parameters]
        with torch.no_grad():  # what travels; the gradients of the shards are in their own dtype
            cast = [_cast(shard, mp_policy.param_dtype) for shard in shards]
            layouts = [_Layout.of(parameter, shard, ring) for parameter, shard in zip(parameters, cast, strict=True)]
            every = _gather_flat(ring, layouts, cast)
    gathered: list[torch.Tensor] = []
    for count in reduced_together or [len(parameters)]:
        these = slice(len(gathered), len(gathered) + count)
        gathered += _Gather.apply(ring, layouts[these], mp_policy.reduce_dtype, every[these], *shards[these])
    for parameter, whole in zip(parameters, gathered, strict=True):
        share_version(whole, parameter)  # a backward that needs it notices that the parameter was written since
    return gathered


def _cast(shard: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return shard if dtype is None or not shard.is_floating_point() else shard.to(dtype)


@dataclass(frozen=True)
class _Layout:
    """How one parameter is cut, and what it takes in the flat buffer."""

    shape: tuple[int, ...]
    dim: int | None  # None: replicated, whole already
    sizes: tuple[int, ...]  # of the owners' shards along dim
    flat_bytes: int  # of the largest shard, aligned

    @classmethod
    def of(cls, parameter: torch.Tensor, shard: torch.Tensor, ring: Ring) -> _Layout:
        shape, dim = tuple(parameter.shape), ring_dim(parameter)
        if dim is None:
            return cls(shape, None, (), 0)
        sizes = tuple(shard_sizes(shape[dim], ring.size))
        largest = math.prod((*shape[:dim], sizes[0], *shape[dim + 1 :])) * shard.element_size()
        return cls(shape, dim, sizes, -(-largest // _ALIGNMENT) * _ALIGNMENT)

    def shard_shape(self, owner: int) -> tuple[int, ...]:
        assert self.dim is not None
        return (*self.shape[: self.dim], self.sizes[owner], *self.shape[self.dim + 1 :])

    def take(self, whole: torch.Tensor, owner: int) -> torch.Tensor:
        """The shard of `owner` out of the whole parameter."""
        if self.dim is None:
            return whole
        return whole.narrow(self.dim, sum(self.sizes[:owner]), self.sizes[owner])


def _gather_flat(ring: Ring, layouts: list[_Layout], shards: list[torch.Tensor]) -> list[torch.Tensor]:
    """Shards travel as bytes, so that parameters of several dtypes share one collective."""
    sections = [layout.flat_bytes for layout in layouts]
    flat = torch.zeros(sum(sections), dtype=torch.uint8, device=ring.device)
    for shard, layout, section in zip(shards, layouts, flat.split(sections), strict=True):
        if layout.dim is not None:
            section[: shard.nbytes].view(shard.dtype).copy_(shard.reshape(-1))
    # [R, bytes] cut into one [R, bytes of a parameter] for each
    gathered = ring.all_gather(flat) if flat.numel() else flat.expand(ring.size, -1)
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
    """This rank's shards of the gradients, averaged over the ring; None for a parameter that no rank has used.

    All ranks reduce the same parameters, whether they used them or not; behind the values, who did.
    """
    if not layouts:
        return []
    double = any(dtype == torch.float64 for dtype in computed)
    dtype = reduce_dtype or (torch.float64 if double else torch.float32)
    counts = [math.prod(layout.shape) for layout in layouts]
    flat = torch.zeros(sum(counts) + len(layouts), dtype=dtype, device=ring.device)
    *values, used = flat.split([*counts, len(layouts)])
    for place, gradient in enumerate(gradients):
        if gradient is not None:
            values[place].copy_(gradient.reshape(-1))
            used[place] = 1
    ring.all_reduce(flat).div_(ring.size)
    # On CUDA nobody waits to learn who used what: a parameter that no rank used gets zeros there.
    unused = (used == 0).tolist() if ring.device.type == "cpu" else [False] * len(layouts)
    return [
        # a copy: the gradient must not keep the whole buffer alive
        None
        if nobody
        else layout.take(value.view(layout.shape), ring.rank).clone(memory_format=torch.contiguous_format)
        for nobody, layout, value in zip(unused, layouts, values, strict=True)
    ]


class GatherPlan:
    """The same for graphs of a compiler, in which gathering and reducing are operators.

    Args:
        parameters: as they are registered.
    """

    def __init__(self, parameters: list[torch.Tensor], ring: Ring, mp_policy: MixedPrecisionPolicy) -> None:
        self.parameters, self.ring, self.mp_policy = parameters, ring, mp_policy

    def gather(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        """Whole parameters from the shards of this rank. Collective."""
        self.ring.check_alive("gather")
        with torch.no_grad():
            cast = [_cast(shard, self.mp_policy.param_dtype) for shard in shards]
            return _gather_flat(self.ring, self._layouts(cast), cast)

    def reduce(
        self,
        gradients: list[torch.Tensor],
        places: Sequence[int],
        wanted: Sequence[int],
    ) -> list[torch.Tensor]:
        """This rank's shards of the gradients of `wanted`; those of `places` are given. Zeros of what nobody used."""
        self.ring.check_alive("reduce")
        shards = [held(self.parameters[place]) for place in wanted]
        computed = [_cast(shard, self.mp_policy.param_dtype) for shard in shards]
        given = dict(zip(places, gradients, strict=True))
        layouts = [_Layout.of(self.parameters[i], shard, self.ring) for i, shard in zip(wanted, computed, strict=True)]
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

    def _layouts(self, shards: list[torch.Tensor]) -> list[_Layout]:
        return [
            _Layout.of(parameter, shard, self.ring) for parameter, shard in zip(self.parameters, shards, strict=True)
        ]


class _Gather(torch.autograd.Function):
    """Whole parameters out of shards, which have been gathered already."""

    @staticmethod
    def forward(
        ctx,
        ring: Ring,
        layouts: list[_Layout],
        reduce_dtype: torch.dtype | None,
        whole: list[torch.Tensor],
        *shards: torch.Tensor,
    ):
        ctx.ring, ctx.layouts, ctx.reduce_dtype = ring, layouts, reduce_dtype
        ctx.dtypes, ctx.computed = [shard.dtype for shard in shards], [tensor.dtype for tensor in whole]
        ctx.set_materialize_grads(False)  # a parameter that was not used gets no gradient, as in the plain model
        # A frozen parameter stays one, whoever is gathered along with it: activation checkpointing compares what
        # autograd saves in the forward and in the recomputation, where other parameters come along.
        ctx.mark_non_differentiable(
            *(tensor for tensor, needed in zip(whole, ctx.needs_input_grad[4:], strict=True) if not needed)
        )
        return tuple(whole)

    @staticmethod
    @first_order_only
    def backward(ctx, *gradients: torch.Tensor | None):
        ring, layouts = ctx.ring, ctx.layouts
        reduced = [i for i, needed in enumerate(wanted(ctx)[4:]) if needed]
        result: list[torch.Tensor | None] = [None] * len(layouts)
        found = _reduce_flat(
            ring,
            [layouts[i] for i in reduced],
            ctx.reduce_dtype,
            [ctx.computed[i] for i in reduced],
            [gradients[i] for i in reduced],
        )
        for i, mine in zip(reduced, found, strict=True):
            result[i] = None if mine is None else rounded(mine, ctx.dtypes[i])
        return None, None, None, None, *result


def _assemble(layout: _Layout, every: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The whole parameter from every owner's bytes [R, flat_bytes]."""
    assert layout.dim is not None
    pieces = []
    for owner, row in enumerate(every):
        shape = layout.shard_shape(owner)
        pieces.append(row[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
    return torch.cat(pieces, layout.dim)
