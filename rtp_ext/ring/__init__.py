"""The Ring: its ranks, transports and routes, and the two primitives `rotate` and `collect`."""

from rtp_ext.ring.mesh import RotationDims
from rtp_ext.ring.prepared import Prepared
from rtp_ext.ring.ring import ROUTES, TRANSPORTS, Ring, ce_refusal, nccl_refusal

__all__ = ["ROUTES", "TRANSPORTS", "Prepared", "Ring", "RotationDims", "ce_refusal", "nccl_refusal"]
