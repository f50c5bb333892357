"""Linear layers over the ring, one or several at once."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rtp_ext import _native
from rtp_ext.functional._call import (
    Call,
    ShardedParameter,
    expect_shape,
    prepare,
    saved,
    watched_where_read,
)
from rtp_ext.functional._passes import in_dtypes_of
from rtp_ext.parameters.frozen import FrozenWeight, expect_takes_blocks
from rtp_ext.parameters.sharding import frozen_of
from rtp_ext.ring import Prepared, Ring
from rtp_ext.ring.autograd import first_order_only, rounded, wanted
from rtp_ext.ring.links.options import wire_itemsize
from rtp_ext.ring.routes.route_planner import LayerSize


class PartialLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Call, shape: Any, x, weight, bias):
        ctx.call, ctx.shape = call, shape
        ctx.needs = ctx.needs_input_grad[2:]
        ctx.bias_dtype = None if bias is None else bias.dtype
        (weight_then,) = watched_where_read([weight], ctx.needs[:1])
        ctx.save_for_backward(x if ctx.needs[1] else x.new_empty(0), weight_then)
        shards = [weight] if bias is None else [weight, bias]

        def run() -> list[torch.Tensor]:
            return [call.run(_native.partial_linear_forward, x, weight, bias, shape, call.options)]

        return call.once("linear", [x], shards, run)[0]

    @staticmethod
    @first_order_only
    def backward(ctx, dy):
        x, weight = saved(ctx)
        needs = wanted(ctx)[2:]
        if not any(needs):
            return None, None, None, None, None
        dx, dweight, dbias = ctx.call.run(
            _native.partial_linear_backward, dy.contiguous(), x, weight, ctx.shape, needs, ctx.call.options
        )
        dweight = None if dweight is None else rounded(dweight, weight.dtype)
        dbias = None if dbias is None else rounded(dbias, ctx.bias_dtype)
        return None, None, dx, dweight, dbias


@dataclass(frozen=True)
class _Bundle:
    layers: Any
    projections: list[Any]
    inputs: int
    features: list[set[int]]  # for each input: features that its layers expect
    outputs: list[tuple[int, int]]  # for each projection: its input and its output features
    multiplied: list[set[int]]  # for each parameter: the inputs whose gradients depend on it
    weights: list[bool]  # for each parameter: whether it is a weight, which the gradients of all inputs depend on


class Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Call, bundle: _Bundle, *tensors):
        inputs, parameters = tensors[: bundle.inputs], tensors[bundle.inputs :]
        needs = ctx.needs_input_grad[2:]
        ctx.call, ctx.bundle = call, bundle
        ctx.needs_input, ctx.needs_parameter = needs[: bundle.inputs], needs[bundle.inputs :]
        ctx.set_materialize_grads(False)
        kept = inputs if any(ctx.needs_parameter) else [x.new_empty(x.shape[0], 0) for x in inputs]
        read = bundle.weights
        if not all(ctx.needs_input):
            read = [any([ctx.needs_input[which] for which in inputs]) for inputs in bundle.multiplied]
        ctx.save_for_backward(*kept, *watched_where_read(parameters, read))
        arguments = (inputs, parameters, bundle.layers, bundle.projections, call.options)
        run = functools.partial(call.run, _native.linear_forward, *arguments)
        return tuple(call.once("linear", inputs, parameters, run))

    @staticmethod
    @first_order_only
    def backward(ctx, *dys):
        bundle = ctx.bundle
        kept = saved(ctx)
        inputs, parameters = kept[: bundle.inputs], kept[bundle.inputs :]
        needs = wanted(ctx)[2:]
        found = [*dys]
        for place, dy in enumerate(dys):
            if dy is not None:
                found[place] = dy.contiguous()
        gradients = ctx.call.run(
            _native.linear_backward,
            found,
            inputs,
            parameters,
            bundle.layers,
            bundle.projections,
            needs[: bundle.inputs],
            needs[bundle.inputs :],
            ctx.call.options,
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
    prepared: Prepared | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    name: str = "rotated_linear",
) -> torch.Tensor:
    """`x @ W.T + b` with W and b spread over the ring; the shards visit every rank while it computes.

    Symbols: R = ring.size, r = ring.rank, I and O = in and out features, W_j and b_j = shards of rank j.

        x        [..., I]   this rank's own batch, in the compute dtype
        weight   [O_r, I]   local shard; [O, I_r] where shard_dim = 1; [I, O_r] or [I_r, O] where transposed
        bias     [O_r]      local shard, cut along its only dimension in both cases
        returns  [..., O]   in the compute dtype

        forward  y[:, j] = x @ W_j.T + b_j              shard_dim 1: y = sum_j x[:, j] @ W_j.T
        dgrad    dx = sum_j dy[:, j] @ W_j
        wgrad    dW_j = 1/R sum_ranks dy[:, j].T @ x    (travels with the weights and ends at its owner)

    Gradients are averaged over the ring. Sums of several products are kept in float32 if the compute dtype has 16
    bits. Cost: R - 1 weight hops forward; R - 1 weight and R - 1 gradient hops backward; weights or gradients that the
    backward does not need do not travel. Memory: at most two weight slots forward, two of each kind backward, each of
    the largest shard, shared by all layers of the ring; one more weight slot if the local shard is cast.

    Args:
        shard_dim: the dimension of W [O, I] that is cut, independent of `transposed`.
        transposed: the weight is stored as [I, O].
        in_place: the local shard itself travels and returns to its owner, with one slot instead of two. If a cast copy
            travels anyway, or over shm, whose hops arrive in slots only, this saves nothing and copies travel.
        prepared: caches the plan of this layer, which makes later calls cheap; see Prepared.
        compute_dtype: weights are cast to it before they travel; default: torch.autocast's if enabled, else the
            weight's own.
        reduce_dtype: dtype in which partial gradients travel; default float32 (float64 for float64).
        name: prefix of error messages.

    Raises ValueError or TypeError if shapes, dtypes or devices do not match (with expected and actual values),
    RingTimeout if a neighbour does not answer. Collective. Source: RTP, arXiv 2311.01635.
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
        return rotated_linears([x], [weight], [bias], ring=ring, transposed=transposed, prepared=prepared, **options)[0]
    call = Call.of(weight, ring=ring, **options)
    x = call.operand(x)
    _, (outputs, inputs, native) = prepare_partial(call, prepared, [x], weight, bias, transposed)
    _refuse_features(call, x.shape, [inputs])
    y = PartialLinear.apply(call, native, call.rows(x), *call.local_shards(), *([None] if bias is None else []))
    return y if x.dim() == 2 else y.view(*x.shape[:-1], outputs)


def rotated_linears(
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] | None = None,
    *,
    ring: Ring,
    projections: Sequence[tuple[int, int, int, int]] | None = None,
    transposed: bool = False,
    in_place: bool = False,
    prepared: Prepared | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    name: str = "rotated_linears",
) -> tuple[torch.Tensor, ...]:
    """Several linear layers whose shards travel together, each cut along its output features.

    One hop carries the shards of all layers. Products with the same input accumulate into one input gradient.

        inputs   each [..., I_i], in the compute dtype
        weights  local shards, each [O_k,r, I]; [I, O_k,r] where transposed
        biases   local shards, each [O_k,r] or None
        returns  one [..., end - begin] for each projection, in the compute dtype

    Args:
        projections: (input, layer, begin, end): rows [begin, end) of the weight of that layer, applied to that input.
            The projections of a layer must cover each of its rows exactly once. Default: every layer applied to
            input 0.

    A weight may be the parameter of a frozen one in blocks (fully_rotate(model, frozen=...)): its blocks travel, and
    each compute widens them before. It is cut between groups of rows that fill whole blocks; its bias is cut as ever.

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
    rows, shapes = [*inputs], []
    for place, x in enumerate(inputs):
        x = call.operand(x)
        shapes.append(x.shape)
        rows[place] = x if len(x.shape) == 2 else call.rows(x)
    _, bundle = prepare_linears(call, prepared, rows, weights, biases, projections, transposed)
    for shape, features in zip(shapes, bundle.features, strict=True):
        if features != {shape[-1]}:
            _refuse_features(call, shape, features)
    ys = Linears.apply(call, bundle, *rows, *call.local_shards())
    found = [*ys]
    for place, (which, outputs) in enumerate(bundle.outputs):
        if len(shapes[which]) != 2:
            found[place] = ys[place].view(*shapes[which][:-1], outputs)
    return tuple(found)


def prepare_partial(
    call: Call,
    prepared: Prepared | None,
    inputs: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transposed: bool,
) -> tuple[list[ShardedParameter], tuple[int, int, Any]]:
    """Returns the local shards of a layer cut along its inputs, and (out features, in features, native shape)."""
    frozen = frozen_of(weight)
    expect_takes_blocks(call.name, [frozen], transposed, call.in_place)
    format = None if frozen is None else frozen.format
    params = _local_shards([weight], [bias], 0 if transposed else 1)

    def derive(shapes: list[tuple[int, ...]]) -> tuple[int, int, Any]:
        shapes = [*shapes] if frozen is None else [frozen.shape, *shapes[1:]]
        outputs, features = reversed(shapes[0]) if transposed else shapes[0]
        _check_biases(call, params, shapes, transposed)
        native = _native.LinearShape(outputs, features, by_outputs=False, transposed=transposed, frozen=format)
        return outputs, features, native

    facts = (("frozen", frozen), ("transposed", transposed))
    return params, prepare(call, prepared, "partial linear", params, inputs, facts, derive, late=True)


def prepare_linears(
    call: Call,
    prepared: Prepared | None,
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    projections: Sequence[tuple[int, int, int, int]] | None,
    transposed: bool,
) -> tuple[list[ShardedParameter], _Bundle]:
    """Returns the local shards of layers cut along their output features, and their bundle."""
    params = _local_shards(weights, biases, 1 if transposed else 0)
    if projections is not None:
        projections = tuple(map(tuple, projections))  # type: ignore[arg-type]
    frozen = tuple(map(frozen_of, weights))
    if in_blocks := any(frozen):
        expect_takes_blocks(call.name, frozen, transposed, call.in_place)

    def derive(shapes: list[tuple[int, ...]]) -> _Bundle:
        return _bundle(call, params, shapes, biases, len(inputs), projections, transposed)

    facts = (("projections", projections), ("inputs", len(inputs)), ("transposed", transposed), ("frozen", frozen))
    tokens = 0
    for x in inputs:
        tokens = max(tokens, x.shape[:-1].numel())
    planned: dict[str, Any] = (
        {} if transposed or in_blocks else {"tokens": tokens, "size": lambda shapes: _size(call, shapes)}
    )
    return params, prepare(call, prepared, "linears", params, inputs, facts, derive, late=True, **planned)


def _size(call: Call, shapes: Sequence[tuple[int, ...]]) -> LayerSize:
    weights = [shape for shape in shapes if len(shape) == 2]
    return LayerSize(
        sum(outputs for outputs, _ in weights),
        max(inputs for _, inputs in weights),
        wire_itemsize(call.ring.travel, call.compute_dtype),
        call.reduce_dtype.itemsize,
    )


def _local_shards(
    weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], dim: int
) -> list[ShardedParameter]:
    """Returns the local shards of layers, each weight followed by its bias if there is one."""
    params = []
    for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        suffix = "" if len(weights) == 1 else f" {number}"
        params.append(ShardedParameter(f"weight{suffix}", weight, dim, 2))
        if bias is not None:
            params.append(ShardedParameter(f"bias{suffix}", bias, 0, 1))
    return params


def _check_biases(
    call: Call, params: Sequence[ShardedParameter], shapes: Sequence[tuple[int, ...]], transposed: bool
) -> None:
    """Raises if a bias does not have the dtype of its weight, which precedes it, or the shape of its output."""
    for place in range(1, len(params)):
        param, weight = params[place], params[place - 1]
        if param.dims == 1:
            if param.tensor.dtype != weight.tensor.dtype and frozen_of(weight.tensor) is None:
                raise TypeError(
                    f"{call.name}: expected a bias of dtype {weight.tensor.dtype}, the weight's, got "
                    f"{param.tensor.dtype}"
                )
            expect_shape(call, param, shapes[place], (shapes[place - 1][1 if transposed else 0],))


def _bundle(
    call: Call,
    params: Sequence[ShardedParameter],
    shapes: Sequence[tuple[int, ...]],
    biases: Sequence[torch.Tensor | None],
    inputs: int,
    projections: Sequence[tuple[int, int, int, int]] | None,
    transposed: bool,
) -> _Bundle:
    frozen: list[FrozenWeight | None] = [frozen_of(param.tensor) for param in params]
    shapes = [shape if each is None else each.shape for shape, each in zip(shapes, frozen, strict=True)]
    _check_biases(call, params, shapes, transposed)
    weights = [shape for shape in shapes if len(shape) == 2]
    blocks = [each for each, param in zip(frozen, params, strict=True) if param.dims == 2]
    outputs = [(shape[1], shape[0]) if transposed else (shape[0], shape[1]) for shape in weights]
    biased = [bias is not None for bias in biases]
    if projections is None:
        projections = [(0, layer, 0, features) for layer, (features, _) in enumerate(outputs)]
    _check_projections(call, projections, inputs, outputs)
    features: list[set[int]] = [set() for _ in range(inputs)]
    for which, layer, _, _ in projections:
        features[which].add(outputs[layer][1])
    multiplied: list[set[int]] = []
    for layer, with_bias in enumerate(biased):
        multiplied.append({which for which, of, _, _ in projections if of == layer})
        if with_bias:
            multiplied.append(set())
    layers = [
        _native.LinearShape(*sizes, by_outputs=True, transposed=transposed, **_native_blocks(each))
        for sizes, each in zip(outputs, blocks, strict=True)
    ]
    return _Bundle(
        _native.LinearBundle(layers, biased),
        [_native.Projection(*projection) for projection in projections],
        inputs,
        features,
        [(which, end - begin) for which, _, begin, end in projections],
        multiplied,
        [bool(inputs) for inputs in multiplied],
    )


def _native_blocks(frozen: FrozenWeight | None) -> dict[str, Any]:
    return {} if frozen is None else {"frozen": frozen.format, "in_mlp": frozen.rows > 0}


def _refuse_features(call: Call, shape: torch.Size, features: Iterable[int]) -> None:
    for expected in features:
        if shape[-1] != expected:
            raise ValueError(f"{call.name}: expected an input of {expected} features, got shape {tuple(shape)}")


def _check_projections(
    call: Call,
    projections: Sequence[tuple[int, int, int, int]],
    inputs: int,
    outputs: Sequence[tuple[int, int]],
) -> None:
    covered: list[list[tuple[int, int]]] = [[] for _ in outputs]
    for projection in projections:
        numbers = len(projection) == 4 and all(isinstance(number, int) for number in projection)
        if not numbers or not 0 <= projection[0] < inputs or not 0 <= projection[1] < len(outputs):
            raise ValueError(
                f"{call.name}: expected projections (input, layer, begin, end) of {inputs} inputs and "
                f"{len(outputs)} layers, got {tuple(projection)}"
            )
        _, layer, begin, end = projection
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
