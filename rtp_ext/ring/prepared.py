"""What is derived for an operation once and used in every call; what the ranks of a ring have yet to compare of it."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch

__all__ = ["Agreements", "Ledger", "Prepared"]


class Prepared:
    """What one operation keeps from call to call: a layer has one, and passes it to the function that it calls.

        self.prepared = rtp_ext.functional.Prepared()
        ...
        y = rotated_linear(x, self.weight, ring=ring, prepared=self.prepared)

    Kept are the whole shapes of the parameters, what the ranks have agreed on, how the weights travel, and native
    descriptions of the layer: everything that follows from the parameters and options alone. A call with the same
    ring, dtypes, options, wanted gradients, and shapes and dtypes of parameters finds them, and then makes no
    collective; any other call prepares anew, which is collective unless the forward of a converted model is running.
    Ranks must pass it alike.

    Without one, operations on DTensors keep what they derive with the ring, by shapes and options, which are the same
    on every rank; nothing is sent ahead for them, since two layers may look alike. Of plain shards nobody can tell from
    one rank's shape which layer it is: without `prepared=` the ranks tell each other in every call. So it is with
    `ring.rotate` and `ring.collect`.

    One Prepared belongs to one set of parameters, whose values may change at will; parameters in their place are found
    by their shapes, and plain shards of another whole shape need another Prepared. A copy, and what was pickled, starts
    empty.

    Args:
        sharded: parameters are DTensors, as those of modules are: a plain one is refused, which may be a whole one that
            somebody has put in the place of a shard.
    """

    __slots__ = ("covered", "found", "most", "seen", "sharded")

    def __init__(self, *, sharded: bool = False) -> None:
        self.sharded = sharded
        self.found: dict[Any, Any] = {}  # by key
        self.covered = False  # a model has agreed on what decides its forwards
        self.seen = 0  # the largest number of tokens of any call on this rank
        self.most: int | None = None  # that of all ranks, as far as they have told each other

    def __reduce__(self) -> tuple:
        return functools.partial(type(self), sharded=self.sharded), ()


class Ledger:
    """What the operations of a model were prepared for, in order and in words, until the ranks have compared it.

    A model's ranks agree on what decides the hops of its forwards; which gradients are wanted decides those of the
    backwards as well, and is known to each operation when it is called.
    """

    def __init__(self) -> None:
        self.open: list[tuple[dict[Any, Any], Any, str]] = []

    def record(self, table: dict[Any, Any], key: Any, text: str) -> None:
        """`text` has to be the same on every rank; `table[key]` goes if it is not."""
        self.open.append((table, key, text))

    def settle(self, exchange: Callable[[Any], list[Any]]) -> None:
        """Raises ValueError on every rank where entries differ. Collective, where there are any."""
        if not self.open:
            return
        entries, self.open = self.open, []
        mine = [text for _, _, text in entries]
        answers = exchange(hashlib.sha256(repr(mine).encode()).digest())
        if all(theirs == answers[0] for theirs in answers):
            return
        for table, key, _ in entries:
            table.pop(key, None)
        expected, *others = exchange(mine)
        for rank, theirs in enumerate(others, start=1):
            for left, right in zip_longest(expected, theirs, fillvalue="no other operation"):
                if left != right:
                    raise ValueError(
                        f"the ranks of the ring disagree: expected {left} (rank 0), got {right} on rank {rank}"
                    )


_phases = itertools.count(1)


class Agreements:
    """What the ranks of a ring have agreed on, and which pass it is in. For the class Ring."""

    exchange: Callable[[Any], list[Any]]
    _agreements: itertools.count
    _forward_phase: int
    _forwards: int  # of models, one within another, that are running
    _ledger: Ledger
    _passing_by: int  # id of the backward that told nothing of the order of others

    def new_agreement(self) -> int:
        """A number for what the ranks have just agreed on, the same on all of them."""
        return next(self._agreements)

    def begin_forward(self) -> None:
        """A forward of a model starts: its passes are expected in the order of the one before."""
        self._forward_phase = next(_phases)
        self._forwards += 1

    def end_forward(self) -> None:
        self._forward_phase = 0
        self._forwards -= 1

    def postpone(self, prepared: Prepared, key: Any, text: str) -> bool:
        """Whether the ranks compare later, all at once, what an operation was prepared for: in the forward of a model
        that has agreed on what decides its hops."""
        later = prepared.covered and self._forwards > 0 and torch._C._current_graph_task_id() == -1
        if later:
            self.compare_later(prepared.found, key, text)
        return later

    def compare_later(self, table: dict[Any, Any], key: Any, text: str) -> None:
        """`settle` will compare `text`, which has to be the same on every rank; `table[key]` goes if it is not."""
        self._ledger.record(table, key, text)

    def settle(self) -> None:
        """Has the ranks compare what was postponed. Raises ValueError on every rank where it differs. Collective, where
        there is anything."""
        self._ledger.settle(self.exchange)

    def settle_in_backward(self) -> None:
        """Has the ranks compare what is open before a gather of a backward or of a recomputation, as `Ring.run` does
        before a rotation."""
        if self._ledger.open and torch._C._current_graph_task_id() >= 0:
            self.settle()

    def pass_by(self) -> None:
        """The backward that runs computes gradients of parameters alone. Such come between backwards that compute those
        of inputs, whose order stays known."""
        self._passing_by = torch._C._current_graph_task_id()
