"""Recognises MLPs of the transformers package by what they compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rtp_ext.families.activations import FUNCTIONS
from rtp_ext.families.same_values import TINY, computes
from rtp_ext.functional.mlp import ACTIVATIONS


class _Mark(nn.Module):
    """Stands for a dropout: shows in the values where in the forward it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * x + 1.0


def computes_mlp(
    module: Any,
    kind: str,
    paths: Sequence[str | None],
    activation: str,
    dropouts: Sequence[str],
    transposed: bool,
) -> bool:
    """Returns whether a module computes an MLP and nothing else, or what `kind` (of `MLPBlock`) adds to it.

    paths: of gate (or None), up and down. dropouts: paths of all dropouts, of which none but the one that belongs to
    the kind may be called. transposed: whether weights are stored as [in_features, out_features].
    """
    gate, up, down = paths
    part = module.get_submodule(down)
    outputs, hidden = reversed(part.weight.shape) if transposed else part.weight.shape
    first = module.get_submodule(up).weight.shape
    features = first[0] if transposed else first[1]
    if (first[1] if transposed else first[0]) != hidden:
        return False
    sizes: dict[int, int] = {}
    if part.weight.numel() > TINY:
        for extent, few in ((features, 5), (hidden, 3), (outputs, 7)):
            sizes.setdefault(extent, few)
    function = FUNCTIONS[ACTIVATIONS[activation][0]]

    def linear(parameters: Mapping[str, torch.Tensor], path: str | None, x: torch.Tensor) -> torch.Tensor:
        weight = parameters[f"{path}.weight"]
        return F.linear(x, weight.t() if transposed else weight, parameters.get(f"{path}.bias"))

    def expected(parameters: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if gate is None:
            y = function(linear(parameters, up, x))
        else:
            y = function(linear(parameters, gate, x)) * linear(parameters, up, x)
        y = linear(parameters, down, y)
        if kind != "forward":
            y = 2.0 * y + 1.0
        if kind != "bert":
            return y
        norm = module.output.LayerNorm
        scale, shift = (parameters.get(f"output.LayerNorm.{key}") for key in ("weight", "bias"))
        return F.layer_norm(y + x, y.shape[-1:], scale, shift, norm.eps)

    def inputs() -> Sequence[tuple[tuple[Any, ...], bool]]:
        width = sizes.get(features, features)
        shapes = (((7, width), 0.1), ((2, 3, width), 10.0), ((5, width), 1e3))
        return [
            (((scale * torch.randn(shape, dtype=torch.float64)).requires_grad_(),), False) for shape, scale in shapes
        ]

    return computes(
        module,
        inputs,
        expected,
        sizes,
        (kind, *paths, activation, transposed),
        method="feed_forward_chunk" if kind == "bert" else "forward",
        instead={path: _Mark() for path in dropouts},
        varies=kind != "bert",
    )
