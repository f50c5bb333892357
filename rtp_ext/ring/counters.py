"""What a ring has sent, and what its slots take."""

from __future__ import annotations

from typing import Any


class Counters:
    """For the class Ring."""

    _executor: Any
    serial: int
    name: str  # by which graphs of a compiler find the ring
    traceable: bool = True  # whether its operations can be in them: gradients come home as the operations return them

    def slot_count(self, channel: str) -> Any:
        """Slots of `weight` or `gradient`: .slots and .bytes that exist, .peak_slots leased at once, .peak_bytes,
        .allocations ever. `scratch`: places of this rank where weights are widened that travel in fewer bits."""
        return self._executor.scratch() if channel == "scratch" else self._executor.slots(channel)

    def reset_peak(self) -> None:
        """Starts the peaks of `slot_count` anew."""
        self._executor.reset_peak()

    def clear_slots(self) -> None:
        """Frees the slots; the next operation allocates them again."""
        self._executor.clear_slots()

    def hops(self, channel: str) -> int:
        """Hops of `weight` or `gradient` that this rank has posted."""
        return self._executor.hops(channel)

    def landed_late(self) -> int:
        """Gradients that arrived after the backward pass of their layer had ended."""
        return self._executor.landed_late()

    def prefetched(self) -> tuple[int, int]:
        """First hops that were sent before their layer was called, and how many of them it could use."""
        return self._executor.prefetched()

    def bytes_sent(self, channel: str) -> int:
        """Bytes of `weight` or `gradient` that this rank has sent."""
        return self._executor.bytes_sent(channel)
