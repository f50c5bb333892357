"""Drop-in modules whose parameters rotate over a ring."""

from rtp_ext.nn.embedding import RotatedEmbedding
from rtp_ext.nn.linear import RotatedLinear

__all__ = ["RotatedEmbedding", "RotatedLinear"]
