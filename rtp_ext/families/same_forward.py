"""Layers of torch, subclasses with the same forward, and activations of the engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from rtp_ext.families.sources import adds_to_forward
from rtp_ext.functional.mlp import ACTIVATIONS
from rtp_ext.parameters.sharded_module import ShardedModule
from rtp_ext.words import Activation

# Methods that take part in a forward of torch's layers.
_CALLS = {
    "forward",
    "__call__",
    "_call_impl",
    "_wrapped_call_impl",
    "__getattr__",
    "__getattribute__",
    "_conv_forward",
    "merge_masks",
}


def has_same_forward(module: Any, base: Any) -> bool:
    """Returns whether a module is a `base`, a layer class of torch, or of a subclass with the same forward.

    A subclass may redefine initialisation, printing and loading, and may have more attributes; it must not redefine an
    attribute that the forward of `base` reads. An instance whose forward was replaced computes in its own way.
    """
    if type(module) is base:
        return not _CALLS & module.__dict__.keys()
    return _keeps(module, base, _CALLS)


def wraps_forward(module: Any, base: Any) -> bool:
    """Returns whether a module is of a subclass of `base` that differs as `has_same_forward` allows, and in a forward
    that calls the one of `base` and reads no weight itself: a rotated layer may take the place of `base` below it."""
    return _keeps(module, base, _CALLS - {"forward"}) and adds_to_forward(type(module), base)


def _keeps(module: Any, base: Any, calls: set[str]) -> bool:
    """Returns whether a module is of a subclass of `base` that redefines none of the methods `calls`, and nothing else
    that the forward of `base` reads."""
    cls = type(module)
    if cls is base or not issubclass(cls, base) or _CALLS & module.__dict__.keys():
        return False
    # nn.MultiheadAttention reads the weights of its out_proj, a NonDynamicallyQuantizableLinear, without calling it
    if issubclass(cls, (ShardedModule, NonDynamicallyQuantizableLinear)) or is_parametrized(module):
        return False
    settings = {*getattr(base, "__constants__", ()), *inspect.signature(base.__init__).parameters} - {"device", "dtype"}
    between = cls.__mro__[: cls.__mro__.index(base)]
    return not any((calls | settings | {"weight"}) & vars(each).keys() for each in between)


# -- activations -------------------------------------------------------------------------------------------------------

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
