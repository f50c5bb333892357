"""Refusal of weights and parameters that a converted model does not support."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from rtp_ext.convert.modules.gathered import GatheredModule
from rtp_ext.dtensor_hooks import patch_parametrizations
from rtp_ext.parameters.extensions import is_extended, refusal
from rtp_ext.parameters.sharded_module import ShardedModule
from rtp_ext.parameters.sharding import type_name
from rtp_ext.ring import Ring
from rtp_ext.ring.parameters_in_use import rotates


def refuse_additions(root: nn.Module, ring: Ring, ignored: Collection[str]) -> None:
    """Raises ValueError, on every rank, where a converted model has unsupported additions: weights that are computed
    from others, and trained parameters that are tensor subclasses. `ignored`: names of parameters."""
    if ring.mesh is None:  # an emulated ring leaves modules that do not rotate unchanged
        return
    live: list[tuple[str, Any]] = [
        (name, part) for name, part in root.named_modules() if isinstance(part, ShardedModule)
    ]
    for name, part in live:
        for key in part.__dict__.get("_rtp_gathered", part.__dict__.get("shard_dims", ())):
            computed = isinstance(part.__dict__.get(key), torch.Tensor) or parametrize.is_parametrized(part, key)
            if computed and key not in part._parameters:
                raise ValueError(_too_late(f"{name + '.' if name else ''}{key} of a {type(part).__name__}"))
    for name, part, key, parameter in _own_parameters(root):
        gathered = isinstance(part, GatheredModule) and key in part._rtp_gathered and is_extended(parameter)
        if name in ignored or gathered or not parameter.requires_grad:
            continue
        problem = refusal(parameter)
        if problem is None and is_extended(parameter):
            problem = f"a {type_name(parameter)}"
        if problem is not None:
            raise ValueError(
                f"{name}, which was put into the model after fully_rotate, is {problem}: expected a plain parameter; "
                "tensor subclasses have to be there before conversion"
            )


def _own_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    for prefix, part in root.named_modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{key}" if prefix else key, part, key, parameter


def _too_late(what: str) -> str:
    return (
        f"{what}: fully_rotate has made it shards, which cannot be computed from other parameters (parametrizations, "
        "weight_norm, spectral_norm, pruning): add these to the plain model, before fully_rotate"
    )


def _refuse_shard(parameter: Any) -> None:
    if rotates(parameter):
        raise ValueError(_too_late(f"a parameter of shape {tuple(parameter.shape)}"))


def _refuse_named(module: nn.Module, name: str) -> None:
    for key in (name, f"{name}_orig"):  # pruning has renamed the parameter to the second name
        if rotates(module._parameters.get(key)):
            raise ValueError(_too_late(f"{name} of a {type(module).__name__}"))


def guard_parametrizations() -> None:
    """Makes torch's utilities that compute a weight from other parameters refuse shards."""
    patch_parametrizations(_refuse_shard, _refuse_named)
