"""Refusals of local training: plain state dicts while replicas differ, and steps of optimizers that the policy is not
attached to. Policies here are those of after_steps.py."""

from __future__ import annotations

import copy
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer

from rtp_ext.dtensor_hooks import before_steps
from rtp_ext.outer.local_training.means import Means
from rtp_ext.outer.local_training.optimizers import rehearses
from rtp_ext.ring.autograd import GRADIENT_HANDLER


def mixture(what: str, policy: Any) -> str:
    return (
        f"{what}: replicas differ under {policy!r}, and a checkpoint would hold a mixture of them: expected "
        "outer_of(model).average() before, or outer_of(model).state_dict() in its place, which has a layer for each"
    )


class Guard:
    """Refuses state dicts of a module while its weights differ between replicas. A copy of it guards its own policy."""

    def __init__(self, policy: Any) -> None:
        self._reference = None if policy is None else weakref.ref(policy)

    @property
    def policy(self) -> Any:
        return None if self._reference is None else self._reference()

    def __call__(self, module: nn.Module, prefix: str, *_: Any) -> None:
        policy = self.policy
        if policy is not None and policy._weights_differ and not policy._own_state_dict:
            raise ValueError(mixture(f"state_dict of {prefix}{type(module).__name__}", policy))

    def __deepcopy__(self, memo: dict) -> Guard:
        return Guard(copy.deepcopy(self.policy, memo))

    def __reduce__(self) -> Any:
        return Guard, (None,)


# -- optimizers that are not attached ----------------------------------------------------------------------------------


def refuse_unattached() -> None:
    """Makes optimizers refuse to step on parameters of a policy that they are not attached to."""
    before_steps("attached", _check_attached)


def _check_attached(optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            handler = parameter.__dict__.get(GRADIENT_HANDLER)
            if handler is None or not isinstance(handler.policy, Means):
                continue
            policy: Any = handler.policy
            if not policy.acts or any(known is optimizer for known in policy._optimizers):
                continue
            if not policy._arrived and rehearses(optimizer, arguments, keywords):
                return
            raise ValueError(
                f"{type(optimizer).__name__}: expected an optimizer that {policy!r} knows of, which acts after its "
                "steps: call outer_of(model).attach(optimizer) before"
            )
