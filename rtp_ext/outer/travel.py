"""What AllReduce keeps of a backward: what has arrived, what is on its way, and what replicas tell each other."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch


def bucketed(sizes: Iterable[tuple[int, torch.dtype, int]], most: int) -> list[tuple[int, ...]]:
    """Parameters that travel together: neighbours of one dtype, up to `most` bytes, but at least one.

    `sizes`: number, dtype and elements of each.
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


Order = tuple[tuple[int, int], ...]  # numbers of parameters, and how many gradients each got


@dataclass(frozen=True)
class Told:
    """What replicas tell each other."""

    what: str
    backward: int  # the how manieth with gradients
    reduces: bool
    model: str
    launched: int  # buckets
    pending: tuple[int, ...]  # numbers of parameters with gradients that have not left
    order: Order  # of all that arrived, by when they were complete

    def comparable(self) -> tuple:
        return self.what, self.backward, self.reduces, self.model

    def __str__(self) -> str:
        kind = "with" if self.reduces else "without"
        return f"{self.what} of backward {self.backward}, {kind} a reduction"


@dataclass
class Flight:
    """A bucket on its way."""

    work: Any
    sent: torch.Tensor  # alive until it has arrived
    flat: torch.Tensor  # what arrives
    indices: tuple[int, ...]


@dataclass
class Pass:
    """What has arrived since the outermost backward began that a gradient has arrived in: reentrant checkpoints run
    others within it, which do not end a pass."""

    reduces: bool
    end: weakref.ref | None = None  # what the backward calls at its end
    values: dict[int, torch.Tensor] = field(default_factory=dict)  # not yet on their way
    counts: dict[int, int] = field(default_factory=dict)  # the last to be complete last
    parameters: dict[int, Any] = field(default_factory=dict)
    launched: int = 0
    flights: list[Flight] = field(default_factory=list)

    @property
    def running(self) -> bool:
        """Whether it will come to an end: a graph task that fails calls nobody, and lets go of what it would call."""
        return self.end is not None and self.end() is not None
