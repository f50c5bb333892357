"""Memory of a training run before it starts: specifications, closed forms and estimates. Pure arithmetic, no torch."""

from rtp_ext.planner.cluster import Cluster
from rtp_ext.planner.model import ModelSpec
from rtp_ext.planner.strategy import Strategy

__all__ = ["Cluster", "ModelSpec", "Strategy"]
