"""What is not there: hosts, of ranks of one machine that take each other for ranks of several, and rings."""

import os
from types import SimpleNamespace

import torch


def pretend_hosts(rank: int, per_host: int) -> None:
    """Lets this process take part in rings of hosts with `per_host` ranks each. Before the ring is made."""
    os.environ["RTP_DEBUG_HOST"] = f"host {rank // per_host}"


def pretend_ring(transport: str = "ce", device: str = "cpu", wanted: str = "auto", **told: object) -> SimpleNamespace:
    """A ring that is being made, as passes as graphs look at it. `wanted`: its `graphs`; `told`: other options."""
    options = {"size": 2, "late_gradients": 0, "prefetch": 1, "_graphs_wanted": wanted}
    absent = dict.fromkeys(("travel", "gradient_travel", "tensor_mesh", "host_memory"))
    return SimpleNamespace(transport=transport, device=torch.device(device), **{**options, **absent, **told})
