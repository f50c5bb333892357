"""What runs around the package: compilers, of which it says what they trace and what they leave to the interpreter, and
selective activation checkpointing, of which it says what it sees."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Files whose functions a compiler may trace when traced code calls them; everything else breaks its graph. Each asks
# `tracing` first, and puts an operator of `functional.torch_compile` into the graph where the eager function would run.
_TRACED = (
    "convert/agreement.py",
    "convert/methods/fully_shard.py",
    "convert/parts/bundled.py",
    "convert/parts/gathered.py",
    "convert/parts/head.py",
    "convert/parts/together.py",
    "convert/scopes.py",
    "functional/torch_compile/traced.py",
    "nn/_base.py",
    "nn/cross_entropy.py",
    "nn/embedding.py",
    "nn/linear.py",
    "nn/mlp.py",
    "parameters/live.py",
    "ring/surroundings.py",
)


@functools.cache
def keep_compilers_out() -> None:
    """Has torch.compile trace `_TRACED` of this package where traced code calls it, and break its graphs at the rest.

    A torch that does not know of files that are traced only when called breaks its graphs at all of the package.
    """
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    rules.add("rtp_ext")
    package = Path(__file__).resolve().parents[1]
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


# -- selective activation checkpointing --------------------------------------------------------------------------------

# The dispatch modes of a region's forward and of its recomputation. In the recomputation the second one returns what
# the first one has stored for an operator, by how often that was called, and calls the others again.
_STORING, _RETURNING = (type(context) for context in create_selective_checkpoint_contexts([]))


def storing_modes() -> list[Any]:
    """The modes of selective activation checkpointing that see what is computed now, the outermost first."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return []
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, (_STORING, _RETURNING))]


def returns(mode: Any) -> bool:
    """Whether a mode of `storing_modes` is that of a recomputation."""
    return isinstance(mode, _RETURNING)


@contextlib.contextmanager
def seen_by(modes: Sequence[Any]) -> Iterator[None]:
    """What runs within is seen by these dispatch modes, the last one first, and by no other."""
    before = _get_current_dispatch_mode_stack()
    for _ in before:
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()
        for mode in before:
            _push_mode(mode)


def other_modes() -> list[Any]:
    """The dispatch modes that see what is computed now, but for those of selective activation checkpointing."""
    return [mode for mode in _get_current_dispatch_mode_stack() if not isinstance(mode, (_STORING, _RETURNING))]


def unseen(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """`function`, of which selective activation checkpointing sees nothing, and other dispatch modes as much as ever.

    For all that a forward does beside what a user has asked for: it may do more in a recomputation than in the forward,
    or less, and it writes to memory that what was stored would not write to again.
    """

    @functools.wraps(function)
    def call(*arguments: _P.args, **keywords: _P.kwargs) -> _T:
        if not storing_modes():
            return function(*arguments, **keywords)
        with seen_by(other_modes()):
            return function(*arguments, **keywords)

    return call
