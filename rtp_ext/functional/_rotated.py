"""The autograd function of all rotated operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rtp_ext.functional._call import Call, saved
from rtp_ext.ring.autograd import first_order_only, rounded, wanted


def run(use: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the results of a use of an operation (`_operation.Operation`), in eager code."""
    options = use.options
    call = Call.of(
        use.given[0],
        ring=options.ring,
        name=options.name,
        compute_dtype=options.compute_dtype,
        reduce_dtype=options.reduce_dtype,
        autocasts=use.autocasts,
    )
    operands = use.operands(call, inputs)
    settings = use.prepare(call, operands)
    use.check(call, settings, inputs)
    return use.shaped(Rotated.apply(type(use), call, settings, *operands, *call.local_shards()), inputs)


class Rotated(torch.autograd.Function):
    """The tensors are the inputs of the operation, then the local shards of its parameters."""

    @staticmethod
    def forward(ctx: Any, operation: Any, call: Call, settings: Any, *tensors: Tensor):
        count = len(tensors) - len(call.watched)
        inputs, parameters = tensors[:count], tensors[count:]
        ctx.operation, ctx.call, ctx.settings, ctx.count = operation, call, settings, count

        def compute() -> list[Tensor]:
            return operation.forward(call, settings, inputs, parameters)

        made = call.once(operation.label, inputs, parameters, compute)
        results = operation.results or len(made)
        operation.after(call, settings, made[results:])
        if operation.results is None:
            ctx.set_materialize_grads(False)
        inputs_are_read = operation.reads_inputs or any(ctx.needs_input_grad[3 + count :])
        kept_inputs = inputs if inputs_are_read else map(empty_rows, inputs)
        # Autograd detects a write to a shard whose values the backward reads. Of the others it reads shapes alone.
        reads = operation.reads(call, settings)
        kept = [shard if read else shard.data for shard, read in zip(parameters, reads, strict=True)]
        ctx.save_for_backward(*kept_inputs, *kept, *made[results:])
        return tuple(made[:results])

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        call, count = ctx.call, ctx.count
        tensors, needs = saved(ctx), wanted(ctx)[3:]
        inputs, parameters, kept = tensors[:count], tensors[count : len(needs)], tensors[len(needs) :]
        found = gradients_of(ctx.operation, call, ctx.settings, gradients, inputs, parameters, kept, needs)
        return None, None, None, *found


def empty_rows(x: Tensor) -> Tensor:
    """Returns an input of as many rows for a backward that reads nothing else of it."""
    return x.new_empty(x.shape[0], 0)


def gradients_of(
    operation: Any,
    call: Call,
    settings: Any,
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    kept: Sequence[Tensor],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Returns the gradients of inputs and parameters; those of parameters, which travelled in the reduce dtype, in the
    dtypes of their parameters."""
    if not any(needs):
        return [None] * len(needs)
    found = [*operation.backward(call, settings, gradients, inputs, parameters, kept, needs)]
    for place, parameter in enumerate(parameters, len(inputs)):
        gradient = found[place]
        if gradient is not None and gradient.dtype != parameter.dtype:
            found[place] = rounded(gradient, parameter.dtype)
    return found
