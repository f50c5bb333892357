"""Experts that are cut along their hidden features: what each rank has at home becomes shards of whole slices.

Slice i of an expert is its hidden features [i c, (i + 1) c), c = ceil(H / r), of all r slices; the output of an expert
is the sum of those of its slices, which rotate as if they were experts. Its weights are DTensors of the whole ring, cut
along the hidden features by the chunk rule: balanced on N r ranks, but a rank has features of experts of other parts,
and of gate and up, where one follows the other, different ones. So in each forward every rank sends each other one what
belongs to the slice of that rank, and gets its gradient back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rtp_ext._native import shard_sizes
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import first_order_only, unseen
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


_Cells = list[tuple[slice, Tensor]]  # for each rank, experts and rows of a tensor


class Slicing:
    """Which values of a parameter travel between which ranks of the whole ring.

    Args:
        shape: of the whole parameter.
    """

    def __init__(self, ring: Ring, division: Division, cut: HiddenCut, shape: Sequence[int]) -> None:
        experts = ring.experts
        assert experts is not None
        whole, slices = shape[cut.dim], experts.inner.size
        sizes = shard_sizes(whole, ring.size)
        starts = [sum(sizes[:rank]) for rank in range(ring.size)]
        places = [cut.places(whole, slices, number) for number in range(slices)]
        own_part, own_slice = experts.places[ring.rank]

        def owned(rank: int, number: int) -> list[tuple[int, int]]:
            start, end = starts[rank], starts[rank] + sizes[rank]
            return [(row - start, place) for row, place in places[number] if start <= row < end]

        def cell(part: int, rows: list[int], first: int = 0) -> tuple[slice, Tensor]:
            chosen = torch.tensor(rows, dtype=torch.int64, device=ring.device)
            return slice(first, first + division.parts[part]), chosen

        self.dim = cut.dim
        self.home_shape, self.slice_shape = [*shape], [*shape]
        self.home_shape[cut.dim] = sizes[ring.rank]
        self.slice_shape[0], self.slice_shape[cut.dim] = max(division.parts), cut.extent(whole, slices)
        first = [sum(division.parts[:part]) for part in range(experts.size)]
        with torch.inference_mode(False):
            self.at_home: _Cells = [
                cell(part, [row for row, _ in owned(ring.rank, number)], first[part]) for part, number in experts.places
            ]
            self.in_slice: _Cells = [
                cell(own_part, [place for _, place in owned(rank, own_slice)]) for rank in range(ring.size)
            ]

    @unseen
    def move(self, ring: Ring, values: Tensor, back: bool, name: str) -> Tensor:
        """Returns this rank's slice for what it has at home; `back`: the reverse. Collective over the whole ring."""
        here, there = (self.in_slice, self.at_home) if back else (self.at_home, self.in_slice)
        found = values.new_zeros(self.home_shape if back else self.slice_shape)
        sent = [self._of(values, cell).reshape(-1) for cell in here]
        shapes = [self._shape(found, cell) for cell in there]
        leaving, arriving = [each.numel() for each in sent], [shape.numel() for shape in shapes]
        received = values.new_empty(sum(arriving))
        ring.experts.slice_bytes_sent += (sum(leaving) - leaving[ring.rank]) * values.itemsize  # type: ignore[union-attr]
        identity = f"slices of {name} {'back' if back else 'out'} ({found.dtype})"
        ring.communicator.all_to_all(received, torch.cat(sent), arriving, leaving, name, identity)
        for (experts, rows), block, shape in zip(there, received.split(arriving), shapes, strict=True):
            if shape.numel():
                found[experts].index_copy_(self.dim, rows, block.view(shape))
        return found

    def _of(self, values: Tensor, cell: tuple[slice, Tensor]) -> Tensor:
        experts, rows = cell
        return values[experts].index_select(self.dim, rows) if rows.numel() else values.new_empty(0)

    def _shape(self, values: Tensor, cell: tuple[slice, Tensor]) -> torch.Size:
        experts, rows = cell
        shape = [*values.shape]
        shape[0], shape[self.dim] = experts.stop - experts.start, rows.numel()
        return torch.Size(shape)


def expect_whole(division: Division, recipe: str | None, name: str) -> None:
    """Raises ValueError where slices of experts would multiply in 8 bits: their codes are those of whole experts."""
    if division.sliced and recipe is not None:
        raise ValueError(
            f"{name}: {division.experts} experts, which {len(division.parts)} parts have cut along their hidden "
            f"features, cannot be combined with recipe {recipe}: expected whole experts, at least one for each rank"
        )


class Sliced(torch.autograd.Function):
    """What this rank has at home of a parameter -> its slice of the experts of its part: [most experts of a part,
    rows of a slice, ...], with zeros for experts and rows that are missing. Its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, home: Tensor, slicing: Slicing, ring: Ring, name: str) -> Tensor:
        ctx.slicing, ctx.ring, ctx.name = slicing, ring, name
        return slicing.move(ring, home, False, name)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor):
        return ctx.slicing.move(ctx.ring, gradient, True, f"gradients of {ctx.name}"), None, None, None


def chosen_slices(numbers: Tensor, experts: int, slices: int) -> Tensor:
    """Returns for rows [n, 1] with the number of an expert the numbers [n, r] of its slices, which lie behind one
    another: slice i of expert e is number i `experts` + e."""
    return numbers + experts * torch.arange(slices, device=numbers.device)
