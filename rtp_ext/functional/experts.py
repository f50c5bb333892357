"""Mixture-of-experts layers whose experts rotate."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from rtp_ext import _native
from rtp_ext.functional._call import INTEGERS, Call, ShardedParameter, expect_shape
from rtp_ext.functional._operation import Operation, Options, expect_features, rotate
from rtp_ext.functional._scaled import expect_fits, expect_takes_recipe, forget_codes
from rtp_ext.functional.dispatch import dispatched, fixed_starts, refuse
from rtp_ext.functional.mlp import ACTIVATIONS
from rtp_ext.functional.sliced import HiddenCut, Sliced, Slicing, chosen_slices, expect_whole, hidden_cuts
from rtp_ext.parameters.coded import CodedWeight, stored_codes
from rtp_ext.parameters.frozen import expect_takes_blocks, part_of_frozen
from rtp_ext.parameters.sharding import frozen_of, local_shards
from rtp_ext.recipes import Recipe, operands
from rtp_ext.recipes import recipe as recipe_of
from rtp_ext.ring import Prepared, Ring
from rtp_ext.ring.expert_ring import Division, ExpertRing
from rtp_ext.ring.mesh import ring_dim
from rtp_ext.words import ExpertActivation, RecipeName

CLAMPED_SWIGLU: Final = "clamped_swiglu"  # the gate of GPT-OSS
# ExpertActivation -> (activation of the engine, gated)
_ACTIVATIONS = {**ACTIVATIONS, CLAMPED_SWIGLU: ("silu", True)}


class Experts(Operation):
    """Stacked MLPs, cut along the experts. Inputs: x, weights of the router, index. Settings: an _Experts."""

    key = label = "experts"

    def __init__(
        self,
        options: Options,
        shards: Sequence[torch.Tensor | None],
        activation: str,
        *,
        transposed: bool = False,
        interleaved: bool = False,
        clamp: tuple[float, float] | None = None,
        recompute: bool = False,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__(options, *shards)  # up, its bias, down, its bias; the gate, where it is a parameter of its own
        self.activation, self.transposed, self.interleaved = activation, transposed, interleaved
        self.clamp, self.recompute, self.recipe = clamp, recompute, recipe
        self.sliced = False  # its experts are slices, made in each call
        self.of_part = False  # its tensors are local ones of parameters, whose changes their versions show
        self.starts: tuple[int, ...] = ()  # of the rows of every expert, and the end, where ranks send fixed numbers

    def run(self, inputs: Sequence[Any], owner: Any = None) -> torch.Tensor:
        """Returns the result for x, weights and index. Where the ring divides experts, tokens travel to them, and the
        experts of this rank's part rotate over a ring of their own."""
        experts, name = self.options.ring.experts, self.options.name
        if experts is None:
            return rotate(self, inputs, owner)[0]
        try:
            twin, division = self._of_part(experts)
            x, weights, index = self._checked(division, inputs)
        except (TypeError, ValueError, IndexError) as error:
            refuse(experts, name, error)
            raise

        def compute(rows: torch.Tensor, numbers: torch.Tensor, ones: torch.Tensor) -> torch.Tensor:
            if division.sliced:
                twin.given = self._slices(experts, division, twin.given)
                numbers = chosen_slices(numbers, max(division.parts), experts.inner.size)
                ones = ones.expand(numbers.shape)
            return rotate(twin, [rows, ones, numbers])[0]

        wanted = [each.requires_grad for each in twin.parameters()]
        return dispatched(experts, division, x, index, weights, compute, wanted, name).reshape(inputs[0].shape)

    def run_arrived(self, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the outputs [n, D] of rows [n, D] that other code has brought to the ranks of their experts. numbers
        [n, 1]: of the expert among those of this rank's part, or of all where the ring divides none; their number
        selects none."""
        experts, ones = self.options.ring.experts, rows.new_ones(numbers.shape, dtype=torch.float32)
        if experts is None:
            return rotate(self, [rows, ones, numbers])[0]
        twin, _ = self._of_part(experts)
        return rotate(twin, [rows, ones, numbers])[0]

    def _of_part(self, experts: ExpertRing) -> tuple[Experts, Division]:
        """Returns the operation of this rank's part of the experts, and their division."""
        options, given = self.options, self.parameters()
        whole = frozen_of(given[0]) or given[0]
        division = experts.divide(whole.shape[0])
        expect_whole(division, self.recipe, options.name)
        for param in self._params(division.sliced):
            each = param.tensor
            on_mesh = isinstance(each, DTensor) and each.device_mesh == options.ring.parameter_mesh
            if not on_mesh or ring_dim(each) != param.dim:
                raise ValueError(
                    f"{options.name}: where dims have expert, expected parameters that are DTensors on the mesh of the "
                    f"ring, here cut along {param.dim}, got a {type(each).__name__} of shape {tuple(each.shape)}"
                )
        twin = copy.copy(self)
        twin.sliced = division.sliced
        twin.options = options._replace(ring=experts.inner, prepared=options.prepared and options.prepared.divided)
        # The ring of this part averages over its own ranks.
        shards = iter(local_shards(given, scale=1 / experts.size))
        parts = [
            None if each is None else part_of_frozen(each, next(shards), division.parts[experts.rank])
            for each in self.given
        ]
        twin.given, twin.of_part, twin.starts = tuple(parts), True, fixed_starts(experts, division)
        return twin, division

    def _checked(self, division: Division, inputs: Sequence[Any]) -> Sequence[torch.Tensor]:
        options, given = self.options, self.parameters()
        whole = frozen_of(given[0]) or given[0]
        call = Call.of(
            given[0],
            ring=options.ring,
            name=options.name,
            compute_dtype=options.compute_dtype,
            reduce_dtype=options.reduce_dtype,
        )
        if division.sliced:  # sizes that differ may have slices of equal sizes
            params = self._params(True)
            for param in params:
                param.check(call)
            self._expect_sizes(call, params, [tuple(param.tensor.shape) for param in params])
        operands = self.operands(call, inputs)
        expect_features(call, operands[0], whole.shape[1 if self.transposed else 2])
        _expect_choices(call, division.experts, operands[2])
        return operands

    def _cuts(self) -> dict[str, HiddenCut]:
        cuts = hidden_cuts(gated=self._joined(), interleaved=self.interleaved, transposed=self.transposed)
        return cuts | ({"gate weight": cuts["up weight"]} if len(self.given) > len(cuts) else {})

    def _joined(self) -> bool:
        """Returns whether up has the rows of a gate."""
        return _ACTIVATIONS[self.activation][1] and len(self.given) < 5

    def _params(self, sliced: bool = False) -> list[ShardedParameter]:
        """Returns the parameters, as they are cut. sliced: see Division."""
        return [
            ShardedParameter(what, tensor, cut.dim if sliced else 0, 3 if what.endswith("weight") else 2)
            for (what, cut), tensor in zip(self._cuts().items(), self.given, strict=True)
            if tensor is not None
        ]

    def _expect_sizes(
        self, call: Call, params: Sequence[ShardedParameter], shapes: Sequence[tuple[int, ...]]
    ) -> tuple[int, int, int]:
        """Returns the numbers of experts, features, and hidden features. Raises ValueError where the parameters, of
        whole `shapes`, do not fit."""
        experts, *matrix = shapes[0]
        features, up_rows = matrix if self.transposed else reversed(matrix)
        joined = self._joined()
        if joined and up_rows % 2:
            raise ValueError(f"{call.name}: expected an even number of rows of gate and up, got {up_rows}")
        hidden = up_rows // 2 if joined else up_rows
        expected = {
            "up weight": shapes[0],
            "up bias": (experts, up_rows),
            "down weight": (experts, hidden, features) if self.transposed else (experts, features, hidden),
            "down bias": (experts, features),
            "gate weight": shapes[0],
        }
        for param, whole in zip(params, shapes, strict=True):
            expect_shape(call, param, whole, expected[param.what])
        return experts, features, hidden

    def _slices(
        self, experts: ExpertRing, division: Division, shards: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...]:
        """Returns this rank's slice of each parameter, differentiable, for what it has at home. Collective."""
        ring, known, slicings = self.options.ring, experts.slicings, []
        for cut, whole in zip(self._cuts().values(), self.given, strict=True):
            if whole is None:
                continue
            key = (division.experts, cut, tuple(whole.shape))
            if key not in known:
                known[key] = Slicing(ring, division, cut, whole.shape)
            slicings.append(known[key])
        homes = [shard for shard in shards if shard is not None]
        made = iter(Sliced.apply(slicings, ring, self.options.name, *homes))
        return tuple(None if whole is None else next(made) for whole in self.given)

    def operands(self, call: Call, inputs: Sequence[Any]) -> list[torch.Tensor]:
        x, (_, weights, index), name = call.operand(inputs[0]), inputs, call.name
        if not isinstance(index, torch.Tensor) or index.dtype not in INTEGERS:
            got = getattr(index, "dtype", type(index).__name__)
            raise TypeError(f"{name}: expected an index of integers, got {got}")
        if not isinstance(weights, torch.Tensor) or not weights.is_floating_point():
            kind = getattr(weights, "dtype", type(weights).__name__)
            raise TypeError(f"{name}: expected weights of floating-point numbers, got {kind}")
        if index.dim() != x.dim() or index.shape[:-1] != x.shape[:-1] or weights.shape != index.shape:
            raise ValueError(
                f"{name}: expected index and weights of shape ({', '.join(map(str, x.shape[:-1]))}, K), got "
                f"{tuple(index.shape)} and {tuple(weights.shape)}"
            )
        return [call.rows(x), call.rows(weights), call.rows(index).to(torch.int64).contiguous()]

    def prepare(self, call: Call, inputs: Sequence[torch.Tensor]) -> _Experts:
        function, gated = _ACTIVATIONS[self.activation]
        params, transposed = self._params(), self.transposed
        frozen = tuple([frozen_of(param.tensor) for param in params])
        expect_takes_blocks(call.name, frozen, False, call.ring.in_place)
        recipe, gpu = self.recipe, call.ring.device.type == "cuda"
        if recipe is not None:
            matrices = [each for param, each in zip(params, frozen, strict=True) if param.dims == 3]
            self._expect_takes_recipe(call, recipe, any(frozen) and not stored_codes(call.name, matrices, recipe))
        blocks = {param.what: each for param, each in zip(params, frozen, strict=True) if each is not None}
        formats = {what: each.format for what, each in blocks.items() if not isinstance(each, CodedWeight)}

        def derive(shapes: list[tuple[int, ...]]) -> _Experts:
            shapes = [shape if each is None else each.shape for shape, each in zip(shapes, frozen, strict=True)]
            experts, features, hidden = self._expect_sizes(call, params, shapes)
            products = {}
            if recipe is not None:
                for outputs, inner in (((1 + gated) * hidden, features), (features, hidden)):
                    expect_fits(call, recipe.refusal(outputs, inner, gpu=gpu))
                products = {"codes": recipe.shard_planes(gpu=gpu), "scaled": operands(recipe, gpu=gpu)}
            shape = _native.ExpertsShape(
                experts=experts,
                features=features,
                hidden_features=hidden,
                gated=gated,
                up_bias=self.given[1] is not None,
                down_bias=self.given[3] is not None,
                transposed=transposed,
                interleaved=self.interleaved,
                gate_apart=len(self.given) > 4,
                activation=function,
                clamped=None if self.clamp is None else _native.ClampedGate(alpha=self.clamp[0], limit=self.clamp[1]),
                up_frozen=formats.get("up weight"),
                down_frozen=formats.get("down weight"),
                starts=list(self.starts),
                **products,
            )
            forgets = recipe is not None and not self.of_part
            return _Experts(experts, features, shape, self.recompute, forgets)

        facts: tuple[tuple[str, Any], ...] = (
            ("frozen", frozen),
            ("activation", self.activation),
            ("recompute", self.recompute),
            ("transposed", transposed),
            ("interleaved", self.interleaved),
            ("clamped", self.clamp),
        )
        if self.starts:
            facts = (*facts, ("starts", self.starts))
        if recipe is not None:
            facts = (*facts, ("recipe", recipe.name))
        return self.agree(call, params, inputs, facts, derive, fresh=self.sliced)

    def _expect_takes_recipe(self, call: Call, recipe: Recipe, in_blocks: bool) -> None:
        if self.recompute or in_blocks:
            other = "recompute=True" if self.recompute else "weights in blocks"
            raise ValueError(f"{call.name}: {other} cannot be combined with recipe {recipe.name}")
        expect_takes_recipe(call, recipe)

    def check(self, call: Call, settings: _Experts, inputs: Sequence[torch.Tensor]) -> None:
        expect_features(call, inputs[0], settings.features)
        _expect_choices(call, settings.experts, inputs[2])

    @staticmethod
    def reads(call: Call, settings: _Experts) -> Sequence[bool]:
        needs_x, needs_weights, *needs = call.needs
        keep = settings.keeps(call)
        names = [param.what for param in call.params]
        needs_up = any([need for need, what in zip(needs, names, strict=True) if what.startswith(("up", "gate"))])
        read = {
            "up weight": needs_x or not keep,  # for dx, and with its bias to recompute
            "up bias": not keep,
            "down weight": needs_x or needs_weights or needs_up,  # for hidden values, and the router's weights
            "down bias": needs_weights,
            "gate weight": needs_x or not keep,
        }
        return [read[what] for what in names]

    @staticmethod
    def forward(call, settings, inputs, parameters):
        if settings.forgets:
            forget_codes(call, parameters)
        arguments = (*inputs, parameters, settings.shape, settings.keeps(call), call.options)
        routed = call.run(_native.experts_forward, *arguments)
        starts = torch.tensor(routed.starts, device="cpu")
        return [routed.y, routed.order, routed.ends, starts, *([] if routed.kept is None else [routed.kept])]

    @staticmethod
    def backward(call, settings, gradients, inputs, parameters, kept, needs):
        (order, ends, starts, *hidden), (x, weights, _) = kept, inputs
        routed = _native.ExpertsResult(hidden[0] if hidden else None, order, ends, starts.tolist())
        tensors = (gradients[0].contiguous(), x, weights, routed, parameters)
        wanted = (*needs[:2], *needs[3:])
        dx, dweights, *of_parameters = call.run(
            _native.experts_backward, *tensors, settings.shape, wanted, call.options
        )
        return dx, dweights, None, *of_parameters


def _expect_choices(call: Call, experts: int, index: torch.Tensor) -> None:
    if index.device.type == "cpu" and index.numel() and (int(index.min()) < 0 or int(index.max()) > experts):
        found = f"{int(index.min())} to {int(index.max())}"
        raise IndexError(f"{call.name}: expected an index in [0, {experts}], got {found}")


@dataclass(frozen=True)
class _Experts:
    experts: int
    features: int
    shape: Any
    recompute: bool
    forgets: bool  # codes of plain tensors

    def keeps(self, call: Call) -> bool:
        """Returns whether the forward keeps hidden values for a backward."""
        return not self.recompute and any(call.needs)


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
    recipe: RecipeName | None = None,
    ring: Ring,
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
        recipe: as in `rotated_linear`: each expert is two linear layers by itself, whose codes and scales, and those of
            the rows of its tokens, are its own. Not with recompute.

    On a ring that divides experts (RotationDims(expert=...)) parameters are DTensors on its mesh, cut along H where
    there are fewer experts than ranks; tokens travel to the ranks of their experts, and outputs back. Collective then
    over all its ranks.

    up and down may be the parameters of frozen weights in blocks, as in `rotated_linears`. Biases travel in the same
    hops. The gradient of `weights` is exact. On CUDA a forward synchronises once, because the host reads the number of
    tokens of each expert, but not where dims have expert_capacity. Raises IndexError for an index above E; everything
    else is as in `rotated_linear`.
    Source: RTP, arXiv 2311.01635 (expert partition).
    """
    if activation not in _ACTIVATIONS:
        raise ValueError(f"{name}: expected an activation of {', '.join(_ACTIVATIONS)}, got {activation!r}")
    if interleaved and not _ACTIVATIONS[activation][1]:
        raise ValueError(f"{name}: interleaved expected an activation with a gate, got {activation!r}")
    options = Options(ring, prepared, compute_dtype, reduce_dtype, name)
    use = Experts(
        options,
        (up, up_bias, down, down_bias),
        activation,
        transposed=transposed,
        interleaved=interleaved,
        clamp=(float(alpha), float(limit)) if activation == CLAMPED_SWIGLU else None,
        recompute=recompute,
        recipe=None if recipe is None else recipe_of(recipe),
    )
    return use.run([x, weights, index])
