"""Maps activation functions and modules to activations of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rtp_ext.functional.mlp import ACTIVATIONS
from rtp_ext.words import Activation

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


_PLAIN = (F.relu, F.gelu, F.silu, torch.relu)
LIBRARIES = ("torch.nn.modules.activation", "transformers.activations")


def activation_of(function: Any, gated: bool) -> Activation | None:
    """Returns the name of an activation in `rotated_mlp` and `rotated_experts`; None if they do not support it.

    Functions and modules of torch and transformers, without parameters, buffers or submodules, are identified by their
    values in float64. Other code is never matched: it may have effects that its values do not show.
    """
    if isinstance(function, nn.Module):
        known = type(function).__module__ in LIBRARIES
        if not known or function._parameters or function._buffers or function._modules:
            return None
    elif function not in _PLAIN:
        return None
    points = torch.linspace(-12.0, 12.0, 97, dtype=torch.float64, device="cpu")
    points = torch.cat([points, points * 1000.0])
    with torch.no_grad():
        values = function(points.clone())
    plain = next((name for name, known in FUNCTIONS.items() if _same(values, known(points))), None)
    return next((name for name, known in ACTIVATIONS.items() if known == (plain, gated)), None)


def _same(values: Any, known: torch.Tensor) -> bool:
    if not isinstance(values, torch.Tensor) or values.shape != known.shape or values.dtype != known.dtype:
        return False
    return torch.allclose(values, known, rtol=1e-9, atol=1e-9)
