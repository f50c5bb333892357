"""Selection of the route of a ring's hops."""

from __future__ import annotations

import logging
from typing import Any

from rtp_ext import _native
from rtp_ext.ring.links.communicator import Communicator
from rtp_ext.ring.links.hosts import Hosts, levels_refusal

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
    if requested == "auto" and crosses_hosts(ring.placed):
        return route, f"; route {route}: two levels cannot be taken: {refusal}"
    if requested == "auto" and ring.wiring is not None and not ring.wiring.any_to_any:
        return route, f"; route {route}: {ring.wiring.reason}"
    return route, ""


def crosses_hosts(hosts: Hosts) -> bool:
    """Returns whether ranks that share a host communicate with other hosts, too."""
    return hosts.count > 1 and hosts.per_host != 1


def warn_of_flat_ring(ring: Communicator, route: str, missed: str) -> None:
    """Warns where a flat ring crosses hosts of several ranks, with its cost against two levels."""
    hosts = ring.placed
    if not crosses_hosts(hosts):
        return
    each = f"{hosts.per_host} ranks" if hosts.per_host is not None else "unequally many ranks"
    logger.warning(
        "ring of %d on %d hosts of %s: on route %s a pass sends %d shards from every host to others, %s; on two levels "
        "every rank sends %d shards, through a port of its own%s",
        *(ring.size, hosts.count, each, route, _crossing(hosts, route), _ports(route), hosts.count - 1, missed),
    )


def _crossing(hosts: Hosts, route: str) -> int:
    """Returns the shards that the first host sends to others in a pass on a flat route."""
    ranks, own = len(hosts.of), hosts.of.count(0)
    return own * (ranks - own) if route == "direct" else ranks - 1


def _ports(route: str) -> str:
    return "of all its ranks" if route == "direct" else "through the port of one rank"


def choose_ce_modes(native: Any, hop_route: str, requested: str) -> None:
    """Sets the modes of a transport `ce`: along the ring the sender pushes; on route direct the receiver pulls.
    Gradients always travel along the ring. `requested`, unless `auto`, overrides both."""
    direct = "pull" if hop_route == "direct" else "push"
    _native.set_ce_mode(native, "weight", direct if requested == "auto" else requested)
    _native.set_ce_mode(native, "gradient", "push" if requested == "auto" else requested)
