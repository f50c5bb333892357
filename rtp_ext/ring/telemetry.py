"""Telemetry of a ring: counters, traces of its streams, and the record of its last passes."""

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
from rtp_ext.ring.links.communicator import Communicator
from rtp_ext.ring.links.transports import Connection
from rtp_ext.words import Buffers, Channel

logger = logging.getLogger("rtp_ext")


@dataclass(frozen=True)
class TraceEvent:
    """The work of one stream from `start` to `end`, in seconds.

    Attributes:
        rank: the rank in the ring.
        lane: the stream: `compute`, `side` (a second stream of computes), `weight` or `gradient` (hops), `outer weight`
            or `outer gradient` (hops between hosts, on route two-level).
        label: the name of the step, as in the table of the schedule.
        step: index of the step in the schedule; for a wait, of the step that waited; -1 at either end of a pass.
        pass_: the number of the pass; -1: a hop that was prefetched for a pass that did not follow, or a wait between
            passes.
        operation: such as `rotated_linear forward`.
        posted: the time at which a hop was posted; the hop starts once those before it on its channel have arrived. For
            other kinds, the start.
        kind: `step`; `wait`: the compute stream waits for a hop, a pulled shard, a slot, or a collective of
            torch.distributed, and on a CPU also while it posts a hop; `stage`: local shards are copied, cast or
            quantized before they travel, arrived ones are dequantized, contributions to gradients are rounded.
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
    """One pass of one operation. `options`: keywords of `make_schedule`; `end` is NaN for a pass that has not ended."""

    number: int
    operation: str
    options: dict[str, Any]
    start: float
    end: float


@dataclass
class Trace:
    """The recording of one rank; empty until the recording has ended.

    Attributes:
        passes, events: in the order in which the rank began them, in seconds from the start of the recording.
        zero: the start of the recording, in seconds of the clock of `host`.
        captured: number of passes that were captured in a CUDA graph. The trace contains neither them nor replays.
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


class Telemetry:
    """Counters and recordings of one rank of a ring.

    Args:
        communicator: the communicator of the ring; its executor counts and records.
        connection: the transport of the ring.
        token: name of the ring in the files of its records, the same on all its ranks.
    """

    def __init__(self, communicator: Communicator, connection: Connection, token: str) -> None:
        self._communicator = communicator
        self._transport, self._native = connection.name, connection.native
        communicator.executor.identify(token, connection.name, _native.host_id())
        if not _native.record_on_signal():
            logger.debug("SIGUSR1 has a handler already: it writes no records of rings; Ring.record does")

    # -- counters ----------------------------------------------------------------------------------------------------

    def slot_count(self, channel: Buffers) -> Any:
        """Returns the counts of `weight` or `gradient` slots: .slots and .bytes allocated, .peak_slots leased at once,
        .peak_bytes, and .allocations in all. `scratch`: the buffers in which this rank dequantizes weights."""
        executor = self._communicator.executor
        return executor.scratch() if channel == "scratch" else executor.slots(channel)

    def reset_peak(self) -> None:
        """Resets the peaks of `slot_count`."""
        self._communicator.executor.reset_peak()

    def clear_slots(self) -> None:
        """Frees the slots; the next operation allocates them again."""
        self._communicator.executor.clear_slots()

    def hops(self, channel: Channel) -> int:
        """Returns the number of `weight` or `gradient` hops that this rank has posted; a collective is one."""
        return self._communicator.executor.hops(channel)

    def landed_late(self) -> int:
        """Returns the number of gradients that arrived after the backward pass of their layer had ended."""
        return self._communicator.executor.landed_late()

    def prefetched(self) -> tuple[int, int]:
        """Returns the number of weight hops that were posted before their layer was called, and of those that the layer
        used."""
        return self._communicator.executor.prefetched()

    def bytes_sent(self, channel: Channel) -> int:
        """Returns the bytes of `weight` or `gradient` that this rank has sent; of a collective R - 1 times the
        largest shard, the least that an algorithm can send."""
        return self._communicator.executor.bytes_sent(channel)

    def bytes_between_hosts(self, channel: Channel) -> int:
        """Returns the bytes of `weight` or `gradient` that this rank has sent to other hosts. Raises RotationError
        where the transport does not count them separately: on several hosts with several ranks only composite
        transports do, and none where collectives were used."""
        if self._communicator.hosts == 1:
            return 0
        if self._communicator.hosts == self._communicator.size:
            return self._communicator.executor.bytes_sent(channel)
        if not isinstance(self._native, _native.CompositeTransport):
            raise RotationError(
                f"transport {self._transport} does not count the bytes that leave the host separately: expected "
                "shm+tcp, shm+c10d, ce+nccl or nccl+nccl"
            )
        return self._native.bytes_between_hosts(channel)

    # -- recordings --------------------------------------------------------------------------------------------------

    def record(self) -> str:
        """Writes the latest work of this rank's end of the ring (passes, computes, hops, waits; times and peers) to a
        file, and returns its path. Not collective, and cheap: may be called at any time, from any thread.

        The ring writes the same record when it fails, and all rings of a process do on SIGUSR1. The folder is that of
        the environment variable RTP_RECORD_DIR, or else the temporary one. `python -m rtp_ext record FILES` evaluates
        the files of all ranks together: late ranks, skipped operations, hops that no rank posted. On a GPU the times
        are those at which the host enqueued.

        Raises OSError where the file cannot be written.
        """
        try:
            return self._communicator.executor.record("asked for by Ring.record")
        except RuntimeError as error:
            raise OSError(str(error)) from error

    def trace(self) -> AbstractContextManager[Trace]:
        """Records the steps of every stream with their times: `with ring.trace() as trace: ...`, then `trace.events`.

        On GPUs the times come from timing events on CUDA streams, which are read when the block ends; on a CPU from the
        host's clock, where a compute lasts until the next step is requested, and a hop from its posting until it
        arrives (over `c10d`: until the wait that finds it complete). Collective at the start and at the end, both of
        which wait for prefetched hops. rtp_ext.trace evaluates and prints traces.

        Raises ValueError where the ring is being recorded already, RotationError for `c10d` between GPUs, whose
        streams cannot be timed.
        """
        return self._trace()

    @contextlib.contextmanager
    def _trace(self) -> Iterator[Trace]:
        ring = self._communicator
        ring.check_alive("trace")
        if ring.device.type == "cuda":
            torch.cuda.synchronize(ring.device)
        ring.exchange(None)  # the ranks start together
        trace = Trace(ring.rank, ring.size, str(ring.device), self._transport, _native.host_id())
        self._record_events(True)
        try:
            yield trace
        finally:
            self._record_events(False)
            if self._communicator.executor.alive:
                trace.zero, trace.captured, passes, events = self._communicator.executor.read_trace()
                trace.passes = [TracePass(number, *each) for number, each in enumerate(passes)]
                trace.events = [
                    TraceEvent(ring.rank, lane, label, start, end, step, pass_, operation, kind, posted)
                    for pass_, operation, step, kind, lane, label, start, end, posted in events
                ]
        if trace.captured:
            logger.warning("trace: %d passes were captured in a CUDA graph and are not in the trace", trace.captured)

    def _record_events(self, on: bool) -> None:
        try:
            self._communicator.executor.trace(on)
        except RotationError as error:
            self._communicator.end(error)
            raise
