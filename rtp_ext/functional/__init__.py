"""Autograd functions over the rotation engine. Arguments are home shards: plain local tensors or DTensors."""

from rtp_ext.functional.embedding import rotated_embedding
from rtp_ext.functional.linear import rotated_linear, rotated_linears

__all__ = ["rotated_embedding", "rotated_linear", "rotated_linears"]
