"""Selection of the route of a ring's hops."""

from __future__ import annotations

from typing import Any

import torch

from rtp_ext import _native
from rtp_ext.ring.links.communicator import Communicator
from rtp_ext.ring.links.hosts import levels_refusal


def choose_route(ring: Communicator, transport: str, requested: str) -> str:
    """Selects `direct` where every rank reaches every other as cheaply as its neighbour, else `ring`. Collective."""
    if requested != "auto":
        return requested
    if transport in ("shm", "ce"):
        return "direct"
    if transport.startswith("nccl"):
        gpus = range(torch.cuda.device_count())
        one_host = len(set(ring.exchange(_native.host_id()))) == 1
        # A rank that sees only its own GPU cannot check access to the others.
        peers = len(gpus) >= ring.size and all(
            torch.cuda.can_device_access_peer(a, b) for a in gpus for b in gpus if a != b
        )
        return "direct" if all(ring.exchange(one_host and peers)) else "ring"
    return "ring"


def choose_hops(ring: Communicator, transport: str, requested: str, gradient_halves: bool | None) -> tuple[str, str]:
    """Selects the route as `choose_route` does, or two-level, which `auto` prefers where possible. Returns the route,
    and the reason where the requested one is not taken. Collective."""
    refusal = levels_refusal(ring.placed, ring.device, gradient_halves)
    if requested in ("auto", "two-level") and refusal is None:
        return "two-level", ""
    if requested == "two-level":
        return choose_route(ring, transport, "auto"), f"; route two-level cannot be taken: {refusal}"
    return choose_route(ring, transport, requested), ""


def choose_ce_modes(native: Any, hop_route: str, requested: str) -> None:
    """Sets the modes of a transport `ce`: along the ring the sender pushes; on route direct the receiver pulls.
    Gradients always travel along the ring. `requested`, unless `auto`, overrides both."""
    direct = "pull" if hop_route == "direct" else "push"
    _native.set_ce_mode(native, "weight", direct if requested == "auto" else requested)
    _native.set_ce_mode(native, "gradient", "push" if requested == "auto" else requested)
