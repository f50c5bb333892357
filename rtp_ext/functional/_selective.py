"""Rotations under selective activation checkpointing: each is one operator, whose result a policy saves or recomputes.

The dispatch modes of torch.utils.checkpoint.create_selective_checkpoint_contexts would see the aten operators of a pass
and replace some of them by stored results, although a pass writes to slices of outputs and to slots. They therefore see
a forward as one call of `torch.ops.rtp_ext.<name>.default`; all other dispatch modes see the operators inside it.
Without such a mode no call goes through torch.library.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import other_modes, returns, seen_by, storing_modes

NAMESPACE = "rtp_ext"


class _Call(Protocol):
    """The attributes of `_call.Call`, which imports this file, that are read here."""

    ring: Ring
    name: str
    serial: int


class _Waiting(threading.local):
    compute: Callable[[], list[Tensor]] | None = None  # computation of the operator that is being called


_waiting = _Waiting()


def as_operator(
    call: _Call,
    name: str,
    inputs: Sequence[Tensor],
    shards: Sequence[Tensor],
    compute: Callable[[], list[Tensor]],
) -> list[Tensor]:
    """Returns `compute()`, tensors that share no memory with others. Within a region of selective activation
    checkpointing, calls it as the operator `name` of `inputs` and `shards`: if the policy saved its result, a
    recomputation returns the saved tensors without calling `compute`.

    All ranks must save the same layers. They compare this in the first backward.
    """
    modes = storing_modes()
    if not modes:
        return compute()
    others, recomputing, ran = other_modes(), any(map(returns, modes)), False

    def compute_here() -> list[Tensor]:
        nonlocal ran
        ran = True
        if recomputing:
            _tell(call, "is recomputed")
        with seen_by(others):
            return compute()

    before, _waiting.compute = _waiting.compute, compute_here
    try:
        with seen_by(modes):
            found = getattr(torch.ops.rtp_ext, name).default([*inputs], [*shards])
    finally:
        _waiting.compute = before
    if recomputing and not ran:
        _tell(call, "is saved")
    return found


def _tell(call: _Call, what: str) -> None:
    """Registers one comparison between ranks of what selective activation checkpointing does with a layer."""
    table, key = call.ring.common, ("selective activation checkpointing", call.name, call.serial, what)
    if key not in table.found:
        table.found[key] = True
        text = f"selective activation checkpointing in which the output of {call.name} {what}"
        call.ring.compare_later(table, key, text)


def _kernel(inputs: list[Tensor], shards: list[Tensor]) -> list[Tensor]:
    compute, _waiting.compute = _waiting.compute, None
    if compute is None:
        raise RuntimeError(
            "the operators of rtp_ext stand for rotations in policies of selective activation checkpointing: expected "
            "a call of a rotated module or of a function of rtp_ext.functional, got one of the operator itself"
        )
    return compute()


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
NAMES: list[str] = []  # of the operators


def register(name: str) -> None:
    """Makes an operator that a policy sees: (inputs, local shards of parameters) -> results, and tensors for the
    backward."""
    if name not in NAMES:
        NAMES.append(name)
        _library.define(f"{name}(Tensor[] inputs, Tensor[] shards) -> Tensor[]")
        _library.impl(name, _kernel, "CompositeExplicitAutograd")
