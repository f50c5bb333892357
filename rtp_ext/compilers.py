"""Rules for compilers: the functions of this package that they trace, and those that run in the interpreter."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch

from rtp_ext.dtensor_hooks import leave_gradients_alone, register_traced_files

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Files whose functions a compiler may trace when traced code calls them; all others break its graph. Each checks
# `tracing` first, and puts an operator of `functional.torch_compile` into the graph in place of what runs eagerly.
_TRACED = (
    "compilers.py",
    "convert/agreement.py",
    "convert/containers.py",
    "convert/methods/fully_shard.py",
    "convert/modules/bundled.py",
    "convert/modules/gathered.py",
    "convert/modules/head.py",
    "convert/modules/shared_input.py",
    "convert/scopes.py",
    "functional/_operation.py",
    "functional/cross_entropy.py",
    "functional/embedding.py",
    "functional/linear.py",
    "functional/mlp.py",
    "functional/torch_compile/traced.py",
    "nn/_base.py",
    "nn/cross_entropy.py",
    "nn/embedding.py",
    "nn/linear.py",
    "nn/mlp.py",
    "parameters/sharded_module.py",
)


def keep_compilers_out() -> None:
    """Registers the files that torch.compile traces where traced code calls them; its graphs break at all others."""
    register_traced_files(_TRACED)


def outermost() -> bool:
    """Returns whether torch.compile traces the current call at the top level of a graph. Operators with effects are
    impossible within checkpoints, branches and other higher-order operators, and under torch.export."""
    symbolic = importlib.import_module("torch._dynamo.symbolic_convert")
    try:
        output = symbolic.InstructionTranslator.current_tx().output
    except AttributeError:  # nothing is traced
        return False
    return len(output.tracers) == 1 and not output.export


outermost._dynamo_marked_constant = True  # type: ignore[attr-defined]  # evaluated once, when a graph is compiled


_ordered: list[Any] = []  # operators whose order compilers must keep, until `_effects`


def keep_order(operators: Iterable[Any]) -> None:
    """Gives operators ordered effects: no compiler drops or reorders them."""
    _ordered.extend(operators)


def _effects() -> bool:
    """Registers the effects at the first trace, because that imports the compiler."""
    effects = importlib.import_module("torch._higher_order_ops.effects")
    kinds = importlib.import_module("torch._library.effects")
    while _ordered:
        effects._register_effectful_op(_ordered.pop(), kinds.EffectType.ORDERED)
    leave_gradients_alone()
    return True


_effects._dynamo_marked_constant = True  # type: ignore[attr-defined]  # runs while a graph is traced


def tracing(ring: Any) -> bool:
    """Returns whether operations of the ring become part of the traced graph. Requires
    torch.compiler.is_dynamo_compiling."""
    return ring.traceable and outermost() and _effects()


def eager(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates a function that compilers must not trace, nor any code that it calls."""

    @functools.wraps(function)
    def call(*arguments: _P.args, **keywords: _P.kwargs) -> _T:
        return _left_out(function)(*arguments, **keywords)

    return call


@functools.cache
def _left_out(function: Callable[..., _T]) -> Callable[..., _T]:
    return torch.compiler.disable(function)  # not when this module is imported: it would import the compiler
