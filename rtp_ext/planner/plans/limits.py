"""How much of a GPU a plan may take."""

from __future__ import annotations

from rtp_ext.planner.constants import memory_constant
from rtp_ext.planner.specs.cluster import Cluster


def limit_bytes(cluster: Cluster) -> float:
    """Of allocated bytes: the share of a GPU's memory below which none was seen to run out (constants.json)."""
    return memory_constant("safe_fraction") * cluster.memory_bytes
