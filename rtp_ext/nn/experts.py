"""RotatedExperts."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from rtp_ext.functional import rotated_experts
from rtp_ext.functional.mlp import ACTIVATIONS
from rtp_ext.initial import construct
from rtp_ext.nn._activations import FUNCTIONS, activation_of
from rtp_ext.nn._base import RotatedModule, mixed_class
from rtp_ext.ring import Ring
from rtp_ext.sharding import init_weights, shallow_copy


class RotatedExperts(RotatedModule, nn.Module):
    """The experts of a mixture whose stacked weights, cut along the experts, rotate; tokens stay where they are.

    Args:
        num_experts, hidden_dim, intermediate_dim: E, D and H.
        activation: swiglu, geglu, geglu_tanh, reglu; without a gate: gelu, gelu_tanh, relu, silu.
        recompute: keep no hidden value for backward, but compute it again from the shard that is passing by.
        ring: the ranks to spread the experts over. Collective: seed every rank alike.
        in_place: let the home shards themselves travel.

    Parameters, named as in `MixtralExperts` of transformers:
        gate_up_proj  [E, 2 H, D], the gate's rows first; without a gate up_proj [E, H, D]
        down_proj     [E, D, H]

    forward(hidden_states [..., D], top_k_index [..., K], top_k_weights [..., K]) -> [..., D], on this rank's own batch;
    an index equal to E is nobody's. See functional.rotated_experts.
    """

    activation: str
    recompute: bool
    down_proj: nn.Parameter

    def __init__(
        self,
        num_experts: int,
        hidden_dim: int,
        intermediate_dim: int,
        *,
        activation: str = "swiglu",
        recompute: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        ring: Ring,
        in_place: bool = False,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"RotatedExperts: expected an activation of {', '.join(ACTIVATIONS)}, got {activation!r}")
        gated = ACTIVATIONS[activation][1]
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        rows = 2 * intermediate_dim if gated else intermediate_dim
        shapes = {
            "gate_up_proj" if gated else "up_proj": (num_experts, rows, hidden_dim),
            "down_proj": (num_experts, hidden_dim, intermediate_dim),
        }

        def plain() -> None:
            for name, shape in shapes.items():
                self.register_parameter(name, nn.Parameter(torch.empty(shape, **options)))
            self.reset_parameters()

        values = construct(self, plain)
        self._rotate(ring, activation=activation, recompute=recompute, in_place=in_place)
        values.fill(ring)

    @classmethod
    def from_module(
        cls, module: nn.Module, ring: Ring, *, in_place: bool = False, recompute: bool = False
    ) -> RotatedExperts:
        """A rotated twin of an experts module of transformers, or of one made alike (meta device included).

        `module` is left as it is. The twin is an instance of its class too. Raises ValueError where `refusal` has a
        reason to.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"RotatedExperts.from_module: expected an nn.Module, got a {type(module).__name__}")
        _check(module)
        twin: Any = shallow_copy(module)
        twin.__class__ = mixed_class(cls, type(module))
        twin._rotate(ring, in_place=in_place, recompute=recompute)
        return twin

    @staticmethod
    def refusal(module: nn.Module) -> str | None:
        """Why an experts module cannot be rotated; None if it can."""
        if "ring" in module.__dict__:
            return "it already is"
        own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        up_name = "gate_up_proj" if "gate_up_proj" in own else "up_proj"
        if set(own) != {up_name, "down_proj"}:
            return f"expected the parameters gate_up_proj (or up_proj) and down_proj, got {', '.join(own) or 'none'}"
        for name, expected in _LAYOUT.items():
            actual = getattr(module, name, expected)
            if actual != expected:
                return f"expected {name} {expected}, got {actual}"
        gated = up_name == "gate_up_proj"
        if getattr(module, "has_gate", gated) != gated:
            return f"expected has_gate {gated} with {up_name}, got {module.has_gate}"
        up, down = tuple(own[up_name].shape), tuple(own["down_proj"].shape)
        if len(down) != 3 or up != (down[0], down[2] * (2 if gated else 1), down[1]):
            rows = "2 H" if gated else "H"
            return f"expected {up_name} [E, {rows}, D] and down_proj [E, D, H], got shapes {up} and {down}"
        gate = getattr(type(module), "_apply_gate", None)
        if gated and gate is not None and gate.__name__ != "_default_apply_gate":
            return f"it has a gate of its own, {gate.__qualname__}"
        others = [name for name, _ in module.named_children() if name != "act_fn"]
        if others:
            return f"expected no modules in it besides act_fn, got {', '.join(others)}"
        arguments = [*inspect.signature(type(module).forward).parameters][1:]
        if len(arguments) != 3:
            return f"expected a forward of hidden states, indices and weights, got one of {', '.join(arguments)}"
        act_fn = getattr(module, "act_fn", None)
        if activation_of(act_fn, gated) is None:
            return f"expected an act_fn that computes one of {', '.join(FUNCTIONS)}, got {act_fn}"
        return None

    def _rotate(self, ring: Ring, *, activation: str | None = None, recompute: bool = False, **options: Any) -> None:
        gated = "gate_up_proj" in self._parameters
        if activation is None:
            _check(self)
        self.activation = activation or activation_of(self.act_fn, gated)  # type: ignore[assignment]
        self.recompute = recompute
        self._adopt(ring, {"gate_up_proj" if gated else "up_proj": 0, "down_proj": 0}, **options)

    @property
    def _up(self) -> nn.Parameter:
        return self.gate_up_proj if ACTIVATIONS[self.activation][1] else self.up_proj  # type: ignore[return-value]

    def reset_parameters(self) -> None:
        """Every expert as nn.Linear initialises its weight: uniform in +-1 / sqrt(input features). Collective."""
        if not hasattr(self, "ring"):  # while it is being constructed
            _reset(self)
        else:
            init_weights(self, lambda module: _reset(module) if module is self else None)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return rotated_experts(
            self._cast(hidden_states),
            top_k_index,
            top_k_weights,
            self._up,
            self.down_proj,
            activation=self.activation,
            recompute=self.recompute,
            **self._rotation(),
        )

    def extra_repr(self) -> str:
        experts, hidden_dim, intermediate_dim = self.down_proj.shape
        return (
            f"num_experts={experts}, hidden_dim={hidden_dim}, intermediate_dim={intermediate_dim}, "
            f"activation={self.activation}, ring={self.ring.size}"
        )


def _check(module: nn.Module) -> None:
    problem = RotatedExperts.refusal(module)
    if problem is not None:
        raise ValueError(f"RotatedExperts: {type(module).__name__} cannot be rotated: {problem}")


# What modules of transformers say about themselves, and what of it is supported.
_LAYOUT = {
    "is_transposed": False,
    "is_concatenated": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "_is_expert_parallel": False,
}


def _reset(module: nn.Module) -> None:
    for parameter in module._parameters.values():
        if parameter is not None and parameter.shape[2] > 0:
            bound = parameter.shape[2] ** -0.5
            nn.init.uniform_(parameter, -bound, bound)
