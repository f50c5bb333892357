"""Optimizers of local training: access to their state, and refusals."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path

from rtp_ext.dtensor_hooks import before_steps
from rtp_ext.outer.local_training.peers import Means
from rtp_ext.ring.autograd import GRADIENT_HANDLER


def parameters_of(*optimizers: Optimizer) -> list[torch.nn.Parameter]:
    """Returns the parameters of all groups."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def rehearses(optimizer: Optimizer, arguments: Any, keywords: Any) -> bool:
    """Returns whether a step only initializes state: torch.distributed.checkpoint runs a step without gradients to
    create the state into which it loads a checkpoint."""
    given = (*arguments[1:], *keywords.values())  # arguments[0] is the optimizer
    if any(argument is not None for argument in given):
        return False
    return all(float(group.get("lr", 1.0)) == 0.0 for group in optimizer.param_groups)


def make_state(optimizer: Optimizer) -> list[torch.Tensor]:
    """Creates the missing state of an optimizer, and returns the parameters that got some.

    Runs a step with gradients and a learning rate of 0, as torch.distributed.checkpoint does for all parameters.
    """
    missing = [p for p in parameters_of(optimizer) if p not in optimizer.state]
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    for parameter in missing:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, before in zip(optimizer.param_groups, settings, strict=True):
        group.update(before)
    for parameter in missing:
        parameter.grad = None
    return [parameter for parameter in missing if parameter in optimizer.state]


def refuse_scaler(policy: Any) -> None:
    """Raises ValueError within a step that a GradScaler runs: after an overflow on one replica it skips the step there
    only, and the other replicas do not notice."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.amp.GradScaler.step.__code__ and frame.f_locals["self"].is_enabled():
            raise ValueError(
                f"{policy!r}: a GradScaler leaves out steps on one replica alone, which the others would not notice: "
                "expected bfloat16 without one"
            )
        frame = frame.f_back  # type: ignore[assignment]


def leaves(state: Any) -> list[tuple[str, Any]]:
    """Flattens an optimizer's state of a parameter (dicts, lists, tuples) to pairs such as `exp_avg`, `factors[0]`."""
    found = tree_flatten_with_path(state)[0]
    return [(str(getattr(path[0], "key", path[0])) + keystr(path[1:]), value) for path, value in found if path]


def unsharded_state(optimizers: Sequence[Optimizer], name_of: Callable[[Any], str | None]) -> dict[str, str]:
    """Returns the state that is not sharded, by parameter name and key, and the settings of parameter groups."""
    found: dict[str, str] = {}
    for number, optimizer in enumerate(optimizers):
        for parameter, state in optimizer.state.items():
            name = name_of(parameter)
            for key, value in leaves(state) if name is not None else ():
                found[f"{key} of {name}"] = _plain(value)
        for place, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    found[f"{key} of group {place} of optimizer {number}"] = _plain(value)
    return found


def _plain(value: Any) -> str:
    if isinstance(value, DTensor):
        return "a shard"
    return repr(value.tolist() if isinstance(value, torch.Tensor) else value)


# -- refusals: plain state dicts while replicas differ, steps that the policy does not act after -----------------------


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
