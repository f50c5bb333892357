"""Access to the engine's rules for the planner: slots and chunks, waves of tiles, schedules."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def engine() -> Any:
    """Imports the compiled extension on first use. It needs torch; other parts of the planner do not."""
    from rtp_ext import _native

    return _native


def wire_bytes(travel: str | None, element_bytes: int) -> float:
    """Returns the bytes of a number that travels, including its share of the scales; `element_bytes`: its size at
    rest."""
    return engine().wire_bytes(128, travel, element_bytes) / 128
