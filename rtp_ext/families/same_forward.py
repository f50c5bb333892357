"""Layers of torch, and subclasses with the same forward."""

from __future__ import annotations

import inspect
from typing import Any

from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from rtp_ext.families.weight_reads import adds_to_forward
from rtp_ext.parameters.sharded_module import ShardedModule

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
