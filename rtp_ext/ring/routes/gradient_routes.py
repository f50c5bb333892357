"""How the gradients of a ring come home: along a chain of partial sums, or each contribution straight to its owner."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rtp_ext.ring.links.groups import Groups
from rtp_ext.ring.routes.hops import choose_route

GRADIENT_ROUTES = ("auto", "chain", "direct")
GRADIENT_TRAVELS = (None, "int8")
BY_DTYPE = "by-dtype"


@dataclass(frozen=True)
class GradientRoutes:
    """What a ring takes.

    Attributes:
        route: `chain` (a partial sum travels from rank to rank), `direct` (each contribution goes straight to the owner
            of its shard, who adds them up in float32, or float64), or `by-dtype` (direct where gradients travel in 16
            bits, else the chain).
        travel: `int8`, or None: the reduce dtype.
        reason: why.
    """

    route: str = "chain"
    travel: str | None = None
    reason: str = ""

    def direct(self, route: str, reduce_dtype: torch.dtype) -> bool:
        """Whether gradients of a layer on this route go straight home."""
        if route in ("gather", "two-level"):  # whose gradients have a way of their own
            return False
        return self.route == "direct" or (self.route == BY_DTYPE and reduce_dtype.itemsize == 2)

    def local_dtype(self, route: str, reduce_dtype: torch.dtype) -> torch.dtype:
        """Of a gradient that has come home."""
        narrow = self.direct(route, reduce_dtype) and reduce_dtype.itemsize == 2
        return torch.float32 if narrow else reduce_dtype


class ComingHome:
    """How gradients come home. For the class Ring."""

    late_gradients: int
    gradients: GradientRoutes
    abandon: Callable[[Exception], None]
    _executor: Any
    _called: collections.deque[int]  # when each of the newest operations that may be late was called

    @property
    def gradient_route(self) -> str:
        """What gradients take: `chain`, `direct`, or `by-dtype`; `gradients` says why."""
        return self.gradients.route

    @property
    def gradient_travel(self) -> str | None:
        """What gradients travel in; None: their reduce dtype."""
        return self.gradients.travel

    def deferred_after(self) -> int:
        """The operation that is called now may let its gradients land late: where in the order of a backward, which is
        that of autograd's sequence numbers, they have to. Once the `late_gradients` operations called before this one,
        which are the next in a backward, have posted their hops."""
        after = self._called[0] if len(self._called) == self.late_gradients else 0
        self._called.append(torch._C._autograd._get_sequence_nr())
        return after

    def land(self, gradient: torch.Tensor) -> None:
        """Waits for what is under way of a gradient that an operation's backward has returned."""
        try:
            self._executor.land(gradient)
        except RuntimeError as error:
            self.abandon(error)
            raise


def check_requested(route: str, travel: str | None, hop_route: str, halves: bool | None) -> None:
    """Raises ValueError for what is unknown, or cannot be together on any ring."""
    if route not in GRADIENT_ROUTES:
        raise ValueError(f"Ring: expected gradient_route one of {', '.join(GRADIENT_ROUTES)}, got {route!r}")
    if travel not in GRADIENT_TRAVELS:
        raise ValueError(f"Ring: expected gradient_travel None or 'int8', got {travel!r}")
    if route == "chain" and travel is not None:
        raise ValueError(f"{_SUMS}, got gradient_travel {travel!r} with gradient_route 'chain'")
    if route == "direct" and hop_route == "two-level":
        raise ValueError("Ring: expected gradient_route auto or chain with route two-level, got 'direct'")
    if route == "direct" and halves:
        raise ValueError("Ring: expected gradient_halves None or False with gradient_route direct, got True")


_SUMS = (
    "Ring: expected gradient_route direct where gradients travel in int8: a partial sum that is "
    "quantized again at every rank loses more with each"
)


def choose_gradient_route(
    ring: Groups, transport: str, hop_route: str, wish: str, travel: str | None
) -> GradientRoutes:
    """What the ring takes of what was wished for, the same on every rank. Collective.

    Raises:
        ValueError: there are two levels, and the route direct is asked for; or gradients are to travel in int8, and
            `auto` does not take it.
    """
    hosts = ring.placed
    if hop_route == "two-level" and wish == "direct":
        raise ValueError(
            f"Ring: expected gradient_route auto or chain on two levels ({hosts.count} hosts of {hosts.per_host} "
            "ranks), whose gradients are summed inside hosts first, got 'direct'; with route='ring' they take it"
        )
    if hop_route == "two-level":
        selected = GradientRoutes("chain", None, "gradients of two levels are summed inside hosts first")
    elif wish != "auto":
        return GradientRoutes(wish, travel, "it was asked for")
    elif not _equal_cost(ring, transport):
        shared = "the ranks of a host share its link to others"
        selected = GradientRoutes("chain", None, shared if hosts.count > 1 else "devices do not all reach each other")
    elif travel is not None:
        return GradientRoutes("direct", travel, f"gradients travel in {travel}")
    else:
        return GradientRoutes(BY_DTYPE, None, "every rank reaches every other at the cost of a neighbour")
    if travel is not None:
        raise ValueError(f"{_SUMS}; here they take the chain, because {selected.reason}")
    return selected


def _equal_cost(ring: Groups, transport: str) -> bool:
    """Whether any rank reaches any other at the cost of a neighbour. Between hosts of several ranks it does not: all of
    them would send nearly every shard over one link."""
    hosts = ring.placed
    if hosts.count > 1:
        return hosts.count == ring.size
    return ring.device.type == "cpu" or choose_route(ring, transport, "auto") == "direct"
