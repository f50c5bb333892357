"""What happens between replicas: rings along a mesh dimension that hold the same shards and have batches of their own.

A policy is given to `fully_rotate(model, mesh=, dims=RotationDims(ring=..., replicate=...), outer=policy)`.
"""

from rtp_ext.outer.all_reduce import AllReduce
from rtp_ext.outer.diloco import DiLoCo
from rtp_ext.outer.gossip import Gossip
from rtp_ext.outer.local_sgd import LocalSGD
from rtp_ext.outer.mixing import mixing_matrix
from rtp_ext.outer.policy import OuterPolicy
from rtp_ext.outer.zero import ZeroOuter

__all__ = ["AllReduce", "DiLoCo", "Gossip", "LocalSGD", "OuterPolicy", "ZeroOuter", "mixing_matrix"]
