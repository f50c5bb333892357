"""Which rank iterates each matrix, what travels there and back, and in which rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from rtp_ext.optim.layout import Layout, Matrix
from rtp_ext.optim.newton_schulz import Iteration, iteration_dtype, triangle_numel

LOCAL = "local"  # one rank has the whole matrix

# `auto` weighs a byte that a rank sends as this many of its floating-point operations: about 60 TFLOP/s of float32
# beside 100 GB/s on GPUs of one host, or 75 GFLOP/s beside 125 MB/s on CPUs. Choices change little with it, since the
# exchange with fewer bytes mostly has fewer operations, too.
FLOPS_PER_BYTE = 600

# Bytes that a rank may send, and the owner of a matrix receive, in one round, unless one matrix needs more.
ROUND = 256 << 20


@dataclass(frozen=True)
class Task:
    """One matrix in the plan.

    Attributes:
        exchange: `gram`, `whole` or `local`.
        owner: the rank, of those that share the parameter, that runs the iteration.
        dtype: the dtype of the momentum, in which parts of `whole` travel.
    """

    matrix: Matrix
    iteration: Iteration
    exchange: str
    owner: int
    dtype: torch.dtype

    def sent_numel(self, rank: int) -> int:
        """Numbers that a rank which is not the owner sends to the owner; as many come back."""
        if self.matrix.parts[rank] is None:
            return 0
        return triangle_numel(self.matrix.short) if self.exchange == "gram" else self.matrix.part_numel(rank)

    @property
    def wire_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Dtypes of what the owner receives, and of what it returns."""
        wide = iteration_dtype(self.dtype)
        return (wide if self.exchange == "gram" else self.dtype), wide

    def nbytes(self, rank: int) -> tuple[int, int]:
        """Bytes between a rank and the owner, there and back."""
        numel = 0 if rank == self.owner else self.sent_numel(rank)
        there, back = self.wire_dtypes
        return numel * there.itemsize, numel * back.itemsize

    @property
    def owner_flops(self) -> int:
        """Floating-point operations of the owner that the other ranks do not have."""
        sides = self.matrix.long, self.matrix.short
        return self.iteration.gram_flops(*sides) if self.exchange == "gram" else self.iteration.whole_flops(*sides)

    @property
    def cost(self) -> int:
        """Operations of all ranks, with the bytes on the wire as operations."""
        sides = self.matrix.long, self.matrix.short
        spread = self.iteration.product_flops(*sides) if self.exchange == "gram" else 0
        return self.owner_flops + spread + FLOPS_PER_BYTE * sum(sum(self.nbytes(r)) for r in self.matrix.holders)


@dataclass(frozen=True)
class Plan:
    """All matrices of the parameters with one layout, in rounds.

    In a round each rank sends its contributions to the owners, the owners iterate, and results come back.
    """

    layout: Layout
    size: int  # the number of ranks that share the parameters
    rounds: tuple[tuple[Task, ...], ...]

    @property
    def tasks(self) -> list[Task]:
        return [task for tasks in self.rounds for task in tasks]

    def bytes_sent(self, rank: int) -> int:
        """Bytes that a rank sends in a step, without padding."""
        there = sum(task.nbytes(rank)[0] for task in self.tasks)
        owned = (task for task in self.tasks if task.owner == rank)
        return there + sum(task.nbytes(other)[1] for task in owned for other in task.matrix.holders)

    def owner_flops(self) -> list[int]:
        """Floating-point operations of each rank's iterations in a step."""
        return [sum(task.owner_flops for task in self.tasks if task.owner == rank) for rank in range(self.size)]


def choose(matrix: Matrix, iteration: Iteration, dtype: torch.dtype, exchange: str) -> str:
    """Returns the exchange of a matrix where `exchange` was asked for.

    The Gram matrix of the cut side has the size of the other one, and is the sum of the ranks' Gram matrices only where
    each has the whole other side. Matrices that are cut along their short side, or along both, go whole.
    """
    if len(matrix.holders) == 1:
        return LOCAL
    if exchange == "whole" or matrix.long_cut is None:
        return "whole"
    if not iteration.allows_gram(dtype):
        if exchange == "gram":
            raise ValueError(
                f"Muon: expected ns_coefficients and ns_steps with which exchange='gram' is accurate, got a first "
                f"coefficient of {iteration.coefficients[0]} and {iteration.steps} steps: take 'auto', or fewer steps"
            )
        return "whole"
    if exchange == "gram":
        return "gram"
    both = [Task(matrix, iteration, each, matrix.holders[0], dtype) for each in ("gram", "whole")]
    return min(both, key=lambda task: task.cost).exchange


def make_plan(
    layout: Layout,
    matrices: Sequence[tuple[Matrix, Iteration, torch.dtype]],
    exchange: str,
    round_bytes: int = ROUND,
) -> Plan:
    """Returns the plan of matrices with one layout. `matrices`: with the dtype of their momentum."""
    size = len(matrices[0][0].parts)
    drafts = [
        Task(matrix, iteration, choose(matrix, iteration, dtype, exchange), matrix.holders[0], dtype)
        for matrix, iteration, dtype in matrices
    ]
    load, queues = [0] * size, [list[Task]() for _ in range(size)]
    for task in sorted(drafts, key=lambda task: (task.exchange != LOCAL, -task.owner_flops)):  # stable
        owner = min(task.matrix.holders, key=lambda rank: load[rank])
        load[owner] += task.owner_flops
        queues[owner].append(Task(task.matrix, task.iteration, task.exchange, owner, task.dtype))
    longest = max(map(len, queues))
    in_turn = [queue[place] for place in range(longest) for queue in queues if place < len(queue)]
    return Plan(layout, size, tuple(_rounds(in_turn, size, round_bytes)))


def _rounds(tasks: Iterable[Task], size: int, limit: int) -> Iterable[tuple[Task, ...]]:
    """Yields the tasks, in order, in rounds in which no rank sends or receives more than `limit` bytes, unless one task
    needs more."""
    current: list[Task] = []
    sent, received = [0] * size, [0] * size
    for task in tasks:
        there = [max(task.nbytes(rank)) for rank in range(size)]
        too_much = received[task.owner] + sum(there) > limit or any(
            one + other > limit for one, other in zip(sent, there, strict=True)
        )
        if current and too_much and any(there):
            yield tuple(current)
            current, sent, received = [], [0] * size, [0] * size
        current.append(task)
        sent = [one + other for one, other in zip(sent, there, strict=True)]
        received[task.owner] += sum(there)
    if current:
        yield tuple(current)
