"""References for weights that travel in fewer bits: one process that rounds them must give the results of a ring.

The 8-bit values come from the extension's own kernel, since a float32 product that lies midway between two of them,
except for its rounding, may go to either. `reckoned` computes them with torch alone, in float64.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from reference import chunk
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from rtp_ext import _native

BLOCK = 128


def arrived(shard: Tensor, travel: str | None, rows: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the shard that a receiver computes with, in `dtype` (default: its own). `rows`: rows of each chunk in
    which it travels."""
    shard, dtype = shard.detach().contiguous(), dtype or shard.dtype
    if travel is None:
        return shard.to(dtype)
    if rows is not None:
        return torch.cat([arrived(piece, travel, dtype=dtype) for piece in shard.split(rows)])
    if travel == "bfloat16":
        return shard.bfloat16().to(dtype)
    sent = torch.empty(_native.kernels.quantized_bytes(shard.numel()), dtype=torch.uint8)
    _native.kernels.quantize(sent, shard)
    received = torch.empty(shard.shape, dtype=dtype)
    _native.kernels.dequantize(received, sent)
    return received


def rebuilt(whole: Tensor, dim: int, ranks: int, travel: str | None, rows: int | None = None) -> Tensor:
    """Returns a whole parameter made of the received shards; on a single rank nothing travels."""
    if ranks == 1:
        return whole.detach()
    return torch.cat([arrived(chunk(whole, ranks, rank, dim), travel, rows) for rank in range(ranks)], dim)


Cuts = tuple[tuple[int, int], ...]  # dimension and number of parts, one cut after the other; the ring's is the last


def cuts_of(parameter: DTensor) -> Cuts:
    """The cuts of a parameter: by tensor parallelism, if any, and then over the ring."""
    ranks = parameter.device_mesh.shape
    return tuple((p.dim, ranks[n]) for n, p in enumerate(parameter.placements) if isinstance(p, Shard))


def rebuilt_parts(whole: Tensor, cuts: Cuts, travel: str | None) -> Tensor:
    """Returns a whole parameter made of the received shards of each of its parts."""
    (dim, ranks), *further = cuts
    if not further:
        return rebuilt(whole, dim, ranks, travel)
    parts = [rebuilt_parts(chunk(whole, ranks, rank, dim), tuple(further), travel) for rank in range(ranks)]
    return torch.cat(parts, dim)


@contextlib.contextmanager
def computing_with(model: nn.Module, cuts: Mapping[str, Cuts], travel: str | None) -> Iterator[None]:
    """Within the context, a plain model has the weights that the ranks of a ring compute with, then its exact ones."""
    exact = {name: model.get_parameter(name).detach().clone() for name in cuts}
    with torch.no_grad():
        for name, values in exact.items():
            model.get_parameter(name).copy_(rebuilt_parts(values, cuts[name], travel))
    yield
    with torch.no_grad():
        for name, values in exact.items():
            model.get_parameter(name).copy_(values)


def blocks_of(values: Tensor) -> Tensor:
    """[blocks, 128] float64, the last one filled up with zeros."""
    flat = values.detach().double().flatten()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def most_in_block(values: Tensor) -> Tensor:
    """Returns the largest magnitude in the block of every number."""
    blocks = blocks_of(values)
    return blocks.abs().amax(1, keepdim=True).expand_as(blocks).flatten()[: values.numel()].view(values.shape)


_NOTHING = 1e-14  # values that are zero except for rounding, such as the gradient of the bias of a key


class Contributions:
    """Checks that the error of gradients on the direct route is the rounding of the other ranks' contributions, and
    no more. `travel`: int8 or bfloat16."""

    def __init__(self, travel: str) -> None:
        self.travel = travel
        self.numbers = self.rounded = self.refused = 0

    def bound(self, part: Tensor) -> Tensor:
        """Returns the tolerance of each number; contiguous, in the layout of the hop."""
        return most_in_block(part) / 254 if self.travel == "int8" else part.abs() * 2.0**-8

    def check(self, what: str, found: Tensor, own: Tensor, others: Sequence[Sequence[Tensor]]) -> None:
        """`others`: the contributions of each other rank, one for each of its backwards, each rounded once; `own` is
        not rounded."""
        if found.numel() == 0:
            return
        parts = [part.contiguous() for rank in others for part in rank]
        slack = 1e-6 * sum(part.abs().max() for part in (own, *parts)) + _NOTHING  # of sums in float32
        allowed = sum(map(self.bound, parts)) + slack
        error = (found - own - sum(parts)).abs()
        assert (error <= allowed).all(), f"{what}: {(error - allowed).max()} beyond {allowed.max()}"
        missing = sum(others[0]).abs()
        self.numbers += int((missing > _NOTHING).sum())
        self.rounded += int((error > 0.1 * allowed).sum())
        self.refused += int((error + missing > allowed).sum())

    def controls(self) -> None:
        assert self.rounded > 0.2 * self.numbers > 0, f"control: of {self.numbers} only {self.rounded} were rounded"
        text = f"control: without a rank's contribution {self.refused} of {self.numbers} numbers are refused"
        assert self.refused > 0.8 * self.numbers, text


def reckoned(values: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest of 255 values in each block, in float64; and how far from the middle between two of them each is, in
    steps."""
    step = most_in_block(values) / 127
    levels = torch.where(step > 0, values.detach().double() / step, 0.0)
    return levels.round() * step, (levels.abs() % 1 - 0.5).abs()
