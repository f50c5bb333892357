"""An MLP whose weights rotate as a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rtp_ext import _native
from rtp_ext.functional._call import (
    Call,
    ShardedParameter,
    expect_shape,
    needs_gradients,
    prepare,
    saved,
    watched_where_read,
)
from rtp_ext.functional._passes import in_dtypes_of
from rtp_ext.parameters.frozen import expect_takes_blocks
from rtp_ext.parameters.sharding import frozen_of
from rtp_ext.ring import Prepared, Ring
from rtp_ext.ring.autograd import first_order_only, wanted
from rtp_ext.words import Activation

# Activation -> (activation of the engine, gated)
ACTIVATIONS: dict[Any, tuple[str, bool]] = {
    "relu": ("relu", False),
    "gelu": ("gelu", False),
    "gelu_tanh": ("gelu_tanh", False),
    "silu": ("silu", False),
    "swiglu": ("silu", True),
    "geglu": ("gelu", True),
    "geglu_tanh": ("gelu_tanh", True),
    "reglu": ("relu", True),
}


class MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Call, shape: Any, keep: bool, read: list[bool], x, *parameters):
        ctx.call, ctx.shape = call, shape

        def run() -> list[torch.Tensor]:
            result = call.run(_native.mlp_forward, x, parameters, shape, keep, call.options)
            return [result.y, *result.kept]

        y, *kept = call.once("mlp", [x], parameters, run)
        ctx.parameters = len(parameters)
        ctx.save_for_backward(x, *watched_where_read(parameters, read), *kept)
        return y

    @staticmethod
    @first_order_only
    def backward(ctx, dy):
        x, *rest = saved(ctx)
        parameters, kept = rest[: ctx.parameters], rest[ctx.parameters :]
        needs_x, *needs_parameter = wanted(ctx)[4:]
        dx, *gradients = ctx.call.run(
            _native.mlp_backward,
            dy.contiguous(),
            x,
            kept,
            parameters,
            ctx.shape,
            needs_x,
            needs_parameter,
            ctx.call.options,
        )
        return None, None, None, None, dx, *in_dtypes_of(parameters, gradients)


def read_by_backward(params: Sequence[ShardedParameter], needs_x: bool, keep: bool) -> list[bool]:
    """Returns for each parameter whether backward reads it: gate and up for dx, and with their biases to recompute;
    down for the gradients of hidden values."""
    hidden = needs_x or any(needs_gradients(*(param.tensor for param in params if not param.what.startswith("down"))))
    found = {"down weight": hidden, "down bias": False}
    return [found.get(param.what, not keep or (needs_x and param.what.endswith("weight"))) for param in params]


class MLPParameters(NamedTuple):
    """Local shards of an MLP."""

    up: torch.Tensor
    down: torch.Tensor
    gate: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None


def prepare_mlp(
    call: Call,
    prepared: Prepared | None,
    x: torch.Tensor,
    parameters: MLPParameters,
    *,
    activation: str,
    recompute: bool,
    transposed: bool,
) -> tuple[list[ShardedParameter], tuple[int, int, Any]]:
    """Returns the local shards in the order of the engine, and (in features, out features, native shape)."""
    function, gated = ACTIVATIONS[activation]
    outputs, inputs = (1, 0) if transposed else (0, 1)
    candidates = [
        ("gate weight", parameters.gate, outputs, 2),
        ("gate bias", parameters.gate_bias, 0, 1),
        ("up weight", parameters.up, outputs, 2),
        ("up bias", parameters.up_bias, 0, 1),
        ("down weight", parameters.down, inputs, 2),
        ("down bias", parameters.down_bias, 0, 1),
    ]
    params = [ShardedParameter(what, tensor, dim, dims) for what, tensor, dim, dims in candidates if tensor is not None]

    frozen = tuple([frozen_of(param.tensor) for param in params])
    formats = {
        None if each is None else each.format for each, param in zip(frozen, params, strict=True) if param.dims > 1
    }
    expect_takes_blocks(call.name, frozen, transposed, call.in_place)
    if any(frozen) and len(formats) > 1:
        raise ValueError(
            f"{call.name}: expected weights of one format for frozen weights in blocks, got formats "
            f"{', '.join(map(str, formats))}"
        )

    def derive(shapes: list[tuple[int, ...]]) -> Any:
        shapes = [shape if each is None else each.shape for shape, each in zip(shapes, frozen, strict=True)]
        whole = {param.what: shape for param, shape in zip(params, shapes, strict=True)}
        hidden, features = whole["up weight"][outputs], whole["up weight"][inputs]
        out_features = whole["down weight"][outputs]
        down_shape = (hidden, out_features) if transposed else (out_features, hidden)
        expected = {
            "gate weight": whole["up weight"],
            "gate bias": (hidden,),
            "up bias": (hidden,),
            "down weight": down_shape,
            "down bias": (out_features,),
        }
        for param in params:
            expect_shape(call, param, whole[param.what], expected.get(param.what, whole[param.what]))
        shape = _native.MlpShape(
            in_features=features,
            hidden_features=hidden,
            out_features=out_features,
            gated=gated,
            transposed=transposed,
            up_bias=parameters.up_bias is not None,
            down_bias=parameters.down_bias is not None,
            activation=function,
            frozen=next(iter(formats)),
        )
        return features, out_features, shape

    facts = (("frozen", frozen), ("activation", activation), ("recompute", recompute))
    return params, prepare(call, prepared, "mlp", params, [x], facts, derive, late=True)


def rotated_mlp(
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    gate: torch.Tensor | None = None,
    *,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
    activation: Activation = "gelu",
    recompute: bool = False,
    ring: Ring,
    transposed: bool = False,
    in_place: bool = False,
    prepared: Prepared | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    name: str = "rotated_mlp",
) -> torch.Tensor:
    """`act(x @ U.T) @ D.T`, or `(act(x @ G.T) * (x @ U.T)) @ D.T`, where U, G and D travel as one bundle.

    Step j computes hidden slice j from shard j of the weights; the slice exists during that step only.

        x          [..., I]  this rank's own batch, in the compute dtype
        up, gate   [H_r, I]  local shards, cut along the hidden features; [I, H_r] where transposed
        down       [O, H_r]  local shard, cut along the hidden features; [H_r, O] where transposed
        up_bias, gate_bias [H_r], down_bias [O_r]  local shards
        returns    [..., O]  in the compute dtype

        forward    y = sum_j h_j @ D_j.T,  h_j = act(x @ G_j.T) * (x @ U_j.T)
        backward   with W_j travelling: dh_j = dy @ D_j, then the gradients of slice j

    Args:
        activation: gelu, gelu_tanh, relu, silu; or, with a gate, swiglu, geglu, geglu_tanh, reglu.
        recompute: save no hidden values for backward, which recomputes them from the visiting shard (one more GEMM for
            each weight of the first layer, no additional hop). Otherwise x @ U.T and x @ G.T, [..., H] each, are saved.

    Partial outputs are summed in float32 if the compute dtype has 16 bits. Everything else is as in
    `rotated_linear`. Source: RTP, arXiv 2311.01635; docs/design.md, 'Bundles'.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name}: expected an activation of {', '.join(ACTIVATIONS)}, got {activation!r}")
    gated = ACTIVATIONS[activation][1]
    if gated != (gate is not None):
        raise ValueError(f"{name}: activation {activation} expected a gate: {gated}, got one: {gate is not None}")
    if gated and (gate_bias is None) != (up_bias is None):
        raise ValueError(f"{name}: expected biases of both gate and up or of neither")
    call = Call.of(up, ring=ring, name=name, in_place=in_place, compute_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    x = call.operand(x)
    parameters = MLPParameters(up, down, gate, up_bias, down_bias, gate_bias)
    params, (features, out_features, shape) = prepare_mlp(
        call, prepared, x, parameters, activation=activation, recompute=recompute, transposed=transposed
    )
    if x.shape[-1] != features:
        raise ValueError(f"{name}: expected an input of {features} features, got shape {tuple(x.shape)}")
    keep = not recompute and any(call.needs)
    read = read_by_backward(params, call.needs[0], keep)
    y = MLP.apply(call, shape, keep, read, call.rows(x), *call.local_shards())
    return y.view(*x.shape[:-1], out_features)
