"""Linear layers over the ring, one or several at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rtp_ext import _native
from rtp_ext.functional._call import Call, ShardedParameter, expect_shape
from rtp_ext.functional._operation import Operation, Options, expect_features, graph_operand, rotate
from rtp_ext.functional._scaled import expect_amaxes, expect_fits, expect_takes_recipe, forget_codes
from rtp_ext.options import wire_itemsize
from rtp_ext.parameters.coded import CodedWeight, stored_codes
from rtp_ext.parameters.frozen import FrozenWeight, expect_takes_blocks
from rtp_ext.parameters.sharding import frozen_of
from rtp_ext.recipes import Recipe, operands
from rtp_ext.recipes import recipe as recipe_of
from rtp_ext.ring import Prepared, Ring
from rtp_ext.ring.routes.route_planner import LayerSize
from rtp_ext.words import RecipeName


class PartialLinear(Operation):
    """A linear layer that is cut along its input features. Settings: its input features and its shape."""

    key = "partial linear"
    label = "linear"
    reads_inputs = False

    def __init__(self, options: Options, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool) -> None:
        super().__init__(options, weight, bias)
        self.transposed = transposed

    def prepare(self, call: Call, inputs: Sequence[torch.Tensor]) -> Any:
        weight, bias = self.given
        frozen, transposed = frozen_of(weight), self.transposed
        expect_takes_blocks(call.name, [frozen], transposed, call.ring.in_place)
        params = _local_shards([weight], [bias], 0 if transposed else 1)

        def derive(shapes: list[tuple[int, ...]]) -> Any:
            shapes = [*shapes] if frozen is None else [frozen.shape, *shapes[1:]]
            outputs, features = reversed(shapes[0]) if transposed else shapes[0]
            _check_biases(call, params, shapes, transposed)
            blocks = None if frozen is None else frozen.format
            shape = _native.LinearShape(outputs, features, by_outputs=False, transposed=transposed, frozen=blocks)
            return features, shape

        facts = (("frozen", frozen), ("transposed", transposed))
        return self.agree(call, params, inputs, facts, derive)

    def check(self, call: Call, settings: Any, inputs: Sequence[torch.Tensor]) -> None:
        expect_features(call, inputs[0], settings[0])

    def in_graph(self, dtype: torch.dtype, inputs: Sequence[Any]) -> tuple[list[torch.Tensor], list[int]] | None:
        return _in_graph(self.given[:1], dtype, inputs, self.transposed)

    @staticmethod
    def reads(call: Call, settings: Any) -> Sequence[bool]:
        return [call.needs[0], False][: len(call.watched)]

    @staticmethod
    def forward(call, settings, inputs, parameters):
        weight, bias = [*parameters, None][:2]
        return [call.run(_native.partial_linear_forward, inputs[0], weight, bias, settings[1], call.options)]

    @staticmethod
    def backward(call, settings, gradients, inputs, parameters, kept, needs):
        wanted = (*needs, False)[:3]
        arguments = (gradients[0].contiguous(), inputs[0], parameters[0], settings[1], wanted, call.options)
        return call.run(_native.partial_linear_backward, *arguments)[: len(needs)]


@dataclass(frozen=True)
class _Bundle:
    layers: Any
    projections: list[Any]
    inputs: int
    features: list[set[int]]  # for each input: features that its layers expect
    multiplied: list[set[int]]  # for each parameter: the inputs whose gradients depend on it
    weights: list[bool]  # for each parameter: whether it is a weight, which the gradients of all inputs depend on
    scaled: Any = None  # native ScaledOperands, of products in 8 bits
    one_scale: bool = False  # all shards of a weight have one scale


class Linears(Operation):
    """Linear layers whose shards travel together, cut along their output features. Settings: a _Bundle."""

    key = label = "linear"
    results = None
    reads_inputs = False

    def __init__(
        self,
        options: Options,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        projections: Sequence[tuple[int, int, int, int]] | None = None,
        transposed: bool = False,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__(options, *weights)
        self.biases, self.projections, self.transposed, self.recipe = biases, projections, transposed, recipe

    def parameters(self) -> list[torch.Tensor]:
        found = []
        for weight, bias in zip(self.given, self.biases, strict=True):
            found.append(weight)
            if bias is not None:
                found.append(bias)
        return found

    def prepare(self, call: Call, inputs: Sequence[torch.Tensor]) -> _Bundle:
        weights, biases, transposed, projections = self.given, self.biases, self.transposed, self.projections
        params = _local_shards(weights, biases, 1 if transposed else 0)
        if projections is not None:
            projections = tuple(map(tuple, projections))  # type: ignore[arg-type]
        frozen = tuple(map(frozen_of, weights))
        recipe = self.recipe
        if stored := any(frozen):
            expect_takes_blocks(call.name, frozen, transposed, call.ring.in_place)
        if recipe is not None:
            in_blocks = stored and not stored_codes(call.name, frozen, recipe)
            _expect_takes_recipe(call, recipe, transposed or in_blocks or projections is not None or len(inputs) > 1)

        def derive(shapes: list[tuple[int, ...]]) -> _Bundle:
            return _bundle(call, params, shapes, biases, len(inputs), projections, transposed, recipe)

        facts: tuple[tuple[str, Any], ...] = (("projections", projections), ("inputs", len(inputs)))
        facts += (("transposed", transposed), ("frozen", frozen))
        if recipe is not None:
            facts = (*facts, ("recipe", recipe.name))
        tokens = 0
        for x in inputs:
            tokens = max(tokens, x.shape[:-1].numel())
        planned: dict[str, Any] = (
            {} if transposed or stored else {"tokens": tokens, "size": lambda shapes: _size(call, shapes, recipe)}
        )
        return self.agree(call, params, inputs, facts, derive, **planned)

    def check(self, call: Call, settings: _Bundle, inputs: Sequence[torch.Tensor]) -> None:
        for x, features in zip(inputs, settings.features, strict=True):
            if features != {x.shape[-1]}:
                for expected in features:
                    expect_features(call, x, expected)

    def shaped(self, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.projections is None:
            return super().shaped(results, inputs)
        found = []
        for y, (which, *_) in zip(results, self.projections, strict=True):
            found += super().shaped([y], inputs[which : which + 1])
        return found

    def in_graph(self, dtype: torch.dtype, inputs: Sequence[Any]) -> tuple[list[torch.Tensor], list[int]] | None:
        return None if self.projections is not None else _in_graph(self.given, dtype, inputs, self.transposed)

    @staticmethod
    def reads(call: Call, settings: _Bundle) -> Sequence[bool]:
        needs = call.needs[: settings.inputs]
        if all(needs):
            return settings.weights
        return [any([needs[which] for which in inputs]) for inputs in settings.multiplied]

    @staticmethod
    def forward(call, bundle, inputs, parameters):
        if bundle.scaled is not None:
            forget_codes(call, parameters)
            if bundle.one_scale:
                expect_amaxes(call, parameters)
            tensors = inputs[0], parameters, bundle.layers
            return call.run(_native.scaled_linear_forward, *tensors, bundle.scaled, call.options)
        return call.run(_native.linear_forward, inputs, parameters, bundle.layers, bundle.projections, call.options)

    @staticmethod
    def backward(call, bundle, gradients, inputs, parameters, kept, needs):
        dys = [None if dy is None else dy.contiguous() for dy in gradients]
        tensors = (dys, inputs, parameters, bundle.layers, bundle.projections)
        wanted = (needs[: bundle.inputs], needs[bundle.inputs :])
        if bundle.scaled is not None:
            scaled = dys, inputs[0], parameters, bundle.layers, bundle.scaled, needs[0], wanted[1]
            return call.run(_native.scaled_linear_backward, *scaled, call.options)
        return call.run(_native.linear_backward, *tensors, *wanted, call.options)


def _in_graph(
    weights: Sequence[Any], dtype: torch.dtype, inputs: Sequence[Any], transposed: bool
) -> tuple[list[torch.Tensor], list[int]] | None:
    """`Operation.in_graph` of layers with one input; sizes: input features, and the output features of each."""
    outputs, features = (1, 0) if transposed else (0, 1)
    rows = graph_operand(inputs[0], dtype, weights[0].shape[features])
    if rows is None:
        return None
    return [rows], [weights[0].shape[features], *[weight.shape[outputs] for weight in weights]]


def rotated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ring: Ring,
    shard_dim: int = 0,
    transposed: bool = False,
    prepared: Prepared | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    recipe: RecipeName | None = None,
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
        prepared: caches the plan of this layer, which makes later calls cheap; see Prepared.
        compute_dtype: weights are cast to it before they travel; default: torch.autocast's if enabled, else the
            weight's own.
        reduce_dtype: dtype in which partial gradients travel; default float32 (float64 for float64).
        recipe: "float8_tensorwise", "float8_tensorwise_whole", "float8_rowwise", "float8_rowwise_with_gw_hp",
            "float8_blockwise", "mxfp8" or "mxfp8_rceil": products in 8 bits, of weights cut along dimension 0. Codes
            and scales travel, which the owner makes once after each change of its shard; see `rtp_ext.recipes`.
        name: prefix of error messages.

    Raises ValueError or TypeError if shapes, dtypes or devices do not match (with expected and actual values),
    RingTimeout if a neighbour does not answer. Collective. Source: RTP, arXiv 2311.01635.
    """
    if shard_dim not in (0, 1):
        raise ValueError(f"{name}: expected shard_dim 0 or 1, got {shard_dim}")
    options = Options(ring, prepared, compute_dtype, reduce_dtype, name)
    chosen = None if recipe is None else recipe_of(recipe)
    if shard_dim == 1 and chosen is None:
        return rotate(PartialLinear(options, weight, bias, transposed), [x])[0]
    if shard_dim == 1:
        raise ValueError(f"{name}: expected shard_dim 0 with recipe {recipe}, got 1")
    return rotate(Linears(options, [weight], [bias], transposed=transposed, recipe=chosen), [x])[0]


def rotated_linears(
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] | None = None,
    *,
    ring: Ring,
    projections: Sequence[tuple[int, int, int, int]] | None = None,
    transposed: bool = False,
    prepared: Prepared | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    recipe: RecipeName | None = None,
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
    options = Options(ring, prepared, compute_dtype, reduce_dtype, name)
    chosen = None if recipe is None else recipe_of(recipe)
    return tuple(rotate(Linears(options, weights, biases, projections, transposed, chosen), inputs))


def _size(call: Call, shapes: Sequence[tuple[int, ...]], recipe: Recipe | None) -> LayerSize:
    weights = [shape for shape in shapes if len(shape) == 2]
    itemsize = wire_itemsize(call.ring.options.travel, call.compute_dtype)
    if recipe is not None:
        itemsize = sum(recipe.travels(*shape) for shape in weights) / max(sum(map(math.prod, weights)), 1)
    return LayerSize(
        sum(outputs for outputs, _ in weights),
        max(inputs for _, inputs in weights),
        itemsize,
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
    recipe: Recipe | None,
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
    gpu, codes = call.ring.device.type == "cuda", {}
    if recipe is not None:
        for out_features, in_features in outputs:
            cuts = tuple(_native.shard_sizes(out_features, call.ring.size))
            expect_fits(call, recipe.refusal(out_features, in_features, cuts, gpu=gpu))
        codes = {"codes": recipe.shard_planes(gpu=gpu)}
    layers = [
        _native.LinearShape(*sizes, by_outputs=True, transposed=transposed, **_native_blocks(each), **codes)
        for sizes, each in zip(outputs, blocks, strict=True)
    ]
    return _Bundle(
        _native.LinearBundle(layers, biased),
        [_native.Projection(*projection) for projection in projections],
        inputs,
        features,
        multiplied,
        [bool(inputs) for inputs in multiplied],
        None if recipe is None else operands(recipe, gpu=gpu),
        recipe is not None and recipe.forward.whole,
    )


def _expect_takes_recipe(call: Call, recipe: Recipe, otherwise: bool) -> None:
    if otherwise:
        raise ValueError(
            f"{call.name}: expected weights [out_features, in_features], of one input and not in blocks, for products "
            f"in 8 bits ({recipe.name})"
        )
    expect_takes_recipe(call, recipe)


def _native_blocks(frozen: FrozenWeight | None) -> dict[str, Any]:
    if frozen is None or isinstance(frozen, CodedWeight):
        return {}
    return {"frozen": frozen.format, "in_mlp": frozen.rows > 0}


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
