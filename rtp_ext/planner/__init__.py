"""Memory and time of a training run before it starts: specifications, closed forms, estimates and search.

Plain arithmetic; what rotations hold and take, and how tiles fill a GPU, comes from the extension (see `engine`).
"""

from rtp_ext.planner import korthikanti, lecture, zero
from rtp_ext.planner.calibrate import Calibration, calibrate, errors_of
from rtp_ext.planner.cluster import Cluster
from rtp_ext.planner.constants import TimeConstants
from rtp_ext.planner.measurements import Measurement, read_measurements
from rtp_ext.planner.memory import estimate_memory
from rtp_ext.planner.model import ModelSpec
from rtp_ext.planner.report import MemoryReport
from rtp_ext.planner.rotation import RotatedOperation, RotationBytes, Weight, rotations_of, rtp_bytes
from rtp_ext.planner.search import Plan, search, smallest_cluster
from rtp_ext.planner.strategy import Strategy
from rtp_ext.planner.time_report import TimeReport
from rtp_ext.planner.timing import estimate_time

__all__ = [
    "Calibration",
    "Cluster",
    "Measurement",
    "MemoryReport",
    "ModelSpec",
    "Plan",
    "RotatedOperation",
    "RotationBytes",
    "Strategy",
    "TimeConstants",
    "TimeReport",
    "Weight",
    "calibrate",
    "errors_of",
    "estimate_memory",
    "estimate_time",
    "korthikanti",
    "lecture",
    "read_measurements",
    "rotations_of",
    "rtp_bytes",
    "search",
    "smallest_cluster",
    "zero",
]
