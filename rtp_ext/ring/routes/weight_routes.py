"""Selection of the route of a ring's hops."""

from __future__ import annotations

import logging
from typing import Any

from rtp_ext import _native
from rtp_ext.ring.links.communicator import Communicator
from rtp_ext.ring.links.hosts import levels_refusal

logger = logging.getLogger("rtp_ext")


def choose_route(ring: Communicator, transport: str, requested: str) -> str:
    """Selects `direct` where every rank reaches every other as cheaply as its neighbour, else `ring`: over shared
    memory, and between GPUs with NVLink between all pairs. The same on every rank."""
    if requested != "auto":
        return requested
    joined = ring.wiring is not None and ring.wiring.any_to_any
    return "direct" if transport == "shm" or (joined and transport != "c10d") else "ring"


def choose_hops(ring: Communicator, transport: str, requested: str, gradient_halves: bool | None) -> tuple[str, str]:
    """Selects the route as `choose_route` does, or two-level, which `auto` prefers where possible. Returns the route,
    and the reason where the requested one, or on GPUs `direct` under `auto`, is not taken. The same on every rank."""
    refusal = levels_refusal(ring.placed, ring.device, transport, gradient_halves)
    if requested in ("auto", "two-level") and refusal is None:
        return "two-level", ""
    if requested == "two-level":
        return choose_route(ring, transport, "auto"), f"; route two-level cannot be taken: {refusal}"
    route = choose_route(ring, transport, requested)
    if requested == "auto" and ring.wiring is not None and not ring.wiring.any_to_any:
        return route, f"; route {route}: {ring.wiring.reason}"
    return route, ""


def warn_of_flat_ring(ring: Communicator, requested: str, missed: str) -> None:
    """Warns where a flat ring crosses hosts of several ranks, with its cost against two levels."""
    hosts = ring.placed
    if hosts.count == 1 or hosts.per_host == 1:
        return
    each = f"{hosts.per_host} ranks" if hosts.per_host is not None else "unequally many ranks"
    logger.warning(
        "ring of %d on %d hosts of %s: its route (%s) sends nearly all %d shards of a pass through one port of every "
        "host; on two levels every rank sends %d shards through a port of its own%s",
        *(ring.size, hosts.count, each, requested, ring.size - 1, hosts.count - 1, missed),
    )


def choose_ce_modes(native: Any, hop_route: str, requested: str) -> None:
    """Sets the modes of a transport `ce`: along the ring the sender pushes; on route direct the receiver pulls.
    Gradients always travel along the ring. `requested`, unless `auto`, overrides both."""
    direct = "pull" if hop_route == "direct" else "push"
    _native.set_ce_mode(native, "weight", direct if requested == "auto" else requested)
    _native.set_ce_mode(native, "gradient", "push" if requested == "auto" else requested)
