"""What becomes of a weight that travels in fewer bits: a process that computes with it is to give what a ring gives.

The values of 8 bits come from the extension's own kernel here: a float32 product that lies between two of them, but for
its rounding, may go to either. `reckoned` makes them with torch alone, in float64.
"""

from __future__ import annotations

import torch
from reference import chunk
from torch import Tensor

from rtp_ext import _native

BLOCK = 128


def arrived(shard: Tensor, travel: str | None, rows: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """A shard as whoever receives it computes with it, in `dtype` (default: its own). `rows`: it travels in pieces of
    so many."""
    shard, dtype = shard.detach().contiguous(), dtype or shard.dtype
    if travel is None:
        return shard.to(dtype)
    if rows is not None:
        return torch.cat([arrived(piece, travel, dtype=dtype) for piece in shard.split(rows)])
    if travel == "bfloat16":
        return shard.bfloat16().to(dtype)
    sent = torch.empty(_native.kernels.quantised_bytes(shard.numel()), dtype=torch.uint8)
    _native.kernels.quantise(sent, shard)
    received = torch.empty(shard.shape, dtype=dtype)
    _native.kernels.dequantise(received, sent)
    return received


def rebuilt(whole: Tensor, dim: int, ranks: int, travel: str | None, rows: int | None = None) -> Tensor:
    """A whole parameter of what arrives of each shard; on a single rank nothing travels."""
    if ranks == 1:
        return whole.detach()
    return torch.cat([arrived(chunk(whole, ranks, rank, dim), travel, rows) for rank in range(ranks)], dim)


def blocks_of(values: Tensor) -> Tensor:
    """[blocks, 128] float64, the last one filled up with zeros."""
    flat = values.detach().double().flatten()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def most_in_block(values: Tensor) -> Tensor:
    """For every number, the largest magnitude in its block."""
    blocks = blocks_of(values)
    return blocks.abs().amax(1, keepdim=True).expand_as(blocks).flatten()[: values.numel()].view(values.shape)


def reckoned(values: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest of 255 values in each block, in float64; and how far from the middle between two of them each is, in
    steps."""
    step = most_in_block(values) / 127
    levels = torch.where(step > 0, values.detach().double() / step, 0.0)
    return levels.round() * step, (levels.abs() % 1 - 0.5).abs()
