"""Converted models in training frameworks. Each integration is imported on first use.

`RotationTrainer`: the Trainer of the transformers package, and those of TRL by mixing it in; `RotationAccelerator`: the
Accelerator of the accelerate package; `RotationStrategy`: a strategy of Lightning; `parallelize`: torchtitan.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rtp_ext.integrations.accelerate import RotationAccelerator
    from rtp_ext.integrations.lightning import RotationStrategy
    from rtp_ext.integrations.titan import parallelize
    from rtp_ext.integrations.trainer import RotationTrainer

__all__ = ["RotationAccelerator", "RotationStrategy", "RotationTrainer", "parallelize"]

_MODULES = {
    "RotationAccelerator": ("accelerate", "accelerate"),
    "RotationStrategy": ("lightning", "lightning"),
    "RotationTrainer": ("trainer", "transformers accelerate"),
    "parallelize": ("titan", "torchtitan"),
}

if not TYPE_CHECKING:  # otherwise a type checker would accept every name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'rtp_ext.integrations' has no attribute {name!r}")
        module, packages = _MODULES[name]
        try:
            value = getattr(importlib.import_module(f"rtp_ext.integrations.{module}"), name)
        except ModuleNotFoundError as error:
            raise ImportError(f"rtp_ext.integrations.{name} needs {error.name}: pip install {packages}") from error
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
