"""Finds out which rank failed, through the store of the process group, once a ring has failed.

The error of a collective does not name the rank that did not answer; the error of a hop names the neighbour, which may
have failed because of another rank. So every rank whose ring has failed writes a report under its own key of the store,
waits briefly for the keys of the others, and names the ranks without a key.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rtp_ext import _native
from rtp_ext._native import RingTimeout, RotationError

__all__ = ["FailureReport", "Process", "broken_links", "cut", "this_process"]

GRACE = 0.6  # seconds for the others to answer: every error has to come within the timeout and one second
PATIENCE = 5.0  # the same, where ranks may be many steps apart
_POLL = 0.03  # seconds
_STORE = 0.35  # seconds for the store's first answer
_MOMENT = 0.05  # seconds
_SLACK = 0.15  # seconds beyond the grace for the store
_TAG = 0x7074  # tag of messages that probe a link; no message has the next tag
_SOME = 8  # the most ranks, or operations, that an error lists
_FOUND = "found"  # the key of the final verdict
_HERE = "here/"  # begins the keys of ranks that have called, with the reasons not to go on

Process = tuple[int, int]  # process id, and start time by the kernel's clock

# For each world, how many rings were made there over the same ranks.
_made: weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


class FailureReport:
    """The failure report of a ring and its replicas. All their ranks create it at the same point, like the ring, before
    the ring's first collective; it uses the store alone.

    Attributes:
        ranks: the global ranks of the ring and its replicas.
        neighbours: processes of ranks on this host, by global rank; the kernel shows whether they run.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.me = dist.get_rank()
        self.neighbours: dict[int, Process] = {}
        counts = _made.setdefault(dist.group.WORLD, Counter())
        counts[self.ranks] += 1
        name = hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:16]
        stock: Any = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"rtp_ext/failure_report/{name}/{counts[self.ranks]}", stock)
        self._keeper = _keeper(stock)
        self._called = False
        # torchrun's agent keeps the store after a restart. All ranks of the ring delete their old entries before any of
        # them ends its first collective.
        with contextlib.suppress(RuntimeError, NotImplementedError):  # some stores cannot delete
            for key in (str(self.me), _FOUND, f"{_HERE}{self.me}"):
                self._store.delete_key(key)

    def meet(self, members: Sequence[int], problem: str | None, timeout: datetime.timedelta) -> None:
        """Raises RotationError on all members where one has a `problem`, and RingTimeout, which names them, where some
        do not call. Collective, through the store alone: before there are process groups."""
        if problem is not None:
            with contextlib.suppress(RuntimeError):  # a store in a file needs a descriptor; others miss this rank then
                self._store.set(f"{_HERE}{self.me}", problem)
            raise RotationError(f"Ring: it cannot be made here: {problem}")
        self._store.set(f"{_HERE}{self.me}", "")
        keys = [f"{_HERE}{rank}" for rank in members]
        try:
            self._store.wait(keys, timeout)
        except RuntimeError as error:
            missing = _some(rank for rank, key in zip(members, keys, strict=True) if not self._store.check([key]))
            raise RingTimeout(
                f"Ring: expected a call on every rank, got none on global ranks {missing} (waited "
                f"{timeout.total_seconds()} s)"
            ) from error
        for rank, text in zip(members, self._store.multi_get(keys), strict=True):
            if text:
                raise RotationError(f"Ring: it cannot be made on global rank {rank}: {text.decode()}")

    def add_processes(self, ranks: Sequence[int], processes: Sequence[Process | None], hosts: Sequence[int]) -> None:
        """Adds the processes of those `ranks` that are on the host of this rank to `neighbours`."""
        here = hosts[[*ranks].index(self.me)]
        every = zip(ranks, processes, hosts, strict=True)
        self.neighbours |= {rank: process for rank, process, host in every if process is not None and host == here}

    def call(
        self,
        text: str,
        own: bool,
        broken: Iterable[int],
        seen: float,
        suspects: Sequence[int] | None = None,
        near: Sequence[int] = (),
        ended: float | None = None,
        left: Sequence[int] = (),
    ) -> str:
        """Reports this rank's failure, and returns the addition to the error `text`, which names the ranks that failed:
        those that do not report, or those that the reports of others name. Returns an empty text in later calls. Takes
        less than a second, or less than six with `suspects`, even if the store does not answer.

        Args:
            text: the text of this rank's error.
            own: whether the cause is in this rank itself: it then waits for no other rank.
            broken: ranks whose connections to this rank were broken at `seen`, in seconds of the clock, before this
                rank closed its own.
            suspects: the ranks that this one waited for, where the others may not have detected a failure yet.
            near: ranks that must have detected the failure, those of the ring. Another rank may be busy with a pass,
                and counts as missing only if none of these is missing.
            ended: the earliest time at which this rank's own connections closed: a collective that times out closes
                them before a rank checks. None: not before `seen`.
            left: ranks that this one waited for, and that had closed their ring.
        """
        grace = GRACE if suspects is None else PATIENCE
        if self._called:
            return ""
        self._called = True
        deadline = time.monotonic() + grace
        mine = {"text": text[:300], "own": own, "broken": sorted(broken), "seen": seen}
        mine |= {"ended": seen if ended is None else min(ended, seen), "left": [*left]}
        heard: list[str] = []  # verdict of the thread
        answers = threading.Event()

        def ask() -> None:
            try:
                self._store.check([_FOUND])
                answers.set()
                heard.append(self._ask(mine, suspects, near, grace, deadline))
            except Exception as error:  # of the store: DistError, or torch's error for that of a socket
                heard.append("" if own else self._without_store(str(error)))

        # A request to a store whose process is stopped blocks for ever: another thread makes it.
        thread = threading.Thread(target=ask, name="rtp failure report", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError):  # there is no memory for a thread; `text` reports that
            return ""
        # The wait for a store without any answer is shorter than the wait for ranks.
        thread.join(_STORE)
        if answers.is_set():  # suspects may answer at the end of the grace, and then have one of their own
            latest = deadline + _SLACK + (0.0 if suspects is None else GRACE)
            thread.join(latest - time.monotonic())
        return (heard or ["" if own else self._without_store("no answer in time", slow=answers.is_set())])[0]

    def _ask(
        self,
        mine: dict[str, Any],
        suspects: Sequence[int] | None,
        near: Sequence[int],
        grace: float,
        deadline: float,
    ) -> str:
        self._store.set(str(self.me), json.dumps(mine))
        if mine["own"]:
            return ""
        others, prompt = [rank for rank in self.ranks if rank != self.me], False
        while True:
            if self._store.check([_FOUND]):
                return self._read(_FOUND)
            # A process that ends after its report is no cause: this checks silent ranks alone.
            running = [rank for rank in others if rank in self.neighbours and rank not in mine["left"]]
            ended = [rank for rank in running if self._state(rank) is not None]
            if gone := self._gone(self._silent(ended)):
                return self._found(gone)
            if time.monotonic() > deadline or self._answered(others):
                break
            if suspects is not None and not prompt and self._answered(suspects):  # the suspects search for the cause
                prompt, deadline = True, time.monotonic() + GRACE
            time.sleep(_POLL)
        silent = self._silent(others)
        missed = [rank for rank in silent if rank in (near if suspects is None else suspects)]
        if suspects is None and not missed:
            missed = silent
        answers = {rank: json.loads(self._read(str(rank))) for rank in self.ranks if rank not in silent}
        left = {rank for each in answers.values() for rank in each["left"]}
        absent, known = [rank for rank in missed if rank not in left], _own(answers) or _lost_links(answers)
        # A silent rank whose process runs may only be slow, if another cause is known.
        if absent and not (known and all(rank in self.neighbours for rank in absent)):
            return self._found(_verdict(absent, f"no report within {grace} s"))
        if missed and not known:
            return self._found(
                f"; global rank{'s' * (len(missed) > 1)} {_some(missed)} had left: closed the ring, as at the end of a "
                "program, or after an error outside of the ring"
            )
        return self._found(_first(answers) if _own(answers) else _links(answers))

    def _answered(self, ranks: Sequence[int]) -> bool:
        return not ranks or self._store.check([str(rank) for rank in ranks])

    def _silent(self, ranks: Sequence[int]) -> list[int]:
        """Returns the `ranks` without an answer. Bisects, so that few requests find few ranks among many."""
        if self._answered(ranks):
            return []
        if len(ranks) == 1:
            return [*ranks]
        half = len(ranks) // 2
        return self._silent(ranks[:half]) + self._silent(ranks[half:])

    def _found(self, verdict: str) -> str:
        """Writes the verdict for ranks that fail later, such as one that was only stopped."""
        self._store.set(_FOUND, verdict)
        return verdict

    def _read(self, key: str) -> str:
        return self._store.get(key).decode()

    def _without_store(self, problem: str, slow: bool = False) -> str:
        """Returns the verdict where the store does not answer, or is too `slow` for all requests."""
        if gone := self._gone([rank for rank in self.neighbours if rank != self.me]):
            return gone
        if slow:
            return "; the rank that failed is unknown: the store of the process group answers too slowly"
        if self._keeper is None or self._keeper in self.neighbours:  # its process runs, or is this one
            return f"; the rank that failed is unknown: the store of the process group does not answer: {problem}"
        return _verdict([self._keeper], f"it keeps the store of the process group, which does not answer: {problem}")

    def _gone(self, ranks: Iterable[int]) -> str:
        """Returns the verdict on those of `ranks`, all on this host, whose processes do not run; empty if all run."""
        states = {rank: state for rank in ranks if (state := self._state(rank)) is not None}
        return _verdict(states, *sorted(set(states.values()))) if states else ""

    def _state(self, rank: int) -> str | None:
        """Returns the fault of the process of a rank on this host; None: it runs."""
        process, start = self.neighbours[rank]
        found = _stat(process)
        if found is None or found[1] != start or found[0] in "ZXx":
            return _native.process_ended
        return "its process is stopped" if found[0] in "Tt" else None


def _verdict(ranks: Iterable[int], *reasons: str) -> str:
    named = sorted(ranks)
    return f"; who failed: global rank{'s' * (len(named) > 1)} {', '.join(map(str, named))} ({'; '.join(reasons)})"


def _first(answers: Mapping[int, dict[str, Any]]) -> str:
    """Returns the verdict where all ranks have answered: the first rank to fail, preferring ranks whose cause is their
    own. Without such a rank it also names the operations in which ranks waited, if they differ."""
    first = min(answers, key=lambda rank: (not answers[rank]["own"], answers[rank]["seen"]))
    verdict = f"; all ranks report, and the first error was that of global rank {first}: {answers[first]['text']}"
    places: dict[str, list[int]] = {}
    for rank, each in sorted(answers.items()):
        places.setdefault(_operation(each["text"]), []).append(rank)
    if _own(answers) or len(places) == 1:
        return verdict
    waited = (f"{operation} (global ranks {_some(ranks)})" for operation, ranks in places.items())
    return f"{verdict}; the ranks are out of step, and waited in {_some(waited)}"


def _operation(text: str) -> str:
    """Returns the operation in which a rank failed, from the text of its error."""
    return re.split(r", | on (?:rank|replica) \d|: ", text, maxsplit=1)[0]


def _some(values: Iterable[Any]) -> str:
    """Returns a list of the first values."""
    every = [*map(str, values)]
    return ", ".join([*every[:_SOME], *(["..."] if len(every) > _SOME else [])])


def _own(answers: Mapping[int, dict[str, Any]]) -> bool:
    return any(each["own"] for each in answers.values())


def _lost_links(answers: Mapping[int, dict[str, Any]]) -> set[tuple[int, int]]:
    """Returns the pairs of ranks, among those that have answered, whose connection broke before either end closed its
    own."""
    return {
        (min(rank, other), max(rank, other))
        for rank, each in answers.items()
        for other in each["broken"]
        if other in answers and each["seen"] <= answers[other]["ended"]
    }


def _links(answers: Mapping[int, dict[str, Any]]) -> str:
    """Returns the verdict where all ranks have answered, and none has a cause of its own: a connection broke."""
    links = _lost_links(answers)
    if not links:
        return _first(answers)
    common = set.intersection(*map(set, links))
    ends = common if len(links) > 1 and common else set().union(*links)
    return _verdict(ends, "its connections broke" if len(ends) == 1 else "the connection between them broke")


def this_process() -> Process | None:
    """Returns this process, for others on this host; None where the kernel does not show it."""
    found = _stat(os.getpid())
    return None if found is None else (os.getpid(), found[1])


def _stat(process: int) -> tuple[str, int] | None:
    """Returns the state of a process, and its start time; None for no such process. Source: proc(5)."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])


def _keeper(store: Any) -> int | None:
    """Returns the rank whose process holds the store; None: no rank does, or it is unknown, as for a store that the
    caller has passed to `init_process_group` and that is not at the address in the environment. Source: torch's
    rendezvous.py."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    made = str(dist.distributed_c10d._default_pg_init_method).startswith(("env:", "tcp:"))
    expected = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return 0 if made or (store.host, str(store.port)) == expected else None


def broken_links(groups: Iterable[Any]) -> set[int]:
    """Returns the global ranks to which no process group of `groups` has a connection: Gloo refuses at once to send
    over a broken one. A group in which an operation timed out has no connections at all, so that one group alone is no
    evidence. When one connection of a rank breaks, the others follow within a moment."""
    of_gloo = [group for group in groups if dist.get_backend(group) == "gloo"]
    deadline = time.monotonic() + _MOMENT
    while True:
        found: dict[tuple[int, ...], set[int]] = {}
        for group in of_gloo:
            members = tuple(dist.get_process_group_ranks(group))
            lost = {rank for rank in members if rank != dist.get_rank() and _refuses(rank, group)}
            found[members] = found[members] & lost if members in found else lost
        broken = set().union(*found.values())
        if broken or not of_gloo or time.monotonic() > deadline:
            return broken
        time.sleep(_MOMENT / 5)


def cut(groups: Iterable[Any]) -> None:
    """Closes the connections of process groups at once, so that the ranks at their other ends fail. A destroyed group
    of Gloo keeps its connections while a reference to one of its works exists, such as in a frame of a traceback. It
    closes all of them where a wait times out. Source: gloo's transport/tcp/unbound_buffer.cc."""
    for group in groups:
        if dist.get_backend(group) != "gloo":
            continue
        for rank in dist.get_process_group_ranks(group):
            if rank == dist.get_rank():
                continue
            with contextlib.suppress(RuntimeError):  # the connection is broken, or the wait times out
                work: Any = dist.irecv(torch.zeros(1, device="cpu"), rank, group=group, tag=_TAG + 1)
                work.wait(datetime.timedelta(milliseconds=1))


def _refuses(rank: int, group: Any) -> bool:
    try:
        dist.isend(torch.zeros(1, device="cpu"), rank, group=group, tag=_TAG)
    except RuntimeError:
        return True
    return False
