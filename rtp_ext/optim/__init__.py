"""Muon on sharded matrices, and optimizers of other packages on shards."""

from rtp_ext.optim.muon import Muon
from rtp_ext.optim.on_shards import on_shards
from rtp_ext.optim.split import matrices
from rtp_ext.optim.table import PlanRow, PlanTable

__all__ = ["Muon", "PlanRow", "PlanTable", "matrices", "on_shards"]
