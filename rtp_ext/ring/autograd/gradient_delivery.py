"""Delivery of gradients: from the ring, through the handler of an outer policy, to the parameter as a DTensor."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from rtp_ext._native import RotationError, read_within
from rtp_ext.ring.autograd.once_differentiable import first_order_only
from rtp_ext.ring.autograd.transforms import storing_modes
from rtp_ext.ring.mesh import live_ring, role_of
from rtp_ext.ring.replicated_gradients import check_replicated_gradient

# Attributes of parameters: the GradientHandler of an outer policy, and the OffloadedShard of a shard on the host.
GRADIENT_HANDLER = "_rtp_gradient_handler"
OFFLOADED = "_rtp_offloaded"
FROZEN = "_rtp_frozen"  # attribute of a parameter that holds a frozen weight in blocks: its description


class GradientHandler(Protocol):
    """Reduces the gradients of one parameter for an outer policy."""

    def reduce(self, ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Reduces, in backward, this rank's gradient of the parameter, averaged over the ring, which the policy may
        write to; None where no rank of the ring used the parameter. Returns the gradient that the parameter receives
        now: with the layout of the parameter, or a DTensor; None for no gradient now."""
        ...

    def local(self, parameter: DTensor) -> torch.Tensor:
        """Returns this rank's shard, which rotates. Outside forwards and backwards of its model it may be collective
        over the replicas."""
        ...

    @property
    def alone(self) -> bool:
        """Whether gradients are not combined with those of replicas."""
        ...

    @property
    def ring(self) -> Any:
        """The Ring of the parameter, which reports failures of collectives; None before it is set."""
        ...


def gradient_handler_of(parameter: DTensor) -> GradientHandler | None:
    """Returns the gradient handler of a parameter; None where it belongs to no outer policy."""
    return parameter.__dict__.get(GRADIENT_HANDLER)


def offloaded_shard_of(parameter: torch.Tensor) -> Any:
    """Returns the OffloadedShard (rtp_ext.ring.cpu_offload) of a parameter; None where its shard is on the device."""
    return parameter.__dict__.get(OFFLOADED)


def run_collective(
    mesh: DeviceMesh, handler: GradientHandler | None, operation: str, post: Any, *tensors: Any, group: Any
) -> None:
    """Runs a torch.distributed collective over ranks of the mesh of a parameter.

    A failure ends the ring of the handler, else the newest live ring on this mesh, and the ring's failure report names
    the rank that failed. Without a live ring torch's error is raised.
    """
    ring = None if handler is None else handler.ring
    if ring is None or not ring.alive:
        ring = live_ring(mesh)
    if ring is None:
        post(*tensors, group=group)
    else:
        ring.communicator.collectively(operation, post, *tensors, group=group)


class Delivery(NamedTuple):
    """What `deliver_gradient` needs to know of a parameter, from the forward."""

    spec: DTensorSpec
    handler: GradientHandler | None
    kept: Any  # OffloadedShard
    late: Any = None  # the Ring, if the gradient may still be travelling
    scale: float = 1.0  # what the gradient is multiplied by before

    @classmethod
    def to(cls, parameter: DTensor) -> Delivery:
        return cls(parameter._spec, gradient_handler_of(parameter), offloaded_shard_of(parameter))


def deliver_gradient(delivery: Delivery, ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the gradient of a parameter as a DTensor, given this rank's part of it. None where a policy or the host
    delivers it at the end of the backward.

    ctx: the node of autograd whose only edge leads to the parameter, or an object with its `next_functions`, and
    `create_graph` where it is set.

    Raises RotationError where replicas hold the parameter and no policy combines its gradients; ValueError where ranks
    of tensor parallelism, which each have a copy of the parameter, have different gradients.
    """
    if torch.is_grad_enabled() or (torch._C._len_torch_dispatch_stack() > 0 and storing_modes()):
        return _outside_of_graph(SimpleNamespace(delivery=delivery, next_functions=ctx.next_functions), gradient)
    spec, handler, kept, late, scale = delivery
    if late is not None and gradient is not None:
        late.land(gradient)
    if scale != 1.0 and gradient is not None:
        gradient = rounded(unrounded(gradient) * scale, gradient.dtype)
    parameter = getattr(ctx.next_functions[0][0], "variable", None)  # None where the edge leads to another tensor
    if parameter is not None and not parameter.requires_grad:
        gradient = None  # frozen since the forward: autograd would drop it
    if len(spec.placements) > 1:  # replicas and tensor parallelism have dimensions of the mesh of their own
        _expect_combined(delivery, parameter, gradient)
    if handler is not None:
        gradient = handler.reduce(ctx, gradient)
    if gradient is None or isinstance(gradient, DTensor):
        return gradient
    gradient = gradient.detach().contiguous()
    if kept is not None:
        # A gradient that is read within the backward has to be on the host now; any other is delivered at its end.
        if parameter is not None and (handler is None or handler.alone) and not read_within(ctx, parameter):
            kept.deliver(parameter, gradient, functools.partial(as_gradient, spec=spec))
            return None
        (gradient,) = kept.memory.store([gradient])
    elif handler is None and parameter is not None and gradient.dtype == parameter.dtype:
        known: Any = parameter.grad
        if (known is None or _takes(known, spec)) and not read_within(ctx, parameter):
            # As autograd would, but for operators of DTensor, which take as long as a small layer.
            if known is None:
                parameter.grad = DTensor.__new__(DTensor, gradient, spec, requires_grad=False)
            else:
                known._local_tensor.add_(gradient)
                torch.autograd.graph.increment_version(known)
            return None
    return as_gradient(gradient, spec)


def _takes(known: Any, spec: DTensorSpec) -> bool:
    """Returns whether the gradient of an earlier backward lies as its parameter does, so that local shards add up."""
    if not isinstance(known, DTensor) or known.requires_grad or known.dtype != spec.tensor_meta.dtype:  # type: ignore[union-attr]
        return False
    return known._spec.placements == spec.placements and known._spec.mesh == spec.mesh


@first_order_only
def _outside_of_graph(ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
    return deliver_gradient(ctx.delivery, ctx, gradient)


def _expect_combined(delivery: Delivery, parameter: torch.Tensor | None, gradient: torch.Tensor | None) -> None:
    """Raises the errors of `deliver_gradient`."""
    mesh, role = delivery.spec.mesh, role_of(delivery.spec.mesh)
    if delivery.handler is None and role.replicas > 1:
        raise RotationError(
            f"a parameter of shape {tuple(delivery.spec.shape)} lies on {role.replicas} replicas, but belongs to no "
            "outer policy, so that its gradient would stay that of one: expected a parameter of a model that "
            "fully_rotate has converted, and a forward of that model before"
        )
    if role.tensor and parameter is not None and isinstance(delivery.spec.placements[-2], Replicate):
        check_replicated_gradient(parameter, gradient, mesh, functools.partial(run_collective, mesh, delivery.handler))


def as_gradient(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Returns `local` as a DTensor with the layout `spec` of a parameter; the dtype may differ."""
    meta = spec.tensor_meta
    if meta is not None and meta.dtype != local.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, local.dtype))
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)  # without __init__, which does nothing slowly


def as_parameter(data: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """Returns `nn.Parameter(data)`, without its detach, for which DTensor evaluates sharding rules: 5 ms for each
    shape."""
    if not isinstance(data, DTensor):
        return nn.Parameter(data, requires_grad=requires_grad)
    # The shard must not be a view: an alias of a view does not have the version counter of its parameter.
    made = as_gradient(data._local_tensor.data, data._spec)
    made._is_param = True  # type: ignore[attr-defined]
    return cast(nn.Parameter, made.requires_grad_(requires_grad))


_WIDE = "_rtp_wide"  # attribute of a rounded gradient: the gradient before rounding, and its version at that time


def rounded(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a gradient in the dtype that autograd expects. `unrounded` returns it without the rounding."""
    result = gradient.to(dtype)
    if dtype.itemsize < gradient.dtype.itemsize:
        setattr(result, _WIDE, (gradient, result._version))
    return result


def unrounded(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a gradient as it was before `rounded`, in float32 at least, for sums of many."""
    wide, version = getattr(gradient, _WIDE, (None, None))
    if wide is not None and version == gradient._version:  # autograd has added nothing to it
        return wide
    return gradient.to(summing_dtype(gradient.dtype))


def summing_dtype(dtype: torch.dtype, asked: torch.dtype | None = None) -> torch.dtype:
    """Returns the dtype, float32 at least and complex where `dtype` is, that adds up gradients of `dtype` without a
    loss. asked: the reduce_dtype of a policy, which decides for real numbers."""
    if asked is not None and not dtype.is_complex:
        return asked
    wide = torch.float32 if dtype.itemsize == 1 else torch.promote_types(dtype, torch.float32)  # float8 has no rule
    return wide if asked is None else torch.promote_types(wide, asked)
