"""The process groups of the ranks that share matrices, for the hops of an optimizer alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rtp_ext._native import RotationError
from rtp_ext.optim.layout import Layout
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import gradient_handler_of
from rtp_ext.ring.links.agree import differing, expect_same_lines
from rtp_ext.ring.links.companion import Companion
from rtp_ext.ring.mesh import live_ring


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

    def all_to_all(self, received: Tensor, sent: Tensor, arriving: list[int], leaving: list[int]) -> None:
        """Sends `leaving[k]` bytes of `sent` to rank k, and receives `arriving[k]` bytes from it. Collective."""
        self.check_alive("Muon")
        self.collectively("Muon", dist.all_to_all_single, received, sent, arriving, leaving, group=self._collective)


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
