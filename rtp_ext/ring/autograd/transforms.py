"""Transforms and dispatch modes around a rotation: transforms are refused, selective checkpointing is bypassed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C import _TorchDispatchModeKey as _Mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

_P = ParamSpec("_P")
_T = TypeVar("_T")

_MODES = {_Mode.FAKE: "fake tensors", _Mode.PROXY: "make_fx", _Mode.FUNCTIONAL: "functionalisation"}


def refuse_transforms(operation: str) -> None:
    """Raises RuntimeError where the current call is traced or transformed, which hops do not support."""
    found = None
    if torch._C._functorch.peek_interpreter_stack() is not None:
        found = "a transform of torch.func (grad, vjp, jvp, vmap, ...)"
    elif torch._C._get_tracing_state() is not None:
        found = "torch.jit.trace"
    elif torch._C._len_torch_dispatch_stack() > 0:
        modes = [name for key, name in _MODES.items() if torch._C._get_dispatch_mode(key) is not None]
        found = modes[0] if modes else None
    if found is None:
        return
    why = "shards travel between processes, which nothing can trace or transform"
    instead = "Call it eagerly, or through torch.compile"
    if found == "torch.jit.trace" or torch.compiler.is_exporting():
        found, verb = (found, "Trace") if found == "torch.jit.trace" else ("torch.export", "Export")
        instead = (
            f"{verb} the plain model: build it in one process, and load into it what get_model_state_dict(converted, "
            "options=StateDictOptions(full_state_dict=True)) returns"
        )
    raise RuntimeError(f"{operation}: rtp_ext does not support {found}: {why}. {instead}")


# The dispatch modes of a region's forward and of its recomputation. In the recomputation the second mode returns the
# results that the first has stored, by the count of calls of an operator, and runs other operators again.
_STORING, _RETURNING = (type(context) for context in create_selective_checkpoint_contexts([]))


def storing_modes() -> list[Any]:
    """Returns the active modes of selective activation checkpointing, the outermost first."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return []
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, (_STORING, _RETURNING))]


def returns(mode: Any) -> bool:
    """Returns whether a mode of `storing_modes` belongs to a recomputation."""
    return isinstance(mode, _RETURNING)


@contextlib.contextmanager
def seen_by(modes: Sequence[Any]) -> Iterator[None]:
    """Activates exactly these dispatch modes, the last one innermost."""
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
    """Returns the active dispatch modes other than those of selective activation checkpointing."""
    return [mode for mode in _get_current_dispatch_mode_stack() if not isinstance(mode, (_STORING, _RETURNING))]


def unseen(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates a function to run outside of selective activation checkpointing; other dispatch modes stay active.

    For internal work of a forward: a recomputation may do more or less of it than the forward, and it writes to memory
    that the results stored by a checkpoint would not write to again.
    """

    @functools.wraps(function)
    def call(*arguments: _P.args, **keywords: _P.kwargs) -> _T:
        if torch._C._len_torch_dispatch_stack() == 0 or not storing_modes():
            return function(*arguments, **keywords)
        with seen_by(other_modes()):
            return function(*arguments, **keywords)

    return call
