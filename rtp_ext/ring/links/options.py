"""Settings of transports between GPUs, and what weights travel in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from rtp_ext import _native

CE_MODES = ("auto", "push", "pull")
TRAVELS = (None, "bfloat16", "int8")


def check_travel(travel: str | None, route: str) -> None:
    """Raises ValueError where the weights of a ring on this route cannot travel so."""
    if travel not in TRAVELS:
        raise ValueError(f"Ring: expected travel to be None, 'bfloat16' or 'int8', got {travel!r}")
    if travel is not None and route == "gather":
        raise ValueError(
            "Ring: expected travel None with route gather, whose products take all shards at once as they are "
            f"computed with, got {travel!r}; on every other route weights can travel so"
        )


def wire_itemsize(travel: str | None, dtype: torch.dtype) -> float:
    """Bytes of a number of a weight of this compute dtype while it travels, its part of the scales among them."""
    return _native.wire_bytes(128, travel, dtype.itemsize) / 128


@dataclass(frozen=True)
class TransportOptions:
    """Settings of transports between GPUs; see `Ring`."""

    min_ctas: int = 0
    max_ctas: int = 0
    blocking: bool = False
    registered: bool | None = None
    delay_us: int = 0
    ce_mode: str = "auto"

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> TransportOptions:
        """The options of a Ring's `transport_options`, with the environment's RTP_DEBUG_DELAY_US as default delay."""
        given = dict(given or {})
        known = [field.name for field in fields(cls)]
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"Ring: expected transport_options among {', '.join(known)}, got {name!r}")
            if name in ("blocking", "registered"):
                if not isinstance(value, bool) and (value is not None or name == "blocking"):
                    what = "a bool" if name == "blocking" else "a bool or None"
                    raise TypeError(f"Ring: expected transport option {name} to be {what}, got {value!r}")
            elif name == "ce_mode":
                if value not in CE_MODES:
                    raise ValueError(
                        f"Ring: expected transport option ce_mode to be one of {', '.join(CE_MODES)}, got {value!r}"
                    )
            elif not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"Ring: expected transport option {name} to be an int, got {value!r}")
            elif value < 0:
                raise ValueError(f"Ring: expected transport option {name} >= 0, got {value}")
        delay = os.environ.get("RTP_DEBUG_DELAY_US", "0")
        if not delay.isdecimal():
            raise ValueError(f"Ring: expected RTP_DEBUG_DELAY_US to be a number of microseconds, got {delay!r}")
        return cls(**{"delay_us": int(delay), **given})
