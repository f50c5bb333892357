"""Policies for replicas: rings along a mesh dimension that hold the same shards and train on different batches.

AllReduce (with or without a compressor) and ZeroOuter average gradients in every step. LocalSGD, DiLoCo and Gossip let
each replica train on its own gradients and combine weights after steps of the optimizer. docs/outer.md compares them.

Pass a policy to `fully_rotate(model, mesh=, dims=RotationDims(ring=..., replicate=...), outer=policy)`.
"""

from rtp_ext.outer.all_reduce import AllReduce
from rtp_ext.outer.compressors import EF21, Compressor, Neolithic, PowerSGD, Quantize, RandomK, Sign, TopK
from rtp_ext.outer.local_training.diloco import DiLoCo, LocalSGD
from rtp_ext.outer.local_training.gossip import Gossip, mixing_matrix
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
