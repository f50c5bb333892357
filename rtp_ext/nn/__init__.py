"""Drop-in modules whose parameters rotate over a ring."""

from rtp_ext.nn.attention import RotatedMultiheadAttention
from rtp_ext.nn.convolution import RotatedConv1d, RotatedConv2d, RotatedConv3d
from rtp_ext.nn.cross_entropy import RotatedLinearCrossEntropy
from rtp_ext.nn.embedding import RotatedEmbedding
from rtp_ext.nn.experts import RotatedExperts
from rtp_ext.nn.flyweight import Flyweight
from rtp_ext.nn.linear import RotatedLinear
from rtp_ext.nn.mlp import RotatedMLP
from rtp_ext.nn.moe import RotatedMoE

__all__ = [
    "Flyweight",
    "RotatedConv1d",
    "RotatedConv2d",
    "RotatedConv3d",
    "RotatedEmbedding",
    "RotatedExperts",
    "RotatedLinear",
    "RotatedLinearCrossEntropy",
    "RotatedMLP",
    "RotatedMoE",
    "RotatedMultiheadAttention",
]
