"""The place of a process: its host, kernel and container."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rtp_ext import _native

__all__ = ["Place", "describe"]

PRETENDED = "RTP_DEBUG_HOST"  # environment variable for tests: ranks with another value are on another host


@dataclass(frozen=True)
class Place:
    """The place of a process; processes with equal `memory` can open each other's memory.

    hostname: neither unique nor shared by all containers of a machine. kernel: its boot id. processes: the namespace of
    process ids; each container of a machine has one.
    """

    hostname: str
    kernel: str
    processes: str

    @classmethod
    def here(cls) -> Place:
        """Returns the place of this process. Raises RotationError where the system does not show it.

        A value of RTP_DEBUG_HOST in its environment separates it from processes with another value, or none.
        """
        pretended = os.environ.get(PRETENDED)
        processes = _native.processes_id() + (f" {pretended}" if pretended else "")
        return cls(socket.gethostname(), _native.host_id(), processes)

    @property
    def memory(self) -> tuple[str, str]:
        """Equal for processes that can open each other's memory; independent of the hostname."""
        return self.kernel, self.processes


def describe(places: Sequence[Place]) -> str | None:
    """Returns the places of all ranks in words; None if all are in one place. `places`: by rank."""
    by_memory: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(places):
        by_memory.setdefault(place.memory, []).append(rank)
    groups = list(by_memory.values())
    if len(groups) == 1:
        return None
    text = ", ".join(f"{_ranks(group)} on {_name(group[0], groups, places)}" for group in groups)
    kernels = [places[group[0]].kernel for group in groups]
    if len(set(kernels)) == len(kernels):
        return f"{text}: different machines"
    if len(set(kernels)) == 1:
        return f"{text}: each in another container of this host"
    return f"{text}: some in another container of this host, some on other machines"


def _name(rank: int, groups: Iterable[list[int]], places: Sequence[Place]) -> str:
    """Returns the hostname, with a mark that distinguishes it from other places of the same name."""
    mine = places[rank]
    others = [places[group[0]] for group in groups if group[0] != rank]
    namesakes = [other for other in others if other.hostname == mine.hostname]
    marks = []
    if any(other.kernel != mine.kernel for other in namesakes):
        marks.append(f"boot {mine.kernel[:8]}")
    if any(other.kernel == mine.kernel for other in namesakes):
        marks.append(mine.processes)
    return mine.hostname + (f" ({', '.join(marks)})" if marks else "")


def _ranks(ranks: Sequence[int]) -> str:
    """Returns `rank 3`, `ranks 0 to 7`, or `ranks 0, 2, 5`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    run = len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1
    return f"ranks {ranks[0]} to {ranks[-1]}" if run else f"ranks {', '.join(map(str, ranks))}"
