"""Pretended hosts, so that ranks of one machine behave like ranks of several, and graphs without a real ring."""

import os
from types import SimpleNamespace
from typing import Any

import torch

from rtp_ext.options import RingOptions
from rtp_ext.ring.graphs import PassGraphs, choose_graphs


def pretend_hosts(rank: int, per_host: int) -> None:
    """Makes this process a member of a host with `per_host` ranks. Must be called before the ring is made."""
    os.environ["RTP_DEBUG_HOST"] = f"host {rank // per_host}"


def graphs_of(
    executor: Any,
    wanted: str = "auto",
    *,
    transport: str = "ce",
    device: str = "cpu",
    size: int = 2,
    late_gradients: int = 0,
    tensor_parallel: bool = False,
    **options: Any,
) -> PassGraphs:
    """Returns the graphs of a ring with `executor` and no other fields. `wanted`: the option `graphs`."""
    ring: Any = SimpleNamespace(size=size, device=torch.device(device))
    asked = RingOptions(graphs=wanted, **options)
    return choose_graphs(
        executor, asked, ring, transport, late_gradients=late_gradients, tensor_parallel=tensor_parallel
    )
