"""Which weights a conversion stores in blocks, and how they are cut."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rtp_ext.convert.plan.layers import drop_in, own_parameters
from rtp_ext.convert.plan.request import Request
from rtp_ext.families.float8_layers import is_in_8_bits
from rtp_ext.nn import RotatedLinear
from rtp_ext.parameters import bitsandbytes, torchao
from rtp_ext.parameters.frozen import FrozenWeight

_LAYERS = ("linear", "head", "experts")


def is_taken(part: nn.Module) -> bool:
    """Returns whether the weight of a linear layer is in blocks already, those of another package."""
    return _of_package(own_parameters(part).get("weight"), part) is not None


def _of_package(parameter: Any, part: nn.Module) -> FrozenWeight | None:
    if bitsandbytes.is_linear_4bit(part):
        return None if bitsandbytes.refusal_of_4bit(part.weight) else bitsandbytes.weight_of(parameter)
    return torchao.weight_of(parameter) if drop_in(part) is RotatedLinear else None


def refusal_of_package(part: nn.Module, parameter: Any) -> str | None:
    """Returns why a weight in 4 bits of another package cannot be stored in blocks; None for any other parameter."""
    if bitsandbytes.is_linear_4bit(part):
        return bitsandbytes.refusal_of_4bit(parameter)
    return torchao.refusal_of_nf4(parameter) if torchao.is_nf4(parameter) else None


class FrozenBlocks:
    """The decisions of one conversion.

    Args:
        tied: ids of parameters that several modules share.
        heads: ids of the vocabulary heads of the model; projections: of the output projections of torch's attention;
            adapters: of the modules of adapters.
    """

    def __init__(
        self,
        request: Request,
        tied: Collection[int],
        heads: Collection[int],
        projections: Collection[int],
        adapters: Collection[int],
    ) -> None:
        self.request, self.format = request, request.options.frozen
        self.tied, self.heads, self.projections, self.adapters = tied, heads, projections, adapters
        self.bundled: dict[int, FrozenWeight] = {}  # weights of MLPs that rotate as bundles, by id

    def weight(self, part: nn.Module, key: str, layer: str) -> FrozenWeight | None:
        """Returns the blocks in which a parameter will be stored; else None. `layer`: as in `ModulePlan`."""
        parameter = part._parameters[key]
        if layer == "linear" and key == "weight" and (taken := _of_package(parameter, part)) is not None:
            return taken
        if not self._requested(parameter, key) or self.wide(part, key, layer) is not None:
            return None
        return self.bundled.get(id(parameter)) or self._stored(parameter)

    def wide(self, part: nn.Module, key: str, layer: str) -> str | None:
        """Returns why a frozen weight is not stored in blocks although these are requested; else None."""
        parameter = part._parameters[key]
        if not self._requested(parameter, key) or (key == "weight" and is_taken(part)):
            return None
        assert parameter is not None, "it is requested"
        if layer not in _LAYERS or id(part) in self.projections:
            return "blocks are for weights of linear layers and experts that rotate by themselves"
        if id(parameter) in self.tied:
            return "it is shared with another module"
        if id(part) in self.adapters:
            return "it belongs to an adapter"
        if layer == "linear" and id(part) in self.heads:
            return "it is the vocabulary head, which errors of a few bits would harm most"
        if is_in_8_bits(part):
            return "torchao computes it in 8 bits"
        if layer != "experts" and drop_in(part) is not RotatedLinear:
            return "it is stored as [in_features, out_features]"
        if isinstance(parameter, DTensor):
            return "other code has divided it among ranks"
        if parameter.numel() == 0:
            return "it is empty"
        rows = self._stored(parameter).group_rows
        if rows > 1 and (layer == "experts" or (layer == "head" and part._parameters.get("bias") is not None)):
            numbers, what = parameter[0].numel(), "an expert" if layer == "experts" else "a row beside a bias"
            return f"{what} of {numbers} numbers does not fill whole blocks of {self.format}"
        return None

    def bundle(self, layers: Sequence[nn.Module]) -> str | None:
        """Cuts the weights of an MLP, [gate,] up and down, so that they can rotate as a bundle.

        Returns None if they will rotate so, in blocks or all in their dtypes; else the reason.
        """
        stored = [self.weight(layer, "weight", "linear") for layer in layers]
        if not any(stored):
            return None
        formats = {None if each is None else each.format for each in stored}
        if None in formats or len(formats) > 1 or any(is_taken(layer) for layer in layers):
            return "not all of their weights are in blocks of the same format that this conversion makes"
        if any(layer._parameters.get("bias") is not None for layer in layers[:-1]):
            return "their weights are in blocks, between which biases are not cut"
        numbers, hidden = stored[-1].block[0], stored[-1].shape[1]  # type: ignore[union-attr]
        if hidden % numbers:
            return f"their weights are in blocks of {numbers}, which do not divide {hidden} hidden features"
        for place, layer in enumerate(layers):
            down = place == len(layers) - 1
            weight: Any = layer._parameters["weight"]
            self.bundled[id(weight)] = self._stored(weight, dim=int(down), rows=0 if down else numbers)
        return None

    def _requested(self, parameter: torch.Tensor | None, key: str) -> bool:
        """Returns whether `frozen` is given, and a parameter is a frozen weight of this call."""
        if self.format is None or parameter is None or nn.parameter.is_lazy(parameter):
            return False
        if (parameter.requires_grad and self.request.trains) or parameter.dim() < 2 or key.endswith("_bias"):
            return False
        return id(parameter) not in self.request.not_ours

    def _stored(self, parameter: Any, **cut: int) -> FrozenWeight:
        assert self.format is not None, "blocks are requested"
        return FrozenWeight(self.format, tuple(parameter.shape), parameter.dtype, **cut)


def taken_parameters(modules: Sequence[tuple[str, nn.Module]]) -> set[int]:
    """Returns the ids of weights that are in blocks already, those of another package."""
    return {
        id(p) for _, part in modules if is_taken(part) for key, p in own_parameters(part).items() if key == "weight"
    }
