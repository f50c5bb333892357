"""The whole state dict of a converted model on selected ranks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rtp_ext.parameters.frozen import gather_plain


def whole_state(module: nn.Module, keep: bool, names: Collection[str] | None = None) -> dict[str, Any]:
    """Returns the plain model's state_dict on the CPU if `keep`, else {}.

    Frozen weights in blocks are dequantized. Tied tensors share their memory. Parameters are gathered one at a time,
    and ranks without `keep` hold none of them. names: entries to return; None: all. Collective: every rank of the mesh
    passes the same names.
    """
    state = module.state_dict(keep_vars=True)
    found: dict[str, Any] = {}
    gathered: dict[int, torch.Tensor] = {}  # by id of the parameter
    for name, value in state.items():
        if names is not None and name not in names:
            continue
        if isinstance(value, DTensor):
            if id(value) not in gathered:
                gathered[id(value)] = gather_plain(value, keep=keep)
            value = gathered[id(value)]
        elif isinstance(value, torch.Tensor):
            value = value.detach().cpu()
        found[name] = value
    return found if keep else {}
