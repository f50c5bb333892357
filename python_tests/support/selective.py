"""Regions of selective activation checkpointing, and policies for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rtp_ext.functional._selective import NAMES

aten, rotations = torch.ops.aten, torch.ops.rtp_ext

SDPA = [
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_attention_math.default,
    aten._scaled_dot_product_efficient_attention.default,
]
MATRICES = [aten.mm.default, aten.addmm.default, *SDPA]


def every_other_product() -> Callable[..., CheckpointPolicy]:
    """Saves the operations that torchtitan saves: every other matrix product, attention, and communication."""
    products = {False: 0, True: 0}  # torch 2.11 asks in the recomputation, too

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        products[context.is_recompute] += operator in MATRICES[:2]
        skipped = operator in MATRICES[:2] and products[context.is_recompute] % 2 == 0
        saved = [*MATRICES, aten.max.default, torch.ops._c10d_functional.reduce_scatter_tensor.default]
        return CheckpointPolicy.MUST_SAVE if operator in saved and not skipped else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def always(what: CheckpointPolicy) -> Callable[[], Callable[..., CheckpointPolicy]]:
    return lambda: lambda *_, **__: what


# The policy of a region; None: all of it is recomputed. A policy may count, so each region has its own.
POLICIES: dict[str, Callable[[], Any] | None] = {
    "full": None,
    "nothing": lambda: [],
    "nothing, a function": always(CheckpointPolicy.PREFER_RECOMPUTE),
    "everything": always(CheckpointPolicy.MUST_SAVE),
    "everything, preferably": always(CheckpointPolicy.PREFER_SAVE),
    "matrices": lambda: MATRICES,
    "every other product": every_other_product,
    "mlp": lambda: [rotations.mlp.default],
    "rotations": lambda: [getattr(rotations, name).default for name in NAMES],
}
SAVES_ROTATIONS = ("everything", "everything, preferably", "rotations")


def contexts(make: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a context_fn for `checkpoint`, with a separate policy for each region."""
    return functools.partial(_make, make)  # torch.compile takes no closure


def _make(make: Callable[[], Any]) -> Any:
    return create_selective_checkpoint_contexts(make())


def region(function: Callable[..., Any], policy: str | Callable[[], Any] | None, *arguments: Any) -> Any:
    """`policy`: one of POLICIES, or a factory of one; None: no checkpoint."""
    if policy is None:
        return function(*arguments)
    make = POLICIES[policy] if isinstance(policy, str) else policy
    if make is None:
        return checkpoint(function, *arguments, use_reentrant=False)
    return checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts(make))
