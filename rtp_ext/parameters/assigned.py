"""Assignments to `parameter.data` of sharded parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rtp_ext.dtensor_hooks import patch_data
from rtp_ext.ring.mesh import own_part
from rtp_ext.ring.parameters_in_use import rotates


def let_data_be_assigned() -> None:
    """Has `parameter.data = values` write to the shard of a parameter on a ring, with `values` whole or laid out as the
    parameter is."""
    patch_data(rotates, _assign)


def _assign(parameter: DTensor, values: Any) -> None:
    """Copies the values of a whole tensor, or of a DTensor, to the shard; collective for a DTensor that is laid out
    otherwise."""
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"parameter.data: expected a tensor, got a {type(values).__name__}")
    shape = tuple(parameter.shape)
    if values.shape != parameter.shape:
        raise ValueError(
            f"parameter.data: expected the values of the whole parameter, of shape {shape}, got {tuple(values.shape)}; "
            "write to a shard with parameter.to_local().copy_(values) under torch.no_grad()"
        )
    if values.dtype != parameter.dtype:
        raise TypeError(
            f"parameter.data: expected {parameter.dtype}, the dtype of the parameter of shape {shape}, got "
            f"{values.dtype}; model.to(dtype) changes it"
        )
    if values.is_meta or parameter.is_meta:
        raise ValueError(
            f"parameter.data: expected a parameter of shape {shape} and values with storage, got one of them on the "
            "meta device: call to_empty(device=...) first"
        )
    with torch.inference_mode(False), torch.no_grad():
        parameter._local_tensor.copy_(_part_of(values.detach(), parameter))
        torch.autograd.graph.increment_version(parameter)


def _part_of(values: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    if isinstance(values, DTensor):
        if values.device_mesh == parameter.device_mesh and values.placements == parameter.placements:
            return values.to_local()
        values = values.full_tensor()
    return own_part(values, parameter.device_mesh, parameter.placements)
