"""The state dict of a converted model, whole, on one rank."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rtp_ext.parameters.sharding import gather_full


def whole_state(module: nn.Module, keep: bool, names: Collection[str] | None = None) -> dict[str, Any]:
    """What the plain model's state_dict would be, on the CPU, on ranks that `keep` it; {} on the others.

    Tensors that the model ties share their memory. One parameter at a time is gathered, and ranks that do not keep it
    drop it at once. `names`: of what is wanted; None: all. Collective: every rank of the mesh asks for the same names.
    """
    state = module.state_dict(keep_vars=True)
    found: dict[str, Any] = {}
    gathered: dict[int, torch.Tensor] = {}  # by id of the parameter
    for name, value in state.items():
        if names is not None and name not in names:
            continue
        if isinstance(value, DTensor):
            if id(value) not in gathered:
                whole = gather_full(value)
                gathered[id(value)] = whole if keep else torch.empty(0)
            value = gathered[id(value)]
        elif isinstance(value, torch.Tensor):
            value = value.detach().cpu()
        found[name] = value
    return found if keep else {}
