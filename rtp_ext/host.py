"""The processors of this host, the setting of its GPUs, and which addresses are its own."""

from __future__ import annotations

import ipaddress
import os
import platform
import re
import sys
from pathlib import Path

__all__ = ["CONNECTIONS", "allow_connections", "cores", "cpu_name", "gpu_driver", "loopback"]

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # CUDA reads it when it starts


def cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def allow_connections() -> None:
    """Sets CUDA_DEVICE_MAX_CONNECTIONS to 32, unless it is set or CUDA has started.

    Streams that share one of CUDA's connections (8 by default) wait for each other: GEMMs for waits for a neighbour.
    """
    torch = sys.modules.get("torch")  # not imported here: the planner needs no torch
    cuda = getattr(torch, "cuda", None)
    if CONNECTIONS not in os.environ and (cuda is None or not cuda.is_initialized()):
        os.environ[CONNECTIONS] = "32"


def gpu_driver() -> bool:
    """Returns whether this system shows files of a driver of NVIDIA's GPUs, without which CUDA finds none: those of
    Linux, of its subsystem in Windows, and of Tegra."""
    return any(Path(f"/dev/{name}").exists() for name in ("nvidiactl", "dxg", "nvmap", "nvhost-gpu"))


def cpu_name() -> str:
    """Returns the CPU's model name from /proc/cpuinfo, or else from `platform`."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def loopback(host: str) -> bool:
    """Returns whether only programs of this machine reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
