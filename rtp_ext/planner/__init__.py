"""Memory of a training run before it starts: specifications, closed forms and estimates. Pure arithmetic, no torch."""

from rtp_ext.planner import korthikanti, lecture, zero
from rtp_ext.planner.cluster import Cluster
from rtp_ext.planner.memory import estimate_memory
from rtp_ext.planner.model import ModelSpec
from rtp_ext.planner.report import MemoryReport
from rtp_ext.planner.rotation import Rotation, RotationBytes, Weight, rotations_of, rtp_bytes
from rtp_ext.planner.strategy import Strategy

__all__ = [
    "Cluster",
    "MemoryReport",
    "ModelSpec",
    "Rotation",
    "RotationBytes",
    "Strategy",
    "Weight",
    "estimate_memory",
    "korthikanti",
    "lecture",
    "rotations_of",
    "rtp_bytes",
    "zero",
]
