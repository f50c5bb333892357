"""Rotations under selective activation checkpointing: each is one operator, whose result a policy saves or not.

The dispatch modes of torch.utils.checkpoint.create_selective_checkpoint_contexts would see the operators of aten that a
pass is made of, and return what they have stored of one in place of computing it, where a pass writes to slices of
outputs and to slots. So a forward is `torch.ops.rtp_ext.<name>.default` to them, and what happens inside is seen by all
other dispatch modes alone. Where no such mode is active, nothing goes through torch.library.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rtp_ext.ring.autograd import other_modes, returns, seen_by, storing_modes

NAMESPACE = "rtp_ext"
# What a policy finds: (inputs, this rank's shards of parameters) -> the output, and what the backward reads beside.
NAMES = ("linear", "mlp", "embedding", "linear_cross_entropy", "experts", "convolution", "flyweight")


class _Waiting(threading.local):
    compute: Callable[[], list[Tensor]] | None = None  # what the operator that is called now computes


_waiting = _Waiting()


def as_operator(
    call: Any,
    name: str,
    inputs: Sequence[Tensor],
    shards: Sequence[Tensor],
    compute: Callable[[], list[Tensor]],
) -> list[Tensor]:
    """What `compute()` returns, tensors that share memory with no other; within a region of selective activation
    checkpointing as the operator `name` of the arguments `inputs` and `shards`. Where the region is recomputed and its
    policy has saved that, what was saved: `compute` is not called.

    All ranks have to save alike. In the first backward they compare what each layer does.
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


def _tell(call: Any, what: str) -> None:
    """Has the ranks compare, once, what selective activation checkpointing does with a layer."""
    table, key = call.ring.common.found, ("selective activation checkpointing", call.name, call.serial, what)
    if key not in table:
        table[key] = True
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


def _register() -> Any:
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for name in NAMES:
        library.define(f"{name}(Tensor[] inputs, Tensor[] shards) -> Tensor[]")
        library.impl(name, _kernel, "CompositeExplicitAutograd")
    return library


_LIBRARY = _register()
