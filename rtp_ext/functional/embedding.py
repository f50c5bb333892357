"""Embedding tables over the ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rtp_ext import _native
from rtp_ext.functional import _rows
from rtp_ext.functional._call import Call, ShardedParameter
from rtp_ext.functional._operation import Operation, Options, rotate
from rtp_ext.options import wire_itemsize
from rtp_ext.ring import Prepared, Ring
from rtp_ext.ring.routes.route_planner import TableSize


class Embedding(Operation):
    """A table. Settings: its shape, the dimension that is cut, and the row without a gradient (-1: none)."""

    key = label = "embedding"
    autocasts = False

    def __init__(self, options: Options, weight: torch.Tensor, shard_dim: int, padding_idx: int | None) -> None:
        super().__init__(options, weight)
        self.shard_dim, self.padding_idx = shard_dim, padding_idx

    def operands(self, call: Call, inputs: Sequence[Any]) -> list[torch.Tensor]:
        (ids,), device = inputs, call.ring.device
        if not isinstance(ids, torch.Tensor) or isinstance(ids, DTensor) or ids.dtype not in _IDS:
            kind = type(ids).__name__
            got = f"{getattr(ids, 'dtype', kind)} in a {kind}"
            raise TypeError(f"{call.name}: expected int32 or int64 ids, got {got}")
        if ids.device != device:
            raise TypeError(f"{call.name}: expected ids on {device}, the device of the ring, got {ids.device}")
        return [ids.reshape(-1).to(torch.int64).contiguous()]

    def prepare(self, call: Call, inputs: Sequence[torch.Tensor]) -> tuple[tuple[int, int], int, int]:
        param, padding = ShardedParameter("weight", self.given[0], self.shard_dim, 2), self.padding_idx
        planned: dict[str, Any] = {}
        prepared = self.options.prepared
        if call.ring.gate.may_send_rows(prepared is not None and prepared.covered):
            planned = {"tokens": inputs[0].numel(), "size": lambda shapes: self._size(call, shapes[0])}
        shape = self.agree(call, [param], inputs, (), lambda shapes: shapes[0], **planned)
        if padding is None:
            return shape, self.shard_dim, -1
        if not -shape[0] <= padding < shape[0]:
            raise ValueError(f"{call.name}: expected padding_idx within {shape[0]} embeddings, got {padding}")
        return shape, self.shard_dim, padding % shape[0]

    def _size(self, call: Call, shape: tuple[int, ...]) -> TableSize:
        # Not whether this call wants a gradient: one rank alone may be under no_grad.
        trained, travel = self.given[0].requires_grad, call.ring.options.travel
        return TableSize(
            *(shape, self.shard_dim, wire_itemsize(travel, call.compute_dtype), call.compute_dtype.itemsize),
            gradient_bytes=trained * call.reduce_dtype.itemsize,
            row_gradient_bytes=trained * min(call.compute_dtype.itemsize, call.reduce_dtype.itemsize),
        )

    def shaped(self, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [results[0].view(*inputs[0].shape, results[0].shape[1])]

    def in_graph(self, dtype: torch.dtype, inputs: Sequence[Any]) -> tuple[list[torch.Tensor], list[int]] | None:
        (ids,), features = inputs, self.given[0].shape[1]
        return None if ids.dtype not in _IDS else ([ids.reshape(-1).to(torch.int64)], [features, features])

    @staticmethod
    def reads(call: Call, settings: Any) -> Sequence[bool]:
        return [False]

    @staticmethod
    def forward(call, settings, inputs, parameters):
        if call.by_rows:
            return [_rows.look_up(call, settings, inputs[0], parameters[0])]
        shape, shard_dim, _ = settings
        return [call.run(_native.embedding_forward, inputs[0], parameters[0], shape, shard_dim, call.options)]

    @staticmethod
    def backward(call, settings, gradients, inputs, parameters, kept, needs):
        dy = gradients[0].contiguous()
        if call.by_rows:
            return None, _rows.gradient(call, settings, dy, inputs[0], parameters[0])
        return None, call.run(_native.embedding_backward, dy, inputs[0], *settings, call.options)


_IDS = (torch.int32, torch.int64)


def rotated_embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    *,
    ring: Ring,
    shard_dim: int = 0,
    padding_idx: int | None = None,
    prepared: Prepared | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    name: str = "rotated_embedding",
) -> torch.Tensor:
    """Looks up rows of a table that is sharded over the ring.

        ids      [...]      int32 or int64, each in [0, V)
        weight   [V_r, E]   local shard; [V, E_r] where shard_dim = 1
        returns  [..., E]   in the compute dtype (the weight's own by default)

    The gradient is averaged over the ring; the row `padding_idx` gets none. Backward sends no weights. On a ring of
    `embedding="rows"` the ids travel to the owners of rows, and rows and their gradients back and forth.

    Raises IndexError for ids out of range (on CUDA: a device assertion); otherwise as `rotated_linear`. Collective.
    Source: RTP, arXiv 2311.01635.
    """
    if shard_dim not in (0, 1):
        raise ValueError(f"{name}: expected shard_dim 0 or 1, got {shard_dim}")
    options = Options(ring, prepared, compute_dtype, reduce_dtype, name)
    return rotate(Embedding(options, weight, shard_dim, padding_idx), [ids])[0]
