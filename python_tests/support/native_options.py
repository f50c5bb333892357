"""Options of the engine for tests that call it without a ring."""

from typing import Any

import torch

from rtp_ext import _native


def rotation_options(route: str, name: str, dtype: torch.dtype, **more: Any) -> _native.RotationOptions:
    """Of an operation in one dtype, whose shards and gradients travel whole."""
    return _native.RotationOptions(
        route=route,
        in_place=False,
        compute_dtype=dtype,
        reduce_dtype=dtype,
        slot_cap=0,
        halves=False,
        name=name,
        **more,
    )
