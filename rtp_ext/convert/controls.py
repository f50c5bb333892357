"""Settings of how a converted model's gradients are reduced, as `fully_shard`'s methods of like names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from rtp_ext.convert.model import outer_of
from rtp_ext.convert.scopes import state_of


def set_requires_all_reduce(module: nn.Module, requires_all_reduce: bool) -> None:
    """Whether the backwards that follow reduce gradients over replicas; for micro-batches, False for all but the last.

    Gradients that are not reduced add up in p.grad of this rank's shards, in float32 where the parameter has 16 bits,
    and the next backward with a reduction reduces their sum, once. Until then the optimizer's step raises ValueError.
    zero_grad clears them. Without replicas it changes nothing. Applies to the whole model, of which `module` is the
    root or a part that fully_rotate was called with.

    Set it alike on every rank: replicas that differ get a ValueError in backward.
    """
    outer_of(module).requires_all_reduce = bool(requires_all_reduce)


def set_requires_gradient_sync(module: nn.Module, requires_gradient_sync: bool) -> None:
    """The same as `set_requires_all_reduce`.

    Within a ring gradients are always summed: a rank has no memory for gradients of weights that are not at home there,
    and what visits it leaves with the sum. What can be put off is the reduction over replicas.
    """
    set_requires_all_reduce(module, requires_gradient_sync)


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Backwards in it do not reduce gradients over replicas: see `set_requires_gradient_sync`."""
    policy = outer_of(module)
    before = policy.requires_all_reduce
    policy.requires_all_reduce = False
    try:
        yield
    finally:
        policy.requires_all_reduce = before


def set_gradient_divide_factor(module: nn.Module, factor: float | None) -> None:
    """What the sum of the gradients of all ranks is divided by, in the backwards that follow.

    None, the default: the number of ranks, of the ring times the replicas, so that gradients are averages. 1: their
    sum, for losses that every rank divides by the number of tokens of all ranks.

    Raises ValueError where ranks disagree, and for a factor that is not positive. Collective.
    """
    if factor is not None and not factor > 0:
        raise ValueError(f"set_gradient_divide_factor: expected a positive number or None, got {factor!r}")
    policy = outer_of(module)
    policy.set_divide_factor(None if factor is None else float(factor))
    state = state_of(module)
    policy.claim(module, None if state is None else state.mp_policy.reduce_dtype)
