"""Which ranks a ring is made of."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rtp_ext._native import RotationError


def resolve_mesh(mesh_or_group: DeviceMesh | dist.ProcessGroup | None) -> DeviceMesh:
    """The mesh that a Ring's `mesh_or_group` stands for."""
    if not dist.is_initialized():
        raise RotationError("Ring: torch.distributed is not initialised; call init_process_group, or use Ring.emulated")
    if isinstance(mesh_or_group, DeviceMesh):
        if mesh_or_group.ndim != 1:
            raise ValueError(
                f"Ring: expected a one-dimensional mesh, got one with dimensions {mesh_or_group.mesh_dim_names}; "
                'pass one of them, such as mesh["rtp"]'
            )
        return mesh_or_group
    if mesh_or_group is not None and not isinstance(mesh_or_group, dist.ProcessGroup):
        raise TypeError(f"Ring: expected a DeviceMesh or a process group, got {type(mesh_or_group).__name__}")
    backend = str(dist.get_backend(mesh_or_group))
    device_type = "cuda" if "nccl" in backend and torch.cuda.is_available() else "cpu"
    if mesh_or_group is None:
        return init_device_mesh(device_type, (dist.get_world_size(),))
    return DeviceMesh.from_group(mesh_or_group, device_type)
