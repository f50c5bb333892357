"""The forwards of a rank that computes forwards only: each in its thread, held back while the weights change."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from typing import Any

from torch import nn

from rtp_ext._native import RingTimeout, RotationError
from rtp_ext.convert.modules.bundled import OWN_HOOKS
from rtp_ext.ring import Ring
from rtp_ext.ring.links.communicator import Communicator
from rtp_ext.ring.op_runner import OpRunner
from rtp_ext.ring.prepared import Agreement

_POLL = 0.05  # seconds


class _Running:
    """A forward in a thread, or a pass outside of any. It ends with its thread, where nothing else ends it."""


class _Gate:
    """Holds forwards back while the weights change, and the change until the running forwards have ended.

    Attributes:
        partly_new: the error of a change that has failed half-way; empty: the weights are old or new.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._forwards: Any = weakref.WeakSet()
        self._passes: Any = weakref.WeakSet()
        self._writer: int | None = None  # the thread that changes the weights
        self.partly_new = ""

    def enter(self, outermost: bool) -> _Running:
        """Waits until no change is under way. `outermost`: a forward; otherwise one pass, which a running forward of
        another thread may wait for."""
        self.expect_outside("a forward")
        with self._changed:
            while self._writer is not None and (outermost or not self._forwards):
                self._changed.wait()
            if self.partly_new:
                raise RotationError(f"the weights are partly new, update_weights again: {self.partly_new}")
            running = _Running()
            (self._forwards if outermost else self._passes).add(running)
            return running

    def expect_outside(self, what: str) -> None:
        """Raises RotationError in the thread that changes the weights."""
        if self._writer == threading.get_ident():
            raise RotationError(f"{what} within update_weights, whose weights are partly new: expected none")

    def leave(self, running: _Running) -> None:
        with self._changed:
            self._forwards.discard(running)
            self._passes.discard(running)
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """Waits for the ends of earlier changes and of all forwards. Raises RingTimeout after so many seconds."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._writer is not None:
                self._changed.wait()
            self._writer = threading.get_ident()
            while self._forwards or self._passes:
                if time.monotonic() > deadline:
                    raise RingTimeout(f"update_weights: a forward of this rank did not end (waited {timeout} s)")
                self._changed.wait(_POLL)  # the end of a thread notifies nothing

    def open(self) -> None:
        """Lets forwards run, if this thread has closed the gate."""
        with self._changed:
            if self._writer == threading.get_ident():
                self._writer = None
                self._changed.notify_all()


class Forwards(Agreement):
    """The running forwards of a rank, each in a thread of its own. Ranks compare nothing after the conversion.

    Attributes:
        turn: held by the operation that runs, since operations of several threads share slots and connections.
    """

    _phases = itertools.count(1)

    def __init__(self, communicator: Communicator) -> None:
        self._own = threading.local()
        self.gate, self.turn = _Gate(), threading.Lock()
        super().__init__(communicator)

    @property
    def forward_phase(self) -> int:  # type: ignore[override]
        return getattr(self._own, "phase", 0)

    @forward_phase.setter
    def forward_phase(self, phase: int) -> None:
        self._own.phase = phase

    def begin_forward(self) -> None:
        """Starts the phase of a model's forward in this thread, whose passes are expected in the order of the one
        before. Waits while weights are updated. Raises RotationError where an update has failed half-way."""
        self._communicator.check_alive("a forward")  # first: a forked process may have no gate that opens
        if self.forward_phase:  # of a forward that KeyboardInterrupt has left
            self.end_forward()
        self._own.running = self.gate.enter(outermost=True)
        self.forward_phase = next(self._phases)

    def end_forward(self) -> None:
        """Ends the phase that `begin_forward` started. Drops the shards that were pulled ahead, and those that other
        ranks of the host may take: they may change."""
        try:
            if self._communicator.alive:  # in a forked process no thread may be there to wait for
                with self.turn:
                    self._communicator.executor.end_forward()
        finally:
            self.forward_phase = 0
            if (running := self._own.__dict__.pop("running", None)) is not None:
                self.gate.leave(running)

    def end_left_forward(self) -> None:
        if self._communicator.alive:
            self.end_forward()

    def postpone(self, *_: Any) -> bool:
        return True


class InTurn(OpRunner):
    """Runs the operations of several threads one after the other."""

    _agreement: Forwards

    def run(self, *arguments: Any, **keywords: Any) -> Any:
        forwards = self._agreement
        alone = None if forwards.forward_phase else forwards.gate.enter(outermost=False)
        try:
            with forwards.turn:
                return super().run(*arguments, **keywords)
        finally:
            if alone is not None:
                forwards.gate.leave(alone)


def mark_forwards(model: nn.Module, ring: Ring) -> None:
    """Installs hooks that tell the ring when a forward of the model begins and ends."""
    model.register_forward_pre_hook(_Begin(ring), prepend=True)
    model.register_forward_hook(_End(ring), always_call=True)


class _Begin:
    def __init__(self, ring: Ring) -> None:
        self.ring = ring

    def __call__(self, *_: Any) -> None:
        self.ring.begin_forward()


class _End(_Begin):
    def __call__(self, *_: Any) -> None:
        self.ring.end_forward()


for _hook in (_Begin, _End):
    setattr(_hook, OWN_HOOKS, True)
