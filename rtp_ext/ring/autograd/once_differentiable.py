"""Backwards of rotated operations: which gradients are requested, and the refusal of a second derivative."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rtp_ext.ring.autograd.transforms import unseen


class _FirstOrder(torch.autograd.Function):
    """Identity on gradients that rotated operations cannot differentiate again: its backward raises."""

    @staticmethod
    def forward(ctx, name: str, count: int, *tensors: torch.Tensor):
        ctx.name = name
        return tuple(gradient.detach() for gradient in tensors[:count])

    @staticmethod
    def backward(ctx, *_: Any):
        raise RuntimeError(
            f"{ctx.name}: double backward is not supported: a gradient that was made with create_graph=True is "
            "differentiated again (a gradient penalty or a Hessian), for which rotated operations have no formula"
        )


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the backward of an autograd Function whose results cannot be differentiated again.

    torch's once_differentiable considers the incoming gradients alone; results also depend on the saved tensors, which
    the backward leaves in `ctx.unpacked`, and on the parameters of `ctx.call`. A later backward through any of them
    raises RuntimeError and never stops silently.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack() > 0:
            return refusing(ctx, *gradients)
        ctx.create_graph = False
        results = backward(ctx, *gradients)
        ctx.__dict__.pop("unpacked", None)
        return results

    @unseen
    def refusing(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.create_graph = torch.is_grad_enabled()
        with torch.no_grad():
            results = backward(ctx, *gradients)
        unpacked = ctx.__dict__.pop("unpacked", ())
        if not torch.is_grad_enabled():
            return results
        call = getattr(ctx, "call", None)
        sources: Sequence[Any] = (*gradients, *unpacked, *(call.watched if call else ()))
        sources = [source for source in sources if source is not None and source.requires_grad]
        several = results if isinstance(results, tuple) else (results,)
        made = [result for result in several if result is not None]
        name = call.name if call else "the gradient of a parameter"
        refused = iter(_FirstOrder.apply(name, len(made), *made, *sources))
        several = tuple(None if result is None else next(refused) for result in several)
        return several if isinstance(results, tuple) else several[0]

    return once


def wanted(ctx: Any) -> tuple[bool, ...]:
    """Returns for each argument of an autograd Function whether the running backward computes its gradient: where
    `ctx.needs_input_grad` is set and the engine executes the argument's node.

    Zero-bubble pipelines, and torch.autograd.grad of some tensors, run a backward for inputs alone or parameters alone,
    which `needs_input_grad` does not show. Valid in a backward only, for Functions that take inputs before parameters.
    """
    nodes = []  # one for each argument with a gradient
    for node, _ in ctx.next_functions:
        if node is not None:
            nodes.append(node)
    if not nodes:  # an operator of a compiled graph, which uses all of its results
        return ctx.needs_input_grad
    executed = []
    for node in nodes:
        try:
            executed.append(torch._C._will_engine_execute_node(node))
        except RuntimeError as error:
            # torch raises for the leaves that are inputs of torch.autograd.grad, which the engine does execute.
            if "A leaf node was passed" not in str(error):
                raise
            executed.append(True)
    call = getattr(ctx, "call", None)
    if call is not None and executed and not executed[0]:
        call.ring.pass_by()
    if all(executed):
        return ctx.needs_input_grad
    found = iter(executed)
    return tuple([needed and next(found) for needed in ctx.needs_input_grad])
