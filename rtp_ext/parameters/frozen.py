"""Frozen weights of linear layers in 4 or 8 bits: blocks of codes, each with a scale, that a parameter holds as bytes.

A parameter of such a weight [O, I] is uint8 [groups, bytes]. A group is the fewest rows that fill whole blocks; the
last group is filled with zeros. The ring shards groups, as DTensor's Shard(0) does, so that no shard cuts a block, and
checkpoints store and reshard the bytes. csrc/base/blocks.h has the layout of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rtp_ext._native import kernels, shard_sizes
from rtp_ext.parameters.sharding import as_sharded, frozen_of, gather_full, shard_bounds
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import FROZEN, as_parameter

FORMATS = ("nf4", "mxfp4", "int8")

_NF4_LEAST = 1e-38  # a smaller largest magnitude counts as this one, as in bitsandbytes
_MX_LEAST = 2.0**-126  # codes of a block with a smaller scale are those for this one, as in torchao
_SECTION = 1 << 22  # numbers that are encoded at once


@dataclass(frozen=True)
class FrozenWeight:
    """A weight in blocks: `nf4`, `mxfp4` or `int8`; its shape [O, I]; the dtype of the plain weight."""

    format: str
    shape: tuple[int, int]
    dtype: torch.dtype

    def shard_rows(self, ranks: int) -> list[int]:
        """Returns the rows of every rank's shard."""
        starts, rows = 0, []
        for groups in shard_sizes(self.packed_shape[0], ranks):
            begin, end = self.rows_of(starts, groups)
            rows.append(end - begin)
            starts += groups
        return rows

    def travelling_bytes(self, rows: int) -> int:
        """Returns the bytes of so many rows in a hop."""
        numbers, size = kernels.block_layout(self.format)
        return -(-rows * self.shape[1] // numbers) * size

    @property
    def group_rows(self) -> int:
        return kernels.rows_of_blocks(self.format, self.shape[1])

    @property
    def packed_shape(self) -> tuple[int, int]:
        """The shape of the parameter."""
        numbers, size = kernels.block_layout(self.format)
        rows = self.group_rows
        return -(-self.shape[0] // rows), rows * self.shape[1] // numbers * size

    def rows_of(self, first: int, groups: int) -> tuple[int, int]:
        """Returns the first row, and the row behind the last, of groups [first, first + groups)."""
        rows, limit = self.group_rows, self.shape[0]
        return min(first * rows, limit), min((first + groups) * rows, limit)

    def converted_by(self, function: Callable[[torch.Tensor], torch.Tensor]) -> FrozenWeight:
        """Returns the description after a call of nn.Module._apply, such as `to`, with `function`."""
        dtype = function(torch.empty(0, dtype=self.dtype)).dtype
        return replace(self, dtype=dtype) if dtype.is_floating_point else self

    def encode(self, rows: torch.Tensor, groups: int) -> torch.Tensor:
        """Returns the bytes [groups, bytes] of rows [<= groups * group_rows, I]; missing rows are zeros."""
        size = groups, self.packed_shape[1]
        if rows.device.type == "meta":
            return torch.empty(size, dtype=torch.uint8, device="meta")
        numbers, _ = kernels.block_layout(self.format)
        packed = torch.empty(size, dtype=torch.uint8, device=rows.device)
        step = max(1, _SECTION // max(1, self.group_rows * self.shape[1]))
        for first in range(0, groups, step):
            count = min(step, groups - first)
            begin, end = first * self.group_rows, (first + count) * self.group_rows
            part = rows[begin : min(end, rows.shape[0])].float()
            if (lacking := end - begin - part.shape[0]) > 0:
                part = torch.cat([part, part.new_zeros(lacking, self.shape[1])])
            blocks = encode_blocks(part.reshape(-1, numbers), self.format)
            packed[first : first + count] = blocks.view(count, size[1])
        return packed

    def decode(self, packed: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the weight [O, I] from the bytes of all groups, in `dtype`, or in that of the plain weight. From the
        bytes of some groups: their rows, with those that the last group lacks."""
        out = torch.empty(packed.shape[0] * self.group_rows, self.shape[1], dtype=dtype or self.dtype)
        kernels.dequantize_blocks(out.view(-1), packed.reshape(-1).to(out.device), self.format)
        return out[: self.shape[0]]


def encode_blocks(values: torch.Tensor, format: str) -> torch.Tensor:
    """Returns float32 values [blocks, numbers of a block] as bytes [blocks, bytes of a block].

    nf4: the codes of bitsandbytes. mxfp4: those of torchao, whose exponent is the floor. int8: those of weights that
    travel in int8. Raises ValueError for values that are not finite.
    """
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"expected finite numbers to store in {format}, got an infinity or a NaN")
    if format == "nf4":
        return _encode_nf4(values)
    return _encode_mxfp4(values) if format == "mxfp4" else _encode_int8(values)


def _encode_nf4(values: torch.Tensor) -> torch.Tensor:
    numbers = torch.tensor(kernels.code_numbers("nf4"), device=values.device)
    bounds = (numbers[1:] + numbers[:-1]) / 2
    largest = values.abs().amax(1, keepdim=True)
    scaled = (values * (1.0 / largest.clamp(min=_NF4_LEAST))).clamp_(-1, 1)
    codes = torch.bucketize(scaled, bounds, out_int32=True).to(torch.uint8)
    return join_blocks(codes[:, ::2] << 4 | codes[:, 1::2], largest)


def _encode_mxfp4(values: torch.Tensor) -> torch.Tensor:
    numbers = torch.tensor(kernels.code_numbers("mxfp4")[:8], device=values.device)
    largest = values.abs().amax(1, keepdim=True)
    exponent = ((largest.view(torch.int32) >> 23) - 2).clamp_(min=0)  # of a scale with which no code exceeds 8
    scale = (exponent << 23).view(torch.float32).clamp(min=_MX_LEAST)
    scaled = values / scale
    magnitude = scaled.abs().clamp_(max=6.0)
    codes = torch.bucketize(magnitude, (numbers[1:] + numbers[:-1]) / 2, out_int32=True)
    upper = torch.bucketize(magnitude, (numbers[1:] + numbers[:-1]) / 2, out_int32=True, right=True)
    codes += (codes != upper) & (codes % 2 == 1)  # a tie goes to the even code
    codes = codes.to(torch.uint8) | torch.signbit(scaled).to(torch.uint8) << 3
    return torch.cat([codes[:, ::2] | codes[:, 1::2] << 4, exponent.to(torch.uint8)], 1)


def _encode_int8(values: torch.Tensor) -> torch.Tensor:
    count = values.numel()
    packed = torch.empty(kernels.quantized_bytes(count), dtype=torch.uint8, device=values.device)
    kernels.quantize(packed, values.contiguous().view(-1))
    return torch.cat([packed[:count].view(values.shape), packed[count:].view(values.shape[0], 4)], 1)


def join_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns blocks of codes [blocks, bytes] and float32 scales [blocks, 1]."""
    return torch.cat([codes, scales.to(torch.float32).contiguous().view(torch.uint8)], 1)


def freeze(parameter: nn.Parameter, ring: Ring, format: str) -> nn.Parameter:
    """Returns a sharded parameter in blocks for a whole plain weight [O, I] (meta device included)."""
    weight = FrozenWeight(format, tuple(parameter.shape), parameter.dtype)  # type: ignore[arg-type]
    first, groups = shard_bounds(weight.packed_shape[0], ring)
    begin, end = weight.rows_of(first, groups)
    return _with_blocks(weight, weight.encode(parameter.detach()[begin:end], groups), ring)


def keep(weight: FrozenWeight, blocks: torch.Tensor, ring: Ring) -> nn.Parameter:
    """Returns a sharded parameter for a whole weight that is in blocks already, uint8 [groups, bytes]."""
    first, groups = shard_bounds(weight.packed_shape[0], ring)
    return _with_blocks(weight, blocks[first : first + groups].clone(), ring)


def _with_blocks(weight: FrozenWeight, local: torch.Tensor, ring: Ring) -> nn.Parameter:
    """Returns the sharded parameter whose local shard is `local`, uint8 [groups of this rank, bytes]."""
    sharded = as_parameter(as_sharded(local, torch.Size(weight.packed_shape), ring, 0), False)
    sharded.__dict__[FROZEN] = weight
    return sharded


def load_plain(parameter: DTensor, rows: Any) -> None:
    """Encodes the rows of a plain weight into this rank's shard of a parameter in blocks.

    rows: a tensor [O, I], or a slice of a file; only this rank's rows are read.
    """
    weight, begin, end = _own_rows(parameter)
    local = parameter._local_tensor
    with torch.no_grad():
        local.copy_(weight.encode(rows[begin:end], local.shape[0]))


def local_plain(parameter: DTensor) -> tuple[torch.Tensor, int]:
    """Returns the values that this rank's shard of a parameter in blocks stands for, as rows [rows, I] of the plain
    weight, and the first of these rows."""
    weight, begin, end = _own_rows(parameter)
    return weight.decode(parameter._local_tensor)[: end - begin], begin


def _own_rows(parameter: DTensor) -> tuple[FrozenWeight, int, int]:
    """Returns the description of a weight in blocks, this rank's first row, and the row behind its last."""
    weight = frozen_of(parameter)
    assert isinstance(weight, FrozenWeight), "the caller has looked"
    mesh = parameter.device_mesh
    sizes = shard_sizes(weight.packed_shape[0], mesh.size(mesh.ndim - 1))
    place = mesh.get_local_rank(mesh.ndim - 1)
    return weight, *weight.rows_of(sum(sizes[:place]), sizes[place])


def gather_plain(
    parameter: torch.Tensor,
    *,
    keep: bool = True,
    dtype: torch.dtype | None = None,
    buffer: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """As `gather_full`; for a parameter in blocks, the values that it stands for. Collective."""
    weight = frozen_of(parameter)
    if weight is None:
        return gather_full(parameter, keep=keep, dtype=dtype, buffer=buffer, device=device)
    blocks = gather_full(parameter, keep=keep, buffer=buffer)
    return weight.decode(blocks).to(device, dtype) if keep else blocks


def frozen_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the values that the frozen weights of a converted model stand for, by name in the plain model.

    For weights that `fully_rotate(model, frozen=...)` keeps in blocks: each [out_features, in_features], on the CPU of
    every rank, in the dtype of the plain weight. Products are computed with these values, rounded to another compute
    dtype where there is one. Whole weights, for small models and tests. Collective.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"frozen_weights: expected a torch.nn.Module, got {type(model).__name__}")
    named = model.named_parameters(remove_duplicate=False)
    return {name: gather_plain(parameter) for name, parameter in named if frozen_of(parameter) is not None}
