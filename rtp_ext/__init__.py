"""Rotated Tensor Parallelism for PyTorch: weights, gradients and optimizer states spread over a ring of ranks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rtp_ext.host import allow_connections

if TYPE_CHECKING:
    from rtp_ext import functional, nn, optim, outer
    from rtp_ext._native import CudaError, NcclError, RingTimeout, RotationError
    from rtp_ext.convert import fully_rotate, outer_of, ring_of
    from rtp_ext.convert.controls import (
        no_sync,
        set_gradient_divide_factor,
        set_requires_all_reduce,
        set_requires_gradient_sync,
    )
    from rtp_ext.convert.explain import explain
    from rtp_ext.convert.methods.fully_shard import register_forward_method
    from rtp_ext.convert.methods.stream_weights import local_shards, stream_weights
    from rtp_ext.convert.plan.rotation_plan import RotationPlan
    from rtp_ext.inference.rotate import rotate_for_inference
    from rtp_ext.inference.update import update_weights
    from rtp_ext.parameters.frozen import frozen_weights
    from rtp_ext.parameters.loading import load_safetensors
    from rtp_ext.parameters.sharding import init_weights
    from rtp_ext.ring import Ring, RotationDims

__version__ = "0.1.0"

allow_connections()

__all__ = [
    "CudaError",
    "NcclError",
    "Ring",
    "RingTimeout",
    "RotationDims",
    "RotationError",
    "RotationPlan",
    "explain",
    "frozen_weights",
    "fully_rotate",
    "functional",
    "init_weights",
    "load_safetensors",
    "local_shards",
    "nn",
    "no_sync",
    "optim",
    "outer",
    "outer_of",
    "register_forward_method",
    "ring_of",
    "rotate_for_inference",
    "set_gradient_divide_factor",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
    "stream_weights",
    "update_weights",
]

# Imported at first use: the planner must not wait for torch, nor need it.
_MODULES = {
    "CudaError": "_native",
    "NcclError": "_native",
    "Ring": "ring",
    "RingTimeout": "_native",
    "RotationDims": "ring",
    "RotationError": "_native",
    "RotationPlan": "convert.plan.rotation_plan",
    "explain": "convert.explain",
    "frozen_weights": "parameters.frozen",
    "fully_rotate": "convert",
    "init_weights": "parameters.sharding",
    "load_safetensors": "parameters.loading",
    "local_shards": "convert.methods.stream_weights",
    "no_sync": "convert.controls",
    "outer_of": "convert",
    "register_forward_method": "convert.methods.fully_shard",
    "ring_of": "convert",
    "rotate_for_inference": "inference.rotate",
    "set_gradient_divide_factor": "convert.controls",
    "set_requires_all_reduce": "convert.controls",
    "set_requires_gradient_sync": "convert.controls",
    "stream_weights": "convert.methods.stream_weights",
    "update_weights": "inference.update",
}


if not TYPE_CHECKING:  # a type checker would accept every unknown name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            try:
                return importlib.import_module(f"rtp_ext.{name}")
            except ModuleNotFoundError:
                raise AttributeError(f"module 'rtp_ext' has no attribute {name!r}") from None
        value = getattr(importlib.import_module(f"rtp_ext.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
