"""Access to the engine's rules for the planner: slots and chunks, waves of tiles, schedules."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def engine() -> Any:
    """Imports the engine's compiled rules, which need no torch, on first use."""
    from rtp_ext import _rules

    return _rules


def travel_bytes(travel: str | None, element_bytes: int) -> float:
    """Returns the bytes of a number that travels, including its share of the scales; `element_bytes`: its size at
    rest."""
    return engine().travel_bytes(128, travel, element_bytes) / 128
