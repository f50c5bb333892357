"""CUDA graphs of the passes of operations: each pass is captured once, and later enqueued in one call.

Graphs do not change the hops: over the transports that support graphs, a rank that replays, one that captures and one
that enqueues hop by hop post the same hops through the same slots in the same order, so that each rank decides by its
own inputs. This requires that slots go to passes in a fixed order and that no shard travels between passes, which all
ranks of a ring agree on when it is made. Other transports are refused: NCCL demands that both ends of a hop are
captured, and the numbers of tokens differ between ranks.

A graph contains addresses. It is replayed where every tensor of the call, results included, has the address that it had
at the capture: in a loop of fixed shapes torch's caching allocator returns the same addresses. Copying into fixed
tensors would read and write every activation and gradient of a layer once more, a tenth of the time of a layer.
Where addresses change, the pass is enqueued hop by hop. torch allocates the results before the pass, with or without a
graph, so that the caller owns them.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rtp_ext import _native
from rtp_ext.options import RingOptions
from rtp_ext.ring.links.communicator import Communicator

logger = logging.getLogger("rtp_ext")

# Passes of operations that the table says are captured. Experts and losses read values on the host.
CAPTURED = frozenset(
    getattr(_native, f"{kind.key.replace(' ', '_')}_{pass_}")
    for kind in _native.operation_kinds()
    for pass_ in ("forward", "backward")
    if kind.captured
)
MOST_GRAPHS = 4  # graphs of one pass, for different addresses; the least recently used one is dropped first
MOST_SEEN = 16  # sets of addresses that are kept for one pass
MOST_PASSES = 1024  # sets of shapes and options, of all operations of a ring


def choose_graphs(
    executor: Any,
    options: RingOptions,
    ring: Communicator,
    transport: str,
    *,
    late_gradients: int,
    tensor_parallel: bool,
) -> PassGraphs:
    """Returns the graphs of a new ring; all its ranks decide the same. Raises ValueError where graphs are 'on' and
    impossible."""
    refusal = None
    if not executor.takes_graphs():
        refusal = f"over the transport {transport} " + (
            "there are no CUDA streams"
            if ring.device.type == "cpu"
            else "both ends of a hop must be captured or neither, and no rank knows the number of tokens of the other"
        )
    elif late_gradients:
        refusal = f"late_gradients is {late_gradients}, and gradients land within the pass that is captured"
    elif untried := _untried(options, tensor_parallel):
        refusal = _refusal_of(untried)
    if options.graphs == "on" and refusal is not None:
        raise ValueError(f"Ring: expected graphs 'auto' or 'off', got 'on': {refusal}")
    on = options.graphs != "off" and refusal is None
    reason = "not asked for" if options.graphs == "off" else refusal or "what a pass launches follows from shapes alone"
    if options.graphs == "auto":
        logger.info("ring of %d: passes are %s graphs: %s", ring.size, "" if on else "no", reason)
    return PassGraphs(executor, reason, on=on, device=ring.device, required=options.graphs == "on")


def emulated_link(asked: str | None, graphs: PassGraphs) -> str:
    """Returns the link of an emulated ring on a GPU. A captured copy within one GPU cannot ask for a copy engine."""
    return "sm-local" if asked is None or (graphs.on and asked.startswith("ce-local")) else asked


def _refusal_of(option: str) -> str:
    return f"{option} and graphs were not tried together"


def _untried(options: RingOptions, tensor_parallel: bool) -> str | None:
    """Returns an option of the ring that no test combines with graphs; None where there is none."""
    if options.travel == "int8":
        return "travel='int8'"
    if options.gradient_travel == "int8":
        return "gradient_travel='int8'"
    return "tensor parallelism" if tensor_parallel else None


_collectors = threading.Lock()
_without_collector = 0  # number of threads that capture
_collects = False  # whether to enable the collector once no thread captures


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disables the garbage collector: freeing an object with memory on the device, such as a ring, may wait for the
    device, which invalidates a capture of this thread."""
    global _without_collector, _collects
    with _collectors:
        if _without_collector == 0:
            _collects = gc.isenabled()
            gc.disable()
        _without_collector += 1
    try:
        yield
    finally:
        with _collectors:
            _without_collector -= 1
            if _without_collector == 0 and _collects:
                gc.enable()


@dataclass
class Pass:
    """One operation with one set of shapes and options.

    Attributes:
        results: shape and dtype of each tensor that it returns; None: it has not run since the slots changed.
        returns: its return value, with indices into `results` in place of tensors; None: the pass returns something
            else, and is never captured.
        warm: whether it has run on the stream that captures.
        seen: addresses of the tensors of earlier calls, oldest first.
        graphs: graphs by addresses, the most recently used one last.
    """

    results: list[tuple[torch.Size, torch.dtype]] | None = None
    returns: Any = None
    warm: bool = False
    seen: OrderedDict[tuple[int, ...], None] = field(default_factory=OrderedDict)
    graphs: OrderedDict[tuple[int, ...], Any] = field(default_factory=OrderedDict)


class PassGraphs:
    """The graphs of one ring on one rank.

    Attributes:
        on: whether passes become graphs.
        reason: the reason for `on`.
        captured, replayed, stepped: numbers of passes that were captured, replayed, and enqueued hop by hop.
    """

    def __init__(self, executor: Any, reason: str, *, on: bool, device: torch.device, required: bool = False) -> None:
        self.on, self.reason, self._required = on, reason, required
        self.captured = self.replayed = self.stepped = 0
        self._executor, self._device = executor, device
        self._passes: OrderedDict[Any, Pass] = OrderedDict()
        self._retired: list[Any] = []  # graphs that may still run
        self._generation = -1
        if on:
            executor.fix_slots()

    def __repr__(self) -> str:
        counts = f"captured={self.captured}, replayed={self.replayed}, stepped={self.stepped}"
        return f"PassGraphs(on={self.on}, reason={self.reason!r}, {counts})"

    def run(self, operation: str, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Returns `function(executor, *arguments)`, enqueued as a graph where there is one for these tensors."""
        executor = self._executor
        if executor.captured():
            raise _native.RotationError(
                f"{operation}: expected no CUDA graph of the caller's around it on a ring whose passes are graphs; "
                "make the ring with graphs='off'"
            )
        if executor.traced():  # a trace records single steps
            return self._step(function, arguments)
        if executor.generation() != self._generation:
            self.forget()
        tensors: list[torch.Tensor] = []
        key = (function, *(_look(argument, tensors) for argument in arguments))
        known = self._passes.get(key)
        if known is None:
            known = self._passes[key] = Pass()
            if len(self._passes) > MOST_PASSES:
                self._retire(self._passes.popitem(last=False)[1])
        else:
            self._passes.move_to_end(key)  # the least recently used pass is dropped first
        if known.results is None:
            return self._first(known, function, arguments)
        if known.returns is None:
            return self._step(function, arguments)
        results = self._places_for(known.results)
        addresses = tuple([tensor.data_ptr() for tensors_ in (tensors, results) for tensor in tensors_])
        graph = known.graphs.get(addresses)
        if graph is not None:
            known.graphs.move_to_end(addresses)
            executor.replay(graph)
            self.replayed += 1
            return _fill(known.returns, results)
        if not known.warm:
            known.warm = True
            returned = self._aside(operation, function, arguments, results, captured=False)[0]
            self._see(known, addresses)
            return returned
        if addresses not in known.seen:
            self._see(known, addresses)
            return self._step(function, arguments, results)
        return self._capture(known, addresses, operation, function, arguments, results)

    def expect_not_required(self, option: str) -> None:
        """Raises ValueError on a ring with graphs='on', since `option` and graphs were not tested together."""
        if self.on and self._required:
            raise ValueError(f"Ring: expected graphs 'auto' or 'off' with {option}, got 'on': {_refusal_of(option)}")

    def refuse(self, option: str) -> None:
        """Turns graphs off, since `option` and graphs were not tested together. Raises ValueError on a ring with
        graphs='on'."""
        self.expect_not_required(option)
        if not self.on:
            return
        self.forget()
        self.on, self.reason = False, _refusal_of(option)
        logger.info("passes are no graphs any more: %s", self.reason)

    def _places_for(self, results: Sequence[tuple[torch.Size, torch.dtype]]) -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in results]

    def forget(self) -> None:
        """Drops all graphs. Called when the slots that they use change."""
        for each in self._passes.values():
            self._retire(each)
        self._passes.clear()
        self._generation = self._executor.generation()

    def close(self) -> None:
        """Drops all graphs, also those that still run: NCCL ends no communicator that a graph holds."""
        self.forget()
        self._retired.clear()

    def _first(self, known: Pass, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Runs a pass and records its results. The run may allocate slots, which invalidates graphs."""
        executor = self._executor
        executor.note_results()
        try:
            returned = self._step(function, arguments)
            asked = executor.results()
        finally:
            executor.clear_results()
        known.results = [(tensor.shape, tensor.dtype) for tensor in asked]
        known.returns = _places(returned, list(enumerate(asked)))
        if executor.generation() != self._generation:
            self.forget()
        return returned

    def _step(self, function: Callable[..., Any], arguments: Sequence[Any], results: Any = None) -> Any:
        self.stepped += 1
        if results is None:
            return function(self._executor, *arguments)
        self._executor.give_results(results)
        try:
            return function(self._executor, *arguments)
        finally:
            self._executor.clear_results()

    def _aside(
        self, operation: str, function: Callable[..., Any], arguments: Sequence[Any], results: Any, *, captured: bool
    ) -> tuple[Any, Any]:
        """Runs or captures a pass on the stream for graphs. Returns its return value and its graph."""
        self._executor.begin_graph_stream(captured)
        try:
            returned = self._step(function, arguments, results)
            return returned, self._executor.end_graph_stream(operation)
        finally:
            self._executor.abandon_graph_stream()  # does nothing after end_graph_stream

    def _capture(
        self,
        known: Pass,
        addresses: tuple[int, ...],
        operation: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        results: list[torch.Tensor],
    ) -> Any:
        with uncollected():
            returned, graph = self._aside(operation, function, arguments, results, captured=True)
        self.stepped -= 1  # a capture runs nothing
        if graph.generation != self._generation:  # the capture allocated slots, so that the graph is invalid
            self.forget()
            return self._step(function, arguments)
        known.graphs[addresses] = graph
        self.captured += 1
        while len(known.graphs) > MOST_GRAPHS:
            self._retired.append(known.graphs.popitem(last=False)[1])
        self._executor.replay(graph)
        self.replayed += 1
        self._retired = [each for each in self._retired if not each.idle]
        return returned

    @staticmethod
    def _see(known: Pass, addresses: tuple[int, ...]) -> None:
        known.seen[addresses] = None
        while len(known.seen) > MOST_SEEN:
            known.seen.popitem(last=False)

    def _retire(self, known: Pass) -> None:
        self._retired.extend(known.graphs.values())
        self._retired = [each for each in self._retired if not each.idle]


def _look(argument: Any, tensors: list[torch.Tensor]) -> Any:
    """Returns the part of a pass's key for `argument`, and appends its tensors to `tensors`. Native descriptions
    compare by identity, and the key keeps them alive."""
    if isinstance(argument, torch.Tensor):
        tensors.append(argument)
        return argument.shape, argument.stride(), argument.dtype
    if isinstance(argument, (list, tuple)):
        return (type(argument), *(_look(each, tensors) for each in argument))
    return argument


def _places(returned: Any, asked: list[tuple[int, torch.Tensor]]) -> Any:
    """Returns `returned` with the index of a result in place of each tensor, or None where a tensor is not a result.
    `asked`: the results without a match so far, with their indices."""
    if isinstance(returned, torch.Tensor):
        for index, (place, result) in enumerate(asked):
            alike = result.shape == returned.shape and result.stride() == returned.stride()
            if alike and result.data_ptr() == returned.data_ptr():
                del asked[index]
                return place
        return None
    if isinstance(returned, (list, tuple)):
        parts = [_Constant(each) if isinstance(each, int | None) else _places(each, asked) for each in returned]
        return None if any(part is None for part in parts) else (type(returned), parts)
    return None


@dataclass
class _Constant:
    """None or a number in the return value of a pass."""

    value: int | None


def _fill(places: Any, results: Sequence[torch.Tensor]) -> Any:
    """Reverses `_places`: puts `results` in the place of their indices."""
    if isinstance(places, _Constant):
        return places.value
    if isinstance(places, int):
        return results[places]
    kind, parts = places
    return kind([_fill(part, results) for part in parts])
