"""Results of the first call of an operation, kept for later calls, and the agreement of the ranks on them."""

from __future__ import annotations

import functools
import hashlib
import itertools
from itertools import zip_longest
from typing import Any

import torch

from rtp_ext.ring.links.communicator import Communicator

__all__ = ["Agreement", "Prepared"]


class Prepared:
    """What one operation keeps from call to call: a layer has one, and passes it to the function that it calls.

        self.prepared = rtp_ext.functional.Prepared()
        ...
        y = rotated_linear(x, self.weight, ring=ring, prepared=self.prepared)

    It keeps the whole shapes of the parameters, the agreement of the ranks, the route of the weights, and native
    descriptions of the layer: everything that follows from the parameters and options alone. A call with the same
    ring, dtypes, options, wanted gradients, and shapes and dtypes of parameters uses them and makes no collective. Any
    other call prepares anew, which is collective unless the forward of a converted model is running. All ranks must
    pass a Prepared, or none.

    Without one, operations on DTensors keep their results with the ring, by shapes and options, which are the same on
    every rank; no shard is sent ahead for them, since two layers may have the same shapes. The shape of one rank's
    plain shard does not identify a layer: without `prepared=` the ranks exchange their shapes in every call. The same
    holds for `ring.rotate` and `ring.collect`.

    One Prepared belongs to one set of parameters, whose values may change at will. Parameters that replace them are
    told apart by their shapes; plain shards of another whole shape need another Prepared. A copy, and an unpickled
    one, starts empty.

    Args:
        sharded: parameters have to be DTensors, as those of modules are. A plain one is refused: it may be a whole
            parameter in the place of a shard.
    """

    __slots__ = ("covered", "found", "most", "seen", "sharded")

    def __init__(self, *, sharded: bool = False) -> None:
        self.sharded = sharded
        self.found: dict[Any, Any] = {}  # by key
        self.covered = False  # a model has agreed on what decides its forwards
        self.seen = 0  # the largest number of tokens of any call on this rank
        self.most: int | None = None  # that of all ranks, as of their last exchange

    def __reduce__(self) -> tuple:
        return functools.partial(type(self), sharded=self.sharded), ()


_phases = itertools.count(1)


class Agreement:
    """What the ranks of a ring have agreed on, what they have yet to compare, and which pass the ring is in.

    A model's ranks agree on what decides the hops of its forwards. Which gradients are wanted decides the hops of the
    backwards as well, and each operation finds it when it is called: the ranks compare that later, in one exchange.

    Attributes:
        open: what operations were prepared for, in order, until the ranks have compared it: a table, a key of it, and
            a text that has to be the same on every rank.
        forward_phase: number of the forward that runs, and by which its passes are expected; 0 outside of one.
        passing_by: id of the backward that does not change the known order of others; -1: none.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._numbers = itertools.count(1)
        self._forwards = 0  # of models, one within another, that are running
        self.open: list[tuple[dict[Any, Any], Any, str]] = []
        self.forward_phase = 0
        self.passing_by = -1

    def new_agreement(self) -> int:
        """A number for what the ranks have just agreed on, the same on all of them."""
        return next(self._numbers)

    def begin_forward(self) -> None:
        """A forward of a model starts: its passes are expected in the order of the one before."""
        self.forward_phase = next(_phases)
        self._forwards += 1

    def end_forward(self) -> None:
        """The forward that `begin_forward` started has ended."""
        self.forward_phase = 0
        self._forwards -= 1

    def postpone(self, prepared: Prepared, key: Any, text: str) -> bool:
        """Whether the ranks compare later, all at once, what an operation was prepared for: in the forward of a model
        that has agreed on what decides its hops."""
        later = prepared.covered and self._forwards > 0 and torch._C._current_graph_task_id() == -1
        if later:
            self.compare_later(prepared.found, key, text)
        return later

    def compare_later(self, table: dict[Any, Any], key: Any, text: str) -> None:
        """`settle` will compare `text`, which has to be the same on every rank, else `table[key]` is deleted."""
        self.open.append((table, key, text))

    def settle(self) -> None:
        """The ranks compare what was postponed. Raises ValueError on every rank where it differs. Collective, where
        there is anything."""
        if not self.open:
            return
        entries, self.open = self.open, []
        mine = [text for _, _, text in entries]
        digests = self._communicator.exchange(hashlib.sha256(repr(mine).encode()).digest())
        if all(theirs == digests[0] for theirs in digests):
            return
        for table, key, _ in entries:
            table.pop(key, None)
        expected, *others = self._communicator.exchange(mine)
        for rank, theirs in enumerate(others, start=1):
            for left, right in zip_longest(expected, theirs, fillvalue="no other operation"):
                if left != right:
                    raise ValueError(
                        f"the ranks of the ring disagree: expected {left} (rank 0), got {right} on rank {rank}"
                    )

    def settle_in_backward(self) -> None:
        """The ranks compare what is open before a gather of a backward or of a recomputation, as `Ring.run` does
        before a rotation."""
        if self.open and torch._C._current_graph_task_id() >= 0:
            self.settle()

    def pass_by(self) -> None:
        """The backward that runs computes gradients of parameters alone. Such come between backwards that compute those
        of inputs, whose order stays known."""
        self.passing_by = torch._C._current_graph_task_id()
