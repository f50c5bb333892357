"""Repeated timing of actions: by CUDA events on a GPU, by the clock on a CPU, of the slowest rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["Sample", "Stopwatch", "Together", "renew", "samples", "settle_memory", "timed"]

WARMUP = 3
MOST = 2000  # largest number of iterations of one quantity
ROUNDS = 5
LARGEST_KEPT = 2**25 - 2**16  # bytes: just below what glibc's malloc takes from the kernel anew each time


@dataclass(frozen=True)
class Together:
    """The ranks that time an action.

    Attributes:
        device: the device of this rank.
        barrier: returns when all ranks have called it.
        gather: returns every rank's values, float64 [ranks, values]. Collective.
    """

    device: torch.device
    barrier: Callable[[], object]
    gather: Callable[[list[float]], torch.Tensor]


@dataclass(frozen=True)
class Sample:
    """Microseconds of one quantity: median, 20th and 80th percentile over `count` iterations."""

    median: float
    p20: float
    p80: float
    count: int

    @classmethod
    def of(cls, microseconds: torch.Tensor) -> Sample:
        """Returns the sample of times [ranks, iterations]; an iteration takes as long as its slowest rank."""
        if microseconds.numel() == 0:
            raise ValueError("expected at least one timed iteration, got none")
        slowest = microseconds.amax(0).numpy()
        p20, median, p80 = (float(value) for value in np.percentile(slowest, [20, 50, 80]))
        return cls(median, p20, p80, len(slowest))


def samples(
    actions: Mapping[str, Callable[[], object]], ranks: Together, *, seconds: float, iterations: int
) -> dict[str, Sample]:
    """Times every action for at least `seconds` and at least `iterations` times, after WARMUP ones. Collective.

    The actions alternate in ROUNDS rounds, so that other load of the machine affects all of them. On a GPU the
    iterations of a round run on the current stream without a pause, each between a pair of events; the host does not
    wait in between. On CPUs a barrier of the ranks precedes each iteration.
    """
    counts = {}
    for name, action in actions.items():
        for _ in range(WARMUP):
            action()
        estimate = ranks.gather([sum(timed(action, ranks, 2)) / 2e6]).max().item()
        counts[name] = max(iterations, min(MOST, math.ceil(seconds / max(estimate, 1e-7))))
    times: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(ROUNDS):
        for name, action in actions.items():
            share = counts[name] * (turn + 1) // ROUNDS - len(times[name])
            times[name] += timed(action, ranks, share)
    return {name: Sample.of(ranks.gather(taken)) for name, taken in times.items()}


def timed(action: Callable[[], object], ranks: Together, count: int = 1) -> list[float]:
    """Returns the microseconds of each of `count` iterations on this rank."""
    if ranks.device.type == "cpu":
        times = []
        for _ in range(count):
            ranks.barrier()
            start = time.perf_counter()
            action()
            times.append((time.perf_counter() - start) * 1e6)
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * count)]
    torch.cuda.synchronize(ranks.device)
    ranks.barrier()
    torch.cuda.synchronize(ranks.device)
    for begin, end in zip(events[::2], events[1::2], strict=True):
        begin.record()
        action()
        end.record()
    torch.cuda.synchronize(ranks.device)
    return [begin.elapsed_time(end) * 1e3 for begin, end in zip(events[::2], events[1::2], strict=True)]


def settle_memory() -> None:
    """Makes malloc of this process keep freed memory, as it does in a program that has run for a while.

    glibc maps large tensors individually and unmaps them when they are freed, or takes them from its heap and trims the
    heap. Every new page costs a page fault, and the faults of a shard cost more than its GEMM over few tokens. The
    thresholds of both follow the largest mapped tensor that was freed so far, up to 32 MiB: without this call, times
    depend on earlier frees of the process.
    """
    torch.empty(LARGEST_KEPT, dtype=torch.uint8)  # freed at once


def renew(*tensors: torch.Tensor) -> None:
    """Gives tensors and their views new, uninitialised memory, as an operation that returns them allocates it. Does
    nothing on a GPU, where torch's allocator keeps freed memory."""
    for tensor in tensors:
        if tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            storage.resize_(0)
            storage.resize_(size)


class Stopwatch:
    """Sums times by kind of work: `start("dgrad")`, the work, `stop()`, ...; then `totals()`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: tuple[str, Any] | None = None
        self._pieces: list[tuple[str, Any, Any]] = []

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self, kind: str) -> None:
        self._open = kind, self._now()

    def stop(self) -> None:
        assert self._open is not None, "stop() without start()"
        kind, begin = self._open
        self._pieces.append((kind, begin, self._now()))

    def totals(self) -> dict[str, float]:
        """Returns microseconds by kind. Waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        sums: dict[str, float] = {}
        for kind, begin, end in self._pieces:
            taken = (end - begin) * 1e6 if self._device.type == "cpu" else begin.elapsed_time(end) * 1e3
            sums[kind] = sums.get(kind, 0.0) + taken
        return sums
