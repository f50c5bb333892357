"""Exchanges of matrices between the ranks that share them, for an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rtp_ext._native import RotationError
from rtp_ext.optim.layout import Layout
from rtp_ext.optim.newton_schulz import iteration_dtype, pack_triangle, triangle_numel, unpack_triangle
from rtp_ext.optim.plan import Task
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import gradient_handler_of
from rtp_ext.ring.links.agree import differing, expect_same_lines
from rtp_ext.ring.links.companion import Companion
from rtp_ext.ring.mesh import live_ring

# -- groups of ranks ---------------------------------------------------------------------------------------------------


class Sharers(Companion):
    """The ranks that hold parts of the same matrices: a ring, or with ZeroOuter the rings of all replicas.

    Collective: every rank makes it in its first step.
    """

    _member, _others = "rank", "a rank that shares matrices"

    def __init__(self, layout: Layout, parameter: Any) -> None:
        ring = _ring_of(layout, parameter)
        members, me = layout.members(), dist.get_rank()
        super().__init__(ring, members.index(me), members)

    def leave(self) -> None:
        """Drops the groups of an optimizer that is gone, perhaps on this rank alone."""
        ring = self._ring()
        if ring is not None:
            ring.communicator.companions = tuple(each for each in ring.companions if each is not self)

    def agree(self, facts: Sequence[str]) -> None:
        """Raises ValueError on every rank if ranks are about to take different steps. `facts`: lines that describe the
        step. Collective."""
        answers = differing(self, list(facts))
        named = [f"rank {member}" for member in self.members].__getitem__
        expect_same_lines("Muon, the step of all ranks that share matrices", answers, named=named)


def _ring_of(layout: Layout, parameter: Any) -> Ring:
    """Returns a ring that fails with the ranks that share a parameter."""
    handler = gradient_handler_of(parameter)
    ring = None if handler is None else handler.ring
    if ring is None or not ring.alive:
        assert layout.mesh is not None, "a parameter that ranks share"
        ring = live_ring(layout.mesh)
    if ring is None:
        raise RotationError(f"Muon: the ring of a parameter of shape {tuple(parameter.shape)} was closed")
    return ring


def on(device: torch.device, tensor: Tensor) -> Tensor:
    """Returns a tensor on a device: shards of an offloaded model lie on the host."""
    return tensor if tensor.device == device else tensor.to(device)


# -- rounds ------------------------------------------------------------------------------------------------------------

_ALIGNMENT = 16  # bytes; of a contribution in the buffer that travels

# The momentum of this rank's part of a matrix [m_r, n_r]; and what takes the result for it.
Source = Callable[[Task], Tensor]
Sink = Callable[[Task, Tensor], None]


class _Wire:
    """Bytes to or from each rank. Both sides of a transfer derive the same layout from the plan."""

    def __init__(self, rows: Sequence[Sequence[tuple[int, int, torch.dtype]]], device: torch.device) -> None:
        """`rows`: by rank, the index of the task in its round, the number of elements, and their dtype."""
        self.splits: list[int] = []
        self.payload = 0
        self._places: dict[tuple[int, int], tuple[int, int, torch.dtype]] = {}  # by rank and task
        start = 0
        for rank, row in enumerate(rows):
            before = start
            for index, numel, dtype in row:
                self._places[rank, index] = start, numel, dtype
                nbytes = numel * dtype.itemsize
                self.payload += nbytes
                start += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
            self.splits.append(start - before)
        self.buffer = torch.empty(start, dtype=torch.uint8, device=device)

    def view(self, rank: int, index: int) -> Tensor:
        start, numel, dtype = self._places[rank, index]
        return self.buffer[start : start + numel * dtype.itemsize].view(dtype)


def run_round(tasks: Sequence[Task], sharers: Sharers | None, source: Source, sink: Sink, device: torch.device) -> int:
    """Runs one round, and returns the bytes that this rank sent. Collective, unless each rank holds whole matrices.

    source: returns this rank's part of the momentum of a task, on `device`; it is called again where the result of
        `gram` is computed, so that no round keeps the parts of all its matrices.
    sink: gets the update of this rank's part.
    """
    rank, size = (0, 1) if sharers is None else (sharers.rank, sharers.size)
    to_owners = _rows(tasks, rank, size, 0)
    from_others = _rows(tasks, rank, size, 1)
    travels = any(len(task.matrix.holders) > 1 for task in tasks)  # the same on all ranks
    sent = 0
    outgoing, incoming = _Wire(to_owners[0], device), _Wire(to_owners[1], device)
    if travels:
        assert sharers is not None, "ranks that share matrices"
        for index, task in enumerate(tasks):
            if task.owner != rank and task.matrix.parts[rank] is not None:
                _contribute(task, source(task), outgoing.view(task.owner, index))
        sharers.all_to_all(incoming.buffer, outgoing.buffer, incoming.splits, outgoing.splits, "Muon")
        sent += outgoing.payload
    del outgoing
    results, updates = _Wire(from_others[0], device), _Wire(from_others[1], device)
    for index, task in enumerate(tasks):
        if task.owner == rank:
            arrived = {r: incoming.view(r, index) for r in task.matrix.holders if r != rank}
            places = {r: results.view(r, index) for r in arrived}
            sink(task, _iterate(task, rank, source(task), arrived, places))
    del incoming
    if travels:
        assert sharers is not None, "ranks that share matrices"
        sharers.all_to_all(updates.buffer, results.buffer, updates.splits, results.splits, "Muon")
        sent += results.payload
    del results
    for index, task in enumerate(tasks):
        if task.owner != rank and task.matrix.parts[rank] is not None:
            sink(task, _finish(task, rank, source, updates.view(task.owner, index)))
    return sent


_Rows = list[list[tuple[int, int, torch.dtype]]]


def _rows(tasks: Sequence[Task], me: int, size: int, way: int) -> tuple[_Rows, _Rows]:
    """Returns what this rank sends to each rank and receives from it: to the owners (`way` 0), or back (1)."""
    as_holder: _Rows = [[] for _ in range(size)]
    as_owner: _Rows = [[] for _ in range(size)]
    for index, task in enumerate(tasks):
        for holder in task.matrix.holders:
            if holder == task.owner:
                continue
            entry = (index, task.sent_numel(holder), task.wire_dtypes[way])
            if holder == me:
                as_holder[task.owner].append(entry)
            if task.owner == me:
                as_owner[holder].append(entry)
    return (as_holder, as_owner) if way == 0 else (as_owner, as_holder)


def _contribute(task: Task, part: Tensor, out: Tensor) -> None:
    if task.exchange == "gram":
        pack_triangle(_gram(task, part), out)
    else:
        out.view(part.shape).copy_(part)


def _gram(task: Task, part: Tensor) -> Tensor:
    """Returns the Gram matrix [n, n] of this rank's part, n the short side."""
    wide = part.to(iteration_dtype(part.dtype))
    return wide.T @ wide if task.matrix.long_cut == 0 else wide @ wide.T


def _iterate(task: Task, rank: int, part: Tensor, arrived: dict[int, Tensor], places: dict[int, Tensor]) -> Tensor:
    """Runs the iteration of a matrix at its owner: writes the results of other ranks to `places`, and returns the
    update of the owner's part."""
    matrix, wide = task.matrix, iteration_dtype(part.dtype)
    if task.exchange == "gram":
        n = matrix.short
        total = part.new_zeros(triangle_numel(n), dtype=wide)
        for holder in matrix.holders:  # in the same order at every owner
            if holder == rank:
                own = torch.empty_like(total)
                pack_triangle(_gram(task, part), own)
                total += own
            else:
                total += arrived[holder]
        factor = task.iteration.on_gram(unpack_triangle(total, n))
        for place in places.values():
            pack_triangle(factor, place)
        return _times(task, part, factor)
    whole = part.new_empty(matrix.shape, dtype=wide)
    for holder in matrix.holders:
        theirs = part if holder == rank else arrived[holder].view(matrix.part_shape(holder))
        matrix.of_whole(whole, holder).copy_(theirs)
    whole = task.iteration.on_matrix(whole)
    for holder, place in places.items():
        place.view(matrix.part_shape(holder)).copy_(matrix.of_whole(whole, holder))
    return matrix.of_whole(whole, rank)


def _times(task: Task, part: Tensor, factor: Tensor) -> Tensor:
    wide = part.to(factor.dtype)
    return wide @ factor if task.matrix.long_cut == 0 else factor @ wide


def _finish(task: Task, rank: int, source: Source, arrived: Tensor) -> Tensor:
    """Returns the update of this rank's part from what its owner returned."""
    if task.exchange == "gram":
        return _times(task, source(task), unpack_triangle(arrived, task.matrix.short))
    return arrived.view(task.matrix.part_shape(rank))
