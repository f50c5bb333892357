"""4-bit weights of the bitsandbytes package, taken as they are. The package is never imported here."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from rtp_ext._native import kernels
from rtp_ext.parameters.frozen import FrozenWeight, join_blocks, repeated_scales

_ZERO = {"nf4": 7 << 4 | 7, "fp4": 0}  # two codes of zero


def is_linear_4bit(module: nn.Module) -> bool:
    """Returns whether a module is a linear layer of bitsandbytes with a weight in 4 bits."""
    package: Any = sys.modules.get("bitsandbytes.nn")
    return package is not None and type(module) in (package.Linear4bit, package.LinearNF4, package.LinearFP4)


def refusal_of_4bit(weight: Any) -> str | None:
    """Returns why the weight of such a layer cannot be stored in blocks; None if it can."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return "its weight is not quantized yet: move the model to a device before"
    if getattr(state, "packing_format_for_cpu", False):
        return "a forward in evaluation has repacked its weight: convert the model before"
    if state.quant_type not in _ZERO or state.blocksize % kernels.block_layout("nf4")[0]:
        return (
            f"expected nf4 or fp4 in blocks of a multiple of 64, got {state.quant_type} in blocks of {state.blocksize}"
        )
    if len(state.shape) != 2 or weight.requires_grad:
        return f"expected a frozen weight of 2 dimensions, got shape {tuple(state.shape)}"
    return None


def weight_of(parameter: Any) -> FrozenWeight | None:
    """Returns the description of a 4-bit weight of bitsandbytes; None for any other parameter."""
    state = getattr(parameter, "quant_state", None)
    return None if state is None else FrozenWeight(state.quant_type, tuple(state.shape), state.dtype)


def blocks_of(parameter: Any, weight: FrozenWeight) -> torch.Tensor:
    """Returns the blocks [groups, bytes] of a whole 4-bit weight, with its codes and its scales.

    Scales that are quantized themselves are dequantized first, by bitsandbytes, to the float32 numbers with which it
    computes. A larger block becomes several blocks of 64 with its scale.
    """
    state = parameter.quant_state
    scales = state.absmax
    if state.nested:
        functional: Any = sys.modules["bitsandbytes.functional"]
        scales = functional.dequantize_blockwise(scales, state.state2) + state.offset
    numbers, _ = weight.block
    codes = parameter.detach().as_subclass(torch.Tensor).contiguous().view(torch.uint8).reshape(-1)
    count = -(-2 * codes.numel() // numbers)
    codes = torch.cat([codes, codes.new_full((count * numbers // 2 - codes.numel(),), _ZERO[weight.format])])
    return weight.grouped(join_blocks(codes.view(count, -1), repeated_scales(scales, state.blocksize, count)))
