"""Passes of operations as CUDA graphs: captured once, then enqueued in one call each, without the user's help.

Whether a pass is a graph decides no hop: over the transports that take graphs, a rank that replays, one that captures
and one that enqueues hop by hop make the same hops through the same slots in the same order, and each rank does what
its own inputs allow. What this rests on is settled for the ring, by all its ranks: that slots go to passes in a fixed
order, and that nothing travels between passes. Other transports are refused: NCCL demands that both ends of a hop are
captured, and no rank knows how many tokens the others have.

A graph knows addresses. It is replayed where every tensor of the call, results included, lies where it lay at the
capture: in a loop of fixed shapes torch's caching allocator sees to that. Copying into tensors that stay was the other
choice; it would read and write every activation and gradient of a layer once more, a tenth of the time of a layer.
Where addresses change, the pass is enqueued hop by hop as ever. Results are allocated by torch before the pass,
whichever way it goes, so that they belong to whoever gets them.
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

logger = logging.getLogger("rtp_ext")

GRAPHS = ("auto", "on", "off")
# What they launch follows from shapes alone. Experts and losses look at values on the host.
CAPTURED = frozenset(
    {
        _native.linear_forward,
        _native.linear_backward,
        _native.partial_linear_forward,
        _native.partial_linear_backward,
        _native.mlp_forward,
        _native.mlp_backward,
    }
)
MOST_GRAPHS = 4  # of one pass, for different addresses; the one that was used last goes last
MOST_SEEN = 16  # addresses that a pass remembers to have been called with
MOST_PASSES = 1024  # shapes and options, of all operations of a ring


def check_graphs(graphs: str) -> None:
    if graphs not in GRAPHS:
        raise ValueError(f"Ring: expected graphs to be one of {', '.join(GRAPHS)}, got {graphs!r}")


def begin_graphs(ring: Any, executor: Any, wish: str) -> PassGraphs:
    """The graphs of a new ring. What decides is the same on all its ranks. ValueError where it cannot do what it is
    asked for."""
    refusal = None
    if not executor.takes_graphs():
        refusal = f"over the transport {ring.transport} " + (
            "there are no CUDA streams"
            if ring.device.type == "cpu"
            else "both ends of a hop must be captured or neither, and no rank knows the number of tokens of the other"
        )
    elif ring.late_gradients:
        refusal = f"late_gradients is {ring.late_gradients}, and gradients land within the pass that is captured"
    elif untried := _untried(ring):
        refusal = f"{untried} and graphs were not tried together"
    if wish == "on" and refusal is not None:
        raise ValueError(f"Ring: expected graphs 'auto' or 'off', got 'on': {refusal}")
    on = wish != "off" and refusal is None
    if on:
        ring.prefetch = 0
        executor.prefetch(False)
    reason = "not asked for" if wish == "off" else refusal or "what a pass launches follows from shapes alone"
    if wish == "auto":
        logger.info("ring of %d: passes are %s graphs: %s", ring.size, "" if on else "no", reason)
    return PassGraphs(executor, reason, on=on, device=ring.device)


def _untried(ring: Any) -> str | None:
    """An option of the ring that no test has together with graphs."""
    if ring.travel == "int8":
        return "travel='int8'"
    if ring.gradient_travel == "int8":
        return "gradient_travel='int8'"
    return None if ring.tensor_mesh is None else "tensor parallelism"


def refuse_graphs(ring: Any, option: str) -> None:
    """Of a ring that exists: what `option` asks for and graphs were not tried together. Its passes are enqueued hop by
    hop. ValueError where graphs were asked for."""
    if not ring.graphs.on:
        return
    reason = f"{option} and graphs were not tried together"
    if ring._graphs_wanted == "on":
        raise ValueError(f"Ring: expected graphs 'auto' or 'off' with {option}, got 'on': {reason}")
    ring.graphs.forget()
    ring.graphs.on, ring.graphs.reason = False, reason
    logger.info("ring of %d: passes are no graphs: %s", ring.size, reason)


_collectors = threading.Lock()
_without_collector = 0  # threads that capture
_collects = False  # once none does any more


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Python looks for no garbage meanwhile: what ends then may wait for the device, as a ring does and whatever else
    has memory there, which in a thread that captures invalidates its capture."""
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
        results: shape and dtype of each tensor that it returns; None: it has not run, or not since slots have changed.
        returns: what it returns, with places in `results` for tensors; None: it returns something else, and steps.
        warm: whether it has run beside the caller's stream.
        seen: addresses of tensors that it was called with, oldest first.
        graphs: by addresses, the one used last at the end.
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
        reason: why, or why not.
        captured, replayed, stepped: how many passes were captured, enqueued as graphs, and hop by hop.
    """

    def __init__(self, executor: Any, reason: str, *, on: bool, device: torch.device) -> None:
        self.on, self.reason = on, reason
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
        """What `function(executor, *arguments)` returns, enqueued as a graph where there is one for these tensors."""
        executor = self._executor
        if executor.captured():
            raise _native.RotationError(
                f"{operation}: expected no CUDA graph of the caller's around it on a ring whose passes are graphs; "
                "make the ring with graphs='off'"
            )
        if executor.traced():  # a trace wants its steps
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
            self._passes.move_to_end(key)  # what is not used any more goes first
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

    def _places_for(self, results: Sequence[tuple[torch.Size, torch.dtype]]) -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in results]

    def forget(self) -> None:
        """Gives up all graphs: the slots that they know have changed, or the ring ends."""
        for each in self._passes.values():
            self._retire(each)
        self._passes.clear()
        self._generation = self._executor.generation()

    def _first(self, known: Pass, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Finds out what a pass returns. It may make slots, which changes what graphs know."""
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
        """What a pass returns that is run, or captured, beside the caller's stream; and its graph."""
        self._executor.begin_graph_stream(captured)
        try:
            returned = self._step(function, arguments, results)
            return returned, self._executor.end_graph_stream(operation)
        finally:
            self._executor.abandon_graph_stream()  # does nothing after the orderly end

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
        self.stepped -= 1  # it has not run
        if graph.generation != self._generation:  # what it made was made in vain: it steps until slots have settled
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
    """What tells one pass from another; the tensors go to the list. Native descriptions are told apart as objects,
    which the key keeps alive."""
    if isinstance(argument, torch.Tensor):
        tensors.append(argument)
        return argument.shape, argument.stride(), argument.dtype
    if isinstance(argument, (list, tuple)):
        return (type(argument), *(_look(each, tensors) for each in argument))
    return argument


def _places(returned: Any, asked: list[tuple[int, torch.Tensor]]) -> Any:
    """What was returned with a place among the results for each tensor, or None where one of them is not a result.
    `asked`: the results that nothing stands for yet, with their places."""
    if isinstance(returned, torch.Tensor):
        for index, (place, result) in enumerate(asked):
            alike = result.shape == returned.shape and result.stride() == returned.stride()
            if alike and result.data_ptr() == returned.data_ptr():
                del asked[index]
                return place
        return None
    if isinstance(returned, _native.MlpResult):
        found = _places([returned.y, list(returned.kept)], asked)
        return None if found is None else (_native.MlpResult, found[1])
    if isinstance(returned, (list, tuple)):
        parts = [_Nothing if each is None else _places(each, asked) for each in returned]
        return None if any(part is None for part in parts) else (type(returned), parts)
    return None


class _Nothing:
    """Stands for None among what a pass returns."""


def _fill(places: Any, results: Sequence[torch.Tensor]) -> Any:
    """What `_places` was made of, with these results."""
    if places is _Nothing:
        return None
    if isinstance(places, int):
        return results[places]
    kind, parts = places
    filled = [_fill(part, results) for part in parts]
    return kind(*filled) if kind is _native.MlpResult else kind(filled)
