"""Checks that tensors are memory that native code can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

_OWN_RULES: Any = torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]  # of classes that define none


def holds_memory(kind: type[torch.Tensor]) -> bool:
    """Returns whether tensors of a class are memory that native code can read. A class with its own
    `__torch_dispatch__` wraps other tensors (quantized weights, DTensor, fake tensors), and has the address 0."""
    return kind.__torch_dispatch__ is _OWN_RULES


# `__torch_function__` of torch's own classes, and of subclasses that do not override it.
_OWN_FUNCTIONS: Any = (torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]


def computes_plainly(kind: type[torch.Tensor]) -> bool:
    """Returns whether tensors of a class are memory, and all functions of torch apply torch's own rules to them."""
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return True
    function: Any = kind.__torch_function__
    return holds_memory(kind) and getattr(function, "__func__", function) in _OWN_FUNCTIONS


def expect_memory(operation: str, values: Sequence[Any]) -> Sequence[Any]:
    """Returns `values` after waiting for results of functional collectives among them. Raises TypeError where another
    tensor among them, or in lists among them, is not memory."""
    found: list[Any] | None = None
    for place, value in enumerate(values):
        kind = type(value)
        if kind is torch.Tensor:
            continue
        if kind is list or kind is tuple:
            now: Any = expect_memory(operation, value)
        elif kind is AsyncCollectiveTensor:
            now = value.wait()
        elif isinstance(value, torch.Tensor) and not holds_memory(kind):
            raise TypeError(
                f"{operation}: expected plain tensors, got a {kind.__module__}.{kind.__qualname__} of shape "
                f"{tuple(value.shape)}, a tensor subclass that computes by rules of its own: pass a plain tensor with "
                "its values"
            )
        else:
            continue
        if now is not value:
            found = [*values] if found is None else found
            found[place] = now
    return values if found is None else found
