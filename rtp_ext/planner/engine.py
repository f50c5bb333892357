"""The engine's own rules, for whoever plans with them: slots and pieces, waves of tiles, schedules."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def engine() -> Any:
    """The compiled extension, loaded when first asked for: it needs torch, which the planner's other parts do not."""
    from rtp_ext import _native

    return _native
