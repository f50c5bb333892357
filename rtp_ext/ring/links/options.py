"""The options of a ring and of its transports, with the checks that need no other rank."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_args

import torch

from rtp_ext import _native
from rtp_ext._native import SLOT_CAP
from rtp_ext.words import CeMode, GradientRoute, GradientTravel, Graphs, Route, Transport, Travel

TRANSPORTS: tuple[str, ...] = get_args(Transport)
ROUTES: tuple[str, ...] = get_args(Route)

PARTIAL_SUMS = (
    "Ring: expected gradient_route direct where gradients travel in int8: a partial sum that is "
    "quantized again at every rank loses more with each"
)


@dataclass(frozen=True)
class TransportOptions:
    """Settings of transports between GPUs; see `Ring`."""

    min_ctas: int = 0
    max_ctas: int | None = None
    blocking: bool | None = None
    registered: bool | None = None
    delay_us: int = 0
    ce_mode: CeMode = "auto"

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> TransportOptions:
        """Returns the options of a Ring's `transport_options`; the environment variable RTP_DEBUG_DELAY_US is the
        default delay."""
        given = dict(given or {})
        known = [each.name for each in fields(cls)]
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"Ring: expected transport_options among {', '.join(known)}, got {name!r}")
            if name in ("blocking", "registered"):
                if not isinstance(value, bool) and value is not None:
                    raise TypeError(f"Ring: expected transport option {name} to be a bool or None, got {value!r}")
            elif name == "ce_mode":
                check_choice("transport option ce_mode", value, get_args(CeMode))
            elif name == "max_ctas" and value is None:
                continue
            elif not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"Ring: expected transport option {name} to be an int, got {value!r}")
            elif value < 0:
                raise ValueError(f"Ring: expected transport option {name} >= 0, got {value}")
        delay = os.environ.get("RTP_DEBUG_DELAY_US", "0")
        if not delay.isdecimal():
            raise ValueError(f"Ring: expected RTP_DEBUG_DELAY_US to be a number of microseconds, got {delay!r}")
        return cls(**{"delay_us": int(delay), **given})


@dataclass(frozen=True, kw_only=True)
class RingOptions:
    """The keyword arguments of `Ring`, which describes them. The ranks of a ring compare all fields.

    Raises ValueError for a value that no ring takes, and for two that cannot be combined on any ring.
    """

    transport: Transport = "auto"
    route: Route = "auto"
    travel: Travel | None = None
    timeout: datetime.timedelta = datetime.timedelta(seconds=600)
    slot_cap: int = SLOT_CAP
    prefetch: int = 1
    gradient_halves: bool | None = None
    late_gradients: int | None = None
    gradient_route: GradientRoute = "auto"
    gradient_travel: GradientTravel | None = None
    graphs: Graphs = "off"
    checksum: bool = False
    transport_options: TransportOptions = field(default_factory=lambda: TransportOptions.of(None))

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> RingOptions:
        """Returns the options among `arguments`, by name; the others keep their defaults."""
        given = {each.name: arguments[each.name] for each in fields(cls) if each.name in arguments}
        if not isinstance(timeout := given.get("timeout", cls.timeout), datetime.timedelta):
            try:
                given["timeout"] = datetime.timedelta(seconds=timeout)
            except OverflowError as error:
                raise ValueError(f"Ring: expected a timeout below 1e14 seconds, got {timeout}") from error
        given["transport_options"] = TransportOptions.of(given.get("transport_options"))
        return cls(**given)

    def __post_init__(self) -> None:
        check_choice("transport", self.transport, TRANSPORTS)
        check_choice("route", self.route, ROUTES)
        if self.route == "two-level" and self.gradient_halves:
            raise ValueError("Ring: expected gradient_halves None or False with route two-level, got True")
        check_requested(self.gradient_route, self.gradient_travel, self.route, self.gradient_halves)
        if self.timeout <= datetime.timedelta(0):
            raise ValueError(f"Ring: expected a positive timeout, got {self.timeout}")
        check_choice("graphs", self.graphs, get_args(Graphs))
        if self.slot_cap < 0:
            raise ValueError(f"Ring: expected slot_cap >= 0, got {self.slot_cap}")
        if self.prefetch not in (0, 1, 2):
            raise ValueError(f"Ring: expected prefetch 0, 1 or 2, got {self.prefetch!r}")
        late = self.late_gradients
        if late is not None and (isinstance(late, bool) or late < 0):
            raise ValueError(f"Ring: expected late_gradients >= 0 or None, got {late!r}")
        check_travel(self.travel, self.route)

    def __str__(self) -> str:
        return ", ".join(f"{each.name} {getattr(self, each.name)}" for each in fields(self))


def check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError where `value` is not one of `choices`."""
    if value not in choices:
        raise ValueError(f"Ring: expected {what} to be one of {', '.join(choices)}, got {value!r}")


def check_travel(travel: str | None, route: str) -> None:
    """Raises ValueError where the weights of a ring on this route cannot travel in this dtype."""
    if travel not in (None, *get_args(Travel)):
        raise ValueError(f"Ring: expected travel to be None, 'bfloat16' or 'int8', got {travel!r}")
    if travel is not None and route == "gather":
        raise ValueError(
            "Ring: expected travel None with route gather, whose products take all shards at once as they are "
            f"computed with, got {travel!r}; on every other route weights can travel so"
        )


def check_requested(route: str, travel: str | None, hop_route: str, halves: bool | None) -> None:
    """Raises ValueError for a gradient route or travel that does not exist, or that no ring can combine with the other
    options."""
    if route not in get_args(GradientRoute):
        raise ValueError(f"Ring: expected gradient_route one of {', '.join(get_args(GradientRoute))}, got {route!r}")
    if travel not in (None, *get_args(GradientTravel)):
        raise ValueError(f"Ring: expected gradient_travel None or 'int8', got {travel!r}")
    if route == "chain" and travel is not None:
        raise ValueError(f"{PARTIAL_SUMS}, got gradient_travel {travel!r} with gradient_route 'chain'")
    if route == "direct" and hop_route == "two-level":
        raise ValueError("Ring: expected gradient_route auto or chain with route two-level, got 'direct'")
    if route == "direct" and halves:
        raise ValueError("Ring: expected gradient_halves None or False with gradient_route direct, got True")


def check_in_place(name: str, travel: str | None, route: str) -> None:
    """Raises ValueError where local shards cannot travel themselves on a ring with these options."""
    if travel is not None:
        raise ValueError(
            f"{name}: expected in_place=False on a ring of travel={travel!r}, where copies travel, got True; "
            "a ring of travel=None moves shards in place"
        )
    if route == "two-level":
        raise ValueError(
            f"{name}: expected in_place=False on route two-level, where a shard leaves in two directions at once, "
            "got True; a ring of route='ring' moves shards in place"
        )


def wire_itemsize(travel: str | None, dtype: torch.dtype) -> float:
    """Returns the bytes on the wire of one number of a weight of this compute dtype, with its share of the scales."""
    return _native.wire_bytes(128, travel, dtype.itemsize) / 128
