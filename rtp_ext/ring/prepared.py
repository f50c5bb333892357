"""Prepared, which keeps results of an operation's first call for later calls, and the ranks' Agreement on them."""

from __future__ import annotations

import functools
import itertools
from typing import Any, Protocol

import torch

from rtp_ext.ring.links.agree import differing, expect_same_lines
from rtp_ext.ring.links.communicator import Communicator

__all__ = ["Agreement", "Prepared"]


class Prepared:
    """A cache that one operation keeps from call to call: a layer has one, and passes it to the function that it calls.

        self.prepared = rtp_ext.functional.Prepared()
        ...
        y = rotated_linear(x, self.weight, ring=ring, prepared=self.prepared)

    It keeps the whole shapes of the parameters, the agreement of the ranks, the route of the weights, and native
    descriptions of the layer: everything that follows from the parameters and options alone. A call with the same
    ring, dtypes, options, requested gradients, and shapes and dtypes of parameters uses them and runs no collective.
    Any other call prepares anew, which is collective unless the forward of a converted model is running. All ranks must
    pass a Prepared, or none.

    Without one, operations on DTensors keep these results in the ring, by shapes and options, which are the same on
    every rank; their shards are not prefetched, since two layers may have the same shapes. The shape of one rank's
    plain shard does not identify a layer: without `prepared=` the ranks exchange their shapes in every call. The same
    holds for `ring.rotate` and `ring.collect`.

    One Prepared belongs to one set of parameters, whose values may change freely. It recognizes replaced parameters by
    their shapes; plain shards of another whole shape need another Prepared. A copied or unpickled Prepared is empty.

    Args:
        sharded: parameters have to be DTensors, as those of modules are. A plain parameter is refused: it may be a
            whole parameter in the place of a shard.
    """

    __slots__ = ("_divided", "covered", "found", "last", "most", "seen", "sharded")

    def __init__(self, *, sharded: bool = False) -> None:
        self.sharded = sharded
        self.found: dict[Any, Any] = {}  # by key
        self.last: tuple[Any, Any] = None, None  # the last key used and its entry: equality costs less than a hash
        self.covered = False  # whether the ranks have compared the model, so that operations are compared later
        self.seen = 0  # the largest number of tokens of any call on this rank
        self.most: int | None = None  # the largest number on any rank, as of the last exchange
        self._divided: Prepared | None = None

    @property
    def divided(self) -> Prepared:
        """The Prepared of the same operation with plain shards on the ring of this rank's part of the experts."""
        if self._divided is None:
            self._divided = Prepared()
        return self._divided

    def __reduce__(self) -> tuple:
        return functools.partial(type(self), sharded=self.sharded), ()

    def pop(self, key: Any, default: Any, /) -> Any:
        """Deletes an entry, and returns it, as dict.pop does."""
        self.last = None, None
        return self.found.pop(key, default)


class _Table(Protocol):
    """Entries that hold only where ranks agree: a Prepared or a dict."""

    def pop(self, key: Any, default: Any, /) -> Any: ...


_phases = itertools.count(1)


class Agreement:
    """The comparisons among the ranks of a ring, done and postponed, and the current phase of the ring.

    [Note: settle]
    The ranks compare a model before its forwards. The requested gradients decide the hops of the backwards, and each
    operation finds them when it is called: the ranks compare these later, in one exchange. `settle` makes it before the
    first thing in which ranks that disagree could wait for each other in vain: the first hop or gather of a backward, a
    recomputation, a collective of the user's. An entry that fails is deleted on every rank, so that a caught error does
    not leave a plan that only some of them hold.

    Attributes:
        open: postponed comparisons, in order: a table, a key of it, and a text that has to be the same on every rank.
        forward_phase: number of the running forward, by which its passes are expected; 0 outside of a forward.
        passing_by: id of the backward that does not change the known order of others; -1: none.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._numbers = itertools.count(1)
        self._forwards = 0  # running forwards of models, one within another
        self.open: list[tuple[_Table, Any, str]] = []
        self.forward_phase = 0
        self.passing_by = -1

    def new_agreement(self) -> int:
        """Returns a number for the agreement that the ranks have just reached, the same on all of them."""
        return next(self._numbers)

    def begin_forward(self) -> None:
        """Starts the phase of a model's forward, whose passes are expected in the order of the forward before."""
        self.forward_phase = next(_phases)
        self._forwards += 1

    def end_forward(self) -> None:
        """Ends the phase that `begin_forward` started."""
        self.forward_phase = 0
        self._forwards -= 1

    def end_left_forward(self) -> None:
        """Ends the forward of a model for forwards only that KeyboardInterrupt may have left in this thread."""

    def postpone(self, prepared: Prepared, key: Any, text: str) -> bool:
        """Postpones the comparison of an operation in the forward of a model that the ranks have compared. Returns
        whether it did."""
        later = prepared.covered and self._forwards > 0 and torch._C._current_graph_task_id() == -1
        if later:
            self.compare_later(prepared, key, text)
        return later

    def compare_later(self, table: _Table, key: Any, text: str) -> None:
        """Has `settle` compare `text`. Where it is not the same on every rank, `settle` deletes this entry."""
        self.open.append((table, key, text))

    def settle(self) -> None:
        """Runs the postponed comparisons. Raises ValueError on every rank where texts differ. Collective, unless there
        are none."""
        if not self.open:
            return
        entries, self.open = self.open, []
        answers = differing(self._communicator, [text for _, _, text in entries])
        for table, key, _ in entries if answers else ():
            table.pop(key, None)
        expect_same_lines("the ranks of the ring disagree", answers, nothing="no other operation")

    def settle_in_backward(self) -> None:
        """Runs the postponed comparisons before a gather in a backward or a recomputation, as `Ring.run` does before a
        rotation."""
        if self.open and torch._C._current_graph_task_id() >= 0:
            self.settle()

    def pass_by(self) -> None:
        """Marks the running backward as one of parameter gradients alone. Such backwards come between those of input
        gradients, whose known order they do not change."""
        self.passing_by = torch._C._current_graph_task_id()
