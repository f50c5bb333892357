"""The matrices of a parameter, and the parts of them that each rank holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rtp_ext.ring.mesh import part_bounds
from rtp_ext.ring.parameters_in_use import rotates

Bounds = tuple[tuple[int, int], ...]  # start and size along each dimension


@dataclass(frozen=True)
class Matrix:
    """One matrix [m, n] of a parameter, and where it is.

    Attributes:
        parameter: index of the parameter in the optimizer.
        number: index of the matrix in the parameter.
        shape: (m, n).
        parts: by rank of those that share the parameter, start and size of the part's rows and columns in the matrix;
            None where a rank has no part.
        places: by rank, start and size of the part along the dimensions of the rank's shard.
    """

    parameter: int
    number: int
    shape: tuple[int, int]
    parts: tuple[Bounds | None, ...]
    places: tuple[Bounds | None, ...]

    @property
    def holders(self) -> list[int]:
        """The ranks that have a part."""
        return [rank for rank, part in enumerate(self.parts) if part is not None]

    @property
    def long(self) -> int:
        return max(self.shape)

    @property
    def short(self) -> int:
        return min(self.shape)

    @property
    def long_cut(self) -> int | None:
        """The dimension of the long side, if all parts have the whole short side; None otherwise. Either side of a
        square matrix is its long one."""
        for dim in (0, 1):
            spans = all(self.parts[rank][1 - dim][1] == self.shape[1 - dim] for rank in self.holders)  # type: ignore[index]
            if spans and self.shape[dim] >= self.shape[1 - dim]:
                return dim
        return None

    def part_shape(self, rank: int) -> tuple[int, int]:
        part = self.parts[rank]
        assert part is not None, "a part of the matrix"
        return part[0][1], part[1][1]

    def part_numel(self, rank: int) -> int:
        return math.prod(self.part_shape(rank))

    def of_shard(self, shard: Tensor, rank: int) -> Tensor:
        """Returns the part, a view of two dimensions, of the matrix in the shard of a rank."""
        place = self.places[rank]
        assert place is not None, "a part of the matrix"
        for dim, (start, size) in enumerate(place):
            shard = shard.narrow(dim, start, size)
        return shard[0] if shard.dim() == 3 else shard

    def of_whole(self, matrix: Tensor, rank: int) -> Tensor:
        """Returns the part of a rank, a view, of the whole matrix."""
        part = self.parts[rank]
        assert part is not None, "a part of the matrix"
        (top, rows), (left, columns) = part
        return matrix[top : top + rows, left : left + columns]


@dataclass(frozen=True)
class Layout:
    """The ranks that share a parameter: those along the dimensions `cut` of its mesh. No mesh: this rank alone."""

    mesh: DeviceMesh | None = None
    cut: tuple[int, ...] = ()

    @classmethod
    def of(cls, parameter: Tensor) -> Layout:
        if not isinstance(parameter, DTensor):
            return cls()
        cut = tuple(i for i, each in enumerate(parameter.placements) if not isinstance(each, Replicate))
        mesh = parameter.device_mesh
        return cls(mesh, cut) if math.prod(mesh.size(i) for i in cut) > 1 else cls()

    def coordinates(self) -> list[list[int]]:
        """The coordinates in the mesh of all ranks that share the parameter, in the order of `members`."""
        assert self.mesh is not None, "a parameter that ranks share"
        own: Any = self.mesh.get_coordinate()
        ranges = [range(self.mesh.size(i)) if i in self.cut else [own[i]] for i in range(self.mesh.ndim)]
        return [list(each) for each in sorted(itertools.product(*ranges), key=self._rank_at)]

    def members(self) -> list[int]:
        """The ranks in the default process group, ascending, as torch orders the members of a group."""
        assert self.mesh is not None, "a parameter that ranks share"
        return [self._rank_at(coordinate) for coordinate in self.coordinates()]

    def _rank_at(self, coordinate: Sequence[int]) -> int:
        assert self.mesh is not None, "a parameter that ranks share"
        return int(self.mesh.mesh[tuple(coordinate)])

    def bounds(self, parameter: Tensor) -> list[list[tuple[int, int]]]:
        """Start and size of every rank's shard along each dimension of the parameter."""
        if self.mesh is None:
            return [[(0, extent) for extent in parameter.shape]]
        assert isinstance(parameter, DTensor), "a parameter that ranks share"
        placements = parameter.placements
        return [part_bounds(parameter.shape, self.mesh.shape, placements, each) for each in self.coordinates()]


def expect_matrices(parameter: Tensor, blocks: Any) -> None:
    """Raises ValueError, or TypeError, for a parameter that is no matrix, no stack of matrices, or of another layout
    than those of fully_rotate."""
    shape = tuple(parameter.shape)
    if parameter.is_complex() or not parameter.is_floating_point():
        raise TypeError(f"Muon: expected real floating-point parameters, got {parameter.dtype} of shape {shape}")
    if parameter.dim() not in (2, 3):
        raise ValueError(
            f"Muon: expected matrices [m, n], or stacks of them [E, m, n], got a parameter of shape {shape}: give it "
            "to torch.optim.AdamW in an optimizer of its own (rtp_ext.optim.matrices(model) returns both lists)"
        )
    if not isinstance(blocks, int) or isinstance(blocks, bool) or blocks < 1:
        raise ValueError(f"Muon: expected blocks, the number of matrices that are stacked by rows, got {blocks!r}")
    if parameter.shape[-2] % blocks or 0 in shape:
        raise ValueError(
            f"Muon: expected a parameter whose rows are {blocks} blocks of equal size, got one of shape {shape}"
        )
    if not isinstance(parameter, DTensor):
        return
    if not rotates(parameter):
        raise ValueError(
            f"Muon: expected plain parameters, or those of a model after fully_rotate, got a DTensor of shape {shape} "
            f"on another mesh, {parameter.device_mesh}: torch.optim.Muon takes it"
        )
    for placement in parameter.placements:
        if not isinstance(placement, (Replicate, Shard, _StridedShard)):
            raise ValueError(
                f"Muon: expected placements Shard and Replicate, got {placement} of a parameter of shape {shape}"
            )


def matrices_of(index: int, parameter: Tensor, blocks: int, layout: Layout) -> list[Matrix]:
    """Returns the matrices of a parameter [m, n] or [E, m, n], whose rows are `blocks` matrices: block k of expert e
    has number e * blocks + k."""
    *stack, rows, columns = parameter.shape
    height = rows // blocks
    bounds = layout.bounds(parameter)
    found = []
    for number in range(math.prod(stack) * blocks):
        expert, block = divmod(number, blocks)
        whole = [(expert, 1)] * len(stack) + [(block * height, height), (0, columns)]
        parts: list[Bounds | None] = []
        places: list[Bounds | None] = []
        for shard in bounds:
            overlap = [_overlap(one, other) for one, other in zip(whole, shard, strict=True)]
            empty = any(size == 0 for _, size in overlap)
            parts.append(None if empty else _within(overlap[-2:], whole[-2:]))
            places.append(None if empty else _within(overlap, shard))
        found.append(Matrix(index, number, (height, columns), tuple(parts), tuple(places)))
    return found


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    start, stop = max(one[0], other[0]), min(sum(one), sum(other))
    return start, max(stop - start, 0)


def _within(bounds: Sequence[tuple[int, int]], around: Sequence[tuple[int, int]]) -> Bounds:
    return tuple((start - outer, size) for (start, size), (outer, _) in zip(bounds, around, strict=True))
