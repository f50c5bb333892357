"""Settings for the reduction of a converted model's gradients, named as the methods of `fully_shard`."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator

from torch import nn

from rtp_ext.convert.model import outer_of
from rtp_ext.convert.modules.whole_embedding import WholeEmbedding
from rtp_ext.convert.scopes import RotationState, state_of
from rtp_ext.outer import OuterPolicy

logger = logging.getLogger("rtp_ext")


def set_requires_all_reduce(module: nn.Module, requires_all_reduce: bool) -> None:
    """Sets whether later backwards reduce gradients over replicas; for micro-batches, False for all but the last.

    Gradients that are not reduced add up in p.grad of this rank's shards, in float32 where the parameter has 16 bits,
    and the next backward with a reduction reduces their sum, once. Until then the optimizer's step raises ValueError.
    zero_grad clears them. Without replicas it changes nothing. Applies to the whole model, as that of fully_shard
    (recurse=True) called with the root; raises ValueError for a part of a larger converted model.

    Set the same value on every rank: replicas that differ raise ValueError in backward.
    """
    _policy_of_whole(module, "set_requires_all_reduce").requires_all_reduce = bool(requires_all_reduce)


def set_requires_gradient_sync(module: nn.Module, requires_gradient_sync: bool) -> None:
    """The same as `set_requires_all_reduce`.

    Within a ring gradients are always summed: a rank has no memory for gradients of weights of other owners, and a
    shard that visits it leaves with the sum. Only the reduction over replicas can be postponed.
    """
    _policy_of_whole(module, "set_requires_gradient_sync").requires_all_reduce = bool(requires_gradient_sync)


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Context in which backwards do not reduce gradients over replicas: see `set_requires_gradient_sync`."""
    policy = _policy_of_whole(module, "no_sync")
    before = policy.requires_all_reduce
    policy.requires_all_reduce = False
    try:
        yield
    finally:
        policy.requires_all_reduce = before


def set_gradient_divide_factor(module: nn.Module, factor: float | None) -> None:
    """Sets the divisor of the sum of the gradients of all ranks, in later backwards.

    Applies to the parameters that the call of fully_rotate with `module` converted, as that of fully_shard: parts that
    were converted before have factors of their own, and keep them when the model around them is converted. For a model
    with parts, call it for each part, and for the model.

    None, the default: the number of ranks, of the ring times the replicas, so that gradients are averages. 1: gradients
    are sums, for losses that every rank divides by the number of tokens of all ranks.

    Raises ValueError, and changes nothing, where ranks disagree, for a factor that is not positive, where a part with
    another factor shares a parameter, and for embeddings with sparse gradients. Collective.
    """
    if isinstance(factor, bool) or not isinstance(factor, (int, float, type(None))):
        raise TypeError(f"set_gradient_divide_factor: expected a positive number or None, got {factor!r}")
    if factor is not None and not factor > 0:
        raise ValueError(f"set_gradient_divide_factor: expected a positive number or None, got {factor!r}")
    policy, state = _policy_of(module, "set_gradient_divide_factor")
    factor = None if factor is None else float(factor)
    around = _alive(each.root for each in state.outer() if each.root is not None)
    members = _alive(state.unit.members)
    for member in members if factor is not None else ():
        _refuse_sparse(member, state)
    policy.set_divide_factor(state.unit, factor, [*reversed(around), *members])
    inner = [part for member in members for part in member.modules() if _keeps_another(part, state)]
    if inner:
        logger.info(
            "set_gradient_divide_factor: %d parts of %s that were converted before it keep factors of their own",
            len(inner),
            type(module).__name__,
        )


def _alive(references: Iterable[weakref.ref[nn.Module]]) -> list[nn.Module]:
    return [module for reference in references if (module := reference()) is not None]


def _keeps_another(part: nn.Module, state: RotationState) -> bool:
    inner = state_of(part)
    return inner is not None and inner.unit.divide_factor != state.unit.divide_factor


def _refuse_sparse(part: nn.Module, state: RotationState) -> None:
    if isinstance(part, WholeEmbedding) and part.sparse:
        raise ValueError(
            f"set_gradient_divide_factor: the gradients of {part.qualified_name} ({type(part).__name__}) are sparse, "
            "and averaged in any case: expected an embedding with sparse=False, or a loss that is scaled instead"
        )
    for child in part.children():
        inner = state_of(child)
        if inner is None or inner.unit is state.unit:
            _refuse_sparse(child, state)


def _policy_of(module: nn.Module, what: str) -> tuple[OuterPolicy, RotationState]:
    """Returns the outer policy and the state of a module that was the argument of fully_rotate. Raises TypeError for an
    object that is no module, such as the list that fully_rotate returned, and ValueError for other modules."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{what}: expected one module that fully_rotate was called with (of a list, any of its modules), got a "
            f"{type(module).__name__}"
        )
    policy, state = outer_of(module), state_of(module)
    assert state is not None, "outer_of has looked"
    return policy, state


def _policy_of_whole(module: nn.Module, what: str) -> OuterPolicy:
    """Returns the outer policy of a model. Raises ValueError for a part: its gradients are reduced with the model's."""
    policy, state = _policy_of(module, what)
    around = next(state.outer(), None)
    if around is not None:
        root = around.root and around.root()
        raise ValueError(
            f"{what}: expected the whole model, whose gradients are reduced together, got a {type(module).__name__} "
            f"that is a part of a {type(root).__name__}: call it with that"
        )
    return policy
