"""DTensor parameters of a ring: gradients through `full_tensor` and `redistribute`, writes and state of optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from rtp_ext._native import share_version
from rtp_ext.dtensor_hooks import after_steps, before_steps, count_writes, patch_full_tensor
from rtp_ext.ring.autograd import Delivery, deliver_gradient, first_order_only, run_collective, summing_dtype
from rtp_ext.ring.dtensor_operators import correct_operators, gradient_as_placed
from rtp_ext.ring.mesh import MeshRole, local_placements, mesh_roles, own_part, rings_on


def register_mesh(mesh: DeviceMesh, replicas: int, tensor: bool) -> None:
    """Registers the mesh of a ring's parameters. Optimizer steps then raise the version counters of these parameters
    and refuse state that is whole or belongs to another rank, and gradients of `full_tensor` are averaged. Raises
    ValueError where an equal mesh has another role: the role of a gradient follows from its mesh alone."""
    role = MeshRole(replicas, tensor)
    known = mesh_roles.get(mesh, role)
    if known != role:
        what = ["tensor parallelism" if each.tensor else "replicas" for each in (known, role)]
        raise ValueError(
            "fully_rotate: expected one meaning for each dimension of a mesh, got "
            f"{mesh.mesh_dim_names} with {what[0]} in another model and with {what[1]} in this one, over the same "
            "ranks: give the dimension another name for one of the two (init_device_mesh(..., mesh_dim_names=...))"
        )
    before_steps("state", _check_state)
    count_writes(rotates)
    after_steps(_count_update)
    patch_full_tensor(rotates, _FullTensor.apply)
    correct_operators()
    mesh_roles.setdefault(mesh, role)


def rotates(tensor: Any) -> bool:
    """Returns whether a tensor is a parameter of a ring."""
    return isinstance(tensor, DTensor) and isinstance(tensor, nn.Parameter) and tensor.device_mesh in mesh_roles


def expect_own_shard(tensor: Any, parameter: torch.Tensor, what: str) -> None:
    """Raises ValueError where `tensor`, which belongs to a parameter, is the shard of another rank: an unpickled
    DTensor has the coordinates of the rank that pickled it."""
    if not isinstance(tensor, DTensor) or not isinstance(parameter, DTensor):
        return
    theirs, mine = tensor.device_mesh, parameter.device_mesh
    if theirs is mine or theirs != mine or theirs.get_coordinate() == mine.get_coordinate():
        return
    raise ValueError(
        f"{what}: expected the shard of the rank at {mine.get_coordinate()} of its mesh, got the one of the rank at "
        f"{theirs.get_coordinate()}: every rank has loaded what one rank saved. Save with torch.distributed.checkpoint "
        "(get_state_dict, set_state_dict), or a file for each rank"
    )


def _check_state(optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in filter(rotates, group["params"]):
            gradient_as_placed(parameter)
            for key, value in optimizer.state.get(parameter, {}).items():
                what = f"{type(optimizer).__name__}: state {key} of a parameter of shape {tuple(parameter.shape)}"
                expect_own_shard(value, parameter, what)
                if _is_whole(value, parameter):
                    raise ValueError(
                        f"{what}: expected a DTensor that is cut as the parameter is, got a plain tensor of the whole "
                        "shape: load whole optimizer state with set_optimizer_state_dict of "
                        "torch.distributed.checkpoint.state_dict and full_state_dict=True"
                    )


def _count_update(optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
    """Has the rings of an optimizer's parameters count its step: hops of ranks with other counts do not match. Version
    counters would not serve: a rank without rows of a parameter may write to none, and one rank may write alone."""
    meshes = {p.device_mesh for group in optimizer.param_groups for p in group["params"] if rotates(p)}
    for ring in {ring for mesh in meshes for reference in rings_on.get(mesh, ()) if (ring := reference()) is not None}:
        for each in ring.rings:
            each.communicator.executor.count_update()


def _is_whole(value: Any, parameter: Any) -> bool:
    """Returns whether a value of the state is a plain tensor as large as a whole parameter that is sharded. The same on
    every rank. One number may be a count of steps, of shape [1] as the parameter."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.shape != parameter.shape:
        return False
    if value.numel() == 1:
        return False
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return any(ranks > 1 and not isinstance(placement, Replicate) for placement, ranks in sizes)


class _FullTensor(torch.autograd.Function):
    """`full_tensor` of a parameter outside its module, such as a vocabulary head in a loss that the user computes.

    torch assumes that its gradient is the same on every rank. Here every rank has a batch of its own: gradients are
    averaged, as those of all parameters are. The average of equal gradients does not change them.
    """

    @staticmethod
    def forward(ctx, parameter: DTensor, stock: Callable[..., torch.Tensor]):
        ctx.delivery = Delivery.to(parameter)
        whole = stock(parameter.detach()).clone()
        share_version(whole, parameter)
        return whole

    @staticmethod
    @first_order_only
    def backward(ctx, gradient: torch.Tensor):
        spec, handler, kept, *_ = ctx.delivery
        mesh = spec.mesh
        ring, ranks = mesh.get_group(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        mean = gradient.to(summing_dtype(gradient.dtype), copy=True, memory_format=torch.contiguous_format)
        run_collective(mesh, handler, "full_tensor backward", dist.all_reduce, mean, group=ring)
        mean.div_(ranks)
        mean = own_part(mean, mesh, local_placements(spec))
        mean = mean if kept is None else kept.memory.load(mean)
        # A copy: the gradient must not keep the whole one alive.
        mean = mean.to(gradient.dtype, copy=True, memory_format=torch.contiguous_format)
        return deliver_gradient(ctx.delivery, ctx, mean), None
