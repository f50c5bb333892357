"""Embeddings whose table stays whole on every rank, because a row depends on the ids of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from rtp_ext.functional._call import Call, saved
from rtp_ext.parameters.sharded_module import ShardedModule
from rtp_ext.parameters.sharding import held, init_weights, local_shard, replicate_parameter
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import first_order_only, unseen


class WholeEmbedding(ShardedModule):
    """Mixin of embeddings with max_norm, scale_grad_by_freq or sparse; the embedding's own class comes second.

    It computes the result of the plain module in one process on the batches of all ranks: rows that any rank looks up
    are renormalized, and gradients are scaled by the counts of all ranks. All ranks have to call it equally often. The
    table is a DTensor Replicate(), so that optimizers and clip_grad_norm_ get one kind of parameter; with sparse
    gradients, which DTensors do not have, it stays a plain parameter.

    Input [...] of ids, this rank's own batch; output [..., embedding_dim], in the compute dtype. Collective.
    """

    NAME_PREFIX = "Whole"

    ring: Ring
    qualified_name: str
    mp_policy: MixedPrecisionPolicy

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Returns whether a module computes as nn.Embedding does, from a weight alone."""
        return type(module).forward is nn.Embedding.forward and module._parameters.keys() == {"weight"}

    def keep_whole(self: Any, ring: Ring, name: str, mp_policy: MixedPrecisionPolicy, memo: dict) -> None:
        """Converts the module. `memo` maps parameters that were converted before (tied weights)."""
        self.ring, self.qualified_name, self.mp_policy = ring, name, mp_policy
        weight = self._parameters["weight"]
        if not self.sparse:
            if id(weight) not in memo:
                memo[id(weight)] = replicate_parameter(weight, ring)
            self._parameters["weight"] = memo[id(weight)]

    def reset_parameters(self) -> None:
        """Initializes the table as the plain module does: the same values under the same seed. Collective."""
        plain = super().reset_parameters  # type: ignore[misc]
        with torch.no_grad():
            init_weights(self, lambda _: plain())  # type: ignore[arg-type]

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        call = Call.of(
            self.weight,
            ring=self.ring,
            name=self.qualified_name,
            compute_dtype=self.mp_policy.param_dtype,
            reduce_dtype=self.mp_policy.reduce_dtype,
            autocasts=False,
        )
        if self.max_norm is not None:
            self._renormalise(input)
        return _Lookup.apply(
            call, self.padding_idx, self.scale_grad_by_freq, self.sparse, input, local_shard(self.weight)
        )

    @unseen
    def _renormalise(self: Any, ids: torch.Tensor) -> None:
        table = held(self.weight)
        looked_up = torch.zeros(table.shape[0], dtype=torch.int32, device=table.device)
        looked_up[ids.reshape(-1)] = 1
        rows = self.ring.all_reduce(looked_up, f"the rows of {self.qualified_name}").nonzero().view(-1)
        with torch.no_grad():
            torch.embedding_renorm_(table, rows, self.max_norm, self.norm_type)
        if isinstance(self.weight, DTensor):  # its version does not count writes to the local tensor
            torch.autograd.graph.increment_version(self.weight)


class _Lookup(torch.autograd.Function):
    """Lookup of rows in a whole table [V, E]; the gradient is the average over the ranks, with the counts of all."""

    @staticmethod
    def forward(ctx, call: Call, padding_idx: int | None, scaled: bool, sparse: bool, ids, table):
        ctx.call, ctx.scaled, ctx.sparse = call, scaled, sparse
        ctx.padding_idx = -1 if padding_idx is None else padding_idx
        ctx.rows, ctx.dtype = table.shape[0], table.dtype
        ctx.save_for_backward(ids)
        return F.embedding(ids, table, padding_idx).to(call.compute_dtype)

    @staticmethod
    @first_order_only
    def backward(ctx, dy):
        (ids,) = saved(ctx)
        gradient = _sparse_gradient(ctx, ids, dy) if ctx.sparse else _dense_gradient(ctx, ids, dy)
        return None, None, None, None, None, gradient.to(ctx.dtype)


def _dense_gradient(ctx: Any, ids: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Returns the dense gradient [V, E]."""
    ring = ctx.call.ring
    summing = torch.promote_types(dy.dtype, torch.float32)  # many rows may add up to one
    own = torch.ops.aten.embedding_dense_backward(dy.to(summing), ids, ctx.rows, ctx.padding_idx, False)
    name = f"the gradient of {ctx.call.name}.weight"
    total = ring.all_reduce(own.to(ctx.call.reduce_dtype), name).to(summing).div_(ring.size)
    if ctx.scaled:
        counts = torch.zeros(ctx.rows, dtype=torch.int64, device=ids.device)
        flat = ids.reshape(-1).long()
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        total.div_(ring.all_reduce(counts, f"the counts of {ctx.call.name}").clamp_(min=1).unsqueeze(1))
    return total


def _sparse_gradient(ctx: Any, ids: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Returns the sparse gradient [V, E], with an entry for each id of all ranks, as torch has one for each id of a
    batch."""
    ring = ctx.call.ring
    if ctx.scaled:  # torch raises the same error
        raise RuntimeError(f"{ctx.call.name}: scale_grad_by_freq is not supported with sparse gradients")
    name = f"the sparse gradient of {ctx.call.name}.weight"
    counts = ring.all_gather(torch.tensor([ids.numel()], device=ids.device), name).view(-1).tolist()
    width = dy.shape[-1]
    own_ids = ids.new_zeros(max(counts), dtype=torch.int64)
    own_ids[: ids.numel()] = ids.reshape(-1)
    own_rows = dy.new_zeros(max(counts), width, dtype=ctx.call.reduce_dtype)
    own_rows[: ids.numel()] = dy.reshape(-1, width)
    every_id = ring.all_gather(own_ids, name)
    every_row = ring.all_gather(own_rows.view(-1), name).view(ring.size, -1, width)
    places = torch.cat([row[:count] for row, count in zip(every_id, counts, strict=True)])
    rows = torch.cat([row[:count] for row, count in zip(every_row, counts, strict=True)])
    kept = places != ctx.padding_idx
    return torch.sparse_coo_tensor(
        places[kept].unsqueeze(0), rows[kept].div_(ring.size), (ctx.rows, width), check_invariants=False
    )
