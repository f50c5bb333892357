"""Micro-batches without a reduction between replicas, and stages of pipelines, which reduce once a step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rtp_ext.dtensor_hooks import before_steps, patch_pipeline_stages
from rtp_ext.outer.policy import OuterPolicy
from rtp_ext.parameters.sharding import held
from rtp_ext.ring.autograd import GRADIENT_HANDLER, as_gradient, offloaded_shard_of


class MicroBatches(OuterPolicy):
    """Tracks which part of each p.grad is not reduced over replicas. Optimizers refuse to step on that part."""

    def __init__(self) -> None:
        super().__init__()
        self._unreduced: dict[int, tuple[Any, torch.Tensor]] = {}  # by number: parameter, and the value of its p.grad
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
        """Returns `value` in the form that is added to p.grad, unreduced."""
        self._take_unreduced(index, parameter, keep=True)
        return self._to_add_up(index, parameter, value)

    def _take_unreduced(self, index: int, parameter: Any, keep: bool = False) -> torch.Tensor | None:
        """Removes and returns the unreduced gradient in p.grad; None if there is none or zero_grad cleared it.

        `keep`: leaves it in p.grad.
        """
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
        """Returns `value` after converting p.grad to its dtype: a rounded p.grad would round the sum."""
        if parameter.grad is not None and parameter.grad.dtype != value.dtype:
            parameter.grad = as_gradient(held(parameter.grad).to(value.dtype), parameter._spec)
        return value

    def has_unreduced(self, index: int, parameter: Any) -> bool:
        """Returns whether an existing p.grad is unreduced."""
        known = self._unreduced.get(index)
        return known is not None and held(parameter.grad) is known[1]

    def _counts_as_unreduced(self, index: int, parameter: Any) -> bool:
        """Returns whether an existing p.grad takes part in the next reduction, after a backward without one.

        Always true here: other replicas may have added to a gradient that this replica did not reach.
        """
        return True

    def _as_gradient(self, parameter: Any, value: torch.Tensor) -> torch.Tensor:
        """Returns `value`, which is on the device of the parameter, in the form of p.grad."""
        return as_gradient(value.to(parameter.dtype), parameter._spec)

    @staticmethod
    def _at_owner(parameters: Sequence[Any], values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Moves reduced values to the devices and dtypes of the parameters."""
        values = [value.to(parameter.dtype) for parameter, value in zip(parameters, values, strict=True)]
        kept = offloaded_shard_of(parameters[0]) if parameters else None  # all parameters are offloaded, or none
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
                    f"{handler.policy._members[handler.index].name} unreduced from micro-batches: call "
                    "set_requires_all_reduce(model, True) before the last backward of a step (of a pipeline: before "
                    "its schedule's step, which has to call PipelineStage.perform_reduce_grad at its end)"
                )


# -- stages of torch.distributed.pipelining ----------------------------------------------------------------------------


def follow_pipelines() -> None:
    """Patches pipeline stages as described above, once torch.distributed.pipelining is imported."""
    patch_pipeline_stages(_defer_reductions, _reduce_at_end)


def _policies(model: nn.Module) -> list[OuterPolicy]:
    """Returns the policies of a stage, which may consist of several converted models."""
    handlers = (parameter.__dict__.get(GRADIENT_HANDLER) for parameter in model.parameters())
    return list({id(handler.policy): handler.policy for handler in handlers if handler is not None}.values())


def _defer_reductions(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def backward_maybe_with_nosync(self: Any, backward_type: str, bwd_kwargs: dict, last_backward: bool = False) -> Any:
        with contextlib.ExitStack() as stack:
            if not (last_backward and backward_type == "full"):
                for policy in _policies(self.submod):
                    stack.enter_context(policy.left_for_later())
            return stock(self, backward_type, bwd_kwargs, last_backward=last_backward)

    return backward_maybe_with_nosync


def _reduce_at_end(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def perform_reduce_grad(self: Any, *arguments: Any, **keywords: Any) -> Any:
        for policy in _policies(self.submod):
            policy.reduce()
        return stock(self, *arguments, **keywords)  # the stock method scales the gradients

    return perform_reduce_grad
