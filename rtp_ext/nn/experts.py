"""RotatedExperts."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from rtp_ext.families.recognised import computes_experts
from rtp_ext.families.same_forward import FUNCTIONS, activation_of
from rtp_ext.functional.experts import CLAMPED_SWIGLU, Experts
from rtp_ext.functional.mlp import ACTIVATIONS
from rtp_ext.functional.sliced import HiddenCut, expect_whole, hidden_cuts
from rtp_ext.nn._base import RotatedModule
from rtp_ext.parameters.initial import construct
from rtp_ext.parameters.sharded_module import mixed_class
from rtp_ext.parameters.sharding import init_weights, shallow_copy
from rtp_ext.recipes import Recipe
from rtp_ext.recipes import recipe as recipe_of
from rtp_ext.ring import Ring
from rtp_ext.ring.expert_ring import whole_experts
from rtp_ext.words import Activation, ExpertActivation, RecipeName


class RotatedExperts(RotatedModule, nn.Module):
    """The experts of a mixture; their stacked weights, cut along the experts, rotate, and tokens stay on their rank.

    Args:
        num_experts, hidden_dim, intermediate_dim: E, D and H.
        activation: swiglu, geglu, geglu_tanh, reglu; without a gate: gelu, gelu_tanh, relu, silu.
        bias: whether both layers of every expert have one.
        recompute: save no hidden values for backward, but recompute them from the visiting shard.
        recipe: of products in 8 bits; see functional.rotated_experts.
        ring: the ranks to shard the experts over. Collective: use the same seed on every rank.

    Parameters, named as in `MixtralExperts` of transformers:

        gate_up_proj  [E, 2 H, D], the gate's rows first; without a gate up_proj [E, H, D]
        down_proj     [E, D, H]

    and with biases gate_up_proj_bias [E, 2 H] (up_proj_bias [E, H]) and down_proj_bias [E, D].

    forward(hidden_states [..., D], top_k_index [..., K], top_k_weights [..., K]) -> [..., D], on this rank's own batch;
    an index equal to E selects no expert. See functional.rotated_experts. On a ring that divides experts
    (RotationDims(expert=...)) tokens travel to them, and experts of which there are fewer than ranks are cut along H.
    """

    activation: ExpertActivation
    recompute: bool
    down_proj: nn.Parameter
    recipe: Recipe | None = None
    clamp: tuple[float, float] | None = None  # alpha and limit of clamped_swiglu
    # Attributes of experts modules of transformers: whether weights are [E, D, 2 H] and [E, H, D]; whether the rows of
    # gate precede those of up, instead of alternating with them.
    is_transposed = False
    is_concatenated = True

    def __init__(
        self,
        num_experts: int,
        hidden_dim: int,
        intermediate_dim: int,
        *,
        activation: Activation = "swiglu",
        bias: bool = False,
        recompute: bool = False,
        recipe: RecipeName | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        ring: Ring,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"RotatedExperts: expected an activation of {', '.join(ACTIVATIONS)}, got {activation!r}")
        gated = ACTIVATIONS[activation][1]
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        rows = 2 * intermediate_dim if gated else intermediate_dim
        up = "gate_up_proj" if gated else "up_proj"
        shapes: dict[str, tuple[int, ...]] = {up: (num_experts, rows, hidden_dim)}
        if bias:
            shapes[f"{up}_bias"] = (num_experts, rows)
        shapes["down_proj"] = (num_experts, hidden_dim, intermediate_dim)
        if bias:
            shapes["down_proj_bias"] = (num_experts, hidden_dim)

        def plain() -> None:
            for name, shape in shapes.items():
                self.register_parameter(name, nn.Parameter(torch.empty(shape, **options)))
            self.reset_parameters()

        values = construct(self, plain)
        self._rotate(ring, activation=activation, recompute=recompute, recipe=recipe and recipe_of(recipe))
        values.fill(ring)

    @classmethod
    def from_module(
        cls, module: nn.Module, ring: Ring, *, recompute: bool = False, recipe: RecipeName | None = None
    ) -> RotatedExperts:
        """Returns a rotated copy of an experts module of transformers, or of a compatible one (meta device included).

        `module` does not change. The copy is an instance of its class too. Raises ValueError if `refusal(module)` is
        not None.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"RotatedExperts.from_module: expected an nn.Module, got a {type(module).__name__}")
        _check(module)
        twin: Any = shallow_copy(module)
        twin.__class__ = mixed_class(cls, type(module))
        twin._rotate(ring, recompute=recompute, recipe=recipe and recipe_of(recipe))
        return twin

    @staticmethod
    def refusal(module: nn.Module) -> str | None:
        """Returns why an experts module cannot be rotated; None if it can."""
        if "ring" in module.__dict__:
            return "it already is"
        own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        up_name = "gate_up_proj" if "gate_up_proj" in own else "up_proj"
        weights, biases = {up_name, "down_proj"}, {f"{up_name}_bias", "down_proj_bias"}
        if set(own) not in (weights, weights | biases):
            return (
                "expected the parameters gate_up_proj (or up_proj) and down_proj, with a _bias of both or of neither, "
                f"got {', '.join(own) or 'none'}"
            )
        gated, biased = up_name == "gate_up_proj", len(own) > 2
        clamp = _clamped_gate(module) if gated else None
        for name, expected in _LAYOUT.items():
            actual = getattr(module, name, expected)
            if actual != expected and not (name == "is_concatenated" and clamp):
                return f"expected {name} {expected}, got {actual}"
        for name, expected in (("has_gate", gated), ("has_bias", biased)):
            if getattr(module, name, expected) != expected:
                return f"expected {name} {expected} with {', '.join(own)}, got {getattr(module, name)}"
        shapes = {name: tuple(parameter.shape) for name, parameter in own.items()}
        if shapes != _expected_shapes(up_name, shapes["down_proj"], _is_transposed(module), gated, biased):
            rows = "2 H" if gated else "H"
            up, down = ("D, " + rows, "H, D") if _is_transposed(module) else (rows + ", D", "D, H")
            with_biases = f" and biases [E, {rows}] and [E, D]" if biased else ""
            return (
                f"expected {up_name} [E, {up}] and down_proj [E, {down}]{with_biases}, got shapes "
                f"{' and '.join(map(str, shapes.values()))}"
            )
        gate = getattr(type(module), "_apply_gate", None)
        if gated and clamp is None and gate is not None and gate.__name__ != "_default_apply_gate":
            return f"it has a gate of its own, {gate.__qualname__}"
        others = [name for name, _ in module.named_children() if name != "act_fn"]
        if others:
            return f"expected no modules in it besides act_fn, got {', '.join(others)}"
        arguments = [*inspect.signature(type(module).forward).parameters][1:]
        if len(arguments) != 3:
            return f"expected a forward of hidden states, indices and weights, got one of {', '.join(arguments)}"
        act_fn = getattr(module, "act_fn", None)
        activation = CLAMPED_SWIGLU if clamp else activation_of(act_fn, gated)
        if activation is None:
            return f"expected an act_fn that computes one of {', '.join(FUNCTIONS)}, got {act_fn}"
        options: dict[str, Any] = {
            "transposed": _is_transposed(module),
            "interleaved": not getattr(module, "is_concatenated", True),
            "clamp": clamp,
        }
        if not computes_experts(module, activation, **options):
            return "its forward computes something else than rotated_experts with these parameters"
        return None

    def _rotate(
        self,
        ring: Ring,
        *,
        activation: ExpertActivation | None = None,
        recompute: bool = False,
        recipe: Recipe | None = None,
        **options: Any,
    ) -> None:
        gated = "gate_up_proj" in self._parameters
        if activation is None:  # an existing module, which `refusal` has accepted
            self.clamp = _clamped_gate(self) if gated else None
            activation = CLAMPED_SWIGLU if self.clamp else activation_of(self.act_fn, gated)
        self.activation = activation  # type: ignore[assignment]
        self.recompute, self.recipe = recompute, recipe
        if ring.experts is not None:
            division = ring.experts.divide(self.down_proj.shape[0])
            expect_whole(division, recipe, options.get("name") or type(self).__name__)
        places = None if ring.experts is None else ring.experts.places
        self._adopt(ring, self.cuts(self, places), **options)

    @staticmethod
    def cuts(module: nn.Module, places: Sequence[tuple[int, int]] | None) -> dict[str, int]:
        """Returns the dimension that each parameter of an experts module is cut along. places: see ExpertMesh; None:
        experts are not divided."""
        names = [name for name, parameter in module._parameters.items() if parameter is not None]
        count = module.get_parameter("down_proj").shape[0]
        if places is None or whole_experts(count, places):
            return dict.fromkeys(names, 0)
        return {name: cut.dim for name, cut in sliced_parameters(names, _is_transposed(module)).items()}

    @property
    def _up_name(self) -> str:
        return "gate_up_proj" if "gate_up_proj" in self._parameters else "up_proj"

    def reset_parameters(self) -> None:
        """Initialises experts like nn.Linear: weights and biases uniform in +-1 / sqrt(input features). Collective."""
        if not hasattr(self, "ring"):  # under construction
            _reset(self)
        else:
            init_weights(self, lambda module: _reset(module) if module is self else None)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return self._operation().run([self._cast(hidden_states), top_k_weights, top_k_index], self)

    def _operation(self, key: str = "") -> Experts:
        names = (self._up_name, f"{self._up_name}_bias", "down_proj", "down_proj_bias")
        return Experts(
            self._options(),
            [getattr(self, name, None) for name in names],
            self.activation,
            transposed=self.is_transposed,
            interleaved=not self.is_concatenated,
            clamp=self.clamp,
            recompute=self.recompute,
            recipe=self.recipe,
        )

    def extra_repr(self) -> str:
        experts, *matrix = self.down_proj.shape
        hidden_dim, intermediate_dim = reversed(matrix) if self.is_transposed else matrix
        return (
            f"num_experts={experts}, hidden_dim={hidden_dim}, intermediate_dim={intermediate_dim}, "
            f"activation={self.activation}, ring={self.ring.size}"
            f"{'' if self.recipe is None else f', recipe={self.recipe.name}'}"
        )


def sliced_parameters(names: Iterable[str], transposed: bool) -> dict[str, HiddenCut]:
    """Returns the cuts of the parameters of experts along their hidden features, by their names in a module."""
    found = {}
    for name in names:
        side = "down" if name.startswith("down") else "up"
        cuts = hidden_cuts(gated=name.startswith("gate"), interleaved=False, transposed=transposed)
        found[name] = cuts[f"{side} {'bias' if name.endswith('_bias') else 'weight'}"]
    return found


def _check(module: nn.Module) -> None:
    problem = RotatedExperts.refusal(module)
    if problem is not None:
        raise ValueError(f"RotatedExperts: {type(module).__name__} cannot be rotated: {problem}")


def _is_transposed(module: nn.Module) -> bool:
    return bool(getattr(module, "is_transposed", False))


def _expected_shapes(
    up_name: str, down: tuple[int, ...], transposed: bool, gated: bool, biased: bool
) -> dict[str, tuple[int, ...]] | None:
    """Returns the shapes of all parameters for down_proj's shape [E, D, H] ([E, H, D] if transposed); None if `down`
    does not have three dimensions."""
    if len(down) != 3:
        return None
    experts, features, hidden = (down[0], down[2], down[1]) if transposed else down
    rows = 2 * hidden if gated else hidden
    shapes: dict[str, tuple[int, ...]] = {}
    shapes[up_name] = (experts, features, rows) if transposed else (experts, rows, features)
    shapes["down_proj"] = down
    if biased:
        shapes |= {f"{up_name}_bias": (experts, rows), "down_proj_bias": (experts, features)}
    return shapes


def _clamped_gate(module: Any) -> tuple[float, float] | None:
    """Returns alpha and limit of the gate, of a class of transformers, where it computes the same values in float64 as
    that of GPT-OSS; else None."""
    gate = getattr(type(module), "_apply_gate", None)
    if gate is None or not gate.__module__.startswith("transformers.models."):
        return None
    for prefix in ("", "swiglu_"):
        alpha, limit = getattr(module, f"{prefix}alpha", None), getattr(module, f"{prefix}limit", None)
        if isinstance(alpha, (int, float)) and isinstance(limit, (int, float)):
            return (float(alpha), float(limit)) if _clamps(module, gate, alpha, limit) else None
    return None


def _clamps(module: Any, gate: Any, alpha: float, limit: float) -> bool:
    points = torch.linspace(-3.0, 3.0, 61, dtype=torch.float64, device="cpu") * max(abs(limit), 1.0)
    first, second = (side.reshape(-1) for side in torch.meshgrid(points, points, indexing="ij"))
    bounded = first.clamp(max=limit)
    expected = (second.clamp(-limit, limit) + 1.0) * bounded * torch.sigmoid(alpha * bounded)
    interleaved = not getattr(module, "is_concatenated", True)
    both = torch.stack([first, second], -1).flatten(-2) if interleaved else torch.cat([first, second], -1)
    with torch.no_grad():
        actual = gate(module, both)
    return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=1e-9, atol=1e-9)


# Attributes of experts modules of transformers, with their supported values.
_LAYOUT = {
    "is_concatenated": True,
    "has_post_expert_norm": False,
    "_is_expert_parallel": False,
}


def _reset(module: nn.Module) -> None:
    """Initialises weights and biases uniformly; a bias has the bound of its weight."""
    inputs = 1 if _is_transposed(module) else 2
    for name, parameter in module._parameters.items():
        weight = module._parameters[name.removesuffix("_bias")]
        if parameter is not None and weight is not None and weight.shape[inputs] > 0:
            bound = weight.shape[inputs] ** -0.5
            nn.init.uniform_(parameter, -bound, bound)
