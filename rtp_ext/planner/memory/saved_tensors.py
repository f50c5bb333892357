"""Counts the tensors that a torch module saves for backward, on the meta device: without computing or allocating."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TracedTensor:
    """A storage that autograd saves."""

    shape: tuple[int, ...]  # of the first tensor seen in it
    dtype: str
    bytes: int


def saved_tensors_of(module: Any, inputs: Sequence[Any]) -> list[TracedTensor]:
    """Returns the storages that the backward of `module(*inputs)` needs, without parameters and buffers.

    Args:
        module: a torch module; parameters and inputs on the meta device. An input that needs a gradient, such as
            that of a layer inside a model, must have requires_grad set.

    Raises:
        TypeError: no module; ValueError: a tensor on another device.
    """
    import torch

    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"trace: expected a torch.nn.Module, got {type(module).__name__}")
    own = [*module.parameters(), *module.buffers()]
    for tensor in [*own, *(value for value in inputs if isinstance(value, torch.Tensor))]:
        if tensor.device.type != "meta":
            raise ValueError(f"trace: expected all tensors on the meta device, got one on {tensor.device}")
    known = {tensor.untyped_storage()._cdata for tensor in own}
    kept: dict[int, tuple[torch.UntypedStorage, TracedTensor]] = {}  # keeps storages alive, so that none is reused

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known and storage._cdata not in kept:
            seen = TracedTensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), storage.nbytes())
            kept[storage._cdata] = (storage, seen)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = module(*inputs)
    del outputs
    return [seen for _, seen in kept.values()]


def saved_bytes(module: Any, inputs: Sequence[Any]) -> int:
    """Returns the bytes of `saved_tensors_of`, for `estimate_memory(..., layer_activation_bytes=...)`."""
    return sum(tensor.bytes for tensor in saved_tensors_of(module, inputs))


def load_and_trace(target: str) -> int:
    """Returns the bytes that one layer saves.

    Args:
        target: `package.module:function` or `file.py:function`. The function takes no arguments and returns a module,
            one layer for one GPU, and the tuple of its inputs for one micro-batch, all on the meta device.

    Raises:
        ValueError: a target that cannot be loaded, or that returns another value.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ValueError(f"trace: expected MODULE:FUNCTION or FILE.py:FUNCTION, got {target!r}")
    function = getattr(_load(place), name, None)
    if not callable(function):
        raise ValueError(f"trace: {place} has no function {name}")
    made = function()
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], list | tuple):
        raise ValueError(f"trace: expected {target} to return a module and a tuple of its inputs, got {made!r:.100}")
    return saved_bytes(*made)


def _load(place: str) -> Any:
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None:
            raise ImportError(f"not a Python file: {place}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except (ImportError, OSError, SyntaxError) as error:
        raise ValueError(f"trace: cannot load {place}: {error}") from error
