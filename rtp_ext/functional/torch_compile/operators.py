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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rtp_ext._native import RotationError
from rtp_ext.functional._call import Call, ShardedParameter
from rtp_ext.functional._passes import accumulation_dtype
from rtp_ext.functional.cross_entropy import LinearCrossEntropy
from rtp_ext.functional.embedding import Embedding
from rtp_ext.functional.linear import Linears, PartialLinear
from rtp_ext.functional.mlp import MLP
from rtp_ext.parameters.sharding import held
from rtp_ext.ring import Ring
from rtp_ext.ring.registry import owner_of, ring_named

# Compiler caches identify an operator by its name and schema only. Increase this number when the effects or the
# behaviour of an operator change.
VERSION = 2


@functools.cache
def operator(name: str) -> Any:
    return getattr(torch.ops.rtp_ext, f"{name}_{VERSION}").default


@dataclass
class Bound:
    """A layer as an operator calls it: the arguments of the eager call besides tensors."""

    ring: Ring
    name: str
    in_place: bool
    reduce_dtype: torch.dtype | None
    # prepares a call for these inputs; returns the local shards, and the function's arguments that precede tensors
    prepare: Callable[[Call, list[Tensor]], tuple[Sequence[ShardedParameter], tuple[Any, ...]]]


class Layer(Protocol):
    """The registered object of the `number` argument of `forward` and `backward`."""

    def _bound(self, operation: str) -> Bound: ...


class _Context:
    """Replaces autograd's context when an operator calls an autograd function."""

    next_functions: tuple = ()
    saved_tensors: tuple[Tensor, ...] = ()

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, _value: bool) -> None: ...


@dataclass(frozen=True)
class _Operation:
    """An operation of the graph. `sizes` are the numbers that decide shapes besides the tensors.

    outputs: number of results for the caller; the other results are kept for the backward.
    results: shape and dtype of every result.
    keep: selects, from the tensors that the function saved, those to return as kept.
    saved: rebuilds the saved tensors of the function from inputs, local shards and kept tensors.
    """

    function: Any
    outputs: Callable[[Sequence[int]], int]
    results: Callable[[list[Tensor], Sequence[Any], torch.dtype], list[tuple[tuple[Any, ...], torch.dtype]]]
    keep: Callable[[tuple[Tensor, ...], int], Sequence[Tensor]]
    saved: Callable[[list[Tensor], list[Tensor], list[Tensor]], Sequence[Tensor]]
    arguments: Callable[[list[Tensor], list[Tensor]], Sequence[Tensor | None]] = lambda inputs, params: [
        *inputs,
        *params,
    ]


def _rows(inputs: list[Tensor]) -> Any:
    return inputs[0].shape[0]


def _one(_sizes: Sequence[int]) -> int:
    return 1


def _nothing(_saved: tuple[Tensor, ...], _tensors: int) -> Sequence[Tensor]:
    return ()


def _behind(saved: tuple[Tensor, ...], tensors: int) -> Sequence[Tensor]:
    return saved[tensors:]


_OPERATIONS = {
    # sizes: in features, and the out features of every layer
    "linears": _Operation(
        Linears,
        lambda sizes: len(sizes) - 1,
        lambda inputs, sizes, dtype: [((_rows(inputs), size), dtype) for size in sizes[1:]],
        _nothing,
        lambda inputs, params, kept: [*inputs, *params],
    ),
    # sizes: in and out features
    "partial linear": _Operation(
        PartialLinear,
        _one,
        lambda inputs, sizes, dtype: [((_rows(inputs), sizes[1]), dtype)],
        _nothing,
        lambda inputs, params, kept: [*inputs, params[0]],
        lambda inputs, params: [*inputs, params[0], params[1] if len(params) > 1 else None],
    ),
    # sizes: in and out features, and the features of every kept hidden value
    "mlp": _Operation(
        MLP,
        _one,
        lambda inputs, sizes, dtype: [((_rows(inputs), size), dtype) for size in sizes[1:]],
        _behind,
        lambda inputs, params, kept: [*inputs, *params, *kept],
    ),
    # sizes: features
    "embedding": _Operation(
        Embedding,
        _one,
        lambda inputs, sizes, dtype: [((_rows(inputs), sizes[0]), dtype)],
        _nothing,
        lambda inputs, params, kept: inputs,
    ),
    # sizes: features
    "linear cross-entropy": _Operation(
        LinearCrossEntropy,
        _one,
        lambda inputs, sizes, dtype: [
            ((_rows(inputs),), accumulation_dtype(dtype)),
            ((2, _rows(inputs)), accumulation_dtype(dtype)),
        ],
        lambda saved, tensors: saved[2:3],
        lambda inputs, params, kept: [inputs[1], inputs[0], *kept, *params],
    ),
}


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


# By layer: the contexts of its forwards for their backwards. They hold no tensor of a batch.
_contexts: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def forward(given: Forward) -> list[Tensor]:
    kind = _OPERATIONS[given.operation]
    layer: Layer = owner_of(given.number)
    inputs, params, needs, dtype = given.inputs, given.params, given.needs, given.dtype
    bound = layer._bound(given.operation)
    if bound.ring is not ring_named(given.ring):
        raise RotationError(f"{bound.name}: expected a graph of {bound.ring.name}, got one of {given.ring}")
    bound.ring.check_alive(bound.name)
    reduce = bound.reduce_dtype or (torch.float64 if dtype == torch.float64 else torch.float32)
    differentiable = [each for each, x in enumerate(inputs) if x.is_floating_point()]
    wanted = tuple(needs[each] for each in (*differentiable, *range(len(inputs), len(needs))))
    call = Call(bound.ring, bound.name, bound.in_place, dtype, reduce, needs=wanted)
    with torch.no_grad():
        registered, constants = bound.prepare(call, [inputs[each] for each in differentiable])
        _expect_registered(call, registered, params)
        arguments = kind.arguments(inputs, params)
        unwanted = (False,) * (1 + len(constants))
        context: Any = _Context((*unwanted, *needs, *(False,) * (len(arguments) - len(needs))))
        result = kind.function.forward(context, call, *constants, *arguments)
    kept = [*kind.keep(context.saved_tensors, len(arguments))]
    if any(needs):
        kept.append(
            _stamp(registered, params, [any(param is each for each in context.saved_tensors) for param in params])
        )
    context.save_for_backward()
    _contexts.setdefault(layer, {})[given.operation, tuple(needs), dtype] = context, unwanted
    return [*result, *kept] if isinstance(result, tuple) else [result, *kept]


def _stamp(registered: Sequence[ShardedParameter], params: list[Tensor], read: Sequence[bool]) -> Tensor:
    """Returns [2, parameters]: versions of the parameters that the backward reads, and addresses of their shards; -1
    for the others.

    Autograd saves shards and does not detect a write to the parameter. A write after the graph, or between two graphs,
    changes the version; after a write within the graph the backward gets another tensor.
    """
    versions = [param.tensor._version if each else -1 for param, each in zip(registered, read, strict=True)]
    addresses = [given.data_ptr() if each else -1 for given, each in zip(params, read, strict=True)]
    return torch.tensor([versions, addresses], dtype=torch.int64, device="cpu")


def _expect_unwritten(call: Call, params: list[Tensor], stamp: Tensor) -> None:
    for parameter, param, version, address in zip(call.watched, params, *stamp.tolist(), strict=True):
        if version >= 0 and (parameter._version, param.data_ptr()) != (version, address):
            raise RuntimeError(
                f"{call.name}: one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a parameter of shape {tuple(parameter.shape)}, now at version {parameter._version}"
            )


def _expect_registered(call: Call, registered: Sequence[ShardedParameter], params: list[Tensor]) -> None:
    for param, given in zip(registered, params, strict=True):
        mine = held(param.tensor)
        if mine.data_ptr() != given.data_ptr() or mine.shape != given.shape or mine.dtype != given.dtype:
            raise RotationError(
                f"{call.name}: a compiled graph was given a {param.what} of shape {tuple(given.shape)} that is not the "
                "parameter of the layer that it was made for: expected parameters as they are registered (neither "
                "replaced by torch.func.functional_call nor written to earlier in the same graph: write to parameters "
                "outside of compiled functions)"
            )


def forward_fake(given: Forward) -> list[Tensor]:
    results = _OPERATIONS[given.operation].results(given.inputs, given.sizes, given.dtype)
    stamp = [given.number.new_empty((2, len(given.params)))] if any(given.needs) else []
    return [*(given.params[0].new_empty(shape, dtype=each) for shape, each in results), *stamp]


def backward(given: Backward) -> list[Tensor]:
    kind = _OPERATIONS[given.operation]
    layer: Layer = owner_of(given.number)
    gradients, inputs, params, wanted = given.gradients, given.inputs, given.params, given.wanted
    then, unwanted = _contexts[layer][given.operation, tuple(given.needs), given.dtype]
    *kept, stamp = given.kept
    _expect_unwritten(then.call, params, stamp)
    if not inputs:  # the backward needs their number of rows only
        inputs = [gradients[0].new_empty(gradients[0].shape[0], 0)]
    padding = (False,) * (len(kind.arguments(inputs, params)) - len(wanted))
    context: Any = _Context((*unwanted, *wanted, *padding))
    context.__dict__.update(
        {**then.__dict__, "saved_tensors": tuple(kind.saved(inputs, params, kept))},
        needs_input_grad=context.needs_input_grad,
    )
    results = kind.function.backward(context, *gradients)[len(unwanted) :]
    found = [gradient for gradient, want in zip(results, wanted, strict=False) if want]
    if (on := ring_named(given.ring)).late_gradients:
        for gradient in found:
            on.land(gradient)
    return found


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
    tensors, count = given.inputs, _OPERATIONS[given.operation].outputs(given.sizes)
    # The backward of a linear layer reads its input only for gradients of parameters.
    read = given.operation not in ("linears", "partial linear") or any(given.needs[len(tensors) :])
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
