"""An MLP whose weights rotate as a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rtp_ext import _native
from rtp_ext.functional._call import Call, ShardedParameter, expect_shape
from rtp_ext.functional._operation import Operation, Options, expect_features, graph_operand, rotate
from rtp_ext.options import wire_itemsize
from rtp_ext.parameters.frozen import expect_takes_blocks
from rtp_ext.parameters.sharding import frozen_of
from rtp_ext.ring import Prepared, Ring
from rtp_ext.ring.routes.route_planner import LayerSize
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


class MLPParameters(NamedTuple):
    """Local shards of an MLP."""

    up: torch.Tensor
    down: torch.Tensor
    gate: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None


class MLP(Operation):
    """An MLP. `down` is cut along its input features. Settings: an _MLP."""

    key = label = "mlp"

    def __init__(
        self, options: Options, shards: MLPParameters, activation: str, recompute: bool, transposed: bool
    ) -> None:
        super().__init__(options, shards.up)
        self.shards, self.activation, self.recompute, self.transposed = shards, activation, recompute, transposed

    def _named(self) -> list[tuple[str, torch.Tensor, int, int]]:
        """Returns name, shard, cut and number of dimensions of each parameter, in the order of the engine."""
        each = self.shards
        outputs, features = (1, 0) if self.transposed else (0, 1)
        candidates = [
            ("gate weight", each.gate, outputs, 2),
            ("gate bias", each.gate_bias, 0, 1),
            ("up weight", each.up, outputs, 2),
            ("up bias", each.up_bias, 0, 1),
            ("down weight", each.down, features, 2),
            ("down bias", each.down_bias, 0, 1),
        ]
        return [(what, tensor, dim, dims) for what, tensor, dim, dims in candidates if tensor is not None]

    def parameters(self) -> list[torch.Tensor]:
        return [tensor for _, tensor, _, _ in self._named()]

    def prepare(self, call: Call, inputs: Sequence[torch.Tensor]) -> _MLP:
        each, transposed = self.shards, self.transposed
        function, gated = ACTIVATIONS[self.activation]
        outputs, features = (1, 0) if transposed else (0, 1)
        params = [ShardedParameter(*named) for named in self._named()]
        frozen = tuple([frozen_of(param.tensor) for param in params])
        weights = [block for block, param in zip(frozen, params, strict=True) if param.dims > 1]
        formats = {None if block is None else block.format for block in weights}
        expect_takes_blocks(call.name, frozen, transposed, call.ring.in_place)
        if any(frozen) and len(formats) > 1:
            raise ValueError(
                f"{call.name}: expected weights of one format for frozen weights in blocks, got formats "
                f"{', '.join(map(str, formats))}"
            )

        def derive(shapes: list[tuple[int, ...]]) -> _MLP:
            shapes = [shape if block is None else block.shape for shape, block in zip(shapes, frozen, strict=True)]
            whole = {param.what: shape for param, shape in zip(params, shapes, strict=True)}
            hidden, in_features = whole["up weight"][outputs], whole["up weight"][features]
            out_features = whole["down weight"][outputs]
            expected = {
                "gate weight": whole["up weight"],
                "gate bias": (hidden,),
                "up bias": (hidden,),
                "down weight": (hidden, out_features) if transposed else (out_features, hidden),
                "down bias": (out_features,),
            }
            for param in params:
                expect_shape(call, param, whole[param.what], expected.get(param.what, whole[param.what]))
            shape = _native.MlpShape(
                in_features=in_features,
                hidden_features=hidden,
                out_features=out_features,
                gated=gated,
                transposed=transposed,
                up_bias=each.up_bias is not None,
                down_bias=each.down_bias is not None,
                activation=function,
                frozen=next(iter(formats)),
            )
            return _MLP(in_features, shape, self.recompute)

        facts = (("frozen", frozen), ("activation", self.activation), ("recompute", self.recompute))

        def size(shapes: list[tuple[int, ...]]) -> LayerSize:
            whole = {param.what: shape for param, shape in zip(params, shapes, strict=True)}
            hidden, gates = whole["up weight"][outputs], 1 + gated
            return LayerSize(
                gates * hidden,
                whole["up weight"][features],
                wire_itemsize(call.ring.options.travel, call.compute_dtype),
                call.reduce_dtype.itemsize,
                whole["down weight"][outputs],
                gates,
                self.recompute,
            )

        planned: dict[str, Any] = {}
        if not (transposed or any(frozen)):
            planned = {"tokens": inputs[0].shape[:-1].numel(), "size": size}
        return self.agree(call, params, inputs, facts, derive, **planned)

    def check(self, call: Call, settings: _MLP, inputs: Sequence[torch.Tensor]) -> None:
        expect_features(call, inputs[0], settings.features)

    def in_graph(self, dtype: torch.dtype, inputs: Sequence[Any]) -> tuple[list[torch.Tensor], list[int]] | None:
        outputs, features = (1, 0) if self.transposed else (0, 1)
        up, down, gate, *_ = self.shards
        rows = graph_operand(inputs[0], dtype, up.shape[features])
        if rows is None:
            return None
        keep = not self.recompute and torch.is_grad_enabled()
        keep = keep and any([tensor.requires_grad for tensor in [rows, *self.parameters()]])
        hidden = up.shape[outputs]
        kept = [hidden if gate is None else 2 * hidden] if keep else []
        return [rows], [up.shape[features], down.shape[outputs], *kept]

    @staticmethod
    def graph_results(rows: Any, sizes: Sequence[Any], dtype: torch.dtype) -> list[tuple[Any, torch.dtype]]:
        y, *values = [((rows, size), dtype) for size in sizes[1:]]
        return [y, *values, *[((1,), torch.int64) for _ in values]]

    @staticmethod
    def reads(call: Call, settings: _MLP) -> Sequence[bool]:
        needs_x, *needs = call.needs
        keep = settings.keeps(call)
        names = [param.what for param in call.params]
        hidden = needs_x or any([need for need, what in zip(needs, names, strict=True) if not what.startswith("down")])
        # down for the gradients of hidden values; gate and up for dx, and with their biases to recompute
        found = {"down weight": hidden, "down bias": False}
        return [found.get(what, not keep or (needs_x and what.endswith("weight"))) for what in names]

    @staticmethod
    def forward(call, settings, inputs, parameters):
        arguments = (inputs[0], parameters, settings.shape, settings.keeps(call), call.options)
        y, hidden, group = call.run(_native.mlp_forward, *arguments)
        # The order of the values travels with them: a backward, or what it recomputes, may have another plan.
        return [y, *hidden, *[torch.tensor([group], device="cpu") for _ in hidden]]

    @staticmethod
    def backward(call, settings, gradients, inputs, parameters, kept, needs):
        *hidden, group = kept or [1]
        arguments = (gradients[0].contiguous(), inputs[0], hidden, int(group), parameters, settings.shape)
        return call.run(_native.mlp_backward, *arguments, needs[0], needs[1:], call.options)


@dataclass(frozen=True)
class _MLP:
    features: int
    shape: Any
    recompute: bool

    def keeps(self, call: Call) -> bool:
        """Returns whether the forward keeps hidden values for a backward."""
        return not self.recompute and any(call.needs)


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
    shards = MLPParameters(up, down, gate, up_bias, down_bias, gate_bias)
    options = Options(ring, prepared, compute_dtype, reduce_dtype, name)
    return rotate(MLP(options, shards, activation, recompute, transposed), [x])[0]
