"""Records what the lanes of one rank did when, `Ring.trace`; and writes what a ring did last, `Ring.record`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from rtp_ext import _native
from rtp_ext._native import RotationError
from rtp_ext.ring.links.groups import Groups

logger = logging.getLogger("rtp_ext")


@dataclass(frozen=True)
class TraceEvent:
    """What one lane did from `start` to `end`, in seconds.

    Attributes:
        rank: of the ring.
        lane: `compute`, `side` (a second lane of computes), `weight` or `gradient` (hops), `outer weight` or
            `outer gradient` (hops between hosts, on route two-level).
        label: of the step, as in the table of the schedule.
        step: its position in the schedule; of a wait, that of the step that waited; -1 at either end of a pass.
        pass_: the number of its pass; -1: a hop that was sent ahead for a pass that did not come.
        operation: such as `rotated_linear forward`.
        posted: when a hop was posted, which starts once those before it on its channel have arrived; else the start.
        kind: `step`; `wait`: the compute lane waits for a hop, and on a CPU also while it posts one; `stage`: home
            shards are copied, or cast, before they travel.
    """

    rank: int
    lane: str
    label: str
    start: float
    end: float
    step: int
    pass_: int
    operation: str
    kind: str
    posted: float


@dataclass(frozen=True)
class TracePass:
    """One pass of one operation. `options`: keywords of `make_schedule`; `end` is NaN where it has not ended."""

    number: int
    operation: str
    options: dict[str, Any]
    start: float
    end: float


@dataclass
class Trace:
    """What one rank recorded; empty until the recording has ended.

    Attributes:
        passes, events: in the order in which the rank began them, in seconds from the start of the recording.
        zero: that start, in seconds of the clock of `host`.
        captured: passes that were captured in a CUDA graph. They are not recorded, nor are replays.
    """

    rank: int
    ranks: int
    device: str
    transport: str
    host: str
    zero: float = 0.0
    captured: int = 0
    passes: list[TracePass] = field(default_factory=list)
    events: list[TraceEvent] = field(default_factory=list)


@contextlib.contextmanager
def record(ring: Groups) -> Iterator[Trace]:
    """Records `ring` while the block runs. Collective."""
    ring.check_alive("trace")
    if ring.device.type == "cuda":
        torch.cuda.synchronize(ring.device)
    ring.exchange(None)  # the ranks start together
    trace = Trace(ring.rank, ring.size, str(ring.device), ring.transport, _native.host_id())
    _switch(ring, True)
    try:
        yield trace
    finally:
        _switch(ring, False)
        if ring._executor.alive:
            trace.zero, trace.captured, passes, events = ring._executor.read_trace()
            trace.passes = [TracePass(number, *each) for number, each in enumerate(passes)]
            trace.events = [
                TraceEvent(ring.rank, lane, label, start, end, step, pass_, operation, kind, posted)
                for pass_, operation, step, kind, lane, label, start, end, posted in events
            ]
    if trace.captured:
        logger.warning("trace: %d passes were captured in a CUDA graph and are not in the trace", trace.captured)


def _switch(ring: Groups, on: bool) -> None:
    try:
        ring._executor.trace(on)
    except RotationError as error:
        ring.end(error)
        raise


class Recorded:
    """For the class Ring."""

    token: str
    transport: str
    _executor: Any

    def _begin_record(self) -> None:
        self._executor.identify(self.token, self.transport, _native.host_id())
        if not _native.record_on_signal():
            logger.debug("SIGUSR1 has a handler already: it writes no records of rings; Ring.record does")

    def record(self) -> str:
        """Writes what this rank's end of the ring did last (passes, computes, hops, waits; times and peers) to a file,
        and returns its path. Not collective, and cheap: it may be called at any time, from any thread.

        The same is written when the ring fails, and for all rings of a process that gets SIGUSR1. The folder is that of
        the environment variable RTP_RECORD_DIR, or else the temporary one. `python -m rtp_ext record FILES` says what
        the files of all ranks tell together: who was late, who skipped an operation, which hop nobody posted. On a GPU
        times are those at which the host enqueued.

        Raises OSError where the file cannot be written.
        """
        try:
            return self._executor.record("asked for by Ring.record")
        except RuntimeError as error:
            raise OSError(str(error)) from error

    def trace(self) -> AbstractContextManager[Trace]:
        """Records what every lane does when: `with ring.trace() as trace: ...`, and then `trace.events`.

        By timing events on CUDA streams, which are read when the block ends; by the host's clock on a CPU, where a
        compute lasts until the next step is asked for, and a hop from its posting until it arrives (over `c10d`: until
        the wait that found it there). Collective, at either end; a hop that was sent ahead is waited for there. What
        to do with a trace: rtp_ext.trace.

        Raises ValueError where the ring is being recorded already, RotationError for `c10d` between GPUs, whose
        streams nobody can time.
        """
        return record(self)  # type: ignore[arg-type]
