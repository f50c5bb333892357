"""Recognises stacks of experts of the transformers package by what they compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rtp_ext.families.activations import FUNCTIONS
from rtp_ext.families.same_values import TINY, computes, is_of_package
from rtp_ext.functional.mlp import ACTIVATIONS


def is_experts(module: nn.Module) -> bool:
    """Returns whether a module of the transformers package holds stacked weights of experts, such as MixtralExperts."""
    if not is_of_package(module):
        return False
    weights = [module._parameters.get(name) for name in ("gate_up_proj", "up_proj", "down_proj")]
    return weights[2] is not None and any(weight is not None and weight.dim() == 3 for weight in weights[:2])


def computes_experts(
    module: Any, activation: str, *, transposed: bool, interleaved: bool, clamp: tuple[float, float] | None
) -> bool:
    """Returns whether the forward of an experts module computes what `rotated_experts` does with its parameters.
    `clamp`: alpha and limit of clamped_swiglu; None for other activations, which are named as in `rotated_experts`."""
    gated = clamp is not None or ACTIVATIONS[activation][1]
    experts, *matrix = module.down_proj.shape
    hidden, features = matrix if transposed else reversed(matrix)
    sizes = {} if module.down_proj.numel() < TINY else _small_sizes(experts, features, hidden)

    def act(x: torch.Tensor) -> torch.Tensor:
        if not gated:
            return FUNCTIONS[ACTIVATIONS[activation][0]](x)
        gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        if clamp is None:
            return FUNCTIONS[ACTIVATIONS[activation][0]](gate) * up
        alpha, limit = clamp
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1.0) * gate * torch.sigmoid(alpha * gate)

    def expected(parameters: Mapping[str, torch.Tensor], x: Any, index: Any, weights: Any) -> torch.Tensor:
        up_name = "gate_up_proj" if gated else "up_proj"
        chosen, weights = index.clamp(max=experts - 1), weights * (index < experts)
        x = x.unsqueeze(1).expand(-1, index.shape[1], -1)
        for name, function in ((up_name, act), ("down_proj", None)):
            x = torch.einsum("tki,tkio->tko" if transposed else "tki,tkoi->tko", x, parameters[name][chosen])
            bias = parameters.get(f"{name}_bias")
            x = x if bias is None else x + bias[chosen]
            x = x if function is None else function(x)
        return (x * weights.unsqueeze(-1)).sum(1)

    def inputs() -> Sequence[tuple[tuple[Any, ...], bool]]:
        """Spread over experts, small and large values; all tokens to one expert; some to none, which it may refuse."""
        width, chosen = sizes.get(features, features), min(experts, 3)
        spread = torch.rand(7, experts).topk(chosen).indices
        none = spread.clone()
        none[::2, 0] = experts
        every = [
            (spread, 0.1),
            (spread, 10.0),
            (spread, 1e3),
            (torch.zeros_like(spread[:, :1]).expand(7, 1), 1.0),
            (none, 1.0),
        ]
        return [
            (
                (
                    (scale * torch.randn(7, width, dtype=torch.float64)).requires_grad_(),
                    index,
                    torch.rand(*index.shape, dtype=torch.float64).requires_grad_(),
                ),
                index is none,
            )
            for index, scale in every
        ]

    return computes(module, inputs, expected, sizes, (activation, transposed, interleaved, clamp))


def _small_sizes(experts: int, features: int, hidden: int) -> dict[int, int]:
    """Returns small sizes with the same equalities among them, and with the number of experts, which stays."""
    half = experts % 2 == 0 and 2 * hidden == experts
    few = experts if hidden == experts else experts // 2 if half else 3
    same = {experts: experts, hidden: few, 2 * hidden: 2 * few}
    width = same.get(features) or next(each for each in (5, 7, 11, 13) if each not in same.values())
    return {hidden: few, 2 * hidden: 2 * few, features: width}
