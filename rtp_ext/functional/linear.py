"""Linear layers over the ring, one or several at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rtp_ext import _native
from rtp_ext.functional._call import (
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
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import first_order_only, rounded
from rtp_ext.ring.gate import Layer, Plan


class _PartialLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Call, shape: Any, x, weight, bias):
        ctx.call, ctx.shape = call, shape
        ctx.needs = ctx.needs_input_grad[2:]
        ctx.bias_dtype = None if bias is None else bias.dtype
        (weight_then,) = watched_where_read([weight], ctx.needs[:1])
        ctx.save_for_backward(x if ctx.needs[1] else x.new_empty(0), weight_then)
        return call.run(_native.partial_linear_forward, x, weight, bias, shape, call.options())

    @staticmethod
    @first_order_only
    def backward(ctx, dy):
        x, weight = saved(ctx)
        if not any(ctx.needs):
            return None, None, None, None, None
        dx, dweight, dbias = ctx.call.run(
            _native.partial_linear_backward, dy.contiguous(), x, weight, ctx.shape, ctx.needs, ctx.call.options()
        )
        dweight = None if dweight is None else rounded(dweight, weight.dtype)
        dbias = None if dbias is None else rounded(dbias, ctx.bias_dtype)
        return None, None, dx, dweight, dbias


@dataclass(frozen=True)
class _Bundle:
    layers: Any
    projections: list[Any]
    inputs: int
    multiplied: list[set[int]]  # for each parameter: the inputs whose gradients are computed from it


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Call, bundle: _Bundle, *tensors):
        inputs, parameters = tensors[: bundle.inputs], tensors[bundle.inputs :]
        needs = ctx.needs_input_grad[2:]
        ctx.call, ctx.bundle = call, bundle
        ctx.needs_input, ctx.needs_parameter = needs[: bundle.inputs], needs[bundle.inputs :]
        ctx.set_materialize_grads(False)
        keep = any(ctx.needs_parameter)
        read = [any(ctx.needs_input[which] for which in inputs) for inputs in bundle.multiplied]
        kept = [x if keep else x.new_empty(x.shape[0], 0) for x in inputs]
        ctx.save_for_backward(*kept, *watched_where_read(parameters, read))
        outputs = call.run(
            _native.linear_forward, inputs, parameters, bundle.layers, bundle.projections, call.options()
        )
        return tuple(outputs)

    @staticmethod
    @first_order_only
    def backward(ctx, *dys):
        bundle = ctx.bundle
        kept = saved(ctx)
        inputs, parameters = kept[: bundle.inputs], kept[bundle.inputs :]
        gradients = ctx.call.run(
            _native.linear_backward,
            [None if dy is None else dy.contiguous() for dy in dys],
            inputs,
            parameters,
            bundle.layers,
            bundle.projections,
            ctx.needs_input,
            ctx.needs_parameter,
            ctx.call.options(),
        )
        of_inputs, of_parameters = gradients[: bundle.inputs], gradients[bundle.inputs :]
        return None, None, *of_inputs, *in_dtypes_of(parameters, of_parameters)


def rotated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ring: Ring,
    shard_dim: int = 0,
    transposed: bool = False,
    in_place: bool = False,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    name: str = "rotated_linear",
) -> torch.Tensor:
    """`x @ W.T + b` with W and b spread over the ring; the shards visit every rank while it computes.

    Symbols: R = ring.size, r = ring.rank, I and O = in and out features, W_j and b_j = shards of rank j.

        x        [..., I]   this rank's own batch, in the compute dtype
        weight   [O_r, I]   home shard; [O, I_r] where shard_dim = 1; [I, O_r] or [I_r, O] where transposed
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
        shard_dim: the dimension of W [O, I] that is cut, however W is stored.
        transposed: the weight is stored as [I, O].
        in_place: the home shard itself travels and comes home, with one slot instead of two. Where a cast copy
            travels anyway, or over shm, whose hops land in slots only, nothing is saved and copies travel.
        compute_dtype: weights are cast to it before they travel; default: torch.autocast's where enabled, else the
            weight's own.
        reduce_dtype: what partial gradients travel in; default float32 (float64 for float64).
        name: named in error messages.

    Raises ValueError or TypeError where shapes, dtypes or devices disagree (naming expected and actual), RingTimeout
    where a neighbour does not answer. Collective. Source: RTP, arXiv 2311.01635.
    """
    options: dict[str, Any] = {
        "in_place": in_place,
        "compute_dtype": compute_dtype,
        "reduce_dtype": reduce_dtype,
        "name": name,
    }
    if shard_dim not in (0, 1):
        raise ValueError(f"{name}: expected shard_dim 0 or 1, got {shard_dim}")
    if shard_dim == 0:
        return rotated_linears([x], [weight], [bias], ring=ring, transposed=transposed, **options)[0]
    call = Call.of(weight, ring=ring, **options)
    x = call.operand(x)
    homes = _homes(call, [weight], [bias], 0 if transposed else 1)
    shape, *bias_shape = agree(call, homes, [f"gradients of x, weight, bias {wants(x, weight, bias)}"])
    outputs, inputs = reversed(shape) if transposed else shape
    if bias_shape:
        expect_shape(call, homes[1], bias_shape[0], (outputs,))
    _expect_features(call, x, inputs)
    prepare_in_place(call, homes, [shape, *bias_shape])
    native = _native.LinearShape(outputs, inputs, by_outputs=False, transposed=transposed)
    rows = call.rows(x)
    y = _PartialLinear.apply(call, native, rows, homes[0].local, None if bias is None else homes[1].local)
    return y.view(*x.shape[:-1], outputs)


def rotated_linears(
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] | None = None,
    *,
    ring: Ring,
    projections: Sequence[tuple[int, int, int, int]] | None = None,
    transposed: bool = False,
    in_place: bool = False,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    name: str = "rotated_linears",
) -> tuple[torch.Tensor, ...]:
    """Several linear layers whose shards travel together, each cut along its output features.

    One hop carries the shards of all layers, and products with the same input share one input gradient, which is never
    split into a sum of several tensors.

        inputs   each [..., I_i], in the compute dtype
        weights  home shards, each [O_k,r, I]; [I, O_k,r] where transposed
        biases   home shards, each [O_k,r] or None
        returns  one [..., end - begin] for each projection, in the compute dtype

    Args:
        projections: (input, layer, begin, end): rows [begin, end) of the weight of that layer applied to that input.
            The projections of a layer cover its rows once. Default: every layer applied to input 0.

    Everything else is as in `rotated_linear`.
    """
    biases = [None] * len(weights) if biases is None else biases
    if not inputs or not weights:
        raise ValueError(f"{name}: expected at least one input and one weight, got {len(inputs)} and {len(weights)}")
    if len(weights) != len(biases):
        raise ValueError(f"{name}: expected as many biases as weights, got {len(biases)} and {len(weights)}")
    call = Call.of(
        weights[0],
        ring=ring,
        in_place=in_place,
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        name=name,
    )
    inputs = [call.operand(x) for x in inputs]
    homes = _homes(call, weights, biases, 1 if transposed else 0)
    told = None if projections is None else tuple(map(tuple, projections))
    facts = [f"gradients {wants(*inputs, *(home.tensor for home in homes))}", f"projections {told}"]
    shapes = agree(call, homes, facts, None if transposed else _planned(call, inputs))
    layers, biased, outputs = [], [], []
    remaining = iter(zip(homes, shapes, strict=True))
    for bias in biases:
        _, shape = next(remaining)
        out_features, in_features = reversed(shape) if transposed else shape
        layers.append(_native.LinearShape(out_features, in_features, by_outputs=True, transposed=transposed))
        biased.append(bias is not None)
        outputs.append((out_features, in_features))
        if bias is not None:
            home, bias_shape = next(remaining)
            expect_shape(call, home, bias_shape, (out_features,))
    if projections is None:
        projections = [(0, layer, 0, features) for layer, (features, _) in enumerate(outputs)]
    _check_projections(call, projections, inputs, outputs)
    prepare_in_place(call, homes, shapes)
    multiplied: list[set[int]] = []
    for layer, bias in enumerate(biases):
        multiplied.append({which for which, of, _, _ in projections if of == layer})
        if bias is not None:
            multiplied.append(set())
    bundle = _Bundle(
        _native.LinearBundle(layers, biased),
        [_native.Projection(*projection) for projection in projections],
        len(inputs),
        multiplied,
    )
    rows = [call.rows(x) for x in inputs]
    ys = _Linears.apply(call, bundle, *rows, *(home.local for home in homes))
    return tuple(
        y.view(*inputs[which].shape[:-1], end - begin)
        for y, (which, _, begin, end) in zip(ys, projections, strict=True)
    )


def _planned(call: Call, inputs: Sequence[torch.Tensor]) -> tuple[int, Callable[..., Plan]]:
    tokens = max(x.shape[:-1].numel() for x in inputs)

    def plan(most_tokens: int, shapes: Sequence[tuple[int, ...]]) -> Plan:
        weights = [shape for shape in shapes if len(shape) == 2]
        layer = Layer(
            sum(outputs for outputs, _ in weights),
            max(inputs for _, inputs in weights),
            call.compute_dtype.itemsize,
            call.reduce_dtype.itemsize,
        )
        return call.ring.gate.plan(call.name, most_tokens, layer, call.compute_dtype)

    return tokens, plan


def _homes(call: Call, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], dim: int) -> list[Home]:
    """The home shards of layers, every weight followed by its bias if it has one."""
    homes = []
    for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        suffix = "" if len(weights) == 1 else f" {number}"
        homes.append(Home(f"weight{suffix}", weight, dim))
        homes[-1].check(call, 2)
        if bias is not None:
            homes.append(Home(f"bias{suffix}", bias, 0))
            homes[-1].check(call, 1)
            if bias.dtype != weight.dtype:
                raise TypeError(f"{call.name}: expected a bias of dtype {weight.dtype}, the weight's, got {bias.dtype}")
    return homes


def _expect_features(call: Call, x: torch.Tensor, features: int) -> None:
    if x.shape[-1] != features:
        raise ValueError(f"{call.name}: expected an input of {features} features, got shape {tuple(x.shape)}")


def _check_projections(
    call: Call,
    projections: Sequence[tuple[int, int, int, int]],
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[tuple[int, int]],
) -> None:
    covered: list[list[tuple[int, int]]] = [[] for _ in outputs]
    for projection in projections:
        numbers = len(projection) == 4 and all(isinstance(number, int) for number in projection)
        if not numbers or not 0 <= projection[0] < len(inputs) or not 0 <= projection[1] < len(outputs):
            raise ValueError(
                f"{call.name}: expected projections (input, layer, begin, end) of {len(inputs)} inputs and "
                f"{len(outputs)} layers, got {tuple(projection)}"
            )
        which, layer, begin, end = projection
        _expect_features(call, inputs[which], outputs[layer][1])
        covered[layer].append((begin, end))
    for layer, ranges in enumerate(covered):
        at = 0
        for begin, end in sorted(ranges):
            if begin != at:
                break
            at = end
        if at != outputs[layer][0]:
            raise ValueError(
                f"{call.name}: expected projections that cover the {outputs[layer][0]} outputs of layer {layer} once, "
                f"got {sorted(ranges)}"
            )
