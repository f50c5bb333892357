"""The engine's own rules, for whoever plans with them: slots and pieces, waves of tiles, schedules."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def engine() -> Any:
    """The compiled extension, loaded when first asked for: it needs torch, which the planner's other parts do not."""
    from rtp_ext import _native

    return _native


def wire_bytes(travel: str | None, element_bytes: int) -> float:
    """Of a number that is `element_bytes` wide where it does not travel; its part of the scales included."""
    return engine().wire_bytes(128, travel, element_bytes) / 128
