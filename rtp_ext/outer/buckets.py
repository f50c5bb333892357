"""State of AllReduce during a backward: arrived gradients, buckets in flight, and messages between replicas."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch


def bucketed(sizes: Iterable[tuple[int, torch.dtype, int]], most: int) -> list[tuple[int, ...]]:
    """Groups parameters into buckets: consecutive ones of one dtype, up to `most` bytes, but at least one.

    `sizes`: number, dtype and element count of each parameter.
    """
    buckets: list[tuple[int, ...]] = []
    filled, last = 0, None
    for index, dtype, elements in sizes:
        size = elements * dtype.itemsize
        if dtype == last and filled + size <= most:
            buckets[-1] += (index,)
            filled += size
        else:
            buckets.append((index,))
            filled, last = size, dtype
    return buckets


Order = tuple[tuple[int, int], ...]  # parameter numbers, and the number of gradients of each


@dataclass(frozen=True)
class AgreementMessage:
    """Message that replicas compare before a reduction."""

    what: str
    backward: int  # index of this backward among those with gradients
    reduces: bool
    model: str
    launched: int  # number of buckets sent
    pending: tuple[int, ...]  # numbers of parameters whose gradients were not sent
    order: Order  # of all gradients, by completion

    def comparable(self) -> tuple:
        return self.what, self.backward, self.reduces, self.model

    def __str__(self) -> str:
        kind = "with" if self.reduces else "without"
        return f"{self.what} of backward {self.backward}, {kind} a reduction"


@dataclass
class InFlightBucket:
    """A bucket in flight."""

    work: Any
    sent: torch.Tensor  # keeps the buffer alive until the operation ends
    flat: torch.Tensor  # the buffer that receives the result
    indices: tuple[int, ...]


@dataclass
class BackwardState:
    """State since the start of the outermost backward that produced a gradient. Backwards of reentrant checkpoints run
    within it and do not end it."""

    reduces: bool
    end: weakref.ref | None = None  # final callback of the backward
    values: dict[int, torch.Tensor] = field(default_factory=dict)  # not sent yet
    counts: dict[int, int] = field(default_factory=dict)  # in the order of completion
    parameters: dict[int, Any] = field(default_factory=dict)
    launched: int = 0
    flights: list[InFlightBucket] = field(default_factory=list)

    @property
    def running(self) -> bool:
        """Returns whether its final callback will run: a graph task that fails drops its callbacks uncalled."""
        return self.end is not None and self.end() is not None
