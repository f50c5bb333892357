"""The process groups of a ring's ranks in torch.distributed, their small collectives, and their shutdown."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import pickle
import re
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rtp_ext import _native
from rtp_ext._native import RingTimeout, RotationError
from rtp_ext.ring.links.failure_report import FailureReport, broken_links, cut
from rtp_ext.ring.links.gpu_links import Wiring
from rtp_ext.ring.links.groups import all_gather_single, destroy, make_group, reduce_scatter_single
from rtp_ext.ring.links.hosts import Hosts

_FIRST_BYTES = 1024  # bytes of a value and its length in the first of two gathers; few values are longer
_CLOSED = re.compile(rf"rank (\d+) of the ring did not answer [^:]*: {_native.ring_closed}")  # as transports tell it
_PIECE = datetime.timedelta(milliseconds=200)

_RECORD = "; what this rank did last: "  # precedes the path of the record in errors of the executor, once in a text


class Communicator:
    """Process groups over some ranks, and the collectives for values that are too small to rotate.

    Args:
        rank, size: the index of this rank among the members, and the number of members.
        device: the device of tensors of `all_gather` and `all_reduce`.
        timeout: a member that does not answer for so long is an error.
        members: the global ranks of the members. None: this process emulates all of them, and there are no groups.

    Attributes:
        members: as given; empty without groups.
        world: the default process group that the groups belong to; None without groups.
        placed: the hosts of the members.
        wiring: the links between the GPUs of a ring's ranks; None elsewhere.
        executor: the ring's executor, which fails with the groups, and the reverse. None until the ring has one;
            replicas have none.
        failure_report: finds out which rank failed; None without groups.
        companions: communicators that close with this one.
        partners: communicators of other rings of the same model, which fail with this one.
    """

    placed: Hosts
    wiring: Wiring | None = None
    _member, _others = "rank", "a rank of the ring"  # in errors

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        timeout: datetime.timedelta,
        members: Sequence[int] | None = None,
    ) -> None:
        self.rank, self.size, self.device, self.timeout = rank, size, device, timeout
        self.world: dist.ProcessGroup | None = None
        self.executor: Any = None
        self.failure_report: FailureReport | None = None
        self.companions: tuple[Communicator, ...] = ()
        self.partners: tuple[weakref.ref[Communicator], ...] = ()
        self.members: list[int] = [] if members is None else [*members]
        self._groups: list[dist.ProcessGroup] = []
        self._control: dist.ProcessGroup | None = None  # for values of the host
        self._collective: dist.ProcessGroup | None = None  # for tensors on the device
        self._owner = os.getpid()
        if members is None:
            return
        self.world = dist.group.WORLD
        dropped = weakref.finalize(self, destroy, self._groups, self.world, self._owner, unclosed=True)
        dropped.atexit = False
        if size > 1:
            self._control = self.new_group("gloo")
            # A separate group on CPUs, too: gloo aborts the process of a rank that compares models while another rank
            # sends it a longer tensor, and replicas may have sent different numbers of buckets at that point.
            self._collective = self.new_group("nccl" if device.type == "cuda" else "gloo")

    # -- the groups --------------------------------------------------------------------------------------------------

    def new_group(self, backend: str) -> dist.ProcessGroup:
        """Creates another process group of the same members, which closes with the others. Collective."""
        group = make_group(self.members, backend, self.timeout)
        self._groups.append(group)
        return group

    def drop_groups(self) -> None:
        """Destroys the groups, and those of the companions. Idempotent."""
        for companion in self.companions:
            companion.drop_groups()
        self._control = self._collective = None
        if self.world is not None:
            destroy(self._groups, self.world, self._owner)

    @contextlib.contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Releases executor and groups if the construction of a ring fails."""
        try:
            yield
        except Exception:
            try:
                if self.executor is not None:
                    self.executor.close()
            finally:
                self.drop_groups()
            raise

    @property
    def hosts(self) -> int:
        """The number of hosts of the members."""
        return self.placed.count

    @property
    def per_host(self) -> int | None:
        """The number of members on each host; None where the numbers differ."""
        return self.placed.per_host

    @property
    def alone(self) -> bool:
        """Whether one process is the whole ring, emulated or not."""
        return self.world is None or self.size == 1

    @property
    def forked(self) -> bool:
        """Whether this process was forked from that of the rank, and is no rank."""
        return os.getpid() != self._owner

    # -- liveness ----------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the executor and the groups can still be used."""
        return (self.executor is None or self.executor.alive) and not self.orphaned

    @property
    def orphaned(self) -> bool:
        """Whether the default process group of the groups was destroyed."""
        return self.world is not None and self.world is not dist.group.WORLD

    def check_alive(self, operation: str) -> None:
        """Raises RotationError if the ring was closed, has failed, or outlived its process group."""
        if self.executor is None:
            return
        self.executor.check_alive(operation)
        if self.orphaned:
            self.executor.fail("its process group was destroyed")
            self.executor.check_alive(operation)

    def abandon(self, error: BaseException) -> None:
        """Drops the groups of a ring that has failed in a native call, so that neighbours in a collective fail too.
        Appends the rank that failed to the text of `error`, unless a handler of a signal raised it. Does nothing to a
        ring that has not failed."""
        if self.executor is not None and not self.executor.alive:
            self._leave(error if isinstance(error, RuntimeError) else _failed_here(error))

    def _leave(
        self,
        error: Exception,
        suspects: Sequence[int] | None = None,
        near: Sequence[int] | None = None,
        ended: float | None = None,
    ) -> None:
        """Drops the groups, and appends the rank that failed to the text of `error`; for the other arguments see
        FailureReport.call."""
        own = not isinstance(error, RingTimeout)
        partners = [partner for reference in self.partners if (partner := reference()) is not None and partner.alive]
        groups = [group for each in (self, *partners) for group in each._open_groups()]
        broken, seen = set() if own else broken_links(groups), time.time()
        for partner in partners:
            partner.executor.fail(str(error))
        cut(groups)
        for each in (self, *partners):
            each.drop_groups()
        # A forked process is no rank, and shares its parent's connection to the store.
        if self.failure_report is None or self.world is not dist.group.WORLD or self.forked:
            return
        note: str = "" if self.executor is None else self.executor.fail("")
        text = str(error).removesuffix(note)
        left = [self.members[int(rank)] for rank in _CLOSED.findall(text) if int(rank) < len(self.members)]
        verdict = self.failure_report.call(
            text, own, broken, seen, suspects, self.members if near is None else near, ended, left
        )
        if verdict:
            error.args = (text + verdict + note,)

    def end(
        self,
        error: Exception,
        suspects: Sequence[int] | None = None,
        near: Sequence[int] | None = None,
        ended: float | None = None,
    ) -> None:
        """Fails the executor with `error`, and drops the groups. Appends the rank that failed to the error's text."""
        if self.executor is not None:
            error.args = (str(error) + self.executor.fail(str(error)),)
        self._leave(error, suspects, near, ended)

    @contextlib.contextmanager
    def ended_by_errors(self, operation: str) -> Iterator[None]:
        """Ends the ring, and so the waits of other ranks, where the body, a part of a collective, raises an error of
        this rank alone."""
        try:
            yield
        except BaseException as error:
            if self.alive:
                self.end(_failed_here(error, operation))
            raise

    def _open_groups(self) -> list[dist.ProcessGroup]:
        """Returns the process groups that close with this communicator."""
        if self.world is None or self.world is not dist.group.WORLD or self.forked:
            return []
        return [*self._groups, *(group for companion in self.companions for group in companion._open_groups())]

    # -- collectives -------------------------------------------------------------------------------------------------

    def meet(self, identity: str) -> None:
        """See `collectively`."""
        if self.executor is not None:
            self.executor.meet(identity)

    def collectively(
        self, operation: str, post: Callable[..., Any], *tensors: Any, group: Any, identity: str = ""
    ) -> None:
        """Runs `post`, a torch.distributed collective. A failure that the process group reports fails the ring, and so
        does a rank that does not answer within the timeout; an error before the collective is posted does not.

        group: one of the ring, or of other ranks.
        identity: what the ranks of a ring over CPUs compare before: operation, module and size. A ring fails where they
        differ, since the process group would mix the values of two modules, or end the process where sizes differ.
        """
        start, work = time.monotonic(), None
        recorded = 0 if self.executor is None else self.executor.begin_collective(operation)
        try:
            if identity:
                self.meet(identity)
            work = post(*tensors, group=group, async_op=True)
            if group not in self._groups:
                work.wait(self.timeout)
            elif group is self._control or self.device.type == "cpu":
                _wait_for_gloo(work)
            else:
                work.wait()
        except RuntimeError as error:
            if work is None and not isinstance(error, (dist.DistError, RingTimeout)):
                self.abandon(error)
                raise
            raise self._lost(operation, time.monotonic() - start, error) from error
        except BaseException as error:  # of a handler of a signal
            if work is None or work.is_completed():
                self.abandon(error)
            else:
                self.end(_failed_here(error, operation))
            raise
        if self.executor is not None:
            self.executor.end_collective(recorded)

    def _lost(
        self, operation: str, waited: float, cause: Exception, suspects: Sequence[int] | None = None
    ) -> Exception:
        """Fails the ring after the failure of a collective, and returns the error to raise. `suspects`: the only
        members that this rank waited for."""
        # Gloo closes the connections of a group at its timeout: other ranks see them break at that time, not later.
        late = waited - self.timeout.total_seconds()
        ended = time.time() - late if late >= 0 else None
        hop = self.last_hop()
        here = f"{operation} on {self._member} {self.rank} of {self.size}, "
        here += f"after {hop}" if hop else "before the first hop"
        told = str(cause).partition(_RECORD)[0]
        error = RingTimeout(f"{here}: {self._others} did not answer (waited {waited:.1f} s): {told}")
        self.end(error, None if suspects is None else [self.members[rank] for rank in suspects], ended=ended)
        return error

    def last_hop(self) -> str:
        """Returns the last hop that this rank posted, in words; empty before the first."""
        return "" if self.executor is None else self.executor.last_hop()

    def exchange(self, value: Any, identity: str = "") -> list[Any]:
        """Returns every rank's `value` (any picklable object), in ring order. For `identity` see `collectively`.
        Collective."""
        self.check_alive("exchange")
        if self._control is None:
            return [value] * self.size
        mine = pickle.dumps(value)
        firsts = self._gather_bytes(len(mine).to_bytes(8, "little") + mine, _FIRST_BYTES, identity)
        sizes = [int.from_bytes(first[:8], "little") for first in firsts]
        longest = 8 + max(sizes) - _FIRST_BYTES
        rests = self._gather_bytes(mine[_FIRST_BYTES - 8 :], longest) if longest > 0 else [b""] * self.size
        every = zip(firsts, rests, sizes, strict=True)
        return [pickle.loads((first[8:] + rest)[:size]) for first, rest, size in every]

    def _gather_bytes(self, mine: bytes, width: int, identity: str = "") -> list[bytes]:
        """Returns the first `width` bytes of every rank's `mine`, padded with zeros. Collective."""
        padded = torch.frombuffer(bytearray(mine[:width].ljust(width, b"\0")), dtype=torch.uint8)
        gathered = torch.empty(self.size * width, dtype=torch.uint8, device="cpu")  # the default device may be another
        self.collectively("exchange", all_gather_single, gathered, padded, group=self._control, identity=identity)
        return [text.numpy().tobytes() for text in gathered.view(self.size, width)]

    def all_gather(self, shard: torch.Tensor, name: str = "values", buffer: torch.Tensor | None = None) -> torch.Tensor:
        """Gathers shards [n] of equal size to [R, n], for tensors that do not rotate. `name`: of the module. `buffer`:
        memory of at least R x n numbers for the result. Collective."""
        self.check_alive("all_gather")
        if self._collective is None:
            return shard.unsqueeze(0).repeat(self.size, 1)
        gathered = _rows(shard, self.size, shard.numel(), buffer)
        what, flat = f"all_gather of {name}", gathered.view(-1)
        self.collectively(
            what, all_gather_single, flat, shard, group=self._collective, identity=f"{what} {_size(shard)}"
        )
        return gathered

    def all_reduce(self, values: torch.Tensor, name: str = "values") -> torch.Tensor:
        """Sums `values` [...] over the ranks, in place. `name`: of the module. Collective."""
        self.check_alive("all_reduce")
        if self._collective is None:
            return values.mul_(self.size)
        what = f"all_reduce of {name}"
        self.collectively(what, dist.all_reduce, values, group=self._collective, identity=f"{what} {_size(values)}")
        return values

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        arriving: list[int],
        leaving: list[int],
        name: str,
        identity: str | None = None,
    ) -> torch.Tensor:
        """Sends the next `leaving[r]` values of `sent` [n] to each rank r, and receives `arriving[r]` from it. `name`:
        of the module. For `identity`, by default the name, see `collectively`. Returns `received` [m]. Collective."""
        self.check_alive("all_to_all")
        if self._collective is None:
            return received.copy_(sent)
        what = f"all_to_all of {name}"
        post = functools.partial(dist.all_to_all_single, output_split_sizes=arriving, input_split_sizes=leaving)
        identity = what if identity is None else identity
        self.collectively(what, post, received, sent, group=self._collective, identity=identity)
        return received

    def reduce_scatter(
        self, rows: torch.Tensor, name: str = "values", buffer: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns this rank's row [n] of the sum of `rows` [R, n] over the ranks. `name`: of the module. `buffer`:
        memory of at least R x n numbers, in which the result may be. Collective.

        Gloo has no reduce-scatter, and torch runs an all-reduce instead, which sends twice as much: there every rank
        gets the rows that are its own, and adds them in the order of the ranks.
        """
        self.check_alive("reduce_scatter")
        if self._collective is None:
            return rows[self.rank] * self.size
        what = f"reduce_scatter of {name}"
        options: dict[str, Any] = {"group": self._collective, "identity": f"{what} {_size(rows)}"}
        if dist.get_backend(self._collective) != "gloo":
            mine = _rows(rows, 1, rows.shape[1], buffer)[0]
            self.collectively(what, reduce_scatter_single, mine, rows.view(-1), **options)
            return mine
        arrived = _rows(rows, self.size, rows.shape[1], buffer)
        self.collectively(what, dist.all_to_all_single, arrived, rows, **options)
        mine = arrived[0]
        for row in arrived[1:]:
            mine.add_(row)
        return mine


def _rows(like: torch.Tensor, count: int, size: int, buffer: torch.Tensor | None) -> torch.Tensor:
    return like.new_empty(count, size) if buffer is None else buffer[: count * size].view(count, size)


def _wait_for_gloo(work: Any) -> None:
    """Waits in pieces, between which Python runs handlers of signals: Gloo's wait runs none."""
    while not work.is_completed():
        with contextlib.suppress(RuntimeError):  # the piece is over, or the work has failed
            work.wait(_PIECE)
    work.wait()


def _failed_here(error: BaseException, operation: str = "Ring") -> RotationError:
    return RotationError(f"{operation}: this rank failed: {type(error).__name__}: {error}")


def _size(values: torch.Tensor) -> str:
    return f"({values.numel()} x {str(values.dtype).removeprefix('torch.')})"
