"""What refuses plain state dicts while replicas differ."""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from rtp_ext.outer.apart.after_steps import AfterSteps


def mixture(what: str, policy: AfterSteps) -> str:
    return (
        f"{what}: replicas differ under {policy!r}, and a checkpoint would hold a mixture of them: expected "
        "outer_of(model).average() before, or outer_of(model).state_dict() in its place, which has a layer for each"
    )


class Guard:
    """Refuses state dicts of a module of which replicas have different weights. A copy is for the copy's policy."""

    def __init__(self, policy: AfterSteps | None) -> None:
        self._reference = None if policy is None else weakref.ref(policy)

    @property
    def policy(self) -> AfterSteps | None:
        return None if self._reference is None else self._reference()

    def __call__(self, module: nn.Module, prefix: str, *_: Any) -> None:
        policy = self.policy
        if policy is not None and policy._weights_differ and not policy._own_state_dict:
            raise ValueError(mixture(f"state_dict of {prefix}{type(module).__name__}", policy))

    def __deepcopy__(self, memo: dict) -> Guard:
        return Guard(copy.deepcopy(self.policy, memo))

    def __reduce__(self) -> Any:
        return Guard, (None,)
