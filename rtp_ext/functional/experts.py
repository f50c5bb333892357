"""Mixture-of-experts layers whose experts rotate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from rtp_ext import _native
from rtp_ext.functional._call import (
    INTEGERS,
    Call,
    ShardedParameter,
    expect_shape,
    needs_gradients,
    prepare,
    saved,
    watched_where_read,
)
from rtp_ext.functional._passes import in_dtypes_of
from rtp_ext.functional.mlp import ACTIVATIONS
from rtp_ext.parameters.frozen import expect_takes_blocks
from rtp_ext.parameters.sharding import frozen_of
from rtp_ext.ring import Prepared, Ring
from rtp_ext.ring.autograd import first_order_only, wanted
from rtp_ext.words import ExpertActivation

CLAMPED_SWIGLU: Final = "clamped_swiglu"  # the gate of GPT-OSS
# ExpertActivation -> (activation of the engine, gated)
_ACTIVATIONS = {**ACTIVATIONS, CLAMPED_SWIGLU: ("silu", True)}


class _RotatedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Call, shape: Any, keep: bool, read: list[bool], index, x, weights, *parameters):
        ctx.call, ctx.shape = call, shape

        def run() -> list[torch.Tensor]:
            routed = call.run(_native.experts_forward, x, weights, index, parameters, shape, keep, call.options)
            ctx.starts = routed.starts  # backward gets this context, even if a checkpoint recomputes the forward
            return [routed.y, routed.order, routed.ends, *([] if routed.kept is None else [routed.kept])]

        y, order, ends, *kept = call.once("experts", [x, weights, index], parameters, run)
        read_then = watched_where_read(parameters, read)
        ctx.save_for_backward(x, weights, *read_then, order, ends, kept[0] if kept else None)
        return y

    @staticmethod
    @first_order_only
    def backward(ctx, dy):
        x, weights, *parameters, order, ends, kept = saved(ctx)
        dx, dweights, *gradients = ctx.call.run(
            _native.experts_backward,
            dy.contiguous(),
            x,
            weights,
            _native.ExpertsResult(kept, order, ends, ctx.starts),
            parameters,
            ctx.shape,
            wanted(ctx)[5:],
            ctx.call.options,
        )
        return None, None, None, None, None, dx, dweights, *in_dtypes_of(parameters, gradients)


def _read(params: Sequence[ShardedParameter], needs_x: bool, needs_weights: bool, keep: bool) -> list[bool]:
    """Returns for each parameter whether backward reads it: up for dx, and with its bias to recompute; down for the
    gradients of hidden values and, with its bias, of the router's weights."""
    needs_up = any(needs_gradients(*(param.tensor for param in params if param.what.startswith("up"))))
    read = {
        "up weight": needs_x or not keep,
        "up bias": not keep,
        "down weight": needs_x or needs_weights or needs_up,
        "down bias": needs_weights,
    }
    return [read[param.what] for param in params]


def rotated_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: ExpertActivation = "swiglu",
    transposed: bool = False,
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    recompute: bool = False,
    ring: Ring,
    in_place: bool = False,
    prepared: Prepared | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    name: str = "rotated_experts",
) -> torch.Tensor:
    """Computes `y[t] = sum_k weights[t, k] * MLP_e(x[t])`, e = index[t, k]. Experts travel, tokens stay.

        MLP_e(x) = act(x @ up_e.T + up_bias_e) @ down_e.T + down_bias_e, or with a gate as in `rotated_mlp`

    There is no all-to-all, no capacity and no dropped token: the time of a step depends on the number of local tokens,
    not on the imbalance between experts.

        x         [..., D]       this rank's own tokens, in the compute dtype
        index     [..., K]       integers in [0, E]; E selects no expert
        weights   [..., K]       of the router, any floating dtype
        up        [E_r, H, D]    cut along the experts; [E_r, 2 H, D] with the gate's rows first where gated
        down      [E_r, D, H]    local shard
        up_bias   [E_r, H]       local shard; [E_r, 2 H] where gated
        down_bias [E_r, D]       local shard
        returns   [..., D]       in the compute dtype

    Args:
        activation: as in `rotated_mlp`; or clamped_swiglu, GPT-OSS's gate: `(clamp(u, -limit, limit) + 1) * g *
            sigmoid(alpha * g)` with g = min(gate, limit).
        transposed: up is [E_r, D, H] (or [E_r, D, 2 H]) and down [E_r, H, D].
        interleaved: the rows of gate and up alternate in the 2 H of up and its bias.
        alpha, limit: parameters of clamped_swiglu.
        recompute: as in `rotated_mlp`.

    up and down may be the parameters of frozen weights in blocks, as in `rotated_linears`. Biases travel in the same
    hops. The gradient of `weights` is exact. On CUDA a forward synchronises once, because the host reads the number of
    tokens of each expert. Raises IndexError for an index above E; everything else is as in `rotated_linear`.
    Source: RTP, arXiv 2311.01635 (expert partition).
    """
    if activation not in _ACTIVATIONS:
        raise ValueError(f"{name}: expected an activation of {', '.join(_ACTIVATIONS)}, got {activation!r}")
    function, gated = _ACTIVATIONS[activation]
    if interleaved and not gated:
        raise ValueError(f"{name}: interleaved expected an activation with a gate, got {activation!r}")
    clamped = (float(alpha), float(limit)) if activation == CLAMPED_SWIGLU else None
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
    candidates = [
        ("up weight", up, 3),
        ("up bias", up_bias, 2),
        ("down weight", down, 3),
        ("down bias", down_bias, 2),
    ]
    params = [ShardedParameter(what, tensor, 0, dims) for what, tensor, dims in candidates if tensor is not None]

    frozen = tuple([frozen_of(param.tensor) for param in params])
    expect_takes_blocks(name, frozen, False, in_place)
    formats = {param.what: each.format for param, each in zip(params, frozen, strict=True) if each is not None}

    def derive(shapes: list[tuple[int, ...]]) -> Any:
        shapes = [shape if each is None else each.shape for shape, each in zip(shapes, frozen, strict=True)]
        experts, *matrix = shapes[0]
        features, up_rows = matrix if transposed else reversed(matrix)
        hidden = up_rows // 2 if gated else up_rows
        if gated and up_rows % 2:
            raise ValueError(f"{name}: expected an even number of rows of gate and up, got {up_rows}")
        expected = {
            "up weight": shapes[0],
            "up bias": (experts, up_rows),
            "down weight": (experts, hidden, features) if transposed else (experts, features, hidden),
            "down bias": (experts, features),
        }
        for param, whole in zip(params, shapes, strict=True):
            expect_shape(call, param, whole, expected[param.what])
        shape = _native.ExpertsShape(
            experts=experts,
            features=features,
            hidden_features=hidden,
            gated=gated,
            up_bias=up_bias is not None,
            down_bias=down_bias is not None,
            transposed=transposed,
            interleaved=interleaved,
            activation=function,
            clamped=None if clamped is None else _native.ClampedGate(alpha=clamped[0], limit=clamped[1]),
            up_frozen=formats.get("up weight"),
            down_frozen=formats.get("down weight"),
        )
        return experts, features, shape

    facts = (
        ("frozen", frozen),
        ("activation", activation),
        ("recompute", recompute),
        ("transposed", transposed),
        ("interleaved", interleaved),
        ("clamped", clamped),
    )
    experts, features, shape = prepare(call, prepared, "experts", params, [x, weights], facts, derive)
    if x.shape[-1] != features:
        raise ValueError(f"{name}: expected an input of {features} features, got shape {tuple(x.shape)}")
    flat = call.rows(index).to(torch.int64).contiguous()
    if flat.device.type == "cpu" and flat.numel() and (int(flat.min()) < 0 or int(flat.max()) > experts):
        raise IndexError(f"{name}: expected an index in [0, {experts}], got {int(flat.min())} to {int(flat.max())}")
    keep = not recompute and any(call.needs)
    y = _RotatedExperts.apply(
        call,
        shape,
        keep,
        _read(params, call.needs[0], call.needs[1], keep),
        flat,
        call.rows(x),
        call.rows(weights),
        *call.local_shards(),
    )
    return y.view(x.shape)
