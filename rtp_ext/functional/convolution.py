"""Convolutions over the ring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_args

import torch
from torch.nn import functional as F

from rtp_ext import _native
from rtp_ext.functional._call import Call, ShardedParameter, expect_shape, prepare
from rtp_ext.functional._driven import accumulation_dtype, add_scaled, drive, owner_shapes
from rtp_ext.functional._operation import Operation
from rtp_ext.functional._rotated import Rotated
from rtp_ext.parameters.sharding import make_contiguous
from rtp_ext.ring import Prepared, Ring
from rtp_ext.words import Padding, PaddingMode

_aten = torch.ops.aten


@dataclass(frozen=True)
class _Piece:
    """Output channels of a shard that one convolution computes, and the input channels that it reads."""

    row: int  # first output channel within the shard
    output: int  # first output channel within the whole output
    rows: int  # number of output channels
    input: int  # first input channel
    inputs: int  # number of input channels
    groups: int

    def of_shard(self, shard: torch.Tensor) -> torch.Tensor:
        return shard.narrow(0, self.row, self.rows)

    def of_output(self, y: torch.Tensor) -> torch.Tensor:
        return y.narrow(1, self.output, self.rows)

    def of_input(self, x: torch.Tensor) -> torch.Tensor:
        return x.narrow(1, self.input, self.inputs)


@dataclass(frozen=True)
class _Convolution:
    """A convolution of `x` [N, I, *extents] whose weight [O, I / groups, *kernel] is cut along O."""

    x: torch.Size
    weight: tuple[int, ...]
    sizes: list[int]  # output channels of every owner's shard
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.weight[2:]

    @property
    def output_shape(self) -> tuple[int, ...]:
        geometry = zip(self.x[2:], self.kernel, self.stride, self.padding, self.dilation, strict=True)
        extents = [(n + 2 * pad - d * (k - 1) - 1) // step + 1 for n, k, step, pad, d in geometry]
        return (self.x[0], self.weight[0], *extents)

    def pieces(self, owner: int) -> Iterator[_Piece]:
        """Yields the convolutions of a shard, which may begin and end inside a group: part of a group, whole groups,
        part of another group."""
        start = sum(self.sizes[:owner])
        end = start + self.sizes[owner]
        if start == end:
            return
        outputs, inputs = self.weight[0] // self.groups, self.weight[1]  # channels of one group
        first, last = -(-start // outputs) * outputs, end // outputs * outputs
        cuts = (start, first, last, end) if first <= last else (start, end)
        for begin, stop in pairwise(cuts):
            if begin < stop:
                groups = max((stop - begin) // outputs, 1)
                yield _Piece(begin - start, begin, stop - begin, begin // outputs * inputs, groups * inputs, groups)

    def forward(self, piece: _Piece, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        none = (0,) * len(self.stride)
        return _aten.convolution(x, weight, bias, self.stride, self.padding, self.dilation, False, none, piece.groups)

    def input_gradient(self, piece: _Piece, dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        like = dy.new_empty(1).expand(self.x[0], piece.inputs, *self.x[2:])  # only its shape is read
        return self._backward(piece, dy, like, weight, 0)

    def weight_gradient(self, piece: _Piece, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        like = dy.new_empty(1).expand(piece.rows, *self.weight[1:])
        return self._backward(piece, dy, x, like, 1)

    def _backward(self, piece: _Piece, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, which: int) -> Any:
        none = (0,) * len(self.stride)
        options = (None, self.stride, self.padding, self.dilation, False, none, piece.groups)
        return _aten.convolution_backward(dy, x, weight, *options, [which == 0, which == 1, False])[which]


class Convolution(Operation):
    """A convolution, whose passes are driven from Python. Settings: a _Convolution, of one call."""

    key = label = "convolution"
    reads_inputs = False

    @staticmethod
    def reads(call: Call, settings: Any) -> Sequence[bool]:
        return [True, False][: len(call.watched)]

    @staticmethod
    def forward(call, convolution, inputs, parameters):
        (x,) = inputs
        y = x.new_empty(convolution.output_shape).contiguous(memory_format=_memory_format(x))

        def compute(execution: Any, step: Any) -> None:
            shard, *bias_shard = execution.weight()
            for piece in convolution.pieces(step.owner):
                piece_bias = piece.of_shard(bias_shard[0]) if bias_shard else None
                part = convolution.forward(piece, piece.of_input(x), piece.of_shard(shard), piece_bias)
                piece.of_output(y).copy_(part)

        shapes = _shapes(call, convolution, parameters)
        drive(call, _native.Execution.forward, (list(parameters), shapes, call.options), compute)
        return [y]

    @staticmethod
    def backward(call, convolution, gradients, inputs, parameters, kept, needs):
        (dy,), (x,), weight = gradients, inputs, parameters[0]
        needs_x, needs_weight, needs_bias = (*needs, False)[:3]
        scale = 1.0 / call.ring.size
        dx = None
        if needs_x:
            dtype = accumulation_dtype(dy.dtype)
            dx = torch.zeros(convolution.x, dtype=dtype, device=dy.device)
            dx = dx.contiguous(memory_format=_memory_format(dy))
        params = []
        if needs_weight:
            params.append(weight.new_empty(weight.shape, dtype=call.options.local_dtype))
        if needs_bias:
            params.append(weight.new_empty(weight.shape[:1], dtype=call.options.local_dtype))
        weights = [weight] if needs_x else []
        shapes = _shapes(call, convolution, weights), _shapes(call, convolution, params)

        def dgrad(execution: Any, owner: int) -> None:
            shard = execution.weight()[0]
            for piece in convolution.pieces(owner):
                part = convolution.input_gradient(piece, piece.of_output(dy), piece.of_shard(shard))
                piece.of_input(dx).add_(part)

        def wgrad(execution: Any, owner: int) -> None:
            out = execution.gradient_out()
            arrived = execution.gradient_in() or [None] * len(out)
            for piece in convolution.pieces(owner):
                sums = [
                    (piece.of_shard(o), None if a is None else piece.of_shard(a))
                    for o, a in zip(out, arrived, strict=True)
                ]
                part = piece.of_output(dy)
                if needs_weight:
                    add_scaled(*sums[0], convolution.weight_gradient(piece, part, piece.of_input(x)), scale)
                if needs_bias:
                    dims = [0, *range(2, part.dim())]
                    add_scaled(*sums[-1], part.sum(dims, dtype=accumulation_dtype(part.dtype)), scale)

        def compute(execution: Any, step: Any) -> None:
            (dgrad if step.compute == "dgrad" else wgrad)(execution, step.owner)

        travelling = weights, shapes[0], params, shapes[1]
        drive(call, _native.Execution.backward, (*travelling, call.options, needs_x, False), compute)
        found = iter(params)
        of_parameters = [next(found) if need else None for need in needs[1:]]
        return None if dx is None else dx.to(dy.dtype), *of_parameters


def _shapes(call: Call, convolution: _Convolution, tensors: Sequence[torch.Tensor]) -> list[list[list[int]]]:
    return [owner_shapes(convolution.weight[: tensor.dim()], 0, call.ring) for tensor in tensors]


def _memory_format(x: torch.Tensor) -> torch.memory_format:
    """Returns the memory format of a convolution's output, which is that of its input."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def rotated_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ring: Ring,
    stride: int | Sequence[int] = 1,
    padding: Padding | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    padding_mode: PaddingMode = "zeros",
    prepared: Prepared | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    name: str = "rotated_convolution",
) -> torch.Tensor:
    """Computes F.conv1d, F.conv2d or F.conv3d with W and b sharded over the ring.

    Symbols: R = ring.size, r = ring.rank, I and O = in and out channels, W_j and b_j = shards of rank j, cut along O.

        x        [N, I, *extents] or [I, *extents]   this rank's own batch, in the compute dtype
        weight   [O_r, I / groups, *kernel]          local shard; one, two or three kernel dimensions
        bias     [O_r]                               local shard
        returns  [N, O, *extents] or [O, *extents]   in the compute dtype

        forward  y[:, j] = conv(x, W_j) + b_j
        dgrad    dx = sum_j conv_backward(dy[:, j], W_j)      in float32 where the compute dtype has 16 bits
        wgrad    dW_j = 1/R sum_ranks conv_backward(dy[:, j], x)

    A shard that begins or ends inside a group takes up to three convolutions: part of a group, whole groups, part of
    another group, each on the input channels of its groups.

    Args:
        stride, padding, dilation, groups: as in F.conv2d; padding may be "same" or "valid".
        padding_mode: zeros, reflect, replicate or circular, as in nn.Conv2d.

    Everything else is as in `rotated_linear`. Collective. Source: RTP, arXiv 2311.01635.
    """
    call = Call.of(
        weight,
        ring=ring,
        name=name,
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
    )
    if weight.dim() not in (3, 4, 5):
        raise ValueError(f"{name}: expected a weight of 3, 4 or 5 dimensions, got shape {tuple(weight.shape)}")
    params = [ShardedParameter("weight", weight, 0, weight.dim())]
    if bias is not None:
        params.append(ShardedParameter("bias", bias, 0, 1))

    def derive(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
        shape = shapes[0]
        if bias is not None:
            if bias.dtype != weight.dtype:
                raise TypeError(f"{name}: expected a bias of dtype {weight.dtype}, the weight's, got {bias.dtype}")
            expect_shape(call, params[1], shapes[1], shape[:1])
        if groups < 1 or shape[0] % groups:
            raise ValueError(f"{name}: expected groups that divide {shape[0]} output channels, got {groups}")
        if 0 in shape:
            raise ValueError(f"{name}: expected a weight with no empty dimension, got shape {shape}")
        return shape

    shape = prepare(call, prepared, "convolution", params, [x], (("groups", groups),), derive)
    kernel = shape[2:]
    _check_input(name, x, shape[1] * groups, len(kernel))
    unbatched = x.dim() == len(kernel) + 1
    strides = _per_dimension(name, "stride", stride, len(kernel), 1)
    dilations = _per_dimension(name, "dilation", dilation, len(kernel), 1)
    x, paddings = _pad(name, x.unsqueeze(0) if unbatched else x, padding, padding_mode, kernel, strides, dilations)
    x = call.operand(x)
    sizes = _native.shard_sizes(shape[0], ring.size)
    convolution = _Convolution(x.shape, shape, sizes, strides, paddings, dilations, groups)
    if min(convolution.output_shape[2:]) < 1:
        raise ValueError(
            f"{name}: expected an input at least as large as the kernel {kernel}, dilation {dilations}, with padding "
            f"{paddings}, got shape {tuple(x.shape)}"
        )
    make_contiguous(weight)
    local = [local.contiguous() for local in call.local_shards()]
    (y,) = Rotated.apply(Convolution, call, convolution, x, *local)
    return y.squeeze(0) if unbatched else y


def _check_input(name: str, x: torch.Tensor, channels: int, dims: int) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected an input tensor, got {type(x).__name__}")
    if x.dim() not in (dims + 1, dims + 2) or x.shape[-dims - 1] != channels:
        extents = ", ".join("DHW"[3 - dims :])
        raise ValueError(
            f"{name}: expected an input of shape [N, {channels}, {extents}] or [{channels}, {extents}], got "
            f"{tuple(x.shape)}"
        )


def _per_dimension(name: str, what: str, value: int | Sequence[int], dims: int, least: int) -> tuple[int, ...]:
    values = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(values) == 1:
        values *= dims
    if len(values) != dims or any(number < least for number in values):
        raise ValueError(f"{name}: expected a {what} of one or {dims} integers >= {least}, got {value}")
    return values


def _pad(
    name: str,
    x: torch.Tensor,
    padding: Padding | int | Sequence[int],
    mode: str,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Returns `x` [N, I, *extents] with the padding that aten.convolution does not support, and the rest of the
    padding, which is passed to it."""
    if mode not in get_args(PaddingMode):
        raise ValueError(f"{name}: expected padding_mode zeros, reflect, replicate or circular, got {mode!r}")
    if not isinstance(padding, str):
        before = after = _per_dimension(name, "padding", padding, len(kernel), 0)
    elif padding == "valid":
        before = after = (0,) * len(kernel)
    elif padding == "same":
        if any(step != 1 for step in stride):
            raise ValueError(f"{name}: expected stride 1 with padding 'same', got {tuple(stride)}")
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        before = tuple(t // 2 for t in total)
        after = tuple(t - t // 2 for t in total)
    else:
        raise ValueError(f"{name}: expected padding 'same', 'valid' or integers, got {padding!r}")
    both = list(zip(before, after, strict=True))
    if mode == "zeros":
        # aten.convolution pads both sides equally
        extra = [amount for low, high in reversed(both) for amount in (0, high - low)]
        return (F.pad(x, extra) if any(extra) else x), before
    amounts = [amount for low, high in reversed(both) for amount in (low, high)]
    return (F.pad(x, amounts, mode=mode) if any(amounts) else x), (0,) * len(kernel)
