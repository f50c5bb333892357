"""Transforms and dispatch modes that may not see a rotation: which are refused, which are hidden from it."""

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
            "or transform. Call it eagerly, or through torch.compile"
        )


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
