"""Routes of gradients to their owners: along a chain of partial sums, or each contribution directly."""

from __future__ import annotations

import collections
from dataclasses import dataclass

import torch

from rtp_ext.options import PARTIAL_SUMS
from rtp_ext.ring.links.communicator import Communicator
from rtp_ext.ring.routes.weight_routes import choose_route

BY_DTYPE = "by-dtype"


@dataclass(frozen=True)
class GradientRoutes:
    """The route of a ring's gradients.

    Attributes:
        route: `chain` (a partial sum travels from rank to rank), `direct` (each contribution goes directly to the owner
            of its shard, who adds them up in float32, or float64), or `by-dtype` (direct where gradients travel in 16
            bits, else the chain; but see `wide`).
        travel: the dtype in which gradients travel: `int8`, or None for the reduce dtype.
        reason: the reason for this choice.
        wide: `by-dtype` is direct for wider gradients too, where there is room for the contributions of all ranks.
    """

    route: str = "chain"
    travel: str | None = None
    reason: str = ""
    wide: bool = False

    def direct(self, route: str, reduce_dtype: torch.dtype, room: bool = True) -> bool:
        """Returns whether gradients of a layer whose weights take `route` take the direct route. `room`: whether the
        contributions of all ranks have places of their own."""
        if route == "two-level":  # gradients are summed inside hosts first
            return False
        chosen = reduce_dtype.itemsize == 2 or (self.wide and room)
        return self.route == "direct" or (self.route == BY_DTYPE and chosen)

    def local_dtype(self, route: str, reduce_dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of a gradient at its owner."""
        summed_wider = self.direct(route, reduce_dtype) and reduce_dtype.itemsize == 2
        return torch.float32 if summed_wider else reduce_dtype


class LateGradients:
    """Gradients that may arrive after the pass of their operation, of at most `passes` operations at a time."""

    def __init__(self, communicator: Communicator, passes: int) -> None:
        self._communicator, self._passes = communicator, passes
        # Autograd's sequence numbers of the newest operations.
        self._called: collections.deque[int] = collections.deque(maxlen=passes)

    def late_after(self) -> int:
        """Returns the sequence number of autograd after which, in the backward, the gradients of the current operation
        have to arrive: that of the operation called `passes` before it. The operations between, which come next in the
        backward, have posted their hops by then."""
        after = self._called[0] if len(self._called) == self._passes else 0
        self._called.append(torch._C._autograd._get_sequence_nr())
        return after

    def land(self, gradient: torch.Tensor) -> None:
        """Waits for the unfinished hops of a gradient that an operation's backward has returned."""
        try:
            self._communicator.executor.land(gradient)
        except BaseException as error:
            self._communicator.abandon(error)
            raise


def choose_gradient_route(
    ring: Communicator, transport: str, hop_route: str, requested: str, travel: str | None, wide: bool = True
) -> GradientRoutes:
    """Selects the route of gradients for the `requested` one, the same on every rank. Collective. `wide`: whether those
    of more than 16 bits may take the direct route: not in halves, and not where buffers are to be lean.

    Raises:
        ValueError: the route direct is requested on two levels; or int8 is requested, and `auto` selects the chain.
    """
    hosts = ring.placed
    if hop_route == "two-level" and requested == "direct":
        raise ValueError(
            f"Ring: expected gradient_route auto or chain on two levels ({hosts.count} hosts of {hosts.per_host} "
            "ranks), whose gradients are summed inside hosts first, got 'direct'; with route='ring' they take it"
        )
    if hop_route == "two-level":
        selected = GradientRoutes("chain", None, "gradients of two levels are summed inside hosts first")
    elif requested != "auto":
        return GradientRoutes(requested, travel, "it was asked for")
    elif not _equal_cost(ring, transport):
        shared = "the ranks of a host share its link to others"
        selected = GradientRoutes("chain", None, shared if hosts.count > 1 else "devices do not all reach each other")
    elif travel is not None:
        return GradientRoutes("direct", travel, f"gradients travel in {travel}")
    else:
        # On CPUs the chain stays: one rank would add the contributions of all, which has not been measured.
        wide = wide and ring.device.type == "cuda"
        return GradientRoutes(BY_DTYPE, None, "every rank reaches every other at the cost of a neighbour", wide)
    if travel is not None:
        raise ValueError(f"Ring: {PARTIAL_SUMS}; here they take the chain, because {selected.reason}")
    return selected


def _equal_cost(ring: Communicator, transport: str) -> bool:
    """Returns whether every rank reaches every other as cheaply as its neighbour. Not between hosts of several ranks:
    all of them would send nearly every shard over one link."""
    hosts = ring.placed
    if hosts.count > 1:
        return hosts.count == ring.size
    return ring.device.type == "cpu" or choose_route(ring, transport, "auto") == "direct"
