"""Stages of torch.distributed.pipelining whose models have replicas: one reduction at the end of a step.

A stage runs a backward for every micro-batch; of zero-bubble schedules one for its inputs and, later, one for each set
of parameters, by torch.autograd.grad, which fires no hooks. Every schedule ends with `perform_reduce_grad` of its
stages, where torch has FSDP reduce gradients: policies of rtp_ext.outer do it there as well, and leave them alone
before, but for a backward that is the last of a stage and whole, under which they reduce as under any other.
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
    """Has stages reduce as described, once torch.distributed.pipelining is imported."""
    patch_pipeline_stages(_leaving, _reducing)


def _policies(model: nn.Module) -> list[OuterPolicy]:
    """Those of a stage, which may consist of several converted models."""
    handlers = (parameter.__dict__.get(GRADIENT_HANDLER) for parameter in model.parameters())
    return list({id(handler.policy): handler.policy for handler in handlers if handler is not None}.values())


def _leaving(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def backward_maybe_with_nosync(self: Any, backward_type: str, bwd_kwargs: dict, last_backward: bool = False) -> Any:
        with contextlib.ExitStack() as stack:
            if not (last_backward and backward_type == "full"):
                for policy in _policies(self.submod):
                    stack.enter_context(policy.left_for_later())
            return stock(self, backward_type, bwd_kwargs, last_backward=last_backward)

    return backward_maybe_with_nosync


def _reducing(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def perform_reduce_grad(self: Any, *arguments: Any, **keywords: Any) -> Any:
        for policy in _policies(self.submod):
            policy.reduce()
        return stock(self, *arguments, **keywords)  # which scales them

    return perform_reduce_grad
