"""The processors of this host."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

__all__ = ["cores", "cpu_name"]


def cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_name() -> str:
    """Returns the CPU's model name from /proc/cpuinfo, or else from `platform`."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()
