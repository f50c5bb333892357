"""Analyses the record files of all ranks of a ring: `python -m rtp_ext record FILES...`.

csrc/transport/sink.h has their layout, and csrc/transport/record.cpp writes them: when a ring fails, on `Ring.record`,
and when a process gets SIGUSR1. Hop n of a channel is the same hop on all ranks, so that records of different ranks are
compared hop by hop, without clocks; records of different hosts are aligned by the hosts' wall clocks.
"""

from __future__ import annotations

import itertools
import statistics
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_HEADER = struct.Struct("=8s5I3iQ2q2IQqII64s32s128s1024s")
_ENTRY = struct.Struct("=QqqqQIHhhhhBBB7x")
_MAGIC = b"RTPREC01"
_KINDS = ("pass", "compute", "hop", "wait", "collective")
_CHANNELS = ("weight", "gradient")
_COMPUTES = ("forward", "dgrad", "wgrad", "copy")
_MOST_RANKS = 1 << 20  # of a ring; more are no record of one
LATE = 1e-3  # seconds; shorter delays are not reported

ALL_RANKS = -1  # both ends of a gather or scatter
Hop = tuple[str, int]  # the channel, and the number of earlier hops of it


@dataclass
class RecordedEvent:
    """One event of a rank. Times are nanoseconds of its host's steady clock; 0: not yet.

    Attributes:
        kind: `pass`, `compute`, `hop`, `wait` (for either end of a hop; short waits are omitted), `collective`.
        end: end of the event; of a hop, the time when a wait found that it had arrived.
        sent: of a hop, the time when a wait found that it had left.
        count: of a hop or wait, the number of hops of the channel posted before.
        index, hops: index of the hop in its pass, and the number of hops of the pass.
        what: of a compute, its kind; of a wait, `received` or `sent`.
    """

    number: int
    begin: int
    end: int
    sent: int
    bytes: int
    count: int
    operation: str
    to: int
    from_: int
    index: int
    hops: int
    kind: str
    channel: str
    what: str

    @property
    def hop(self) -> Hop:
        return self.channel, self.count

    def describe(self) -> str:
        if self.kind in ("hop", "wait") and self.to == ALL_RANKS:
            return f"{self.operation}, {self.channel} {'gather' if self.channel == 'weight' else 'scatter'}"
        if self.kind in ("hop", "wait"):
            return f"{self.operation}, {self.channel} hop {self.index + 1} of {self.hops}"
        return self.operation


@dataclass
class Record:
    """The record of one rank. posted: number of hops by channel. waiting: awaited hop, its end, begin of the wait."""

    path: str
    rank: int
    ranks: int
    pid: int
    ring: str
    transport: str
    host: str
    reason: str
    on_host: bool
    steady: int
    wall: int
    posted: dict[str, int]
    waiting: tuple[RecordedEvent, str, int] | None
    events: list[RecordedEvent] = field(default_factory=list)

    def of(self, *kinds: str) -> list[RecordedEvent]:
        return [event for event in self.events if event.kind in kinds]

    def hops(self) -> dict[Hop, RecordedEvent]:
        return {event.hop: event for event in self.of("hop")}


def read(path: str | Path) -> Record:
    """Reads a record file. Raises ValueError if the file is not a record, OSError if it cannot be read."""
    data = Path(path).read_bytes()
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        raise ValueError(f"{path}: expected a record of a ring, got {len(data)} bytes that begin with {data[:8]!r}")
    (_, size, names, name_bytes, entries, entry_bytes, rank, ranks, pid, _next, steady, wall, *rest) = (
        _HEADER.unpack_from(data)
    )
    weight, gradient, waiting_for, waiting_since, waiting_end, on_host, *texts = rest
    whole = size + names * name_bytes + entries * entry_bytes
    if size != _HEADER.size or entry_bytes != _ENTRY.size or len(data) != whole:
        raise ValueError(f"{path}: expected {whole} bytes of this version's layout, got {len(data)}")
    if not 0 <= rank < ranks <= _MOST_RANKS:
        raise ValueError(f"{path}: expected a rank of at most {_MOST_RANKS} ranks, got rank {rank} of {ranks}")
    ring, transport, host, reason = (_text(each) for each in texts)
    known = [_text(data[size + n * name_bytes : size + (n + 1) * name_bytes]) for n in range(names)]
    events = []
    for raw in _ENTRY.iter_unpack(data[size + names * name_bytes :]):
        number, begin, end, sent, size_, count, operation, to, from_, index, hops, kind, channel, what = raw
        if number == 0 or kind >= len(_KINDS):
            continue
        answers = ("received", "sent")[what & 1] if _KINDS[kind] == "wait" else _COMPUTES[what & 3]
        events.append(
            RecordedEvent(
                *(number, begin, end, sent, size_, count, known[operation], to, from_, index, hops),
                *(_KINDS[kind], _CHANNELS[channel & 1], answers),
            )
        )
    events.sort(key=lambda event: event.number)
    awaited = next((event for event in events if event.number == waiting_for), None)
    waiting = None if awaited is None else (awaited, ("received", "sent")[waiting_end & 1], waiting_since)
    posted = {"weight": weight, "gradient": gradient}
    return Record(
        str(path), rank, ranks, pid, ring, transport, host, reason, bool(on_host), steady, wall, posted, waiting, events
    )


def _text(raw: bytes) -> str:
    """Returns a text of a record in characters that a terminal prints as they are."""
    text = raw.split(b"\0", 1)[0].decode(errors="replace")
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def rings(paths: Iterable[str | Path]) -> list[dict[int, Record]]:
    """Reads files. Returns for each ring in them its records by rank.

    Raises ValueError if a file is not a record, or if two are records of one rank.
    """
    found: dict[str, dict[int, Record]] = defaultdict(dict)
    for path in paths:
        record = read(path)
        if other := found[record.ring].get(record.rank):
            raise ValueError(f"{path}: expected one record of a rank, got another of rank {other.rank}, {other.path}")
        found[record.ring][record.rank] = record
    return [dict(sorted(records.items())) for records in found.values()]


def to_dict(records: dict[int, Record]) -> dict[str, Any]:
    """Returns the state of the ranks of one ring, and the findings, as values for `report` and JSON."""
    first = next(iter(records.values()))
    return {
        "ring": first.ring,
        "ranks": first.ranks,
        "transport": first.transport,
        "absent": [rank for rank in range(first.ranks) if rank not in records],
        "records": [
            {"rank": rank, "process": record.pid, "state": _state(record), "written": record.reason}
            for rank, record in records.items()
        ],
        "on_host": first.on_host,
        "findings": [*out_of_step(records), *not_posted(records), *late(records), *waits(records)],
    }


def report(facts: Iterable[dict[str, Any]]) -> str:
    """Returns a text with the state and the findings of every ring; `facts`: of `to_dict`."""
    return "\n\n".join("\n".join(_lines(ring)) for ring in facts)


def _lines(ring: dict[str, Any]) -> list[str]:
    found = _ranks(each["rank"] for each in ring["records"])
    answers = f"ring {ring['ring']}: {ring['ranks']} ranks, transport {ring['transport']}, records of {found}"
    lines = [answers + (f", none of {_ranks(ring['absent'])}" if ring["absent"] else "")]
    for each in ring["records"]:
        lines.append(f"  rank {each['rank']} (process {each['process']}): {each['state']}")
        lines.append(f"    written: {each['written']}")
    if not ring["on_host"]:
        lines.append("  times are those at which the host enqueued; the device came later")
    findings = ring["findings"] or ["no rank was late, and no hop is missing"]
    return [*lines, "findings:", *(f"  {each}" for each in findings)]


def _ranks(ranks: Iterable[int]) -> str:
    listed = list(ranks)
    return f"rank{'s' if len(listed) != 1 else ''} {', '.join(map(str, listed))}"


def _state(record: Record) -> str:
    """Returns a description of the rank's activity when it wrote the record."""
    if record.waiting is not None:
        event, end, since = record.waiting
        seconds = (record.steady - since) / 1e9
        peer = f"from rank {event.from_} to arrive" if end == "received" else f"to rank {event.to} to leave"
        peer = "of all ranks" if event.to == ALL_RANKS else peer
        return f"had waited {seconds:.3f} s for {event.describe()}, {peer}"
    if begun := [event for event in record.of("collective", "compute", "pass") if event.end == 0]:
        event = begun[-1] if begun[-1].kind != "pass" else begun[0]
        doing = f"{event.what} with the shard of rank {event.from_}, " if event.kind == "compute" else ""
        return f"was in {doing}{event.operation} for {(record.steady - event.begin) / 1e9:.3f} s"
    if not record.events:
        return "had done nothing"
    last = max(record.events, key=lambda event: max(event.begin, event.end))
    seconds = (record.steady - max(last.begin, last.end)) / 1e9
    return f"was in no operation for {seconds:.3f} s, after {last.describe()}"


def out_of_step(records: dict[int, Record]) -> list[str]:
    """Returns the first hop that differs between ranks, and the operations that ranks skipped."""
    every = {rank: record.hops() for rank, record in records.items()}
    for channel in _CHANNELS:
        counts = sorted({count for hops in every.values() for kind, count in hops if kind == channel})
        for count in counts:
            here = {rank: hops[channel, count] for rank, hops in every.items() if (channel, count) in hops}
            answers = {rank: (event.operation, event.index, event.hops) for rank, event in here.items()}
            if len(set(answers.values())) > 1:
                return [_describe_desync(records, here, channel, count)]
    return []


def _describe_desync(records: dict[int, Record], here: dict[int, RecordedEvent], channel: str, count: int) -> str:
    each = "; ".join(f"rank {rank} posted {event.describe()}" for rank, event in here.items())
    text = f"out of step from {channel} hop {count} on: {each}"
    # Counts successors of operations in earlier passes: a rank with an unusual successor has skipped the usual one.
    followers: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records.values():
        begun = _begun(record, here)
        names = [event.operation for event in record.of("pass") if event.begin < begun]
        for before, after in itertools.pairwise(names):
            followers[before][after] += 1
    odd = []
    for rank, event in here.items():
        passes = [each for each in records[rank].of("pass") if each.begin <= event.begin]
        if len(passes) < 2 or not followers[passes[-2].operation]:
            continue
        usual = followers[passes[-2].operation].most_common(1)[0][0]
        if usual != passes[-1].operation and any(usual == other.operation for other in here.values()):
            odd.append(f"rank {rank} skipped {usual}")
    return f"{text}. {'; '.join(odd)}" if odd else text


def _begun(record: Record, here: dict[int, RecordedEvent]) -> int:
    """Returns the begin of the pass in which `record` posted its hop of `here`."""
    event = here.get(record.rank)
    if event is None:
        return record.steady
    return max((each.begin for each in record.of("pass") if each.begin <= event.begin), default=event.begin)


def not_posted(records: dict[int, Record]) -> list[str]:
    """Returns awaited hops that the other end has not posted, and the next hop of a pass if no rank has posted it."""
    found = []
    for rank, record in records.items():
        if record.waiting is None:
            continue
        event, end, _ = record.waiting
        peer = event.from_ if end == "received" else event.to
        for each in range(record.ranks) if peer == ALL_RANKS else [peer]:
            if each not in records:
                found.append(f"rank {rank} waited for {event.describe()} of rank {each}, which has left no record")
            elif records[each].posted[event.channel] <= event.count:
                found.append(f"rank {rank} waited for {event.describe()}, which rank {each} never posted")
    ranks = next(iter(records.values())).ranks
    for channel in _CHANNELS:
        begun = [[event for event in record.of("hop") if event.channel == channel][-1:] for record in records.values()]
        last = [event for events in begun for event in events]
        open_ = any(event.end == 0 and event.kind == "pass" for record in records.values() for event in record.events)
        if not last or not open_:
            continue
        newest = max(last, key=lambda event: event.count)
        if len(records) == ranks and newest.index + 1 < newest.hops:
            by = _ranks(rank for rank, each in records.items() if each.posted[channel] > newest.count)
            found.append(
                f"no rank has posted {newest.operation}, {channel} hop {newest.index + 2} of {newest.hops}; the one "
                f"before was posted by {by}"
            )
    return found


def own_times(record: Record) -> dict[Hop, float]:
    """Returns for each hop the seconds since the previous hop (of either channel), without waiting times."""
    own: dict[Hop, float] = {}
    before, waited = 0, 0
    for event in record.of("hop", "wait", "collective"):
        if event.kind == "hop":
            if before:
                own[event.hop] = max(event.begin - before - waited, 0) / 1e9
            before, waited = event.begin, 0
        elif event.end:
            waited += event.end - event.begin
    return own


def late(records: dict[int, Record]) -> list[str]:
    """Returns the hops before which one rank took longest compared with the others, without waiting times."""
    own = {rank: own_times(record) for rank, record in records.items()}
    common = set.intersection(*(set(each) for each in own.values())) if own else set()
    found: list[tuple[float, str]] = []
    hops = {rank: record.hops() for rank, record in records.items()}
    for hop in common:
        for rank, times in own.items():
            others = [each[hop] for other, each in own.items() if other != rank]
            excess = times[hop] - (statistics.median(others) if others else times[hop])
            if excess > LATE:
                text = f"rank {rank} was {excess:.3f} s later than others, and waited for no rank, before "
                found.append((excess, f"{text}{hops[rank][hop].describe()}"))
    lines = [text for _, text in sorted(found, reverse=True)[:3]]
    # A rank that does not wait while others do is still late.
    if any(record.waiting for record in records.values()):
        for rank, record in records.items():
            idle = record.steady - max((max(e.begin, e.end, e.sent) for e in record.events), default=record.steady)
            if record.waiting is None and idle / 1e9 > LATE and not any(e.end == 0 for e in record.of("collective")):
                lines.append(f"rank {rank} {_state(record)}, while others waited")
    return lines


def waits(records: dict[int, Record]) -> list[str]:
    """Returns for each rank the peer that it waited for longest, if longer than LATE."""
    lines = []
    for rank, record in records.items():
        total: Counter[int] = Counter()
        for event in (each for each in record.of("wait") if each.to != ALL_RANKS):
            total[event.from_ if event.what == "received" else event.to] += event.end - event.begin
        if total and (most := total.most_common(1)[0])[1] / 1e9 > LATE:
            lines.append(f"rank {rank} waited {most[1] / 1e9:.3f} s in all for rank {most[0]}")
    return lines


def files_of(paths: Sequence[str]) -> list[Path]:
    """Returns the files at `paths`, which may be folders of records. Raises FileNotFoundError if there are none."""
    files = []
    for path in map(Path, paths):
        files += sorted(path.glob("rtp_record_*.bin")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"no records of rings in {', '.join(paths)}")
    return files
