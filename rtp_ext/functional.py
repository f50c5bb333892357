"""Autograd functions over the rotation engine. Arguments are home shards: plain local tensors or DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from rtp_ext import _native
from rtp_ext.ring import Ring, agreements
from rtp_ext.sharding import local_shard, reserve, shard_dim_of


@dataclass(frozen=True)
class _Call:
    """What one call of an operation needs besides tensors."""

    ring: Ring
    name: str
    shape: tuple[int, int]
    shard_dim: int
    in_place: bool
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype

    def options(self) -> Any:
        return _native.RotationOptions(
            route=self.ring.route,
            in_place=self.in_place,
            compute_dtype=self.compute_dtype,
            reduce_dtype=self.reduce_dtype,
            name=self.name,
        )

    def run(self, function: Any, *tensors: Any) -> Any:
        return self.ring.run(self.name, function, *tensors)


def _compute_dtype(weight: torch.Tensor, asked: torch.dtype | None) -> torch.dtype:
    kind = weight.device.type
    if torch.is_autocast_enabled(kind) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return asked or weight.dtype


def _reduce_dtype(compute: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    if asked is not None:
        return asked
    return torch.float64 if compute == torch.float64 else torch.float32


def _full_shape(
    weight: torch.Tensor,
    call_name: str,
    ring: Ring,
    shard_dim: int,
    facts: Sequence[Any],
    bias: torch.Tensor | None = None,
) -> tuple:
    """The whole shape of a sharded weight [2-D]; all ranks agree on it, and on `facts`, before anything travels.

    A DTensor knows its shape. Of plain shards the ranks tell each other, and check that they belong together. Every
    weight is agreed on once for each combination of facts.
    """
    agreed = agreements(weight)
    local = tuple(local_shard(weight).shape)
    local_bias = None if bias is None else tuple(local_shard(bias).shape)
    key = (ring.serial, local, local_bias, str(weight.dtype), shard_dim, *facts)
    if key in agreed:
        return agreed[key]
    whole = tuple(weight.shape) if isinstance(weight, DTensor) else None
    told = ring.exchange((call_name, whole, local, str(weight.dtype), shard_dim, tuple(facts), local_bias))
    for rank, theirs in enumerate(told):
        mine, other = told[0], theirs
        if (mine[1], mine[3:6]) != (other[1], other[3:6]) or len(mine[2]) != len(other[2]):
            raise ValueError(
                f"{call_name}: the ranks of the ring disagree: expected {_describe(mine)} (rank 0), got "
                f"{_describe(other)} on rank {rank}"
            )
    if whole is None:
        whole = _assemble(f"{call_name}: weight", [theirs[2] for theirs in told], shard_dim)
    if bias is not None:
        biases = [theirs[6] for theirs in told]
        expected = [(size,) for size in _native.shard_sizes(whole[0], ring.size)]
        if biases != expected:
            raise ValueError(f"{call_name}: expected bias shards of shapes {expected} on the ranks, got {biases}")
    agreed[key] = whole
    return whole


def _describe(told: tuple) -> str:
    name, whole, local, dtype, shard_dim, facts, _ = told
    return f"{name} weight {whole or f'shard {local}'} {dtype} cut along {shard_dim}, {', '.join(map(str, facts))}"


def _assemble(name: str, shapes: list[tuple[int, ...]], shard_dim: int) -> tuple[int, ...]:
    """The whole shape of plain shards, which must be what the chunk rule makes of it."""
    extent = sum(shape[shard_dim] for shape in shapes)
    whole = [*shapes[0]]
    whole[shard_dim] = extent
    sizes = _native.shard_sizes(extent, len(shapes))
    for rank, shape in enumerate(shapes):
        expected = [*whole]
        expected[shard_dim] = sizes[rank]
        if list(shape) != expected:
            raise ValueError(
                f"{name} shards do not belong together: expected shape {tuple(expected)} on rank {rank} for a whole "
                f"of {tuple(whole)}, got {tuple(shape)}; shards of all ranks: {shapes}"
            )
    return tuple(whole)


def _check_weight(name: str, weight: torch.Tensor, ring: Ring, shard_dim: int) -> None:
    if shard_dim not in (0, 1):
        raise ValueError(f"{name}: expected shard_dim 0 or 1, got {shard_dim}")
    if weight.dim() != 2:
        raise ValueError(f"{name}: expected a weight of 2 dimensions, got shape {tuple(weight.shape)}")
    if not weight.dtype.is_floating_point:
        raise TypeError(f"{name}: expected a floating-point weight, got {weight.dtype}")
    if isinstance(weight, DTensor):
        if weight.device_mesh.size() != ring.size:
            raise ValueError(f"{name}: expected a weight on {ring.size} ranks, got {weight.device_mesh.size()}")
        if shard_dim_of(weight) != shard_dim:
            raise ValueError(f"{name}: expected a weight cut along {shard_dim}, got placements {weight.placements}")


def _prepare_in_place(
    name: str, ring: Ring, tensors: Sequence[torch.Tensor | None], shapes: Sequence[tuple], dims: Sequence[int]
) -> None:
    if ring.transport == "shm":
        return  # copies travel
    for tensor, shape, dim in zip(tensors, shapes, dims, strict=True):
        if tensor is not None:
            reserve(tensor, shape, dim, ring, name)


class _RotatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, call: _Call):
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        ctx.call = call
        ctx.needs = (needs_x, needs_weight, needs_bias)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(x if needs_weight else x.new_empty(0), weight)
        return call.run(_native.linear_forward, x, weight, bias, call.shape, call.shard_dim, call.options())

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        call = ctx.call
        if not any(ctx.needs):
            return None, None, None, None
        dx, dweight, dbias = call.run(
            _native.linear_backward,
            dy.contiguous(),
            x,
            weight,
            call.shape,
            call.shard_dim,
            ctx.needs,
            call.options(),
        )
        if dweight is not None:
            dweight = dweight.to(weight.dtype)
        if dbias is not None:
            dbias = dbias.to(ctx.bias_dtype)
        return dx, dweight, dbias, None


def rotated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ring: Ring,
    shard_dim: int = 0,
    in_place: bool = False,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    name: str = "rotated_linear",
) -> torch.Tensor:
    """`x @ W.T + b` with W and b spread over the ring; the shards visit every rank while it computes.

    Symbols: R = ring.size, r = ring.rank, I and O = in and out features, W_j and b_j = shards of rank j.

        x        [..., I]   this rank's own batch, in the compute dtype
        weight   [O_r, I]   home shard; [O, I_r] where shard_dim = 1
        bias     [O_r]      home shard, cut along its only dimension in both cases
        returns  [..., O]   in the compute dtype

        forward  y[:, j] = x @ W_j.T + b_j              shard_dim 1: y = sum_j x[:, j] @ W_j.T
        dgrad    dx = sum_j dy[:, j] @ W_j
        wgrad    dW_j = 1/R sum_ranks dy[:, j].T @ x    (travels with the weights and ends at home)

    Gradients are averaged over the ring. Sums of several products are kept in float32 where the compute dtype has 16
    bits. Cost: R - 1 weight hops forward; R - 1 weight and R - 1 gradient hops backward, none of a kind that is not
    needed. Memory: at most two weight slots forward, two of each kind backward, each of the largest shard, shared by
    all layers of the ring; one weight slot more where the home shard is cast.

    Args:
        in_place: the home shard itself travels and comes home, with one slot instead of two. Where a cast copy
            travels anyway, or over shm, whose hops land in slots only, nothing is saved and copies travel.
        compute_dtype: weights are cast to it before they travel; default: torch.autocast's where enabled, else the
            weight's own.
        reduce_dtype: what partial gradients travel in; default float32 (float64 for float64).
        name: named in error messages.

    Raises ValueError or TypeError where shapes, dtypes or devices disagree (naming expected and actual), RingTimeout
    where a neighbour does not answer. Collective. Source: RTP, arXiv 2311.01635.
    """
    ring.check_alive(name)
    _check_weight(name, weight, ring, shard_dim)
    dtype = _compute_dtype(weight, compute_dtype)
    if not isinstance(x, torch.Tensor) or x.dim() < 1:
        raise TypeError(f"{name}: expected an input tensor [..., features], got {x!r:.100}")
    if torch.is_autocast_enabled(weight.device.type) and x.is_floating_point():
        x = x.to(dtype)
    if x.device != ring.device:
        raise TypeError(f"{name}: expected an input on {ring.device}, the device of the ring, got {x.device}")
    if x.dtype != dtype:
        raise TypeError(f"{name}: expected an input of dtype {dtype}, got {x.dtype}")
    grad = torch.is_grad_enabled()
    needs = (
        grad and x.requires_grad,
        grad and weight.requires_grad,
        grad and bias is not None and bias.requires_grad,
    )
    if bias is not None and bias.dtype != weight.dtype:
        raise TypeError(f"{name}: expected a bias of dtype {weight.dtype}, the weight's, got {bias.dtype}")
    facts = (
        f"dtype {dtype}",
        f"bias {bias is not None}",
        f"gradients of x, weight, bias {needs}",
        f"in_place {in_place}",
        f"reduce_dtype {reduce_dtype}",
    )
    shape = _full_shape(weight, name, ring, shard_dim, facts, bias)
    if x.shape[-1] != shape[1]:
        raise ValueError(f"{name}: expected an input of {shape[1]} features, got shape {tuple(x.shape)}")
    if in_place:
        _prepare_in_place(name, ring, (weight, bias), (shape, shape[:1]), (shard_dim, 0))
    call = _Call(ring, name, shape, shard_dim, in_place, dtype, _reduce_dtype(dtype, reduce_dtype))
    rows = x.reshape(-1, shape[1])
    y = _RotatedLinear.apply(rows, local_shard(weight), None if bias is None else local_shard(bias), call)
    return y.view(*x.shape[:-1], shape[0])


class _RotatedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, padding_idx: int, call: _Call):
        ctx.call = call
        ctx.padding_idx = padding_idx
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(ids)
        return call.run(_native.embedding_forward, ids, weight, call.shape, call.shard_dim, call.options())

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (ids,) = ctx.saved_tensors
        call = ctx.call
        dweight = call.run(
            _native.embedding_backward,
            dy.contiguous(),
            ids,
            call.shape,
            call.shard_dim,
            ctx.padding_idx,
            call.options(),
        )
        return None, dweight.to(ctx.weight_dtype), None, None


def rotated_embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    *,
    ring: Ring,
    shard_dim: int = 0,
    padding_idx: int | None = None,
    in_place: bool = False,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    name: str = "rotated_embedding",
) -> torch.Tensor:
    """Rows of a table that is spread over the ring.

        ids      [...]      int32 or int64, each in [0, V)
        weight   [V_r, E]   home shard; [V, E_r] where shard_dim = 1
        returns  [..., E]   in the compute dtype (the weight's own by default)

    The gradient is averaged over the ring; the row `padding_idx` gets none. Backward sends no weights.

    Raises IndexError for ids out of range (on CUDA: a device assertion); otherwise as `rotated_linear`. Collective.
    Source: RTP, arXiv 2311.01635.
    """
    ring.check_alive(name)
    _check_weight(name, weight, ring, shard_dim)
    if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64 ids, got {getattr(ids, 'dtype', type(ids).__name__)}")
    if ids.device != ring.device:
        raise TypeError(f"{name}: expected ids on {ring.device}, the device of the ring, got {ids.device}")
    dtype = compute_dtype or weight.dtype
    needs = torch.is_grad_enabled() and weight.requires_grad
    facts = (
        f"dtype {dtype}",
        f"gradient of weight {needs}",
        f"in_place {in_place}",
        f"reduce_dtype {reduce_dtype}",
    )
    shape = _full_shape(weight, name, ring, shard_dim, facts)
    padding = -1
    if padding_idx is not None:
        if not -shape[0] <= padding_idx < shape[0]:
            raise ValueError(f"{name}: expected padding_idx within {shape[0]} embeddings, got {padding_idx}")
        padding = padding_idx % shape[0]
    if in_place:
        _prepare_in_place(name, ring, (weight,), (shape,), (shard_dim,))
    call = _Call(ring, name, shape, shard_dim, in_place, dtype, _reduce_dtype(dtype, reduce_dtype))
    flat = ids.reshape(-1).to(torch.int64).contiguous()
    y = _RotatedEmbedding.apply(flat, local_shard(weight), padding, call)
    return y.view(*ids.shape, shape[1])
