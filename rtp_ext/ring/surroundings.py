"""Compilers, which trace nothing of this package."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


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
