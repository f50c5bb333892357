"""What happens between replicas: rings along a mesh dimension that hold the same shards and have batches of their own.

Gradients are averaged in every step (AllReduce, with a compressor or without, ZeroOuter), or replicas train apart and
act together after steps of the optimizer (LocalSGD, DiLoCo, Gossip). docs/outer.md says when to take which.

A policy is given to `fully_rotate(model, mesh=, dims=RotationDims(ring=..., replicate=...), outer=policy)`.
"""

from rtp_ext.outer.all_reduce import AllReduce
from rtp_ext.outer.compressors import EF21, Compressor, Neolithic, PowerSGD, Quantize, RandomK, Sign, TopK
from rtp_ext.outer.local_training.diloco import DiLoCo
from rtp_ext.outer.local_training.gossip import Gossip
from rtp_ext.outer.local_training.local_sgd import LocalSGD
from rtp_ext.outer.local_training.mixing import mixing_matrix
from rtp_ext.outer.policy import OuterPolicy
from rtp_ext.outer.zero import ZeroOuter

__all__ = [
    "EF21",
    "AllReduce",
    "Compressor",
    "DiLoCo",
    "Gossip",
    "LocalSGD",
    "Neolithic",
    "OuterPolicy",
    "PowerSGD",
    "Quantize",
    "RandomK",
    "Sign",
    "TopK",
    "ZeroOuter",
    "mixing_matrix",
]
