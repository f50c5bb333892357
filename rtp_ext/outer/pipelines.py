"""Replicated stages of torch.distributed.pipelining reduce gradients once, at the end of a schedule step.

A stage runs one backward per micro-batch. Zero-bubble schedules run one for the inputs and later one for each set of
parameters, by torch.autograd.grad, which fires no hooks. Every schedule ends with `perform_reduce_grad` of its stages,
where torch makes FSDP reduce gradients; the policies of rtp_ext.outer reduce there too. Before that they defer
reductions, except in the last backward of a stage if it is a full one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from rtp_ext.dtensor_hooks import patch_pipeline_stages
from rtp_ext.outer.policy import OuterPolicy
from rtp_ext.ring.autograd import GRADIENT_HANDLER


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
