"""The network address of this rank."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from rtp_ext import _native
from rtp_ext._native import RotationError

LOOPBACK = "127.0.0.1"


def own_address(exchange: Callable[[Any], list[Any]]) -> str:
    """Returns the numeric address at which other ranks reach this host: that of the interface in GLOO_SOCKET_IFNAME,
    else the source address of packets to the rendezvous, or, where the rendezvous is on this host, of packets to
    another rank. Collective.

    Raises RotationError where there is none.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    address, problem = LOOPBACK, None
    try:
        address = _native.interface_address(interface) if interface else _toward(_rendezvous())
    except RotationError as error:
        problem = error
    others = [answers for answers in exchange(address) if not ipaddress.ip_address(answers.split("%")[0]).is_loopback]
    if problem is not None:
        raise problem
    return _toward(others[0]) if others and address not in others and not interface else address


def _rendezvous() -> str:
    """Returns the host of the rendezvous of this job; the name of this host for a rendezvous in a file."""
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None) or socket.gethostname()


def _toward(host: str) -> str:
    """Returns `_native.address_toward(host)`; the loopback address where the name of the host cannot be resolved."""
    try:
        return _native.address_toward(host)
    except RotationError:
        return LOOPBACK
