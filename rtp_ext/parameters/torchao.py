"""NF4 weights of the torchao package, taken as they are. The package is never imported here."""

from __future__ import annotations

import sys
from typing import Any

import torch

from rtp_ext._native import kernels
from rtp_ext.parameters.frozen import FrozenWeight, join_blocks, repeated_scales

# The formats of blocks by dtype of the weight: the numbers of the codes have this dtype, too.
_FORMATS = {torch.float32: "nf4-torchao", torch.bfloat16: "nf4-torchao-bfloat16"}
_PLACES = ("torchao.quantization", "torchao.dtypes.nf4tensor")  # from torchao 0.18 on, and before


def is_nf4(parameter: Any) -> bool:
    """Returns whether a parameter is an NF4Tensor of torchao."""
    classes = (getattr(sys.modules.get(place), "NF4Tensor", None) for place in _PLACES)
    return any(kind is not None and type(parameter) is kind for kind in classes)


def refusal_of_nf4(weight: Any) -> str | None:
    """Returns why an NF4Tensor cannot be stored in blocks; None if it can."""
    format = _FORMATS.get(weight.dtype)
    if weight.requires_grad or weight.dim() != 2 or not weight.is_contiguous():
        return f"expected a frozen, contiguous weight of 2 dimensions, got shape {tuple(weight.shape)}"
    if weight.block_size % kernels.block_layout("nf4")[0]:
        return f"expected blocks of a multiple of 64, got {weight.block_size}"
    if format is None:
        return f"expected numbers of {' or '.join(map(str, _FORMATS))}, got {weight.dtype}"
    if weight.is_meta:
        return "it is on the meta device"
    if weight.nf4.tolist() != kernels.code_numbers(format):
        return "its codes stand for other numbers than those of torchao"
    return None


def weight_of(parameter: Any) -> FrozenWeight | None:
    """Returns the description of an NF4Tensor that can be stored in blocks; None for any other parameter."""
    if not is_nf4(parameter) or refusal_of_nf4(parameter) is not None:
        return None
    return FrozenWeight(_FORMATS[parameter.dtype], tuple(parameter.shape), parameter.dtype)


def blocks_of(parameter: Any, weight: FrozenWeight) -> torch.Tensor:
    """Returns the blocks [groups, bytes] of a whole NF4Tensor, with its codes.

    Its scales, which are quantized, are dequantized first, by torchao, to the numbers of the weight's dtype with which
    it computes. Their product with the numbers of the codes, rounded to this dtype, is its `get_original_weight()`.
    """
    sizes = parameter.quantized_scalers, parameter.quantization_factor, parameter.scaler_block_size
    scales = parameter.dequantize_scalers(*sizes).float()
    codes = parameter.quantized_data.reshape(-1, kernels.block_layout("nf4")[0] // 2)
    scales = repeated_scales(scales, parameter.block_size, len(codes))
    return weight.grouped(join_blocks(codes, scales))
