"""One linear layer of the benchmark `python -m rtp_ext bench`: what is timed, and what must come out.

Formulas: `measure.metrics`. The pieces: g1 (three GEMMs with the whole weight), gr (those of the shards, without hops),
c (the hops, without GEMMs), ov (the rotated layer), base (the hops, then g1).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rtp_ext import _native
from rtp_ext._native import RotationError
from rtp_ext.functional import rotated_linear
from rtp_ext.measure.metrics import Times
from rtp_ext.ring import Prepared, Ring

__all__ = ["Layer", "clocked", "layer_times"]

TURNS = 3
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}  # of the largest value
GRADIENT = torch.float32


class Layer:
    """One linear layer on one rank: x [T, K], dy [T, N], W [N, K] in shards of N / R rows; the actions to be timed."""

    def __init__(self, ring: Ring, rows: int, columns: int, tokens: int, dtype: torch.dtype) -> None:
        self.ring, self.size = ring, rows // ring.size

        def random(seed: int, *shape: int) -> torch.Tensor:
            generator = torch.Generator(ring.device).manual_seed(seed)
            return torch.randn(shape, device=ring.device, generator=generator)

        owners = [ring.rank] * ring.size if ring.mesh is None else range(ring.size)  # alone, every shard is this rank's
        scale = columns**-0.5
        self.shards = [(random(1000 + owner, self.size, columns) * scale).to(dtype) for owner in owners]
        self.whole = torch.cat(self.shards)
        self.home = self.shards[ring.rank].clone().requires_grad_()
        self.prepared = Prepared()
        self.x = random(2000 + ring.rank, tokens, columns).to(dtype).requires_grad_()
        self.dy = random(3000 + ring.rank, tokens, rows).to(dtype)
        self.input = self.x.detach()
        self.y, self.dx, self.dw = (torch.empty_like(of) for of in (self.dy, self.input, self.whole))
        self.sum = self.dx.float()
        self.partials = [torch.zeros_like(shard, dtype=GRADIENT) for shard in self.shards]
        self.options = _native.RotationOptions(
            route=ring.hop_route,
            in_place=False,
            compute_dtype=dtype,
            reduce_dtype=GRADIENT,
            slot_cap=0,
            halves=False,
            name="bench",
        )

    def g1(self) -> None:
        torch.mm(self.input, self.whole.t(), out=self.y)
        torch.mm(self.dy, self.whole, out=self.dx)
        torch.mm(self.dy.t(), self.input, out=self.dw)

    def gr(self) -> None:
        gemm = _native.kernels.gemm
        for owner, shard in enumerate(self.shards):
            gemm(self.y[:, self._columns(owner)], None, self.input, shard.t(), 1.0)
        for owner, shard in enumerate(self.shards):
            dy = self.dy[:, self._columns(owner)]
            gemm(self.sum, self.sum if owner else None, dy, shard, 1.0)
            gemm(self.partials[owner], self.partials[owner], dy.t(), self.input, 1 / self.ring.size)

    def _columns(self, owner: int) -> slice:
        return slice(owner * self.size, (owner + 1) * self.size)

    def c(self) -> None:
        home, shapes = self.home.detach(), [[list(self.home.shape)] * self.ring.size]
        self._pass(_native.Execution.forward, [home], shapes, self.options)
        sums = [self.partials[self.ring.rank]]
        self._pass(_native.Execution.backward, [home], shapes, sums, shapes, self.options, True, False)

    def _pass(self, start: Any, *arguments: Any) -> None:
        execution = self.ring.run("bench", start, *arguments)
        while execution.next() is not None:
            pass

    def ov(self) -> tuple[torch.Tensor, ...]:
        y = rotated_linear(self.x, self.home, ring=self.ring, prepared=self.prepared)
        return y.detach(), *torch.autograd.grad(y, (self.x, self.home), self.dy)

    def base(self) -> None:
        self.c()
        self.g1()

    def check(self) -> None:
        """Raises RotationError where the results are not those of the plain layer. Collective."""
        self.g1()
        parts = self.dw.float().view(self.ring.size, self.size, -1)
        if self.ring.mesh is None:
            gradient = parts.mean(0)
        else:
            gradient = self.ring.all_reduce(parts)[self.ring.rank] / self.ring.size
        names = ("output", "input gradient", "weight gradient")
        for name, found, expected in zip(names, self.ov(), (self.y, self.dx, gradient), strict=True):
            error, largest = (found - expected).abs().max().item(), expected.abs().max().item()
            if not error <= TOLERANCE[found.dtype] * largest:  # NaN is not
                raise RotationError(
                    f"bench: {name}: expected an error below {TOLERANCE[found.dtype]:.0e} of {largest:.3g}, got "
                    f"{error:.3g}; nothing is timed"
                )


def clocked(ring: Ring, action: Callable[[], object]) -> float:
    """Microseconds of one call on this rank, all ranks starting together."""
    ring.exchange(None)
    if ring.device.type == "cpu":
        start = time.perf_counter()
        action()
        return (time.perf_counter() - start) * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    action()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def layer_times(layer: Layer, seconds: float) -> tuple[Times, float]:
    """Medians of the slowest rank, and how far apart the 20th and 80th percentile of GEMMs or of the rotation are.

    The quantities take turns, each for at least `seconds` in all. Raises RotationError for a wrong result. Collective.
    """
    layer.check()
    ring = layer.ring
    actions = {name: getattr(layer, name) for name in ("g1", "gr", "c", "ov", "base")}
    counts, taken = {}, {name: [] for name in actions}  # type: dict[str, int], dict[str, list[float]]
    for name, action in actions.items():
        action()
        estimate = max(ring.exchange(clocked(ring, action)))
        counts[name] = max(1, min(200, round(seconds * 1e6 / TURNS / max(estimate, 1.0))))
    for _ in range(TURNS):
        for name, action in actions.items():
            taken[name] += [clocked(ring, action) for _ in range(counts[name])]
    percentiles = {}
    for name, mine in taken.items():
        slowest = [max(times) for times in zip(*ring.exchange(mine), strict=True)]
        percentiles[name] = [float(value) for value in np.percentile(slowest, [20, 50, 80])]
    g1, gr, c, ov, base = (percentiles[name][1] for name in actions)
    noise = max(percentiles[name][2] - percentiles[name][0] for name in ("g1", "gr", "ov"))
    return Times(g1, gr, c, ov, base, gr), noise
