"""Memory limit of a plan."""

from __future__ import annotations

from rtp_ext.planner.constants import memory_constant
from rtp_ext.planner.specs.cluster import Cluster


def limit_bytes(cluster: Cluster) -> float:
    """Limit of allocated bytes: below this share of a GPU's memory no published run failed (constants.json)."""
    return memory_constant("safe_fraction") * cluster.memory_bytes
