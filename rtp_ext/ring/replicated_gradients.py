"""Gradients that have to be the same on all ranks of a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_COMPARED = "_rtp_compared"  # attribute of a parameter

# Gradients may differ by rounding alone, relative to their norm. A gradient that is tiny relative to the largest one so
# far may itself be rounding, and is not compared.
_TOLERANCE, _ROUNDING = 1e-2, 1e-4
_largest: dict[DeviceMesh, float] = {}


def check_replicated_gradient(
    parameter: Any, gradient: torch.Tensor | None, mesh: DeviceMesh, collective: Callable[..., None]
) -> None:
    """Compares the first gradient of a parameter that every rank of tensor parallelism has a copy of. Raises ValueError
    on every rank where the gradients differ: the copies would diverge. Collective over these ranks, once for each
    parameter.

    `mesh`: the mesh of the parameter; tensor parallelism is the dimension before the last one. `collective`: runs a
    collective, see rtp_ext.ring.autograd.run_collective.
    """
    if _COMPARED in parameter.__dict__:
        return
    parameter.__dict__[_COMPARED] = True
    mine = torch.zeros(2, dtype=torch.float32, device=parameter.device)
    if gradient is not None and gradient.numel():
        numbers = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
        flat = numbers.detach().reshape(-1).float()
        waves = torch.arange(1, flat.numel() + 1, dtype=torch.float32, device=flat.device).cos_()
        mine = torch.stack([flat.norm(), flat.dot(waves)])
    answers = [torch.empty_like(mine) for _ in range(mesh.size(mesh.ndim - 2))]
    group = mesh.get_group(mesh.ndim - 2)
    collective("a copy's gradient", dist.all_gather, answers, mine, group=group)
    every = torch.stack(answers).cpu()
    norm, difference = every[:, 0].max().item(), (every - every[0]).abs().max().item()
    largest = _largest[mesh] = max(norm, _largest.get(mesh, 0.0))
    if norm > _ROUNDING * largest and difference > _TOLERANCE * norm:
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)}, which every rank of tensor parallelism "
            f"has a copy of, is not the same on them: expected the same norm, got {every[:, 0].tolist()}. Its module "
            "sees another input on each of these ranks (a part of the sequence or of the heads, or another batch): "
            "name it in the plan of parallelize_module, such as SequenceParallel(), or give them the same input"
        )
