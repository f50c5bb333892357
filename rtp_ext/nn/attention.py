"""RotatedMultiheadAttention."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from rtp_ext.functional import rotated_linears
from rtp_ext.nn._base import RotatedModule
from rtp_ext.nn.linear import RotatedLinear
from rtp_ext.parameters.gather import gather
from rtp_ext.parameters.initial import construct
from rtp_ext.parameters.sharded_module import ShardedModule
from rtp_ext.parameters.sharding import init_weights, shallow_copy, shard_bounds
from rtp_ext.ring import Ring

SHARD_DIMS = {
    "in_proj_weight": 0,
    "q_proj_weight": 0,
    "k_proj_weight": 0,
    "v_proj_weight": 0,
    "in_proj_bias": 0,
    "bias_k": 2,
    "bias_v": 2,
}


class RotatedOutProjection(RotatedLinear, NonDynamicallyQuantizableLinear):
    """The output projection of attention: a rotated linear layer that remains an instance of torch's class."""


_OUT_PROJECTIONS: dict[type, type[RotatedLinear]] = {
    NonDynamicallyQuantizableLinear: RotatedOutProjection,
    nn.Linear: RotatedLinear,
}


class RotatedMultiheadAttention(RotatedModule, nn.MultiheadAttention):
    """nn.MultiheadAttention whose projections rotate.

    The query, key and value projections travel together, in one rotation; the output projection is a rotated linear
    layer. The weight [3 E, E] is cut, not the heads, so that a cut may split a head. bias_k, bias_v, and in_proj_bias
    if kdim or vdim differ from embed_dim, are sharded as well, and gathered when they are used.

    Args: those of nn.MultiheadAttention, and
        ring: the ranks to shard the parameters over. Collective: use the same seed on every rank.

    Inputs, masks and results are those of nn.MultiheadAttention, of this rank's own batch; see `forward`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        ring: Ring,
    ) -> None:
        values = construct(
            self,
            super().__init__,
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device,
            dtype,
        )
        self._rotate(ring)
        values.fill(ring)

    @classmethod
    def from_module(cls, module: nn.MultiheadAttention, ring: Ring) -> RotatedMultiheadAttention:
        """Returns a rotated copy of `module` (meta device included), which does not change."""
        twin = cls._from(module, nn.MultiheadAttention)
        twin._modules = {**module._modules, "out_proj": shallow_copy(module.out_proj)}
        twin._rotate(ring)
        return twin

    @staticmethod
    def refusal(module: nn.MultiheadAttention) -> str | None:
        """Returns why a module cannot be rotated; None if it can."""
        unknown = module._parameters.keys() - SHARD_DIMS.keys()
        if unknown:  # such as weight_norm's
            return f"it has parameters that nn.MultiheadAttention has not: {', '.join(sorted(unknown))}"
        if type(module.out_proj) not in _OUT_PROJECTIONS:
            return f"its out_proj is a {type(module.out_proj).__name__}"
        return None

    def _rotate(self, ring: Ring, *, name: str | None = None, memo: dict | None = None, **options: Any) -> None:
        problem = self.refusal(self)
        if problem is not None:
            raise ValueError(f"{name or type(self).__name__}: cannot be rotated: {problem}")
        memo = {} if memo is None else memo
        if ring.mesh is None:  # an emulated ring has no other ranks to gather from
            for key in self._gathered():
                memo[id(self._parameters[key])] = self._parameters[key]
        self._adopt(ring, SHARD_DIMS, name=name, memo=memo, **options)
        out_proj: Any = self.out_proj
        out_proj.__class__ = _OUT_PROJECTIONS[type(out_proj)]
        out_proj._rotate(ring, name=f"{self.qualified_name}.out_proj", memo=memo, **options)

    def _reset_parameters(self) -> None:
        plain: Any = super(ShardedModule, type(self))._reset_parameters  # a subclass may have its own
        if not any(isinstance(parameter, DTensor) for parameter in self._parameters.values()):
            plain(self)  # under construction, or on the whole copies of init_weights
            return
        with torch.no_grad():  # also changes out_proj's bias, as in the plain module
            init_weights(self, lambda module: plain(self) if module is self else None)

    @property
    def reset_parameters(self) -> Any:
        # nn.MultiheadAttention has no such method, and code that calls it where present must skip this module too. A
        # subclass may have one.
        own = getattr(super(ShardedModule, type(self)), "reset_parameters", None)
        if own is not None:
            return lambda: init_weights(self, lambda module: own(module) if module is self else None)
        raise AttributeError(f"{type(self).__name__} has no reset_parameters, as nn.MultiheadAttention has none")

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention as nn.MultiheadAttention computes it outside its inference fast path, which is never taken.

        Symbols: N = batch, L and S = target and source length, E = embed_dim, H = num_heads, R = ring size.

            query             [L, N, E], [N, L, E] if batch_first, or [L, E]
            key, value        the same with S, and kdim and vdim features
            key_padding_mask  [N, S] or [S]; bool (True: ignored) or added to the scores
            attn_mask         [L, S] or [N * H, L, S]; bool (True: ignored) or added to the scores
            returns           attention of the query's shape, and weights [N, L, S] averaged over heads or
                              [N, H, L, S] (without N for unbatched inputs), or None without need_weights

        Without need_weights, F.scaled_dot_product_attention computes the core and no [L, S] weights are kept. is_causal
        is a hint that attn_mask is the causal mask. Cost: two rotations, of the in-projections and of out_proj.

        Raises ValueError where shapes disagree, RuntimeError for is_causal without attn_mask, TypeError for nested
        tensors or wrong dtypes. Collective.
        """
        self._check_inputs(query, key, value)
        batched = query.dim() == 3
        mask, is_causal = self._merge_masks(query, key, key_padding_mask, attn_mask, is_causal, need_weights)
        rows = self._appended_rows()
        q, k, v = (self._split_heads(x) for x in self._project(query, key, value))
        if self.add_zero_attn:
            zero = k.new_zeros(self.embed_dim)
            rows = [*rows, zero, zero]
        if rows:
            k, v = self._append(k, rows[::2]), self._append(v, rows[1::2])
            mask = None if mask is None else F.pad(mask, (0, len(rows) // 2))

        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            heads, weights = _attend_with_weights(q, k, v, mask, dropout)
            weights = weights.mean(dim=1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            heads = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        del q, k, v  # frees them unless autograd saved them
        return self.out_proj(self._join_heads(heads, batched)), weights

    def _check_inputs(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        name = self.qualified_name
        if query.is_nested or key.is_nested or value.is_nested:
            raise TypeError(
                f"{name}: expected plain tensors, got a nested one, which only the fast path of torch takes"
            )
        batch = slice(0) if query.dim() == 2 else slice(0, 1) if self.batch_first else slice(1, 2)
        features = (self.embed_dim, self.kdim, self.vdim)
        shapes = [tuple(x.shape) for x in (query, key, value)]
        if (
            len(shapes[0]) not in (2, 3)
            or any(len(shape) != len(shapes[0]) for shape in shapes)
            or tuple(shape[-1] for shape in shapes) != features
            or shapes[1][:-1] != shapes[2][:-1]
            or shapes[0][batch] != shapes[1][batch]
        ):
            order = "[N, L, {}], [N, S, {}], [N, S, {}]" if self.batch_first else "[L, N, {}], [S, N, {}], [S, N, {}]"
            raise ValueError(
                f"{name}: expected query, key, value of shapes {order.format(*features)} (or without N), got {shapes}"
            )

    def _merge_masks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        key_padding_mask: torch.Tensor | None,
        attn_mask: torch.Tensor | None,
        is_causal: bool,
        need_weights: bool,
    ) -> tuple[torch.Tensor | None, bool]:
        """Returns one additive mask that broadcasts to [N, H, L, S], or None; and whether to use causal attention."""
        key_padding_mask = F._canonical_mask(
            mask=key_padding_mask,
            mask_name="key_padding_mask",
            other_type=F._none_or_dtype(attn_mask),
            other_name="attn_mask",
            target_type=query.dtype,
        )
        attn_mask = F._canonical_mask(
            mask=attn_mask,
            mask_name="attn_mask",
            other_type=None,
            other_name="",
            target_type=query.dtype,
            check_other=False,
        )
        if is_causal and attn_mask is None:
            raise RuntimeError(
                f"{self.qualified_name}: expected an attn_mask with is_causal, which is a hint about it, got None. "
                "nn.Transformer.generate_square_subsequent_mask makes one"
            )
        if key_padding_mask is not None:  # the merged mask is no longer causal
            is_causal = False
        elif is_causal and not need_weights:  # the hint replaces the mask
            return None, True

        batch, target, source = 1, query.shape[0], key.shape[0]
        if query.dim() == 3:
            sequence = 1 if self.batch_first else 0
            batch, target, source = query.shape[1 - sequence], query.shape[sequence], key.shape[sequence]
        mask = None
        if attn_mask is not None:
            self._expect_mask("attn_mask", attn_mask, (target, source), (batch * self.num_heads, target, source))
            shared = attn_mask.dim() == 2
            mask = attn_mask[None, None] if shared else attn_mask.unflatten(0, (batch, self.num_heads))
        if key_padding_mask is not None:
            self._expect_mask("key_padding_mask", key_padding_mask, (batch, source)[3 - query.dim() :])
            padding = key_padding_mask.view(batch, 1, 1, source)
            mask = padding if mask is None else mask + padding
        return mask, is_causal

    def _expect_mask(self, what: str, mask: torch.Tensor, *shapes: tuple[int, ...]) -> None:
        if tuple(mask.shape) not in shapes:
            expected = " or ".join(map(str, shapes))
            raise ValueError(f"{self.qualified_name}: expected {what} of shape {expected}, got {tuple(mask.shape)}")

    def _gathered(self) -> list[str]:
        """Returns the names of parameters that are gathered, not rotated: appended rows, and in_proj_bias if the
        projections have separate weights."""
        names = ["bias_k", "bias_v"] if self._qkv_same_embed_dim else ["bias_k", "bias_v", "in_proj_bias"]
        return [name for name in names if self._parameters.get(name) is not None]

    def _appended_rows(self) -> list[torch.Tensor]:
        """Returns the whole bias_k and bias_v, or an empty list."""
        rows: Any = [self.bias_k, self.bias_v]
        if self.bias_k is None or self.ring.mesh is None:
            return [row for row in rows if row is not None]
        return gather(rows, self.ring, self.mp_policy, [("bias_k", self), ("bias_v", self)])

    def _bias_parts(self) -> list[torch.Tensor | None]:
        """Returns in_proj_bias [3 E] as local shards of three biases [E], each with the cut of its weight."""
        whole: Any = self.in_proj_bias
        if whole is None:
            return [None, None, None]
        if self.ring.mesh is not None:
            policy = MixedPrecisionPolicy(reduce_dtype=self.mp_policy.reduce_dtype)
            (whole,) = gather([whole], self.ring, policy, [("in_proj_bias", self)])
            # The rotation averages already, and each rank contributes one shard: this cancels gather's second average.
            if whole.requires_grad:
                whole.register_hook(lambda gradient: gradient * self.ring.size)
        start, size = shard_bounds(self.embed_dim, self.ring)
        parts = [part.narrow(0, start, size).clone() for part in whole.chunk(3)]
        if self.ring.mesh is None:
            return [*parts]
        # On the mesh of the ring alone: replicas reduce the gradient of the whole bias.
        layout: dict[str, Any] = {"run_check": False, "shape": torch.Size([self.embed_dim]), "stride": (1,)}
        return [DTensor.from_local(part, self.ring.mesh, [Shard(0)], **layout) for part in parts]

    def _project(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Computes q, k, v, each [..., E], in one rotation."""
        different: list[torch.Tensor] = []
        places = []  # equal inputs share one input gradient
        for x in (query, key, value):
            places.append(next((at for at, known in enumerate(different) if known is x), len(different)))
            if places[-1] == len(different):
                different.append(x)
        inputs = [self._cast(x) for x in different]
        weights: Any = [self.in_proj_weight]
        biases: Any = [self.in_proj_bias]
        features = self.embed_dim
        projections = tuple((at, 0, part * features, (part + 1) * features) for part, at in enumerate(places))
        if not self._qkv_same_embed_dim:
            weights, biases = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight], self._bias_parts()
            projections = tuple((at, layer, 0, features) for layer, at in enumerate(places))
        return rotated_linears(inputs, weights, biases, projections=projections, **self._rotation())

    def _split_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [N, L, E], [L, N, E] or [L, E] as a view [N, H, L, E / H]."""
        heads = x.unflatten(-1, (self.num_heads, self.head_dim))
        if x.dim() == 2:
            return heads.transpose(0, 1).unsqueeze(0)
        return heads.transpose(1, 2) if self.batch_first else heads.permute(1, 2, 0, 3)

    def _join_heads(self, heads: torch.Tensor, batched: bool) -> torch.Tensor:
        """Inverts _split_heads."""
        if not batched:
            return heads.squeeze(0).transpose(0, 1).flatten(-2)
        return (heads.transpose(1, 2) if self.batch_first else heads.permute(2, 0, 1, 3)).flatten(-2)

    def _append(self, x: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
        """Appends P rows [..., E], shared by the batch, to x [N, H, S, E / H]; returns [N, H, S + P, E / H]."""
        shape = (x.shape[0], self.num_heads, 1, self.head_dim)
        return torch.cat([x, *(row.to(x.dtype).view(1, *shape[1:]).expand(shape) for row in rows)], dim=2)

    def extra_repr(self) -> str:
        settings = f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, ring={self.ring.size}"
        return ", ".join(filter(None, (super().extra_repr(), settings)))


def _attend_with_weights(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, dropout: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns attention [N, H, L, D] and its weights [N, H, L, S] for q [N, H, L, D] and k, v [N, H, S, D]."""
    batch, heads, _, features = q.shape
    q, k, v = ((q * math.sqrt(1.0 / features)).flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
    if mask is None:
        scores = torch.bmm(q, k.transpose(-2, -1))
    else:
        shared = mask.shape[:2] == (1, 1)
        mask = mask[0] if shared else mask.expand(batch, heads, -1, -1).flatten(0, 1)
        scores = torch.baddbmm(mask, q, k.transpose(-2, -1))
    weights = F.softmax(scores, dim=-1)
    if dropout > 0.0:
        weights = F.dropout(weights, dropout)
    return torch.bmm(weights, v).unflatten(0, (batch, heads)), weights.unflatten(0, (batch, heads))
