"""Autograd functions over the rotation engine. Arguments are local shards: plain local tensors or DTensors.

Each function derives a plan from its parameters and options, agrees on it with the other ranks and keeps it in a
`Prepared`.
"""

from rtp_ext.functional.convolution import rotated_convolution
from rtp_ext.functional.cross_entropy import rotated_linear_cross_entropy
from rtp_ext.functional.embedding import rotated_embedding
from rtp_ext.functional.experts import rotated_experts
from rtp_ext.functional.flyweight import rotated_flyweight
from rtp_ext.functional.linear import rotated_linear, rotated_linears
from rtp_ext.functional.mlp import rotated_mlp
from rtp_ext.ring import Prepared

__all__ = [
    "Prepared",
    "rotated_convolution",
    "rotated_embedding",
    "rotated_experts",
    "rotated_flyweight",
    "rotated_linear",
    "rotated_linear_cross_entropy",
    "rotated_linears",
    "rotated_mlp",
]
