"""Linear layers and experts that torchao computes in 8 bits, and their recipes. The package is never imported here."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rtp_ext.families.recognised import is_experts
from rtp_ext.families.same_forward import has_same_forward
from rtp_ext.parameters.sharding import keep_hooks

NONE = "torchao computes it in 8 bits by none of the recipes"
_FLOAT8 = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
# Settings of a Float8LinearConfig without effect on values: how weights are gathered, and what computes the products.
_FREE = ("enable_fsdp_float8_all_gather", "pad_inner_dim", "emulate", "force_recompute_fp8_weight_in_bwd")


def _of_config(layer: Any) -> str | None:
    config = layer.config
    free = {name: False for name in _FREE if hasattr(config, name)}
    for name in _FLOAT8:
        if dataclasses.replace(config, **free) == type(config).from_recipe_name(name):
            return f"float8_{name}"
    return None


def _of_mx(settings: Any) -> str | None:
    mode = {"floor": "mxfp8", "rceil": "mxfp8_rceil"}.get(settings.scale_calculation_mode.value)
    return None if settings.wgrad_with_hp else mode


def _of_blocks(layer: Any) -> str | None:
    return "float8_blockwise" if layer.block_size == 128 else None


def _of_float8_weight(config: Any) -> str | None:
    return f"float8_{config.float8_linear_recipe}" if config.float8_linear_recipe in _FLOAT8 else None


_Reader = Callable[[Any], str | None]
_LAYERS: tuple[tuple[str, str, _Reader], ...] = (
    ("torchao.float8.float8_linear", "Float8Linear", _of_config),
    ("torchao.prototype.moe_training.mxfp8_linear", "MXFP8Linear", _of_mx),
    ("torchao.prototype.blockwise_fp8_training.linear", "Float8BlockwiseLinear", _of_blocks),
)
_WEIGHTS: tuple[tuple[str, str, _Reader], ...] = (  # of plain linear layers, which call them
    ("torchao.prototype.moe_training.tensor", "Float8TrainingWeightWrapperTensor", _of_float8_weight),
    ("torchao.prototype.moe_training.tensor", "MXFP8TrainingWeightWrapperTensor", _of_mx),
)


def _of_grouped(config: Any) -> str | None:
    return "float8_rowwise" if config.float8_dtype == torch.float8_e4m3fn else None


_STACKS: tuple[tuple[str, str, _Reader], ...] = (  # of experts, whose forward calls torch._grouped_mm
    ("torchao.prototype.moe_training.tensor", "Float8TrainingWeightWrapperTensor", _of_grouped),
    ("torchao.prototype.moe_training.tensor", "MXFP8TrainingWeightWrapperTensor", _of_mx),
)


def _class(place: str, name: str) -> Any:
    return getattr(sys.modules.get(place), name, None)


def is_in_8_bits(part: nn.Module) -> bool:
    """Returns whether torchao computes a linear layer, or experts, in 8 bits in training."""
    return _found(part) is not None


def recipe_name(part: nn.Module) -> str | None:
    """Returns the name of the recipe by which torchao computes such a module; None if it is another, or none."""
    found = _found(part)
    return None if found is None else found[0]


def _found(part: Any) -> tuple[str | None] | None:
    if is_experts(part):
        return _found_experts(part)
    if not isinstance(part, nn.Linear):
        return None
    for place, name, read in _LAYERS:
        kind = _class(place, name)
        if kind is not None and isinstance(part, kind):
            return (read(part) if has_same_forward(part, kind) else None,)
    weight: Any = part._parameters.get("weight")
    for place, name, read in _WEIGHTS:
        if type(weight) is _class(place, name):
            lost = read is _of_mx and part.bias is not None  # torchao leaves out the bias
            return (read(weight.config) if has_same_forward(part, nn.Linear) and not lost else None,)
    return None


def _found_experts(part: Any) -> tuple[str | None] | None:
    if getattr(getattr(part, "config", None), "_experts_implementation", None) != "grouped_mm":
        return None  # torchao leaves other products wide
    weights = [weight for weight in part._parameters.values() if weight is not None and weight.dim() == 3]
    found = {
        read(weight.config)
        for weight in weights
        for place, name, read in _STACKS
        if type(weight) is _class(place, name)
    }
    wrapped = sum(type(weight) in {_class(place, name) for place, name, _ in _STACKS} for weight in weights)
    if wrapped == 0:
        return None
    return (found.pop() if len(found) == 1 and wrapped == len(weights) else None,)


def unwrap(part: nn.Module) -> None:
    """Replaces parameters of such a layer that are wrapped, for products or gathers in 8 bits, by plain ones."""
    for key, parameter in part._parameters.items():
        flatten = getattr(parameter, "__tensor_flatten__", None)
        if parameter is not None and flatten is not None:
            plain = nn.Parameter(getattr(parameter, flatten()[0][0]).detach(), parameter.requires_grad)
            keep_hooks(plain, parameter)
            part._parameters[key] = plain
