"""Communicators over other ranks than those of a ring, which end with it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from rtp_ext._native import RotationError
from rtp_ext.ring.links.communicator import Communicator


class Companion(Communicator):
    """A communicator that closes with a ring. A failure of one ends the other, which informs its ranks.

    Args:
        ring: the Ring, of the same device and timeout.
        rank, members: the index of this rank among the members, and their global ranks.
    """

    def __init__(self, ring: Any, rank: int, members: Sequence[int]) -> None:
        self._ring = weakref.ref(ring)
        super().__init__(rank, len(members), ring.device, ring.timeout, members)
        ring.communicator.companions += (self,)

    @property
    def alive(self) -> bool:
        ring = self._ring()
        return ring is not None and ring.alive

    def check_alive(self, operation: str) -> None:
        ring = self._ring()
        if ring is not None:
            ring.check_alive(operation)
        if self.size > 1 and self._control is None:
            raise RotationError(f"{operation}: the ring was closed")

    def abandon(self, error: BaseException) -> None:
        ring = self._ring()
        if ring is not None:
            ring.abandon(error)

    def end(
        self,
        error: Exception,
        suspects: Sequence[int] | None = None,
        near: Sequence[int] | None = None,
        ended: float | None = None,
    ) -> None:
        """Ends the ring, so that its ranks stop too."""
        ring = self._ring()
        if ring is not None:
            ring.end(error, suspects, self.members if near is None else near, ended)

    def last_hop(self) -> str:
        ring = self._ring()
        return "" if ring is None else ring.communicator.last_hop()
