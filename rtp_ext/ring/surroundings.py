"""Compilers and tracers, which trace nothing of this package."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._C import _TorchDispatchModeKey as _Mode

_P = ParamSpec("_P")
_T = TypeVar("_T")

_MODES = {_Mode.FAKE: "fake tensors", _Mode.PROXY: "make_fx", _Mode.FUNCTIONAL: "functionalisation"}


@functools.cache
def keep_compilers_out() -> None:
    """Lets torch.compile break its graphs where this package is called, and trace none of its functions."""
    importlib.import_module("torch._dynamo.trace_rules").add("rtp_ext")


def eager(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """`function`, of which compilers trace nothing, nor of other people's code that it calls."""

    @functools.wraps(function)
    def call(*arguments: _P.args, **keywords: _P.kwargs) -> _T:
        return _left_out(function)(*arguments, **keywords)

    return call


@functools.cache
def _left_out(function: Callable[..., _T]) -> Callable[..., _T]:
    return torch.compiler.disable(function)  # not when this module is imported: it would import the compiler


def refuse_transforms(operation: str) -> None:
    """Raises RuntimeError where what is computed now is traced or transformed: hops cannot be."""
    found = None
    if torch._C._functorch.peek_interpreter_stack() is not None:
        found = "a transform of torch.func (grad, vjp, jvp, vmap, ...)"
    elif torch._C._get_tracing_state() is not None:
        found = "torch.jit.trace"
    elif torch._C._len_torch_dispatch_stack() > 0:
        modes = [name for key, name in _MODES.items() if torch._C._get_dispatch_mode(key) is not None]
        found = modes[0] if modes else None
    if found is not None:
        raise RuntimeError(
            f"{operation}: rtp_ext does not support {found}: shards travel between processes, which nothing can trace "
            "or transform. Call it eagerly, or through torch.compile, which leaves it out of its graphs"
        )
