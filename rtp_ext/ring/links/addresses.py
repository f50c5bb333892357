"""Where the other ranks find this one."""

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
    """The address of this host, in numbers, at which the other ranks find it: that of the interface that
    GLOO_SOCKET_IFNAME names, else the one that packets to the rendezvous leave from. Where the rendezvous is on this
    host: the one that packets to another rank leave from. Collective.

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
    """The host where the ranks of this job met; the name of this one where they met in a file."""
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None) or socket.gethostname()


def _toward(host: str) -> str:
    """As `_native.address_toward`; that of this host alone where the name of the other means nothing here."""
    try:
        return _native.address_toward(host)
    except RotationError:
        return LOOPBACK
