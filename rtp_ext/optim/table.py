"""The plan of an optimizer as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from rtp_ext.optim.plan import Plan


@dataclass(frozen=True)
class PlanRow:
    """One matrix.

    Attributes:
        parameter: the name of its parameter, if the optimizer got names.
        matrix: index of the matrix in the parameter, of as many as it has.
        shape: m x n.
        exchange: `gram`, `whole`, or `local`: one rank has the whole matrix.
        owner: the global rank that runs the iteration; None where every rank has the parameter whole, and iterates it.
        bytes: what all ranks together send for it in a step.
    """

    parameter: str
    matrix: str
    shape: str
    exchange: str
    owner: int | None
    bytes: int


@dataclass(frozen=True)
class PlanTable:
    """What each matrix does in a step, as `Muon.plan` returns it."""

    rows: tuple[PlanRow, ...]
    plans: tuple[Plan, ...]

    @classmethod
    def of(cls, plans: Sequence[Plan], names: Sequence[str]) -> PlanTable:
        rows: dict[tuple[int, int], PlanRow] = {}
        for plan in plans:
            members = None if plan.layout.mesh is None else plan.layout.members()
            counts: dict[int, int] = {}
            for task in plan.tasks:
                counts[task.matrix.parameter] = max(counts.get(task.matrix.parameter, 0), task.matrix.number + 1)
            for task in plan.tasks:
                matrix = task.matrix
                rows[matrix.parameter, matrix.number] = PlanRow(
                    names[matrix.parameter],
                    f"{matrix.number + 1}/{counts[matrix.parameter]}",
                    "x".join(map(str, matrix.shape)),
                    task.exchange,
                    None if members is None else members[task.owner],
                    sum(sum(task.nbytes(rank)) for rank in matrix.holders),
                )
        return cls(tuple(row for _, row in sorted(rows.items())), tuple(plans))

    def bytes_sent(self) -> list[list[int]]:
        """For each group of ranks that share parameters, the bytes that each of them sends in a step."""
        return [[plan.bytes_sent(rank) for rank in range(plan.size)] for plan in self.plans]

    def __str__(self) -> str:
        head = [field.name for field in fields(PlanRow)]
        lines = [head] + [[str(getattr(row, name)) for name in head] for row in self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        return "\n".join(
            "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )
