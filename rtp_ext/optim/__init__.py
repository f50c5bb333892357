"""Optimizers of sharded matrices."""

from rtp_ext.optim.muon import Muon
from rtp_ext.optim.split import matrices
from rtp_ext.optim.table import PlanRow, PlanTable

__all__ = ["Muon", "PlanRow", "PlanTable", "matrices"]
