"""Compilers: what of this package they trace, and what they leave to the interpreter."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Files whose functions a compiler may trace when traced code calls them; everything else breaks its graph. Each asks
# `tracing` first, and puts an operator of `functional.torch_compile` into the graph where the eager function would run.
_TRACED = (
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
    "ring/patches/dynamo.py",
)


@functools.cache
def keep_compilers_out() -> None:
    """Has torch.compile trace `_TRACED` of this package where traced code calls it, and break its graphs at the rest.

    A torch that does not know of files that are traced only when called breaks its graphs at all of the package.
    """
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    rules.add("rtp_ext")
    package = Path(__file__).resolve().parents[2]
    traced: set[str] = getattr(rules, "BUILTIN_INLINE_WHEN_CALLED", set())
    traced.update(str(package / file) for file in _TRACED)


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
