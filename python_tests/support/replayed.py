"""Passes as graphs on rings of CPUs: repeats the calls that a GPU would replay, with the addresses of the capture.

`with replayed() as rings:` gives graphs to every ring made inside. A pass that would be captured is stored as a graph
would store it: the function, the addresses and layouts of its tensors, and the options; a replay runs it with these,
not with the arguments of the call. So the numbers differ if an option or a tensor is missing in the key of a graph,
if a result is not where the call expects it, or if memory was reused meanwhile.
python_tests/engine/pass_graphs/test_pass_graphs.py tests flags and streams.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rtp_ext.ring import ring
from rtp_ext.ring.graphs import MOST_GRAPHS, PassGraphs, _fill


class Address:
    """The address and the layout of a tensor. `here()`: a tensor with these."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.start, self.bytes = storage.data_ptr(), storage.nbytes()
        self.dtype, self.offset = tensor.dtype, tensor.storage_offset()
        self.shape, self.strides = tensor.shape, tensor.stride()

    def here(self) -> torch.Tensor:
        made = torch.empty(0, dtype=self.dtype)
        if self.bytes == 0:
            return made.new_empty(self.shape)
        raw = (ctypes.c_uint8 * self.bytes).from_address(self.start)
        storage = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
        return made.set_(storage, self.offset, self.shape, self.strides)


def _seen(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return Address(argument)
    return type(argument)(map(_seen, argument)) if isinstance(argument, (list, tuple)) else argument


def _there(seen: Any) -> Any:
    if isinstance(seen, Address):
        return seen.here()
    return type(seen)(map(_there, seen)) if isinstance(seen, (list, tuple)) else seen


class Graph:
    """The data of a pass that a graph would store."""

    idle = True

    def __init__(self, function: Any, arguments: Any, results: list[torch.Tensor]) -> None:
        self.function, self.arguments, self.results = function, _seen(list(arguments)), _seen(results)


class Executor:
    """The ring's own, which can replay."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def fix_slots(self) -> None:
        pass

    def replay(self, graph: Graph) -> None:
        self.real.give_results(_there(graph.results))
        try:
            graph.function(self.real, *_there(graph.arguments))
        finally:
            self.real.clear_results()


class Places:
    """Memory for results that is reused once it is free, the newest first: like that of torch's CUDA allocator, and
    often unlike that of the host."""

    def __init__(self) -> None:
        self.blocks: list[torch.Tensor] = []
        self.alone = self._users(torch.empty(8))

    @staticmethod
    def _users(block: torch.Tensor) -> int:
        return torch._C._storage_Use_Count(block.untyped_storage()._cdata)

    def take(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        size = max(shape.numel() * dtype.itemsize, 1)
        for block in reversed(self.blocks):
            if block.numel() == size and self._users(block) == self.alone:
                break
        else:
            block = torch.empty(size, dtype=torch.uint8)
            self.blocks.append(block)
        strides = torch.empty(shape, device="meta").stride()
        return torch.empty(0, dtype=dtype).set_(block.untyped_storage(), 0, shape, strides)


class Replayed(PassGraphs):
    """The graphs of one ring."""

    def __init__(self, executor: Any, device: torch.device) -> None:
        self.places = Places()
        super().__init__(Executor(executor), "a test", on=True, device=device)

    def _places_for(self, results: Any) -> list[torch.Tensor]:
        return [self.places.take(shape, dtype) for shape, dtype in results]

    def _step(self, function: Any, arguments: Any, results: Any = None) -> Any:
        real, wrapped = self._executor.real, self._executor
        self._executor = real
        try:
            return super()._step(function, arguments, results)
        finally:
            self._executor = wrapped

    def _aside(self, operation: str, function: Any, arguments: Any, results: Any, *, captured: bool) -> Any:
        assert not captured
        return self._step(function, arguments, results), None

    def _capture(
        self, known: Any, addresses: Any, operation: str, function: Any, arguments: Any, results: list[torch.Tensor]
    ) -> Any:
        graph = known.graphs[addresses] = Graph(function, arguments, results)
        self.captured += 1
        if len(known.graphs) > MOST_GRAPHS:
            known.graphs.popitem(last=False)
        self._executor.replay(graph)
        self.replayed += 1
        return _fill(known.returns, results)


@contextlib.contextmanager
def replayed() -> Iterator[list[Replayed]]:
    """Rings that are made within the context have graphs. Yields the list of these rings."""
    made: list[Replayed] = []

    def choose(
        executor: Any, options: Any, ring: Any, transport: str, *, late_gradients: int, tensor_parallel: bool
    ) -> Replayed:
        assert late_gradients == 0, "what graphs refuse"
        made.append(Replayed(executor, ring.device))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "choose_graphs", choose)
        yield made
