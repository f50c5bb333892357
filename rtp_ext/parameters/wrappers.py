"""Tensor subclasses that wrap plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rtp_ext.ring.autograd import computes_plainly


def type_name(tensor: torch.Tensor) -> str:
    kind = type(tensor)
    return f"{kind.__module__}.{kind.__qualname__}"


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Returns the plain floating-point tensors inside a wrapper if they have its shape; None for any other tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return None
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    plain = all(computes_plainly(type(each)) and each.shape == tensor.shape for each in inner)
    return inner if inner and plain and all(each.is_floating_point() for each in inner) else None


def with_inner(like: Any, inner: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns a tensor of the class of `like` that wraps `inner`, tensors of one shape."""
    names, context = like.__tensor_flatten__()
    shape, stride = inner[0].shape, inner[0].stride()
    return type(like).__tensor_unflatten__(dict(zip(names, inner, strict=True)), context, shape, stride)
