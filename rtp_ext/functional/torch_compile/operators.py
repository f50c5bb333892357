"""Rotated operations as operators of torch.library, for the graphs of torch.compile.

Each has an ordered effect: no compiler pass drops or reorders it, since ranks would then send different hops. So an
operator neither writes to its arguments nor returns a tensor that shares memory with one; it returns gradients. An
operator looks up the layer of its `number` argument and runs the same native call as the eager function, prepared by
the same agreement of the ranks. Eager calls do not use these operators.

All values that decide shapes are arguments, so that one graph fits all layers of a kind.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rtp_ext._native import RotationError
from rtp_ext.functional._call import Call
from rtp_ext.functional._operation import OPERATIONS, Operation
from rtp_ext.functional._rotated import empty_rows, gradients_of
from rtp_ext.parameters.sharding import held
from rtp_ext.ring.registry import owner_of, ring_named

# Compiler caches identify an operator by its name and schema only. Increase this number when the effects or the
# behaviour of an operator change.
VERSION = 3


@functools.cache
def operator(name: str) -> Any:
    return getattr(torch.ops.rtp_ext, f"{name}_{VERSION}").default


class Layer(Protocol):
    """The registered object of the `number` argument of `forward` and `backward`."""

    def _operation(self, key: str) -> Operation: ...


# -- forward and backward of an operation ------------------------------------------------------------------------------


class Forward(NamedTuple):
    """Arguments of the operator `forward`, in the order of its schema."""

    number: Tensor
    ring: str
    operation: str
    inputs: list[Tensor]
    params: list[Tensor]
    sizes: Sequence[int]
    needs: Sequence[bool]  # for inputs, then parameters: whether they need gradients
    dtype: torch.dtype


class Backward(NamedTuple):
    """Arguments of the operator `backward`, in the order of its schema."""

    number: Tensor
    ring: str
    operation: str
    gradients: list[Tensor]
    inputs: list[Tensor]
    params: list[Tensor]
    kept: list[Tensor]
    sizes: Sequence[int]
    needs: Sequence[bool]
    wanted: Sequence[bool]  # for inputs, then parameters: whether this backward must return a gradient
    dtype: torch.dtype


# By layer: the call and the settings of its forwards for their backwards. They hold no tensor of a batch.
_forwards: weakref.WeakKeyDictionary[Any, dict[Any, tuple[Call, Any]]] = weakref.WeakKeyDictionary()


def forward(given: Forward) -> list[Tensor]:
    layer: Layer = owner_of(given.number)
    inputs, params, needs, dtype = given.inputs, given.params, given.needs, given.dtype
    use = layer._operation(given.operation)
    options = use.options
    if options.ring is not ring_named(given.ring):
        raise RotationError(f"{options.name}: expected a graph of {options.ring.name}, got one of {given.ring}")
    options.ring.check_alive(options.name)
    reduce = options.reduce_dtype or (torch.float64 if dtype == torch.float64 else torch.float32)
    differentiable = [each for each, x in enumerate(inputs) if x.is_floating_point()]
    wanted = tuple(needs[each] for each in (*differentiable, *range(len(inputs), len(needs))))
    call = Call(options.ring, options.name, dtype, reduce, needs=wanted)
    with torch.no_grad():
        settings = use.prepare(call, inputs)
        _expect_registered(call, params)
        found = use.forward(call, settings, inputs, params)
    if any(needs):
        found = [*found, _stamp(call, params, use.reads(call, settings))]
    _forwards.setdefault(layer, {})[given.operation, tuple(needs), dtype] = call, settings
    return found


def _stamp(call: Call, params: list[Tensor], read: Sequence[bool]) -> Tensor:
    """Returns [2, parameters]: versions of the parameters that the backward reads, and addresses of their shards; -1
    for the others.

    Autograd saves shards and does not detect a write to the parameter. A write after the graph, or between two graphs,
    changes the version; after a write within the graph the backward gets another tensor.
    """
    versions = [param._version if each else -1 for param, each in zip(call.watched, read, strict=True)]
    addresses = [given.data_ptr() if each else -1 for given, each in zip(params, read, strict=True)]
    return torch.tensor([versions, addresses], dtype=torch.int64, device="cpu")


def _expect_unwritten(call: Call, params: list[Tensor], stamp: Tensor) -> None:
    for parameter, param, version, address in zip(call.watched, params, *stamp.tolist(), strict=True):
        if version >= 0 and (parameter._version, param.data_ptr()) != (version, address):
            raise RuntimeError(
                f"{call.name}: one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a parameter of shape {tuple(parameter.shape)}, now at version {parameter._version}"
            )


def _expect_registered(call: Call, params: list[Tensor]) -> None:
    for param, given in zip(call.params, params, strict=True):
        mine = held(param.tensor)
        if mine.data_ptr() != given.data_ptr() or mine.shape != given.shape or mine.dtype != given.dtype:
            raise RotationError(
                f"{call.name}: a compiled graph was given a {param.what} of shape {tuple(given.shape)} that is not the "
                "parameter of the layer that it was made for: expected parameters as they are registered (neither "
                "replaced by torch.func.functional_call nor written to earlier in the same graph: write to parameters "
                "outside of compiled functions)"
            )


def forward_fake(given: Forward) -> list[Tensor]:
    results = OPERATIONS[given.operation].graph_results(_rows(given.inputs), given.sizes, given.dtype)
    host, device = given.number, given.params[0]
    made = [(host if each == host.dtype else device).new_empty(shape, dtype=each) for shape, each in results]
    return [*made, host.new_empty((2, len(given.params)))] if any(given.needs) else made


def backward(given: Backward) -> list[Tensor]:
    layer: Layer = owner_of(given.number)
    gradients, inputs, params, wanted = given.gradients, given.inputs, given.params, given.wanted
    call, settings = _forwards[layer][given.operation, tuple(given.needs), given.dtype]
    *kept, stamp = given.kept
    _expect_unwritten(call, params, stamp)
    inputs = inputs or [empty_rows(gradients[0])]
    operation = OPERATIONS[given.operation]
    with torch.no_grad():
        results = gradients_of(operation, call, settings, gradients, inputs, params, kept, wanted)
    found: list[Any] = [gradient for gradient, want in zip(results, wanted, strict=True) if want]
    if (on := ring_named(given.ring)).options.late_gradients:
        for gradient in found:
            on.land(gradient)
    return found


def _rows(tensors: list[Tensor]) -> Any:
    return tensors[0].shape[0]


def backward_fake(given: Backward) -> list[Tensor]:
    like, params = given.gradients[0], given.params
    shape, count = (_rows(given.gradients), given.sizes[0]), len(given.wanted) - len(params)
    of_inputs = [like.new_empty(shape, dtype=given.dtype) for want in given.wanted[:count] if want]
    of_local_shards = [
        param.new_empty(param.shape) for param, want in zip(params, given.wanted[count:], strict=True) if want
    ]
    return [*of_inputs, *of_local_shards]


def keep_for_backward(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    given = Forward(*inputs)
    tensors, operation = given.inputs, OPERATIONS[given.operation]
    count = operation.results or len(given.sizes) - 1
    read = operation.reads_inputs or any(given.needs[len(tensors) :])
    kept = output[count:]
    ctx.counts = len(tensors), len(tensors) if read else 0, len(given.params), count
    ctx.constants = given.ring, given.operation, given.sizes, list(given.needs), given.dtype
    ctx.save_for_backward(given.number, *(tensors if read else ()), *given.params, *kept)


def differentiate(ctx: Any, gradients: list[Tensor]) -> tuple:
    ring, operation, sizes, needs, dtype = ctx.constants
    tensors, read, params, count = ctx.counts
    number, *saved = ctx.saved_tensors
    wanted = [*ctx.needs_input_grad[3], *ctx.needs_input_grad[4]]
    given = Backward(
        number,
        ring,
        operation,
        gradients[:count],
        inputs=saved[:read],
        params=saved[read : read + params],
        kept=saved[read + params :],
        sizes=sizes,
        needs=needs,
        wanted=wanted,
        dtype=dtype,
    )
    found = iter(operator("backward")(*given))
    each = [next(found) if want else None for want in wanted]
    return None, None, None, each[:tensors], each[tensors:], None, None, None
