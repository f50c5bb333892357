"""Mixture-of-experts layers whose experts rotate."""

from __future__ import annotations

from typing import Any

import torch

from rtp_ext import _native
from rtp_ext._autograd import first_order_only
from rtp_ext.functional._call import (
    INTEGERS,
    Call,
    Home,
    agree,
    expect_shape,
    in_dtypes_of,
    prepare_in_place,
    saved,
    wants,
    watched_where_read,
)
from rtp_ext.functional.mlp import ACTIVATIONS
from rtp_ext.ring import Ring


class _RotatedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Call, shape: Any, keep: bool, index, x, weights, up, down):
        ctx.call, ctx.shape = call, shape
        ctx.needs = ctx.needs_input_grad[4:]
        routed = call.run(_native.experts_forward, x, weights, index, up, down, shape, keep, call.options())
        ctx.starts = routed.starts
        needs_x, needs_weights, needs_up, _ = ctx.needs
        read = [needs_x or not keep, needs_x or needs_weights or needs_up]
        ctx.save_for_backward(x, weights, *watched_where_read((up, down), read), routed.order, routed.kept)
        return routed.y

    @staticmethod
    @first_order_only
    def backward(ctx, dy):
        x, weights, up, down, order, kept = saved(ctx)
        dx, dweights, dup, ddown = ctx.call.run(
            _native.experts_backward,
            dy.contiguous(),
            x,
            weights,
            _native.ExpertsResult(kept, order, ctx.starts),
            up,
            down,
            ctx.shape,
            ctx.needs,
            ctx.call.options(),
        )
        return None, None, None, None, dx, dweights, *in_dtypes_of((up, down), (dup, ddown))


def rotated_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    activation: str = "swiglu",
    recompute: bool = False,
    ring: Ring,
    in_place: bool = False,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    name: str = "rotated_experts",
) -> torch.Tensor:
    """Routed experts: `y[t] = sum_k weights[t, k] * MLP_e(x[t])`, e = index[t, k]. Experts travel, tokens stay.

    No all-to-all, no capacity, no dropped token: the time of a step follows the number of local tokens, whatever the
    imbalance between experts.

        x         [..., D]       this rank's own tokens, in the compute dtype
        index     [..., K]       integers in [0, E]; E is nobody's expert
        weights   [..., K]       of the router, any floating dtype
        up        [E_r, H, D]    home shard, cut along the experts; [E_r, 2 H, D] with the gate's rows first where gated
        down      [E_r, D, H]    home shard
        returns   [..., D]       in the compute dtype

    Args:
        activation, recompute: as in `rotated_mlp`.

    The gradient with respect to `weights` is exact. On CUDA the host reads the numbers of tokens per expert once in a
    forward. Raises IndexError for an index above E; everything else is as in `rotated_linear`.
    Source: RTP, arXiv 2311.01635 (expert partition).
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name}: expected an activation of {', '.join(ACTIVATIONS)}, got {activation!r}")
    function, gated = ACTIVATIONS[activation]
    call = Call.of(up, ring=ring, name=name, in_place=in_place, compute_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    x = call.operand(x)
    if not isinstance(index, torch.Tensor) or index.dtype not in INTEGERS:
        raise TypeError(f"{name}: expected an index of integers, got {getattr(index, 'dtype', type(index).__name__)}")
    if not isinstance(weights, torch.Tensor) or not weights.is_floating_point():
        kind = getattr(weights, "dtype", type(weights).__name__)
        raise TypeError(f"{name}: expected weights of floating-point numbers, got {kind}")
    if index.dim() != x.dim() or index.shape[:-1] != x.shape[:-1] or weights.shape != index.shape:
        raise ValueError(
            f"{name}: expected index and weights of shape ({', '.join(map(str, x.shape[:-1]))}, K), got "
            f"{tuple(index.shape)} and {tuple(weights.shape)}"
        )
    homes = [Home("up weight", up, 0), Home("down weight", down, 0)]
    for home in homes:
        home.check(call, 3)
    needs = wants(x, weights, up, down)
    shapes = agree(call, homes, [f"gradients of x, weights, up, down {needs}", activation, f"recompute {recompute}"])
    (experts, up_rows, features), _ = shapes
    hidden = up_rows // 2 if gated else up_rows
    if gated and up_rows % 2:
        raise ValueError(f"{name}: expected an even number of rows of gate and up, got {up_rows}")
    expect_shape(call, homes[1], shapes[1], (experts, features, hidden))
    if x.shape[-1] != features:
        raise ValueError(f"{name}: expected an input of {features} features, got shape {tuple(x.shape)}")
    prepare_in_place(call, homes, shapes)
    shape = _native.ExpertsShape(
        experts=experts, features=features, hidden_features=hidden, gated=gated, activation=function
    )
    choices = index.shape[-1]
    flat = index.reshape(-1, choices).to(torch.int64).contiguous()
    if flat.device.type == "cpu" and flat.numel() and (int(flat.min()) < 0 or int(flat.max()) > experts):
        raise IndexError(f"{name}: expected an index in [0, {experts}], got {int(flat.min())} to {int(flat.max())}")
    y = _RotatedExperts.apply(
        call,
        shape,
        not recompute and any(needs),
        flat,
        x.reshape(-1, features),
        weights.reshape(-1, choices),
        homes[0].local,
        homes[1].local,
    )
    return y.view(x.shape)
