"""Predicts memory and time of a training run: specifications, closed forms, estimates and search.

The planner is arithmetic in Python. The compiled rules of the engine, which need no torch, compute the slots of
rotations and the tiles of GEMMs (see `engine`).
"""

from rtp_ext.planner.constants import TimeConstants
from rtp_ext.planner.measured import Calibration, Measurement, calibrate, errors_of, read_measurements
from rtp_ext.planner.memory.estimate import estimate_memory
from rtp_ext.planner.memory.report import MemoryReport
from rtp_ext.planner.plans.forwards import ForwardTime, break_even_tokens, forward_time
from rtp_ext.planner.plans.search import Plan, search, smallest_cluster
from rtp_ext.planner.published import chinchilla, fujii, korthikanti, lecture, zero
from rtp_ext.planner.rotation.operations import RotatedOperation, RotationBytes, Weight, rotations_of, rtp_bytes
from rtp_ext.planner.specs.cluster import Cluster
from rtp_ext.planner.specs.model import ModelSpec
from rtp_ext.planner.specs.strategy import Strategy
from rtp_ext.planner.time.estimate import estimate_time
from rtp_ext.planner.time.goodput import Goodput, goodput
from rtp_ext.planner.time.outer import OuterCost, outer_cost
from rtp_ext.planner.time.report import TimeReport

__all__ = [
    "Calibration",
    "Cluster",
    "ForwardTime",
    "Goodput",
    "Measurement",
    "MemoryReport",
    "ModelSpec",
    "OuterCost",
    "Plan",
    "RotatedOperation",
    "RotationBytes",
    "Strategy",
    "TimeConstants",
    "TimeReport",
    "Weight",
    "break_even_tokens",
    "calibrate",
    "chinchilla",
    "errors_of",
    "estimate_memory",
    "estimate_time",
    "forward_time",
    "fujii",
    "goodput",
    "korthikanti",
    "lecture",
    "outer_cost",
    "read_measurements",
    "rotations_of",
    "rtp_bytes",
    "search",
    "smallest_cluster",
    "zero",
]
