"""A transport that writes down what asynchronous lanes would have been asked to do, and the check of what it wrote.

Nothing runs asynchronously here. Instead the recording holds every operator of torch with the memory that it reads and
writes and the compute lane that it would run on, every hop with its memory and channel, every mark, and every wait.
`conflicts` rebuilds from it what is certain to happen before what, on a machine that promises no more than the waits:

    computes   two lanes, each in order; a mark stands for all that its lane was given before it
    hops       posted in order on two channels, but they may overlap: what left and what arrived is certain only to
               whoever waits for it
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import compiled

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]

COMPUTE, SIDE, CHANNELS = (0,), (1,), (2, 3)  # lanes
# The kinds of waits: who waits, and for what
WAITS = {
    "compute after mark": (COMPUTE, "mark"),
    "side after mark": (SIDE, "mark"),
    "channel after mark": (CHANNELS, "mark"),
    "compute after received": (COMPUTE + SIDE, "received"),
    "channel after received": (CHANNELS, "received"),
    "compute after sent": (COMPUTE + SIDE, "sent"),
    "channel after sent": (CHANNELS, "sent"),
}


def build() -> Path:
    """The path of the module, compiled if it is not there."""
    return compiled.build_module("rtp_recording_transport", [HERE / "recording.cpp"], ["-DNDEBUG"], [ROOT / "csrc"])


@functools.cache
def load() -> Any:
    """The module; the ordinary extension's Executor takes its transport."""
    return compiled.load_module("rtp_recording_transport", build())


class _Memory:
    """All memory of a recording, cut so finely that every access covers whole pieces."""

    def __init__(self, records: Iterable[Any]):
        edges = set()
        for record in records:
            for address, size in (*record.reads, *record.writes):
                edges |= {address, address + size}
        self.edges = sorted(edges)
        self.writer: dict[int, int] = {}  # node, by piece
        self.readers: dict[int, list[int]] = {}  # since

    def pieces(self, spans: Sequence[tuple[int, int]]) -> set[int]:
        found: set[int] = set()
        for address, size in spans:
            found.update(range(bisect_left(self.edges, address), bisect_left(self.edges, address + size)))
        return found


def conflicts(records: Sequence[Any], without: Collection[str] = (), *, streams: bool = False) -> list[str]:
    """Pairs of accesses to the same memory, at least one of them a write, that nothing keeps in order.

    Args:
        records: what the module's `records()` returned.
        without: names out of WAITS that are taken for not made.
        streams: the hops of a channel run one after the other, as on a CUDA stream, and no channel waits for a hop.
    """
    if streams:
        without = {*without, "channel after received", "channel after sent"}
    ignored = {(lane, kind) for lanes, kind in map(WAITS.__getitem__, without) for lane in lanes}
    before = dict.fromkeys(range(4), 0)  # by lane: everything that has happened to it, as bits
    known: dict[tuple[int, str], int] = {}  # the same by mark, and by either end of a hop
    names: list[str] = []
    memory = _Memory(records)
    found: dict[str, None] = {}

    def access(text: str, seen: int, reads: set[int], writes: set[int]) -> int:
        """A new node; returns its bit."""
        node = len(names)
        names.append(text)
        for pieces, others in ((reads | writes, memory.writer), (writes, memory.readers)):
            for piece in pieces:
                earlier = others.get(piece, ())
                for other in [earlier] if isinstance(earlier, int) else earlier:
                    if not seen >> other & 1:
                        found[f"{names[other]} | {text}"] = None
        for piece in reads - writes:
            memory.readers.setdefault(piece, []).append(node)
        for piece in writes:
            memory.writer[piece], memory.readers[piece] = node, []
        return 1 << node

    for number, record in enumerate(records):
        if record.kind == "memory":
            reads, writes = memory.pieces(record.reads), memory.pieces(record.writes)
            text = f"{number} {record.text} on lane {record.lane}"
            before[record.lane] |= access(text, before[record.lane], reads, writes)
        elif record.kind == "marked":
            known[record.id, "mark"] = before[record.lane]
        elif record.kind == "hop":
            seen = before[record.lane]
            text = f"{number} {record.text}"
            sent = seen | access(f"{text}, sent", seen, memory.pieces(record.reads), set())
            received = seen | access(f"{text}, received", seen, set(), memory.pieces(record.writes))
            if streams:
                sent = received = before[record.lane] = sent | received
            known[record.id, "sent"], known[record.id, "received"] = sent, received
        elif (record.lane, record.kind) not in ignored:
            before[record.lane] |= known[record.id, record.kind]
    return list(found)
