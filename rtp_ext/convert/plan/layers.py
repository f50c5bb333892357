"""The rules that decide whether plain modules rotate, are gathered, or stay whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from rtp_ext.families.float8_layers import recipe_name
from rtp_ext.families.same_forward import has_same_forward, wraps_forward
from rtp_ext.nn import (
    RotatedConv1d,
    RotatedConv2d,
    RotatedConv3d,
    RotatedEmbedding,
    RotatedExperts,
    RotatedLinear,
    RotatedLinearCrossEntropy,
    RotatedMultiheadAttention,
)
from rtp_ext.nn.embedding import RotatedRows
from rtp_ext.nn.grouped import RotatedGroupedExperts
from rtp_ext.nn.linear import RotatedTransposedLinear
from rtp_ext.parameters.extensions import is_extended
from rtp_ext.parameters.sharded_module import ShardedModule

# The rotated class of each layer of torch.
DROP_INS: dict[type[nn.Module], type] = {
    nn.Linear: RotatedLinear,
    nn.Embedding: RotatedEmbedding,
    nn.Conv1d: RotatedConv1d,
    nn.Conv2d: RotatedConv2d,
    nn.Conv3d: RotatedConv3d,
    nn.MultiheadAttention: RotatedMultiheadAttention,
}

# The name of each rotated class in a plan; "convolution" covers all operations that are driven from Python.
_LAYERS: dict[type, str] = {
    RotatedLinear: "linear",
    RotatedTransposedLinear: "linear",
    RotatedExperts: "experts",
    RotatedGroupedExperts: "experts",
    RotatedLinearCrossEntropy: "head",
    RotatedEmbedding: "embedding",
    RotatedRows: "embedding",
    RotatedMultiheadAttention: "attention",
}


def drop_in(part: nn.Module) -> type | None:
    """Returns the rotated class for a layer of torch, or for a subclass that computes like one, or by a recipe; else
    None."""
    if wraps_forward(part, nn.Embedding) and own_parameters(part).keys() == {"weight"}:
        return RotatedRows
    if isinstance(part, nn.Linear) and recipe_name(part) is not None:
        return RotatedLinear
    return next((rotated for base, rotated in DROP_INS.items() if has_same_forward(part, base)), None)


def layer_of(rotated: type) -> str:
    """Returns the name in a plan of layers of a rotated class."""
    return next((_LAYERS[cls] for cls in rotated.__mro__ if cls in _LAYERS), "convolution")


def unlike(part: nn.Module) -> type[nn.Module] | None:
    """Returns the layer of torch from which a module inherits without computing as that layer does; else None."""
    return next((base for base in DROP_INS if isinstance(part, base)), None)


def own_parameters(part: Any) -> dict[str, torch.Tensor]:
    """Returns the parameters that a module owns itself, by name."""
    return {key: parameter for key, parameter in part._parameters.items() if parameter is not None}


def tied_parameters(modules: Iterable[tuple[str, nn.Module]]) -> set[int]:
    """Returns the ids of parameters that more than one module owns."""
    owners = Counter(id(parameter) for _, part in modules for parameter in own_parameters(part).values())
    return {parameter for parameter, count in owners.items() if count > 1}


def extended_parameters(modules: Iterable[tuple[str, nn.Module]], ignored: Collection[int]) -> set[int]:
    """Returns the ids of the parameters that are gathered through extensions of their class."""
    plain = (part for _, part in modules if not isinstance(part, ShardedModule))
    own = (parameter for part in plain for parameter in own_parameters(part).values())
    return {id(parameter) for parameter in own if id(parameter) not in ignored and is_extended(parameter)}


def stray_parameters(layer: nn.Module) -> str | None:
    """Returns why a layer of weight and bias cannot rotate, such as one with weight_norm or pruning; None if it can."""
    stray = layer._parameters.keys() - {"weight", "bias"}
    return f"it has parameters of its own: {', '.join(sorted(stray))}" if stray else None


def table_problem(part: nn.Module) -> str | None:
    """Returns why the table of an embedding can be neither rotated nor gathered; None otherwise."""
    return RotatedEmbedding.refusal(part) if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) else None
