"""Embedding tables over the ring."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from rtp_ext import _native
from rtp_ext.functional._call import Call, ShardedParameter, prepare, saved
from rtp_ext.ring import Prepared, Ring
from rtp_ext.ring.autograd import first_order_only, rounded


class Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Call, shape: tuple[int, int], shard_dim: int, padding_idx: int, ids, weight):
        ctx.call, ctx.shape, ctx.shard_dim = call, shape, shard_dim
        ctx.padding_idx = padding_idx
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(ids)

        def run() -> list[torch.Tensor]:
            return [call.run(_native.embedding_forward, ids, weight, shape, shard_dim, call.options)]

        return call.once("embedding", [ids], [weight], run)[0]

    @staticmethod
    @first_order_only
    def backward(ctx, dy):
        (ids,) = saved(ctx)
        dweight = ctx.call.run(
            _native.embedding_backward,
            dy.contiguous(),
            ids,
            ctx.shape,
            ctx.shard_dim,
            ctx.padding_idx,
            ctx.call.options,
        )
        return None, None, None, None, None, rounded(dweight, ctx.weight_dtype)


def prepare_embedding(
    call: Call, prepared: Prepared | None, weight: torch.Tensor, shard_dim: int, padding_idx: int | None
) -> tuple[ShardedParameter, tuple[tuple[int, int], int]]:
    """Returns the local shard, the shape of the whole table, and the row without a gradient (-1: none)."""
    param = ShardedParameter("weight", weight, shard_dim, 2)
    shape = prepare(call, prepared, "embedding", [param], [], (), lambda shapes: shapes[0])
    if padding_idx is None:
        return param, (shape, -1)
    if not -shape[0] <= padding_idx < shape[0]:
        raise ValueError(f"{call.name}: expected padding_idx within {shape[0]} embeddings, got {padding_idx}")
    return param, (shape, padding_idx % shape[0])


def rotated_embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    *,
    ring: Ring,
    shard_dim: int = 0,
    padding_idx: int | None = None,
    in_place: bool = False,
    prepared: Prepared | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    name: str = "rotated_embedding",
) -> torch.Tensor:
    """Looks up rows of a table that is sharded over the ring.

        ids      [...]      int32 or int64, each in [0, V)
        weight   [V_r, E]   local shard; [V, E_r] where shard_dim = 1
        returns  [..., E]   in the compute dtype (the weight's own by default)

    The gradient is averaged over the ring; the row `padding_idx` gets none. Backward sends no weights.

    Raises IndexError for ids out of range (on CUDA: a device assertion); otherwise as `rotated_linear`. Collective.
    Source: RTP, arXiv 2311.01635.
    """
    call = Call.of(
        weight,
        ring=ring,
        name=name,
        in_place=in_place,
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        autocasts=False,
    )
    if shard_dim not in (0, 1):
        raise ValueError(f"{name}: expected shard_dim 0 or 1, got {shard_dim}")
    if not isinstance(ids, torch.Tensor) or isinstance(ids, DTensor) or ids.dtype not in (torch.int32, torch.int64):
        kind = type(ids).__name__
        raise TypeError(f"{name}: expected int32 or int64 ids, got {getattr(ids, 'dtype', kind)} in a {kind}")
    if ids.device != ring.device:
        raise TypeError(f"{name}: expected ids on {ring.device}, the device of the ring, got {ids.device}")
    _, (shape, padding) = prepare_embedding(call, prepared, weight, shard_dim, padding_idx)
    flat = ids.reshape(-1).to(torch.int64).contiguous()
    y = Embedding.apply(call, shape, shard_dim, padding, flat, *call.local_shards())
    return y.view(*ids.shape, shape[1])
