"""Linear layers that are called with the same input, such as q, k and v: their shards travel together."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rtp_ext.compilers import tracing
from rtp_ext.functional._operation import in_graph, rotate
from rtp_ext.functional.linear import Linears
from rtp_ext.functional.torch_compile import traced
from rtp_ext.nn.linear import RotatedLinear
from rtp_ext.ring import Prepared
from rtp_ext.ring.registry import register

logger = logging.getLogger("rtp_ext")


class SharedInput:
    """Layers with the same input, all computed in one rotation when the first is called; later calls return the stored
    outputs.

    Stored outputs are valid for one input (the same object, unchanged) and unchanged weights; each is returned once.
    After a call with different inputs the layers rotate one by one.
    """

    def __init__(self, layers: Sequence[RotatedLinear], name: str) -> None:
        self.layers = list(layers)
        self.name = name
        self.shared = True
        self.prepared = Prepared(sharded=True)
        self._rtp_number = register(self)
        self.in_graph: Any = None  # while a compiler traces: the input, modes, and outputs not returned yet
        self._source: Any = None  # weak reference to the input, which it must not keep alive
        self._key: Any = None
        self._waiting: dict[int, torch.Tensor] = {}  # outputs not returned yet, by index of their layer

    def clear(self) -> None:
        self._source = self._key = None
        self._waiting.clear()

    def separate(self) -> None:
        """Makes the layers rotate one by one from now on."""
        self.shared = False
        self.clear()

    def output(self, layer: RotatedLinear, x: torch.Tensor) -> torch.Tensor | None:
        """Returns the output of `layer` for `x`, or None where it has to rotate on its own."""
        if torch.compiler.is_dynamo_compiling() and tracing(layer.ring):
            return self._traced(layer, x)
        return self._eager(layer, x)

    def _operation(self, key: str = "") -> Linears:
        weights, biases = [each.weight for each in self.layers], [each.bias for each in self.layers]
        first = self.layers[0]
        return Linears(first._options(self.name, self.prepared), weights, biases, recipe=first.recipe)

    def _eager(self, layer: RotatedLinear, x: torch.Tensor) -> torch.Tensor | None:
        if not self.shared or not isinstance(x, torch.Tensor) or x.is_inference():
            return None  # an inference tensor has no version counter that would show writes
        place = next(i for i, each in enumerate(self.layers) if each is layer)
        key = self._state(x)
        if self._source is not None and self._source() is x and self._key == key and place in self._waiting:
            return self._waiting.pop(place)
        if self._waiting:
            self.separate()
            logger.info("%s: its layers are called with different inputs and rotate one by one", self.name)
            return None
        outputs = rotate(self._operation(), [layer._cast(x)])
        self._source, self._key = weakref.ref(x, lambda _: self.clear()), key
        self._waiting = dict(enumerate(outputs))
        return self._waiting.pop(place)

    def _traced(self, layer: RotatedLinear, x: torch.Tensor) -> torch.Tensor | None:
        if not self.shared or not isinstance(x, torch.Tensor):
            return None
        place: int = layer.shared_input_place  # type: ignore[assignment]
        mode = torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type)
        weights = [p for each in self.layers for p in (each.weight, each.bias) if p is not None]
        if self.in_graph is not None:
            source, then, waiting = self.in_graph
            same = source is x and then == mode and waiting[place] is not None
            if same and all([traced.unchanged(tensor) for tensor in [x, *weights]]):
                rest = [None if each == place else y for each, y in enumerate(waiting)]
                self.in_graph = (source, then, rest) if any([y is not None for y in rest]) else None
                return waiting[place]
            self.shared, self.in_graph = False, None
            return None
        outputs = in_graph(self._operation(), [layer._cast(x)], self)
        if outputs is None:
            return None
        for tensor in [x, *weights]:
            traced.watch(tensor)
        self.in_graph = (x, mode, [None if each == place else y for each, y in enumerate(outputs)])
        return outputs[place]

    def _state(self, x: torch.Tensor) -> tuple:
        weights = [
            (p._version, p.requires_grad) for each in self.layers for p in each._parameters.values() if p is not None
        ]
        return x._version, torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type), weights

    def __deepcopy__(self, memo: dict) -> SharedInput:
        twin = type(self)([], self.name)
        memo[id(self)] = twin  # before the copies of its layers, which refer to it
        twin.layers = copy.deepcopy(self.layers, memo)
        twin.shared = self.shared
        return twin


def join(block: nn.Module, names: Sequence[str], label: str) -> None:
    """Makes the layers `names` of a block, all sharded along their outputs, travel together."""
    layers = [block.get_submodule(name) for name in names]
    group = SharedInput(layers, f"{label}.({', '.join(names)})")  # type: ignore[arg-type]
    for place, layer in enumerate(layers):
        layer.__dict__["together"], layer.__dict__["shared_input_place"] = group, place
    block.register_forward_pre_hook(_Clear(group))


class _Clear:
    """Hook that drops the outputs of an earlier forward, such as one that failed."""

    def __init__(self, group: SharedInput) -> None:
        self.group = group

    def __call__(self, _block: nn.Module, _arguments: Any) -> None:
        if torch.compiler.is_compiling():
            self.group.in_graph = None
            return
        self.group.clear()
