"""A vocabulary head and its cross-entropy as one operation."""

from __future__ import annotations

from typing import Any, get_args

import torch

from rtp_ext import _native
from rtp_ext.functional._call import (
    INTEGERS,
    Call,
    ShardedParameter,
    expect_shape,
    prepare,
    saved,
)
from rtp_ext.functional._passes import in_dtypes_of
from rtp_ext.parameters.frozen import expect_takes_blocks
from rtp_ext.parameters.sharding import frozen_of
from rtp_ext.ring import Prepared, Ring
from rtp_ext.ring.autograd import first_order_only, wanted
from rtp_ext.words import Reduction

REDUCTIONS: tuple[str, ...] = get_args(Reduction)


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Call, shape: Any, targets, x, *parameters):
        ctx.call, ctx.shape = call, shape

        def run() -> list[torch.Tensor]:
            result = call.run(_native.cross_entropy_forward, x, targets, parameters, shape, call.options)
            return [result.loss, result.lse]

        loss, lse = call.once("linear_cross_entropy", [x, targets], parameters, run)
        ctx.save_for_backward(x, targets, lse, *parameters)
        return loss

    @staticmethod
    @first_order_only
    def backward(ctx, dloss):
        x, targets, lse, *parameters = saved(ctx)
        needs_x, *needs_parameter = wanted(ctx)[3:]
        dx, *gradients = ctx.call.run(
            _native.cross_entropy_backward,
            dloss.contiguous(),
            x,
            targets,
            lse,
            parameters,
            ctx.shape,
            needs_x,
            needs_parameter,
            ctx.call.options,
        )
        return None, None, None, dx, *in_dtypes_of(parameters, gradients)


def check_settings(name: str, label_smoothing: float, reduction: str, soft_cap: float | None, z_loss: float) -> None:
    """Raises ValueError if a setting of the loss is out of range."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: expected a reduction of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{name}: expected label_smoothing in [0, 1], got {label_smoothing}")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"{name}: expected a positive soft_cap or None, got {soft_cap}")
    if z_loss < 0:
        raise ValueError(f"{name}: expected z_loss >= 0, got {z_loss}")


def prepare_cross_entropy(
    call: Call,
    prepared: Prepared | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transposed: bool,
) -> tuple[list[ShardedParameter], tuple[int, int, str | None]]:
    """Returns the local shards, and (vocabulary, features, the format of the weight if it is in blocks)."""
    params = [ShardedParameter("weight", weight, 1 if transposed else 0, 2)]
    if bias is not None:
        params.append(ShardedParameter("bias", bias, 0, 1))

    frozen = frozen_of(weight)
    expect_takes_blocks(call.name, [frozen], transposed, call.in_place)

    def derive(shapes: list[tuple[int, ...]]) -> tuple[int, int, str | None]:
        whole = shapes[0] if frozen is None else frozen.shape
        vocabulary, features = reversed(whole) if transposed else whole
        if bias is not None:
            expect_shape(call, params[1], shapes[1], (vocabulary,))
            if frozen is not None and frozen.group_rows > 1:
                raise ValueError(
                    f"{call.name}: expected rows that fill whole blocks of {frozen.format} in a frozen weight with a "
                    f"bias, got rows of {features}"
                )
        return vocabulary, features, None if frozen is None else frozen.format

    facts = (("frozen", frozen), ("transposed", transposed))
    return params, prepare(call, prepared, "linear cross-entropy", params, [x], facts, derive)


def native_shape(
    vocabulary: int,
    features: int,
    frozen: str | None,
    biased: bool,
    transposed: bool,
    ignore_index: int,
    label_smoothing: float,
    soft_cap: float | None,
    z_loss: float,
) -> Any:
    return _native.CrossEntropyShape(
        vocabulary=vocabulary,
        features=features,
        transposed=transposed,
        bias=biased,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        soft_cap=soft_cap or 0.0,
        z_loss=z_loss,
        frozen=frozen,
    )


def rotated_linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ring: Ring,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    transposed: bool = False,
    in_place: bool = False,
    prepared: Prepared | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    name: str = "rotated_linear_cross_entropy",
) -> torch.Tensor:
    """Computes `cross_entropy(x @ W.T + b, targets)` while W travels, without a [tokens, vocabulary] tensor.

    Vocabulary shards visit every rank while an online softmax runs. Logits exist for one shard and a part of the tokens
    at a time (the smaller of a quarter of the tokens and 64 MiB; never fewer than 128 tokens), and backward recomputes
    them. The sums of the softmax are kept in float32 or wider.

        x         [..., D]   this rank's own batch, in the compute dtype
        weight    [V_r, D]   local shard, cut along the vocabulary; [D, V_r] where transposed
        bias      [V_r]      local shard
        targets   [...]      integers in [0, V), or ignore_index
        returns   scalar, or [...] where reduction is "none"; float32, float64 for float64

    Args:
        ignore_index, label_smoothing, reduction: as in torch.nn.functional.cross_entropy.
        soft_cap: logits are `soft_cap * tanh(logits / soft_cap)` (Gemma 2, arXiv 2408.00118).
        z_loss: `z_loss * logsumexp(logits) ** 2` is added for every token (PaLM, arXiv 2204.02311, section 5).

    The weight may be the parameter of a frozen one in blocks, as in `rotated_linears`; it travels in one piece. With a
    bias, its rows must fill whole blocks.

    Raises IndexError for targets out of range (on CUDA: a device assertion); everything else as in `rotated_linear`.
    Source: RTP, arXiv 2311.01635; online softmax: Milakov and Gimelshein, arXiv 1805.02867.
    """
    check_settings(name, label_smoothing, reduction, soft_cap, z_loss)
    call = Call.of(
        weight, ring=ring, name=name, in_place=in_place, compute_dtype=compute_dtype, reduce_dtype=reduce_dtype
    )
    x = call.operand(x)
    if not isinstance(targets, torch.Tensor) or targets.dtype not in INTEGERS:
        raise TypeError(f"{name}: expected integer targets, got {getattr(targets, 'dtype', type(targets).__name__)}")
    if targets.shape != x.shape[:-1]:
        raise ValueError(f"{name}: expected targets of shape {tuple(x.shape[:-1])}, got {tuple(targets.shape)}")
    _, (vocabulary, features, frozen) = prepare_cross_entropy(call, prepared, x, weight, bias, transposed)
    if x.shape[-1] != features:
        raise ValueError(f"{name}: expected an input of {features} features, got shape {tuple(x.shape)}")
    shape = native_shape(
        vocabulary, features, frozen, bias is not None, transposed, ignore_index, label_smoothing, soft_cap, z_loss
    )
    flat = targets.reshape(-1).to(torch.int64).contiguous()
    loss = LinearCrossEntropy.apply(call, shape, flat, call.rows(x).contiguous(), *call.local_shards())
    if reduction == "none":
        return loss.view(targets.shape)
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / flat.ne(ignore_index).sum()
