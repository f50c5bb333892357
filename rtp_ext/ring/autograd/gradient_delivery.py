"""Delivery of gradients: from the ring, through the handler of an outer policy, to the parameter as a DTensor."""

from __future__ import annotations

import functools
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from rtp_ext._native import RotationError
from rtp_ext.ring.mesh import live_ring, role_of
from rtp_ext.ring.replicated_gradients import check_replicated_gradient

# Attributes of parameters: the GradientHandler of an outer policy, and the OffloadedShard of a shard on the host.
GRADIENT_HANDLER = "_rtp_gradient_handler"
OFFLOADED = "_rtp_offloaded"


class GradientHandler(Protocol):
    """Reduces the gradients of one parameter for an outer policy."""

    def reduce(self, ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Called in backward with this rank's gradient of the parameter, averaged over the ring, which is the policy's
        to write to; None where nobody on the ring used it. Returns what goes on to the parameter now, if anything: laid
        out as the parameter is, or a DTensor."""
        ...

    def local(self, parameter: DTensor) -> torch.Tensor:
        """This rank's shard, which rotates. Outside forwards and backwards of its model it may be collective over the
        replicas."""
        ...

    @property
    def alone(self) -> bool:
        """Whether no replica has a part in its gradients."""
        ...

    @property
    def ring(self) -> Any:
        """The Ring of the parameter, which reports failures of collectives; None before it is known."""
        ...


def gradient_handler_of(parameter: DTensor) -> GradientHandler | None:
    """The gradient handler of a parameter; None where no outer policy has it."""
    return parameter.__dict__.get(GRADIENT_HANDLER)


def offloaded_shard_of(parameter: torch.Tensor) -> Any:
    """The OffloadedShard (rtp_ext.ring.offload) of a parameter; None where its shard is on the device."""
    return parameter.__dict__.get(OFFLOADED)


def run_collective(
    mesh: DeviceMesh, handler: GradientHandler | None, operation: str, post: Any, *tensors: Any, group: Any
) -> None:
    """Runs a torch.distributed collective over ranks of the mesh of a parameter.

    Its failure ends the ring of the parameter, whose failure report says which rank failed: the ring of its handler,
    else a live ring that was made for this mesh. Without any ring the error of torch stays.
    """
    ring = None if handler is None else handler.ring
    if ring is None or not ring.alive:
        ring = live_ring(mesh)
    if ring is None:
        post(*tensors, group=group)
    else:
        ring.communicator.collectively(operation, post, *tensors, group=group)


def save_delivery(ctx: Any, parameter: DTensor) -> None:
    """In the forward of a function whose backward calls `deliver_gradient`."""
    ctx.spec, ctx.handler, ctx.kept = parameter._spec, gradient_handler_of(parameter), offloaded_shard_of(parameter)


def deliver_gradient(ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient of a parameter as a DTensor, of this rank's part of it: in the backward of a function that called
    `save_delivery`. None where it is delivered at the end of the backward, by a policy or from the host.

    Raises RotationError where replicas hold the parameter and nobody would bring its gradients together; ValueError
    where ranks of tensor parallelism, which each have a copy of it, have different gradients.
    """
    mesh = ctx.spec.mesh
    role = role_of(mesh)
    if ctx.handler is None and role.replicas > 1:
        raise RotationError(
            f"a parameter of shape {tuple(ctx.spec.shape)} lies on {role.replicas} replicas, but belongs to no outer "
            "policy, so that its gradient would stay that of one: expected a parameter of a model that fully_rotate "
            "has converted, and a forward of that model before"
        )
    parameter = getattr(ctx.next_functions[0][0], "variable", None)
    if role.tensor and parameter is not None and isinstance(ctx.spec.placements[-2], Replicate):
        check_replicated_gradient(parameter, gradient, mesh, functools.partial(run_collective, mesh, ctx.handler))
    if ctx.handler is not None:
        gradient = ctx.handler.reduce(ctx, gradient)
    if gradient is None or isinstance(gradient, DTensor):
        return gradient
    gradient = gradient.detach().contiguous()
    if ctx.kept is not None:
        # Waited for where somebody reads it before the backward ends, or as soon as it does.
        if parameter is not None and (ctx.handler is None or ctx.handler.alone) and not read_within(ctx, parameter):
            ctx.kept.deliver(parameter, gradient, functools.partial(as_gradient, spec=ctx.spec))
            return None
        (gradient,) = ctx.kept.memory.store([gradient])
    return as_gradient(gradient, ctx.spec)


def read_within(ctx: Any, parameter: torch.Tensor) -> bool:
    """Whether the backward that runs hands on the gradient of a parameter to somebody: the user, who asked for it with
    torch.autograd.grad, a graph of this backward, or a hook."""
    return ctx.create_graph or hooked(parameter) or not accumulates(ctx.next_functions[0][0])


def hooked(parameter: Any) -> bool:
    """Whether a hook sees the gradient of a parameter."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def accumulates(node: Any) -> bool:
    """Whether the backward that runs adds to the gradient of a leaf, and does not just return what it would add."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch's answer for torch.autograd.grad
        return False


def as_gradient(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """A DTensor laid out as a parameter is, which may be of another dtype."""
    meta = spec.tensor_meta
    if meta is not None and meta.dtype != local.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg]


def as_parameter(data: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """What `nn.Parameter` makes of a tensor. That detaches it: a DTensor asks its rules then, 5 ms for each shape."""
    if not isinstance(data, DTensor):
        return nn.Parameter(data, requires_grad=requires_grad)
    # The shard is no view: aliases of a view would not have the version that it shares with its parameter.
    made = as_gradient(data._local_tensor.data, data._spec)
    made._is_param = True  # type: ignore[attr-defined]
    return cast(nn.Parameter, made.requires_grad_(requires_grad))


_WIDE = "_rtp_wide"  # attribute of a rounded gradient: what it was rounded from, and its version then


def rounded(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A gradient in the dtype that autograd wants of it. `unrounded` finds what it was."""
    result = gradient.to(dtype)
    if dtype.itemsize < gradient.dtype.itemsize:
        setattr(result, _WIDE, (gradient, result._version))
    return result


def unrounded(gradient: torch.Tensor) -> torch.Tensor:
    """What a gradient was before it was rounded, in float32 at least: many may be added up."""
    wide, version = getattr(gradient, _WIDE, (None, None))
    if wide is not None and version == gradient._version:  # autograd has added nothing to it
        return wide
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))
