"""Frozen weights in 4 or 8 bits: blocks of codes, each with a scale, that a parameter holds as bytes.

A parameter of such a weight [O, ...] is uint8 [groups, bytes], in some formats followed by extents of 1. A group is the
fewest rows that fill whole blocks; the last group is filled with zeros. The ring shards groups, as DTensor's Shard(0)
does, so that no shard cuts a block, and checkpoints store and reshard the bytes. csrc/base/blocks.h has the layout of a
block.

The weights of an MLP that rotates as a bundle are cut along its hidden features, between multiples of the block: gate
and up in groups of as many rows as a block has numbers; down [O, I] along its inputs, as uint8 [O, I / block, bytes of
a block], Shard(1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rtp_ext._native import ParameterFacts, kernels, shard_sizes
from rtp_ext.parameters.sharding import as_sharded, frozen_of, gather_full, shard_bounds, take_shard
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import FROZEN, as_parameter
from rtp_ext.words import Format

FORMATS: tuple[str, ...] = get_args(Format)
_FOREIGN = ("fp4", "nf4-torchao", "nf4-torchao-bfloat16")  # formats of other packages, of the layout of nf4

_NF4_LEAST = 1e-38  # a smaller largest magnitude counts as this one, as in bitsandbytes
_MX_LEAST = 2.0**-126  # codes of a block with a smaller scale are those for this one, as in torchao
_SECTION = 1 << 22  # numbers that are encoded at once


@dataclass(frozen=True)
class FrozenWeight:
    """A weight in blocks.

    Attributes:
        format: of its blocks: one of FORMATS or of _FOREIGN.
        shape: [O, ...], of the plain weight; [E, ...] of stacked experts.
        dtype: of the plain weight.
        dim: the dimension that the ring cuts: 0, or 1 for [O, I] with a multiple of the block in each row.
        rows: of a group; 0: the fewest that fill whole blocks. `dim` 0 only.
    """

    format: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int = 0
    rows: int = 0

    @property
    def facts(self) -> Any:
        """It in the engine's form (csrc/schedule/operations.h)."""
        return ParameterFacts(self.shape, self.dim, self.format, self.rows, trained=False)

    def shard_rows(self, ranks: int) -> list[int]:
        """Returns the rows of every rank's shard; the columns where `dim` is 1."""
        return self.facts.sizes(ranks)

    def with_rows(self, rows: int) -> FrozenWeight:
        """Returns a part of it that has so many rows, in groups of its own."""
        return replace(self, shape=(rows, *self.shape[1:]))

    @property
    def block(self) -> tuple[int, int]:
        """The numbers and the bytes of a block."""
        return kernels.block_layout(self.format)

    @property
    def group_rows(self) -> int:
        """The rows of a group; its columns where `dim` is 1."""
        return self.facts.rows_of_group

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """The shape of the parameter. It tells formats with blocks of equal layout apart, so that bytes of another one
        are an error when they are loaded: each format of _FOREIGN has another number of extents of 1 at its end."""
        numbers, size = self.block
        mark = (1,) * (_FOREIGN.index(self.format) + 1 if self.format in _FOREIGN else 0)
        if self.dim == 1:
            return self.shape[0], self.shape[1] // numbers, size, *mark
        rows = self.group_rows
        return -(-self.shape[0] // rows), rows * math.prod(self.shape[1:]) // numbers * size, *mark

    def rows_of(self, first: int, groups: int) -> tuple[int, int]:
        """Returns the first row, and the row behind the last, of groups [first, first + groups)."""
        rows, limit = self.group_rows, self.shape[self.dim]
        return min(first * rows, limit), min((first + groups) * rows, limit)

    def part(self, first: int, groups: int) -> tuple[slice, ...]:
        """Returns the slices of the plain weight that these groups hold."""
        return (*[slice(None)] * self.dim, slice(*self.rows_of(first, groups)))

    def grouped(self, blocks: torch.Tensor) -> torch.Tensor:
        """Returns the parameter [groups, bytes] for the blocks [blocks, bytes] of a whole weight; the last group is
        filled with zeros."""
        lacking = math.prod(self.packed_shape) // self.block[1] - len(blocks)
        zeros = encode_blocks(torch.zeros(lacking, self.block[0], device=blocks.device), self.format)
        return torch.cat([blocks, zeros]).view(self.packed_shape)

    def converted_by(self, function: Callable[[torch.Tensor], torch.Tensor]) -> FrozenWeight:
        """Returns the description after a call of nn.Module._apply, such as `to`, with `function`."""
        dtype = function(torch.empty(0, dtype=self.dtype)).dtype
        return replace(self, dtype=dtype) if dtype.is_floating_point else self

    def same_blocks(self, other: FrozenWeight) -> bool:
        """Returns whether the same bytes stand for the same values in another weight."""
        return replace(self, dtype=other.dtype) == other

    def encode(self, values: torch.Tensor, groups: int) -> torch.Tensor:
        """Returns the bytes of so many groups: of rows [<= groups * group_rows, ...], where missing rows are zeros, or
        of columns [O, groups * group_rows]."""
        size = [*self.packed_shape]
        size[self.dim] = groups
        packed = torch.empty(size, dtype=torch.uint8, device=values.device)
        if packed.is_meta:
            return packed
        numbers, block = self.block
        flat, blocks = values.reshape(-1), packed.view(-1, block)
        step = max(1, _SECTION // numbers)
        for first in range(0, len(blocks), step):
            count = min(step, len(blocks) - first)
            part = flat[first * numbers : (first + count) * numbers].float()
            if (lacking := count * numbers - len(part)) > 0:
                part = torch.cat([part, part.new_zeros(lacking)])
            blocks[first : first + count] = encode_blocks(part.view(count, numbers), self.format)
        return packed

    def decode(self, packed: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the weight from the bytes of all groups, in `dtype`, or in that of the plain weight. From the bytes
        of some groups: their part of it, with the rows that the last group lacks."""
        numbers, size = self.block
        out = torch.empty(packed.numel() // size * numbers, dtype=dtype or self.dtype)
        kernels.dequantize_blocks(out, packed.reshape(-1).to(out.device), self.format)
        return out.view(self.shape[0], -1) if self.dim == 1 else out.view(-1, *self.shape[1:])[: self.shape[0]]

    def decode_part(self, packed: torch.Tensor, extent: int) -> torch.Tensor:
        """Returns the part of the weight that some groups hold: `extent` rows, or columns where `dim` is 1."""
        return self.decode(packed).narrow(self.dim, 0, extent)


def encode_blocks(values: torch.Tensor, format: str) -> torch.Tensor:
    """Returns float32 values [blocks, numbers of a block] as bytes [blocks, bytes of a block].

    nf4, fp4: the codes of bitsandbytes. mxfp4: those of torchao, whose exponent is the floor. int8: those of weights
    that travel in int8. The nearest numbers in the other formats. Raises ValueError for values that are not finite.
    """
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"expected finite numbers to store in {format}, got an infinity or a NaN")
    if format == "mxfp4":
        return _encode_mxfp4(values)
    return _encode_int8(values) if format == "int8" else _encode_nearest(values, format)


def _encode_nearest(values: torch.Tensor, format: str) -> torch.Tensor:
    numbers, order = torch.tensor(kernels.code_numbers(format), device=values.device).sort(stable=True)
    bounds = (numbers[1:] + numbers[:-1]) / 2
    largest = values.abs().amax(1, keepdim=True)
    scaled = (values * (1.0 / largest.clamp(min=_NF4_LEAST))).clamp_(-1, 1)
    codes = order[torch.bucketize(scaled, bounds, out_int32=True)].to(torch.uint8)
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


def repeated_scales(scales: torch.Tensor, block: int, count: int) -> torch.Tensor:
    """Returns float32 scales [count, 1] of blocks of 64 for those of larger blocks, a multiple of 64 numbers each."""
    return scales.float().repeat_interleave(block // kernels.block_layout("nf4")[0])[:count].view(-1, 1)


def freeze(parameter: nn.Parameter, ring: Ring, weight: FrozenWeight) -> nn.Parameter:
    """Returns a sharded parameter in blocks for a whole plain weight (meta device included)."""
    first, groups = shard_bounds(weight.packed_shape[weight.dim], ring)
    return _with_blocks(weight, weight.encode(parameter.detach()[weight.part(first, groups)], groups), ring)


def keep(weight: FrozenWeight, blocks: torch.Tensor, ring: Ring) -> nn.Parameter:
    """Returns a sharded parameter for a whole weight that is in blocks already, uint8 [groups, bytes]."""
    return _with_blocks(weight, take_shard(blocks, ring, weight.dim), ring)


def _with_blocks(weight: FrozenWeight, local: torch.Tensor, ring: Ring) -> nn.Parameter:
    """Returns the sharded parameter whose local shard is `local`, with the groups of this rank."""
    sharded = as_parameter(as_sharded(local, torch.Size(weight.packed_shape), ring, weight.dim), False)
    sharded.__dict__[FROZEN] = weight
    return sharded


def part_of_frozen(parameter: torch.Tensor, local: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns this rank's shard, `local`, of a parameter as one of a ring that has `rows` rows of it. A weight in
    blocks is described by its parameter."""
    weight = frozen_of(parameter)
    if weight is not None:
        local = local.detach()
        local.__dict__[FROZEN] = weight.with_rows(rows)
    return local


def load_plain(parameter: DTensor, rows: Any) -> None:
    """Encodes its part of a plain weight into this rank's shard of a parameter in blocks.

    rows: a tensor of the weight's shape, or a slice of a file, of which only this rank's part is read.
    """
    weight, first, groups = _own_groups(parameter)
    with torch.no_grad():
        parameter._local_tensor.copy_(weight.encode(rows[weight.part(first, groups)], groups))


def local_plain(parameter: DTensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Returns the values that this rank's shard of a parameter in blocks stands for, a part of the plain weight, and
    the offsets of this part."""
    weight, first, groups = _own_groups(parameter)
    begin, end = weight.rows_of(first, groups)
    values = weight.decode_part(parameter._local_tensor, end - begin)
    return values, tuple(begin if dim == weight.dim else 0 for dim in range(values.dim()))


def _own_groups(parameter: DTensor) -> tuple[FrozenWeight, int, int]:
    """Returns the description of a weight in blocks, this rank's first group, and the number of its groups."""
    weight = frozen_of(parameter)
    assert isinstance(weight, FrozenWeight), "the caller has looked"
    mesh = parameter.device_mesh
    sizes = shard_sizes(weight.packed_shape[weight.dim], mesh.size(mesh.ndim - 1))
    place = mesh.get_local_rank(mesh.ndim - 1)
    return weight, sum(sizes[:place]), sizes[place]


def gather_plain(parameter: torch.Tensor, *, keep: bool = True, **options: Any) -> torch.Tensor:
    """As `gather_full`; for a parameter in blocks, the values that it stands for. Collective."""
    weight = frozen_of(parameter)
    if weight is None:
        return gather_full(parameter, keep=keep, **options)
    device, dtype = options.pop("device", "cpu"), options.pop("dtype", None)
    blocks = gather_full(parameter, keep=keep, **options)
    return weight.decode(blocks).to(device, dtype) if keep else blocks


def frozen_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the values that the frozen weights of a converted model stand for, by name in the plain model.

    For weights that are in blocks, by `fully_rotate(model, frozen=...)` or by another package, and for those that
    `rotate_for_inference(model, weights=...)` stores as codes of a recipe: each in the shape and dtype of the plain
    weight, on the CPU of every rank. Products are computed with these values, rounded to another compute dtype where
    there is one; in 8 bits with codes of tokens. Whole weights, for small models and tests. Collective.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"frozen_weights: expected a torch.nn.Module, got {type(model).__name__}")
    named = model.named_parameters(remove_duplicate=False)
    return {name: gather_plain(parameter) for name, parameter in named if frozen_of(parameter) is not None}


def expect_takes_blocks(name: str, frozen: Sequence[Any], transposed: bool, in_place: bool) -> None:
    """Raises ValueError for options of an operation that frozen weights in blocks do not take.

    frozen: the FrozenWeight, or None, of each of its parameters. transposed: weights are stored [in, out].
    """
    if any(frozen) and (transposed or in_place):
        expected = "a weight stored [out, in]" if transposed else "in_place=False"
        raise ValueError(f"{name}: expected {expected} for a frozen weight in blocks")
