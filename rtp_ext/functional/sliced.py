"""Experts that are cut along their hidden features: what each rank has at home becomes shards of whole slices.

Slice i of an expert is its hidden features [i c, (i + 1) c), c = ceil(H / r), of all r slices; the output of an expert
is the sum of those of its slices, which rotate as if they were experts. Its weights are DTensors of the whole ring, cut
along the hidden features by the chunk rule: balanced on N r ranks, but a rank has features of experts of other parts,
and of gate and up, where one follows the other, different ones. So in each forward every rank sends each other one what
belongs to the slice of that rank, and gets its gradient back.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtp_ext._native import shard_sizes
from rtp_ext.recipes import Recipe
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import first_order_only, unseen, wanted
from rtp_ext.ring.expert_ring import Division


@dataclass(frozen=True)
class HiddenCut:
    """How a stacked parameter of experts is cut along the hidden features.

    Attributes:
        dim: the dimension that is cut.
        rows: how many rows of it belong to a hidden feature; 0: none, and the first slice has all of them (the bias of
            down, which is added once).
        adjacent: whether those of a feature lie side by side; else all of the gate come first.
    """

    dim: int
    rows: int
    adjacent: bool = True

    def extent(self, whole: int, slices: int) -> int:
        """Returns the rows of a slice, those of the largest: the others are filled up with zeros."""
        return self.rows * -(-whole // self.rows // slices) if self.rows else whole

    def places(self, whole: int, slices: int, number: int) -> list[tuple[int, int]]:
        """Returns for each row of slice `number` its place among the `whole` rows, and among those of the slice."""
        if self.rows == 0:
            return [(row, row) for row in range(whole)] if number == 0 else []
        hidden = whole // self.rows
        each = -(-hidden // slices)
        features = range(number * each, min((number + 1) * each, hidden))
        if self.adjacent:
            start = self.rows * number * each
            rows = range(self.rows * features.start, self.rows * features.stop)
            return [(row, row - start) for row in rows]
        return [
            (kind * hidden + feature, kind * each + feature - features.start)
            for kind in range(self.rows)
            for feature in features
        ]


@functools.cache
def hidden_cuts(*, gated: bool, interleaved: bool, transposed: bool) -> dict[str, HiddenCut]:
    """Returns the cuts of the parameters of experts: `up weight`, `up bias`, `down weight`, `down bias`."""
    rows = 2 if gated else 1
    adjacent = interleaved or not gated
    return {
        "up weight": HiddenCut(2 if transposed else 1, rows, adjacent),
        "up bias": HiddenCut(1, rows, adjacent),
        "down weight": HiddenCut(1 if transposed else 2, 1),
        "down bias": HiddenCut(1, 0),
    }


class _Cell(NamedTuple):
    """Rows of some experts of a tensor that travel between two ranks, and the shape of the block that they are."""

    experts: slice
    rows: Tensor
    shape: tuple[int, ...]


class Slicing:
    """Which values of a parameter travel between which ranks of the whole ring.

    Attributes:
        shape, dim: of the whole parameter, and the dimension that is cut.
        home, in_slice: for each rank of the ring, what of this rank's shard goes into its slice, and what of its shard
            goes into the slice of this rank.
        home_shape, slice_shape: of the shard and of the slice of this rank.
    """

    def __init__(self, ring: Ring, division: Division, cut: HiddenCut, shape: Sequence[int]) -> None:
        experts = ring.experts
        assert experts is not None
        whole, slices = shape[cut.dim], experts.inner.size
        sizes = shard_sizes(whole, ring.size)
        starts = [sum(sizes[:rank]) for rank in range(ring.size)]
        places = [cut.places(whole, slices, number) for number in range(slices)]
        own_part, own_slice = experts.places[ring.rank]

        def resized(count: int, rows: int) -> tuple[int, ...]:
            return count, *shape[1 : cut.dim], rows, *shape[cut.dim + 1 :]

        def owned(rank: int, number: int) -> list[tuple[int, int]]:
            start, end = starts[rank], starts[rank] + sizes[rank]
            return [(row - start, place) for row, place in places[number] if start <= row < end]

        def cell(part: int, rows: list[int], first: int = 0) -> _Cell:
            count, chosen = division.parts[part], torch.tensor(rows, dtype=torch.int64, device=ring.device)
            return _Cell(slice(first, first + count), chosen, resized(count, len(rows)))

        self.shape, self.dim = tuple(shape), cut.dim
        self.home_shape = resized(shape[0], sizes[ring.rank])
        self.slice_shape = resized(max(division.parts), cut.extent(whole, slices))
        first = [sum(division.parts[:part]) for part in range(experts.size)]
        with torch.inference_mode(False):
            self.home = [
                cell(part, [row for row, _ in owned(ring.rank, number)], first[part]) for part, number in experts.places
            ]
            self.in_slice = [
                cell(own_part, [place for _, place in owned(rank, own_slice)]) for rank in range(ring.size)
            ]


@unseen
def _moved(
    ring: Ring, slicings: Sequence[Slicing], values: Sequence[Tensor], back: bool, name: str, what: str
) -> list[Tensor]:
    """Returns this rank's slices of parameters for what it has at home of them; `back`: the reverse. One exchange for
    all parameters of a dtype. what: in errors where it differs between ranks. Collective over the whole ring."""
    found = [
        value.new_zeros(each.home_shape if back else each.slice_shape)
        for each, value in zip(slicings, values, strict=True)
    ]
    for dtype in dict.fromkeys(value.dtype for value in values):
        chosen = [place for place, value in enumerate(values) if value.dtype == dtype]
        own = [slicings[place] for place in chosen]
        here = [each.in_slice if back else each.home for each in own]
        there = [each.home if back else each.in_slice for each in own]
        leaving, arriving = (
            [sum(math.prod(cell.shape) for cell in cells) for cells in zip(*side, strict=True)]
            for side in (here, there)
        )
        sent, received = (found[chosen[0]].new_empty(sum(counts)) for counts in (leaving, arriving))
        for part, dim, rows, block in _blocks(sent, own, here, [values[place] for place in chosen]):
            torch.index_select(part, dim, rows, out=block)
        ring.experts.slice_bytes_sent += (sum(leaving) - leaving[ring.rank]) * dtype.itemsize  # type: ignore[union-attr]
        identity = f"{what} of {name} ({dtype} {', '.join(str(each.shape) for each in own)})"
        ring.communicator.all_to_all(received, sent, arriving, leaving, name, identity)
        for part, dim, rows, block in _blocks(received, own, there, [found[place] for place in chosen]):
            part.index_copy_(dim, rows, block)
    return found


def _blocks(
    buffer: Tensor, slicings: Sequence[Slicing], side: Sequence[Sequence[_Cell]], tensors: Sequence[Tensor]
) -> Iterator[tuple[Tensor, int, Tensor, Tensor]]:
    """Yields for each rank and parameter the experts of a cell, the dimension and its rows, and its block of a buffer,
    except for empty ones."""
    start = 0
    for cells in zip(*side, strict=True):
        for slicing, cell, tensor in zip(slicings, cells, tensors, strict=True):
            size = math.prod(cell.shape)
            if size:
                yield tensor[cell.experts], slicing.dim, cell.rows, buffer[start : start + size].view(cell.shape)
            start += size


def expect_whole(division: Division, recipe: Recipe | None, name: str) -> None:
    """Raises ValueError where slices of experts would multiply in 8 bits: their codes are those of whole experts."""
    if division.sliced and recipe is not None:
        raise ValueError(
            f"{name}: {division.experts} experts, which {len(division.parts)} parts have cut along their hidden "
            f"features, cannot be combined with recipe {recipe.name}: expected whole experts, as many on every rank"
        )


class Sliced(torch.autograd.Function):
    """What this rank has at home of parameters -> its slices of the experts of its part: [most experts of a part, rows
    of a slice, ...], with zeros for experts and rows that are missing. Their gradients come back."""

    @staticmethod
    def forward(ctx: Any, slicings: Sequence[Slicing], ring: Ring, name: str, *homes: Tensor):
        ctx.slicings, ctx.ring, ctx.name = slicings, ring, name
        needs = ctx.needs_input_grad[3:]  # no other comparison before the rotation has all ranks of the ring
        found = _moved(ring, slicings, homes, False, name, f"slices with gradients {needs}")
        ctx.mark_non_differentiable(*[made for made, home in zip(found, homes, strict=True) if not home.requires_grad])
        return tuple(found)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *gradients: Tensor):
        results: list[Tensor | None] = [None] * len(gradients)
        chosen = [place for place, need in enumerate(wanted(ctx)[3:]) if need]
        given = [ctx.slicings[place] for place in chosen], [gradients[place] for place in chosen]
        made = _moved(ctx.ring, *given, True, ctx.name, "gradients of slices")
        for place, gradient in zip(chosen, made, strict=True):
            results[place] = gradient
        return None, None, None, *results


def chosen_slices(numbers: Tensor, experts: int, slices: int) -> Tensor:
    """Returns for rows [n, 1] with the number of an expert the numbers [n, r] of its slices, which lie behind one
    another: slice i of expert e is number i `experts` + e."""
    return numbers + experts * torch.arange(slices, device=numbers.device)
