"""Gradients that micro-batches without a reduction over replicas leave in p.grad, where they add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rtp_ext.dtensor_hooks import before_steps
from rtp_ext.outer.policy import OuterPolicy
from rtp_ext.parameters.sharding import held
from rtp_ext.ring.autograd import GRADIENT_HANDLER, as_gradient, offloaded_shard_of


class MicroBatches(OuterPolicy):
    """Knows, of each parameter, what of p.grad is not reduced yet. Optimizers refuse to step on that."""

    def __init__(self) -> None:
        super().__init__()
        self._unreduced: dict[int, tuple[Any, torch.Tensor]] = {}  # by number: parameter, and what its grad holds
        before_steps("reduced", _check_reduced)

    def __deepcopy__(self, memo: dict) -> OuterPolicy:
        for index, (parameter, value) in self._unreduced.items():
            if parameter.grad is not None and held(parameter.grad) is value:
                raise ValueError(
                    f"{self._members[index].name}: expected gradients that are reduced over replicas, or none, when a "
                    "model is copied; got those that micro-batches have left: copy it before them, or after zero_grad"
                )
        return super().__deepcopy__(memo)

    def _note_unreduced(self) -> None:
        for index, parameter in self._handled():
            gradient = parameter.grad
            if gradient is not None and self._counts_as_unreduced(index, parameter):
                self._unreduced[index] = (parameter, held(gradient))

    def _hand_on(self, index: int, parameter: Any, value: torch.Tensor) -> torch.Tensor:
        """`value` as it is to be added to p.grad, unreduced."""
        self._take_unreduced(index, parameter, keep=True)
        return self._to_add_up(index, parameter, value)

    def _take_unreduced(self, index: int, parameter: Any, keep: bool = False) -> torch.Tensor | None:
        """What micro-batches without a reduction have left in p.grad, which is empty then; None where there is nothing,
        or zero_grad has cleared it. `keep`: looks only."""
        known = self._unreduced.get(index) if keep else self._unreduced.pop(index, None)
        gradient = parameter.grad
        if known is None or gradient is None:
            return None
        if held(gradient) is not known[1]:
            name = self._members[index].name
            raise ValueError(
                f"{name}: expected the gradient that micro-batches without a reduction over replicas have left, or "
                "none after zero_grad; got one that was put in its place"
            )
        if keep:
            return known[1]
        parameter.grad = None
        kept = offloaded_shard_of(parameter)
        return known[1] if kept is None else kept.memory.load(known[1])

    def _to_add_up(self, index: int, parameter: Any, value: torch.Tensor) -> torch.Tensor:
        """`value`, of which p.grad is of the same dtype then: a rounded p.grad would round what is added."""
        if parameter.grad is not None and parameter.grad.dtype != value.dtype:
            parameter.grad = as_gradient(held(parameter.grad).to(value.dtype), parameter._spec)
        return value

    def has_unreduced(self, index: int, parameter: Any) -> bool:
        """Whether p.grad, which is there, holds what micro-batches without a reduction have left."""
        known = self._unreduced.get(index)
        return known is not None and held(parameter.grad) is known[1]

    def _counts_as_unreduced(self, index: int, parameter: Any) -> bool:
        """Whether p.grad, which is there, takes part in the next reduction, after a backward without one. Each does:
        what this replica has not reached, others may have added to."""
        return True

    def _as_gradient(self, parameter: Any, value: torch.Tensor) -> torch.Tensor:
        """What p.grad is to be given, of a value that is where the parameter is."""
        return as_gradient(value.to(parameter.dtype), parameter._spec)

    @staticmethod
    def _at_owner(parameters: Sequence[Any], values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What replicas have reduced, in the dtypes of the parameters and where these are."""
        values = [value.to(parameter.dtype) for parameter, value in zip(parameters, values, strict=True)]
        kept = offloaded_shard_of(parameters[0]) if parameters else None  # all of them are, or none
        return list(values) if kept is None else kept.memory.store(values)


def _check_reduced(optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            handler = parameter.__dict__.get(GRADIENT_HANDLER) if parameter.grad is not None else None
            if handler is None or not isinstance(handler.policy, MicroBatches):
                continue
            if handler.policy.has_unreduced(handler.index, parameter):
                raise ValueError(
                    f"{type(optimizer).__name__}: expected gradients that are reduced over replicas, got those of "
                    f"{handler.policy._members[handler.index].name} as micro-batches have left them: call "
                    "set_requires_all_reduce(model, True) before the last backward of a step (of a pipeline: before "
                    "its schedule's step, which has to call PipelineStage.perform_reduce_grad at its end)"
                )
