"""Compilers: what of this package they trace, and what they leave to the interpreter."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from rtp_ext.dtensor_hooks import register_traced_files

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Files whose functions a compiler may trace when traced code calls them; everything else breaks its graph. Each asks
# `tracing` first, and puts an operator of `functional.torch_compile` into the graph where the eager function would run.
_TRACED = (
    "compilers.py",
    "convert/agreement.py",
    "convert/methods/fully_shard.py",
    "convert/modules/bundled.py",
    "convert/modules/gathered.py",
    "convert/modules/head.py",
    "convert/modules/shared_input.py",
    "convert/scopes.py",
    "functional/torch_compile/traced.py",
    "nn/_base.py",
    "nn/cross_entropy.py",
    "nn/embedding.py",
    "nn/linear.py",
    "nn/mlp.py",
    "parameters/live.py",
)


def keep_compilers_out() -> None:
    """Has torch.compile trace `_TRACED` of this package where traced code calls it, and break at the rest."""
    register_traced_files(_TRACED)


def outermost() -> bool:
    """Whether torch.compile traces now what is called, in no region of its own: in a checkpoint, a branch or another
    higher-order operator operators with effects cannot be, nor in what torch.export makes."""
    symbolic = importlib.import_module("torch._dynamo.symbolic_convert")
    try:
        output = symbolic.InstructionTranslator.current_tx().output
    except AttributeError:  # nothing is traced
        return False
    return len(output.tracers) == 1 and not output.export


outermost._dynamo_marked_constant = True  # type: ignore[attr-defined]  # asked once, when a graph is made


def eager(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """`function`, of which compilers trace nothing, nor of other people's code that it calls."""

    @functools.wraps(function)
    def call(*arguments: _P.args, **keywords: _P.kwargs) -> _T:
        return _left_out(function)(*arguments, **keywords)

    return call


@functools.cache
def _left_out(function: Callable[..., _T]) -> Callable[..., _T]:
    return torch.compiler.disable(function)  # not when this module is imported: it would import the compiler
