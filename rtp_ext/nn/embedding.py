"""RotatedEmbedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rtp_ext.functional._operation import rotate
from rtp_ext.functional.embedding import Embedding
from rtp_ext.nn._base import RotatedModule
from rtp_ext.parameters.initial import construct
from rtp_ext.ring import Ring


class RotatedEmbedding(RotatedModule, nn.Embedding):
    """nn.Embedding whose table rotates.

    Args: those of nn.Embedding (max_norm, scale_grad_by_freq and sparse must be off), and
        ring: the ranks to shard the table over. Collective: use the same seed on every rank.
        shard_dim: cut the table [num_embeddings, embedding_dim] along the vocabulary (0) or the features (1).

    Input [...] of ids, this rank's own batch; output [..., embedding_dim]. See functional.rotated_embedding.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        _freeze: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        ring: Ring,
        shard_dim: int = 0,
    ) -> None:
        values = construct(
            self,
            super().__init__,
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            _weight,
            _freeze,
            device,
            dtype,
        )
        self._rotate(ring, shard_dim=shard_dim)
        values.fill(ring)

    @classmethod
    def from_module(cls, module: nn.Embedding, ring: Ring, *, shard_dim: int = 0) -> RotatedEmbedding:
        """Returns a rotated copy of `module` (meta device included), which does not change."""
        twin = cls._from(module, nn.Embedding)
        twin._rotate(ring, shard_dim=shard_dim)
        return twin

    @staticmethod
    def refusal(module: nn.Embedding | nn.EmbeddingBag) -> str | None:
        """Why an embedding cannot be rotated; None if it can."""
        if module.max_norm is not None:
            return f"max_norm={module.max_norm} renormalises in forward the rows that any rank looks up"
        if module.sparse:
            return "sparse gradients do not travel"
        if module.scale_grad_by_freq:
            return "scale_grad_by_freq needs the counts of the whole batch"
        return None

    def _rotate(self, ring: Ring, *, shard_dim: int = 0, **options: Any) -> None:
        if shard_dim not in (0, 1):
            raise ValueError(f"RotatedEmbedding: expected shard_dim 0 or 1, got {shard_dim}")
        problem = self.refusal(self)
        if problem is not None:
            raise ValueError(f"RotatedEmbedding: cannot be rotated: {problem}")
        self._adopt(ring, {"weight": shard_dim}, **options)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return rotate(self._operation(), [input], self)[0]

    def _operation(self, key: str = "") -> Embedding:
        table: Any = self._parameters["weight"]
        return Embedding(self._options(), table, self.shard_dims["weight"], self.padding_idx)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ring={self.ring.size}, shard_dim={self.shard_dims['weight']}"


class RotatedRows(RotatedEmbedding):
    """The base class that a subclass of nn.Embedding gets in a converted model, if its forward changes the rows that
    nn.Embedding returns, as transformers' scaled embeddings do."""

    _rtp_within: bool  # whether its forward runs

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The parameter; within the forward, which reads its dtype, shape or device, a stand-in without values that has
        the compute dtype."""
        table: Any = self._parameters["weight"]
        dtype = self.mp_policy.param_dtype if self._rtp_within else None
        if dtype is None or dtype == table.dtype:
            return table
        return torch.empty(1, dtype=dtype, device=table.device).expand(table.shape)
