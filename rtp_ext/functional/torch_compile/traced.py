"""Functions that compilers trace, once for each graph, in place of what runs eagerly in forwards of models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rtp_ext.functional._operation import local

# -- whether the traced graph writes to a tensor -----------------------------------------------------------------------

_watched = WeakTensorKeyDictionary()  # versions, by fake tensor
_unchanged = [False]  # result of the last `_compare`


def _note(context: Any) -> None:
    fake = context.get_local("x").as_fake()
    _watched[fake] = fake._version


def _compare(context: Any) -> None:
    fake = context.get_local("x").as_fake()
    _unchanged[0] = _watched.get(fake) == fake._version


def _answer() -> bool:
    return _unchanged[0]


_answer._dynamo_marked_constant = True  # type: ignore[attr-defined]


def watch(x: Tensor) -> None:
    from torch._dynamo.comptime import comptime  # imports the compiler

    comptime(_note)


def unchanged(x: Tensor) -> bool:
    """Returns whether the traced graph has not written to `x` since `watch(x)`."""
    from torch._dynamo.comptime import comptime

    comptime(_compare)
    return _answer()


# -- whole parameters, forwards of models ------------------------------------------------------------------------------


def gather(owner: Any, ring: Any, parameters: list[Tensor], policy: Any) -> list[Tensor]:
    """Gathers whole parameters of `owner`, the registered object."""
    shapes, dtypes = [], []
    for parameter in parameters:
        shapes += [parameter.dim(), *parameter.shape]
        floating = parameter.is_floating_point()
        dtypes.append(policy.param_dtype if floating and policy.param_dtype is not None else parameter.dtype)
    shards = [local(parameter) for parameter in parameters]
    return torch.ops.rtp_ext.gather_3(owner._rtp_number, ring.name, shards, shapes, dtypes)


def scope(state: Any, event: str, split: bool = False) -> None:
    """Marks the begin or end of a scope in the forward of a model."""
    kind = state.ring.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    torch.ops.rtp_ext.scope_3(state._rtp_number, state.ring.name, event, split, autocast)
