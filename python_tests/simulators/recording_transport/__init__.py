"""A transport that records the requests that asynchronous streams would receive, and a race check of the recording.

All work runs synchronously. The recording holds every torch operator with the memory that it reads and writes and the
compute stream that it would run on, every hop with its memory and channel, every event, and every wait. `conflicts`
derives the happens-before order that the waits alone guarantee:

    computes   two streams, each in order; an event covers all earlier work of its stream
    hops       posted in order on two channels, but they may overlap: only a wait guarantees that data was sent or
               received, and a hop sends after the waits of its source, and receives after those of its target. With
               `per_host`, the waits of hops between hosts are not those of hops inside them
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import compiled

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]

# Values of Record.lane: two compute streams; the sources and the targets of the hops of two channels, inside hosts and
# between them
COMPUTE, SIDE, SOURCES, TARGETS = (0,), (1,), (2, 3, 6, 7), (4, 5, 8, 9)
# The kinds of waits: the waiting streams, and the awaited record
WAITS = {
    "compute after mark": (COMPUTE, "mark"),
    "side after mark": (SIDE, "mark"),
    "source after mark": (SOURCES, "mark"),
    "target after mark": (TARGETS, "mark"),
    "compute after received": (COMPUTE + SIDE, "received"),
    "source after received": (SOURCES, "received"),
    "target after received": (TARGETS, "received"),
    "compute after sent": (COMPUTE + SIDE, "sent"),
    "target after sent": (TARGETS, "sent"),
}


def build() -> Path:
    """Returns the path of the module, after compiling it if it is missing."""
    return compiled.build_module("rtp_recording_transport", [HERE / "recording.cpp"], ["-DNDEBUG"], [ROOT / "csrc"])


@functools.cache
def load() -> Any:
    """Returns the module. The extension's Executor accepts its transport."""
    return compiled.load_module("rtp_recording_transport", build())


class _Memory:
    """All memory of a recording, split so that every access covers whole pieces."""

    def __init__(self, records: Iterable[Any]):
        edges = set()
        for record in records:
            for address, size in (*record.reads, *record.writes):
                edges |= {address, address + size}
        self.edges = sorted(edges)
        self.writer: dict[int, int] = {}  # by piece: node of the last write
        self.readers: dict[int, list[int]] = {}  # by piece: nodes of later reads

    def pieces(self, spans: Sequence[tuple[int, int]]) -> set[int]:
        found: set[int] = set()
        for address, size in spans:
            found.update(range(bisect_left(self.edges, address), bisect_left(self.edges, address + size)))
        return found


def conflicts(records: Sequence[Any], without: Collection[str] = (), *, streams: bool = False) -> list[str]:
    """Returns unordered pairs of accesses to the same memory of which at least one is a write.

    Args:
        records: the result of the module's `records()`.
        without: keys of WAITS; these waits are ignored.
        streams: the hops of a channel run one after the other, as on a CUDA stream, and none waits for another of its
            stream. Hops between hosts have a stream of their own.
    """
    return list(dict.fromkeys(_conflicts(records, without, streams)))


def any_conflict(records: Sequence[Any], without: Collection[str] = (), *, streams: bool = False) -> bool:
    """Returns whether there are `conflicts`, without a search for those after the first."""
    return next(_conflicts(records, without, streams), None) is not None


def _conflicts(records: Sequence[Any], without: Collection[str], streams: bool) -> Iterator[str]:
    ignored = {(lane, kind) for lanes, kind in map(WAITS.__getitem__, without) for lane in lanes}
    before = dict.fromkeys(range(10), 0)  # by lane: bit mask of the nodes that happen before its next work
    known: dict[tuple[int, str], int] = {}  # the same by event, and by either end of a hop
    stream_of: dict[int, int] = {}  # by hop: its lane
    names: list[str] = []
    memory = _Memory(records)

    def access(text: str, seen: int, reads: set[int], writes: set[int]) -> Generator[str, None, int]:
        """Adds a node and returns its bit."""
        node = len(names)
        names.append(text)
        for pieces, others in ((reads | writes, memory.writer), (writes, memory.readers)):
            for piece in pieces:
                earlier = others.get(piece, ())
                for other in [earlier] if isinstance(earlier, int) else earlier:
                    if not seen >> other & 1:
                        yield f"{names[other]} | {text}"
        for piece in reads - writes:
            memory.readers.setdefault(piece, []).append(node)
        for piece in writes:
            memory.writer[piece], memory.readers[piece] = node, []
        return 1 << node

    for number, record in enumerate(records):
        if record.kind == "memory":
            reads, writes = memory.pieces(record.reads), memory.pieces(record.writes)
            text = f"{number} {record.text} on lane {record.lane}"
            before[record.lane] |= yield from access(text, before[record.lane], reads, writes)
        elif record.kind == "marked":
            known[record.id, "mark"] = before[record.lane]
        elif record.kind == "hop":
            source, target = before[record.lane], before[record.lane + 2]
            if streams:
                source = target = source | target
            text = f"{number} {record.text}"
            sent = source | (yield from access(f"{text}, sent", source, memory.pieces(record.reads), set()))
            received = target | (yield from access(f"{text}, received", target, set(), memory.pieces(record.writes)))
            if streams:
                sent = received = before[record.lane] = sent | received
            known[record.id, "sent"], known[record.id, "received"] = sent, received
            stream_of[record.id] = record.lane
        elif streams and stream_of.get(record.id) in (record.lane, record.lane - 2):
            continue
        elif (record.lane, record.kind) not in ignored:
            before[record.lane] |= known[record.id, record.kind]
