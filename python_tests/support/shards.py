"""AdamW, SGD and clipping on each rank's own shards, with torch's state and kernels but without DTensor's rules; and
what makes DTensors of others: `detach`, which autograd calls for every gradient that it keeps, `clone`, `zeros_like`,
`copy_`, and the sum of two gradients.

DTensor evaluates its rules for every new shape of an operation in a process, which takes 1 to 20 ms on a mesh of two or
three dimensions: for the state, the step and the clipping of one small model a third of the time of its test. The steps
are elementwise, so each shard can be updated alone. Torch's own steps on DTensors are tested in
functional/test_autograd.py, parameters/test_state.py, convert/test_whole_embedding.py, and once on meshes of two
dimensions with replicas and with tensor parallelism, where tests use `stock`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim.sgd import sgd

# torch's rules give their results the placements of the first argument where none of these is partial.
_ALIKE = {getattr(torch.ops.aten, f"{name}_like").default for name in ("empty", "full", "ones", "zeros")}
_ALIKE |= {torch.ops.aten.clone.default, torch.ops.aten.zero_.default}
_OF_TWO = {torch.ops.aten.copy_.default, torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor}


def copies_without_rules() -> None:
    """From now on no rule of DTensor is evaluated for `detach`, for the operations of _ALIKE, and for those of _OF_TWO
    between equal placements, shapes and dtypes: their results have the placements of the first argument."""
    stock = ShardingPropagator.propagate_op_sharding_non_cached
    detach = torch.ops.aten.detach.default

    def keeps(op: Any, spec: DTensorSpec, schema: OpSchema) -> bool:
        if op is detach:
            return True
        if any(placement.is_partial() for placement in spec.placements):
            return False
        if op in _ALIKE:
            given = {key: value for key, value in schema.kwargs_schema.items() if value is not None}
            return given.items() <= {"memory_format": torch.preserve_format, "pin_memory": False}.items()
        return op in _OF_TWO and schema.args_schema[1:] == (spec,) and not schema.kwargs_schema

    @functools.wraps(stock)
    def propagate(self: ShardingPropagator, schema: OpSchema) -> OutputSharding:
        spec = schema.args_schema[0] if schema.args_schema else None
        if isinstance(spec, DTensorSpec) and spec.tensor_meta is not None and keeps(schema.op, spec, schema):
            return OutputSharding(spec)
        return stock(self, schema)

    ShardingPropagator.propagate_op_sharding_non_cached = propagate


def _own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gradient(parameter: Tensor) -> Tensor:
    """Returns the gradient with the placements of the parameter, which torch's steps need, too."""
    gradient = parameter.grad
    assert gradient is not None
    assert isinstance(gradient, DTensor) == isinstance(parameter, DTensor), (type(gradient), type(parameter))
    if isinstance(parameter, DTensor):
        found, expected = ((t.device_mesh, t.placements, t.shape) for t in (gradient, parameter))
        assert found == expected, f"expected a gradient cut as its parameter is, {expected}, got {found}"
    assert _own(gradient).shape == _own(parameter).shape, (_own(gradient).shape, _own(parameter).shape)
    return gradient


class AdamW(torch.optim.AdamW):
    """AdamW whose step sees this rank's shards. Its state is made of DTensors, as torch's is."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            _gradient(parameter)
            if isinstance(parameter, DTensor) and not self.state[parameter]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": DTensor(torch.zeros_like(_own(parameter)), parameter._spec, requires_grad=False),
                    "exp_avg_sq": DTensor(torch.zeros_like(_own(parameter)), parameter._spec, requires_grad=False),
                }
        result = super()._init_group(group, *lists)
        for each in lists:
            each[:] = [_own(tensor) for tensor in each]
        return result


class SGD(torch.optim.SGD):
    """SGD whose step sees this rank's shards. Its momentum is made of DTensors, as torch's is."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            given = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [_own(_gradient(parameter)) for parameter in given]
            momenta = [self.state[parameter].get("momentum_buffer") for parameter in given]
            buffers = [None if momentum is None else _own(momentum) for momentum in momenta]
            options = {
                key: group[key] for key in ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
            }
            sgd([_own(parameter) for parameter in given], gradients, buffers, foreach=False, fused=False, **options)
            if group["momentum"] != 0:
                for parameter, momentum, buffer in zip(given, momenta, buffers, strict=True):
                    if momentum is None:
                        if isinstance(parameter, DTensor):
                            buffer = DTensor(buffer, parameter._spec, requires_grad=False)
                        self.state[parameter]["momentum_buffer"] = buffer


def clip_shards(parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
    """`clip_grad_norm_`, whose norm torch computes from the DTensors. Returns the norm, whole."""
    given = [parameter for parameter in parameters if parameter.grad is not None]
    norm = _norm([_gradient(parameter) for parameter in given])
    scale_shards(given, largest, norm)
    return norm


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the norm of all gradients together. Collective over the dimensions of meshes that cut them."""
    cut: dict[tuple[Any, tuple[int, ...]], list[Tensor]] = {}  # by mesh, and dimensions of it
    for gradient in gradients:
        key: tuple[Any, tuple[int, ...]] = (None, ())
        if isinstance(gradient, DTensor):
            placed = gradient.placements
            assert not any(each.is_partial() for each in placed), placed
            key = gradient.device_mesh, tuple(dim for dim, each in enumerate(placed) if not each.is_replicate())
        cut.setdefault(key, []).append(_own(gradient))
    squares = []
    for (mesh, dims), parts in cut.items():
        square = torch.stack(torch._foreach_norm(parts)).square().sum()
        for dim in dims:
            dist.all_reduce(square, group=mesh.get_group(dim))
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


def scale_shards(parameters: Iterable[nn.Parameter], largest: float, norm: Tensor) -> None:
    """`clip_grads_with_norm_`."""
    factor = torch.clamp(largest / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            _own(_gradient(parameter)).mul_(factor.to(parameter.grad.dtype))
