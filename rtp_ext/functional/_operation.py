"""Rotated operations: what eager code, graphs of torch.compile and selective checkpointing know of each.

A subclass of `Operation` is an operation, an instance one use of it: its parameters and settings. `rotate` computes it.
This file and those of the operations are traced by compilers; `_rotated.py` runs in the interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rtp_ext import _native
from rtp_ext.compilers import tracing
from rtp_ext.functional import _rotated, _selective
from rtp_ext.functional._call import Call, ShardedParameter, prepare
from rtp_ext.ring import Prepared, Ring

Shape = tuple[Any, ...]


class Options(NamedTuple):
    """The keyword arguments that all rotated operations have in common; see `rotated_linear`."""

    ring: Ring
    prepared: Prepared | None
    compute_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    name: str


OPERATIONS: dict[str, type[Operation]] = {}  # by key; a subclass adds itself


class Operation:
    """One use of an operation. `tensors` of a pass are its inputs, then its parameters in the order of the engine.

    Attributes:
        key: the name of the operation, in agreements of the ranks and in graphs.
        label: of its operator in policies of selective checkpointing.
        results: the number of results; None: one for each number of `in_graph` but the first, and nothing is kept. Else
            a forward returns others behind them, which are kept for the backward.
        kind: its row of the table in csrc/schedule/operations.h: which parameters travel in which pass, and how.
        autocasts: whether it computes in the dtype of torch.autocast.
        reads_inputs: whether a backward reads the inputs for gradients of inputs too; else for parameters only.
    """

    key: ClassVar[str]
    label: ClassVar[str]
    results: ClassVar[int | None] = 1
    autocasts: ClassVar[bool] = True
    reads_inputs: ClassVar[bool] = True
    kind: ClassVar[Any]

    def __init_subclass__(cls) -> None:
        OPERATIONS[cls.key], cls.kind = cls, _native.operation_kind(cls.key)
        _selective.register(cls.label)

    def __init__(self, options: Options, *parameters: Tensor | None) -> None:
        self.options = options
        self.given: tuple[Any, ...] = parameters

    # -- a use ---------------------------------------------------------------------------------------------------------

    def parameters(self) -> list[Tensor]:
        """Returns the parameters in the order of the engine."""
        return [parameter for parameter in self.given if parameter is not None]

    def operands(self, call: Call, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Returns the inputs as the passes read them, checked but for their sizes."""
        return [call.rows(call.operand(x)) for x in inputs]

    def prepare(self, call: Call, inputs: Sequence[Tensor]) -> Any:
        """Prepares `call` with the operands, and returns the settings of the passes, which hold no tensor."""
        raise NotImplementedError

    def agree(self, call: Call, params: Sequence[ShardedParameter], inputs: Any, facts: Any, derive: Any, **more: Any):
        """`prepare` of this operation."""
        more["late"] = self.kind.late
        inputs = [x for x in inputs if x.is_floating_point()]  # which may require gradients
        return prepare(call, self.options.prepared, self.key, params, inputs, facts, derive, **more)

    def check(self, call: Call, settings: Any, inputs: Sequence[Tensor]) -> None:
        """Raises ValueError where the inputs do not have the sizes of the settings."""

    def shaped(self, results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Returns results [rows, features] with the leading dimensions of the input."""
        x = inputs[0]
        return [y if x.dim() == 2 else y.reshape(*x.shape[:-1], y.shape[-1]) for y in results]

    def in_graph(self, dtype: torch.dtype, inputs: Sequence[Any]) -> tuple[list[Tensor], list[int]] | None:
        """Returns the operands, and the numbers, input features first, that decide shapes besides the tensors. None
        where no graph has the operation, or the eager function would refuse it."""
        return None

    # -- its passes ----------------------------------------------------------------------------------------------------

    @staticmethod
    def graph_results(rows: Any, sizes: Sequence[Any], dtype: torch.dtype) -> list[tuple[Shape, torch.dtype]]:
        """Returns shape and dtype of all that a forward returns in a graph. Those of int64 are on the host."""
        return [((rows, size), dtype) for size in sizes[1:]]

    @staticmethod
    def reads(call: Call, settings: Any) -> Sequence[bool]:
        """Returns for each parameter whether the backward reads its values."""
        return [True] * len(call.watched)

    @staticmethod
    def forward(call: Call, settings: Any, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
        raise NotImplementedError

    @staticmethod
    def after(call: Call, settings: Any, kept: Sequence[Tensor]) -> None:
        """Follows a forward, and a selective checkpoint's recomputation that has run none."""

    @staticmethod
    def backward(
        call: Call,
        settings: Any,
        gradients: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
        kept: Sequence[Tensor],
        needs: Sequence[bool],
    ) -> Sequence[Tensor | None]:
        """Returns the gradients of all tensors. `needs`: which are wanted, one at least."""
        raise NotImplementedError


def rotate(use: Operation, inputs: Sequence[Any], owner: Any = None) -> list[Tensor]:
    """Returns the results of a use of an operation.

    owner: the object that is registered for graphs of compilers (rtp_ext.ring.registry). While one traces, the
    operation becomes an operator of its graph where it can be part of one; else the graph breaks.
    """
    if owner is not None and torch.compiler.is_dynamo_compiling() and tracing(use.options.ring):
        found = in_graph(use, inputs, owner)
        if found is not None:
            return found
    return _rotated.run(use, inputs)


def in_graph(use: Operation, inputs: Sequence[Any], owner: Any) -> list[Tensor] | None:
    """Puts an operator into the graph that a compiler traces. None where it cannot be part of one."""
    options, parameters = use.options, use.parameters()
    if options.ring.in_place:
        return None
    dtype = options.compute_dtype or parameters[0].dtype
    device = options.ring.device
    if use.autocasts and torch.is_autocast_enabled(device.type) and parameters[0].dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device.type)  # the rule of Call.of
    for x in inputs:
        if not isinstance(x, Tensor) or isinstance(x, DTensor) or x.device.type != device.type:
            return None
    found = use.in_graph(dtype, inputs)
    if found is None:
        return None
    operands, sizes = found
    grad = torch.is_grad_enabled()
    needs = [grad and tensor.requires_grad for tensor in [*operands, *parameters]]
    shards = [local(parameter) for parameter in parameters]
    results = torch.ops.rtp_ext.forward_3(
        owner._rtp_number, options.ring.name, use.key, operands, shards, sizes, needs, dtype
    )
    return use.shaped(results[: use.results or len(sizes) - 1], inputs)


def graph_operand(x: Tensor, dtype: torch.dtype, features: int) -> Tensor | None:
    """Returns [..., features] as [rows, features] in the compute dtype; None if the eager function would refuse it."""
    if x.dim() < 1:
        return None
    if x.dtype != dtype and x.is_floating_point() and torch.is_autocast_enabled(x.device.type):
        x = x.to(dtype)
    if x.dtype != dtype or x.shape[-1] != features:
        return None
    return x if x.dim() == 2 else x.reshape(-1, features)


def local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def expect_features(call: Call, x: Tensor, features: int) -> None:
    if x.shape[-1] != features:
        raise ValueError(f"{call.name}: expected an input of {features} features, got shape {tuple(x.shape)}")
