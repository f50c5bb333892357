"""The passes of an embedding whose table stays where it is: ids travel to the owners of its rows, rows come back, and
gradients of rows go home.

A pass sends its ids itself, so that nothing but a forward's own ids is kept for its backward, whichever way that goes.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from rtp_ext import _native
from rtp_ext._native import RotationError
from rtp_ext.functional._call import Call
from rtp_ext.ring.autograd import summing_dtype, unseen

Settings = tuple[tuple[int, int], int, int]  # shape of the table, dimension of the cut, row without a gradient


class _Asked(NamedTuple):
    """What the ranks ask of one another in a pass.

    order: of this rank's tokens as they travel, by the owners of their ids; None: every owner is asked for all of them.
    counts, given: by rank, the number of ids that this one asks it for, and that it asks this one for.
    widths: by owner, the features of its rows.
    ids: those of `given`, as rows of the local shard.
    """

    order: torch.Tensor | None
    counts: list[int]
    given: list[int]
    widths: list[int]
    ids: torch.Tensor


@unseen
def look_up(call: Call, settings: Settings, ids: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Returns the rows [T, E] of ids [T], in the compute dtype. Collective."""
    name = f"{call.name} forward"
    asked = _ask(call, settings, ids, name)
    with call.ring.communicator.ended_by_errors(name):
        with call.on_device():
            rows = shard.index_select(0, asked.ids).to(call.compute_dtype)
        sent, parts = _sizes(asked.given, [shard.shape[1]]), _sizes(asked.counts, asked.widths)
        arrived = rows.new_empty(sum(parts))
        call.ring.communicator.all_to_all(arrived, rows.view(-1), parts, sent, f"rows of {name}")
        if asked.order is None:
            several = zip(arrived.split(parts), asked.widths, strict=True)
            return torch.cat([part.view(len(ids), width) for part, width in several], 1)
        y = arrived.view(len(ids), settings[0][1])
        return torch.empty_like(y).index_copy_(0, asked.order, y)


@unseen
def gradient(call: Call, settings: Settings, dy: torch.Tensor, ids: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of the local shard, in float32 or wider: the mean over the ranks. Collective.

    The owner adds the rows of the rank before it first, then those of the rank before that, and its own last: on a CPU
    sums of float32 have the bits of a partial sum that travels around the ring. Gradients of rows travel in the
    narrower of the dtype of `dy` and the reduce dtype.
    """
    ring, name, padding = call.ring, f"{call.name} backward", settings[2]
    asked = _ask(call, settings, ids, name)
    with ring.communicator.ended_by_errors(name):
        if call.reduce_dtype.itemsize < dy.dtype.itemsize:
            dy = dy.to(call.reduce_dtype)
        if padding >= 0:
            dy = dy.masked_fill(ids.eq(padding).unsqueeze(1), 0)
        if asked.order is None:
            rows = torch.cat([part.reshape(-1) for part in dy.split(asked.widths, 1)])
        else:
            rows = dy.index_select(0, asked.order).view(-1)
        width = shard.shape[1]
        sent, parts = _sizes(asked.counts, asked.widths), _sizes(asked.given, [width])
        values = rows.new_empty(len(asked.ids), width)
        ring.communicator.all_to_all(values.view(-1), rows, parts, sent, f"gradients of {name}")
        before = [(ring.rank - step) % ring.size for step in range(1, ring.size + 1)]
        from_ranks = (each.split(asked.given) for each in (asked.ids, values.to(summing_dtype(values.dtype))))
        where, wide = (torch.cat([parts[rank] for rank in before]) for parts in from_ranks)
        if wide.is_cuda:  # where index_add_ adds in no fixed order
            return torch.ops.aten.embedding_dense_backward(wide, where, len(shard), -1, False).div_(ring.size)
        return wide.new_zeros(shard.shape).index_add_(0, where, wide, alpha=1 / ring.size)


def _ask(call: Call, settings: Settings, ids: torch.Tensor, name: str) -> _Asked:
    """Sends ids to the owners of their rows. Raises IndexError on every rank where one has ids out of range; on CUDA
    that is a device assertion. Collective."""
    ring, (shape, dim, _) = call.ring, settings
    communicator, ranks = ring.communicator, ring.size
    sizes = _native.shard_sizes(shape[dim], ranks)
    order, rows, ends = None, ids, (0, -1)
    ring.check_alive(name)
    ring.settle_in_backward()
    with communicator.ended_by_errors(name):
        if ids.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RotationError(
                f"{name}: expected embedding='rotate' on a ring whose passes are captured in a CUDA graph, got rows, "
                "whose numbers the ranks exchange in every pass"
            )
        if len(ids):
            inside = torch.logical_and(ids >= 0, ids < shape[0]).all()
            if ids.is_cuda:
                torch._assert_async(inside)
            elif not inside:
                ends = int(ids.min()), int(ids.max())
        counts = [len(ids)] * ranks
        if dim == 1:
            rows = ids.repeat(ranks)
        elif ends == (0, -1):
            starts = torch.tensor([0, *itertools.accumulate(sizes[:-1])], device=ids.device)
            owners = torch.bucketize(ids, starts, right=True).sub_(1)
            order = owners.argsort(stable=True)
            counts, rows = owners.bincount(minlength=ranks).tolist(), (ids - starts[owners])[order]
    every = communicator.exchange((counts, ends), f"ids of {name}")
    for rank, (_, (first, last)) in enumerate(every):
        if first <= last:
            raise IndexError(
                f"{call.name}: expected ids in [0, {shape[0]}), got ids from {first} to {last} on rank {rank}"
            )
    given = counts if ring.alone else [theirs[ring.rank] for theirs, _ in every]
    arrived = communicator.all_to_all(rows.new_empty(sum(given)), rows, given, counts, f"ids of {name}")
    return _Asked(order, counts, given, sizes if dim == 1 else [shape[1]] * ranks, arrived)


def _sizes(counts: list[int], widths: list[int]) -> list[int]:
    widths = widths * (len(counts) // len(widths))
    return [count * width for count, width in zip(counts, widths, strict=True)]
