"""The process groups of a ring: its small collectives, and what becomes of the groups when it ends."""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rtp_ext._native import RingTimeout
from rtp_ext.ring.links.failure_report import FailureReport, broken_links, cut
from rtp_ext.ring.links.options import TransportOptions

if TYPE_CHECKING:
    from rtp_ext.ring.links.hosts import Hosts

# torch 2.14 renamed it
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Older versions of torch name a new group by how many there are, which has to be the same number on all ranks.
_NAMES_ARE_COUNTED = "group_count" in dist.distributed_c10d._hash_ranks_to_str.__code__.co_names
_AT_FIRST = 1024  # bytes of what a rank tells, with their number, that go in a first exchange; few have more


class Groups:
    """Process groups over the ranks of a ring, for the class Ring. A ring of one process, emulated or not, has none."""

    rank: int
    size: int
    device: torch.device
    timeout: datetime.timedelta
    transport: str
    transport_options: TransportOptions
    placed: Hosts  # where its ranks are
    check_alive: Callable[[str], None]
    _executor: Any = None  # until the ring is made; replicas have none

    _world: dist.ProcessGroup | None = None  # the one that the groups belong to
    _control: dist.ProcessGroup | None = None  # for what the host tells
    _collective: dist.ProcessGroup | None = None  # for tensors on the device
    _groups: list[dist.ProcessGroup]
    companions: tuple[Groups, ...] = ()  # end with this one
    failure_report: FailureReport | None = None
    _member, _others = "rank", "a rank of the ring"  # in errors

    def _open_groups(self, members: list[int]) -> None:
        self._world, self._members, self._groups = dist.group.WORLD, members, []
        self._owner = os.getpid()
        dropped = weakref.finalize(self, _destroy, self._groups, self._world, self._owner, unclosed=True)
        dropped.atexit = False
        if self.size > 1:
            self._control = self.new_group("gloo")
            # One of its own on CPUs, too: gloo ends the process of a rank that compares models while another sends it
            # a longer tensor, and replicas may have sent different numbers of buckets when they meet. Apart, they wait.
            self._collective = self.new_group("nccl" if self.device.type == "cuda" else "gloo")

    def new_group(self, backend: str) -> dist.ProcessGroup:
        with _counted_apart(self._members):
            group: Any = dist.new_group(
                self._members, timeout=self.timeout, backend=backend, use_local_synchronization=True
            )
        self._groups.append(group)
        return group

    def drop_groups(self) -> None:
        for companion in self.companions:
            companion.drop_groups()
        self._control = self._collective = None
        if self._world is not None:
            _destroy(self._groups, self._world, self._owner)

    def abandon(
        self,
        error: Exception,
        suspects: Sequence[int] | None = None,
        near: Sequence[int] | None = None,
        ended: float | None = None,
    ) -> None:
        """Drops the groups of a ring that has failed, so that neighbours in a collective learn of it. `error` then says
        who failed, too: see Roll, also for `ended`. Does nothing to a ring that goes on."""
        if self._executor is not None and self._executor.alive:
            return
        own = not isinstance(error, RingTimeout)
        groups = self._open()
        broken, seen = set() if own else broken_links(groups), time.time()
        cut(groups)
        self.drop_groups()
        # A forked process is no rank, and its connection to the store is another's.
        if self.failure_report is None or self._world is not dist.group.WORLD or os.getpid() != self._owner:
            return
        note: str = "" if self._executor is None else self._executor.fail("")
        text = str(error).removesuffix(note)
        verdict = self.failure_report.call(
            text, own, broken, seen, suspects, self._members if near is None else near, ended
        )
        if verdict:
            error.args = (text + verdict + note,)

    def _open(self) -> list[dist.ProcessGroup]:
        """The process groups that end with this one."""
        if self._world is None or self._world is not dist.group.WORLD or os.getpid() != self._owner:
            return []
        return [*self._groups, *(group for companion in self.companions for group in companion._open())]

    def end(
        self,
        error: Exception,
        suspects: Sequence[int] | None = None,
        near: Sequence[int] | None = None,
        ended: float | None = None,
    ) -> None:
        """Ends the ring for `error`, which then says who failed."""
        if self._executor is not None:
            error.args = (str(error) + self._executor.fail(str(error)),)
        self.abandon(error, suspects, near, ended)

    def _lost(
        self, operation: str, waited: float, cause: Exception, suspects: Sequence[int] | None = None
    ) -> Exception:
        """What to raise where a collective has failed: it ends the ring. `suspects`: whom alone it waited for."""
        # Gloo ends the connections of a group that runs out of time: those of other ranks break then, not later.
        late = waited - self.timeout.total_seconds()
        ended = time.time() - late if late >= 0 else None
        hop = self._last_hop()
        here = f"{operation} on {self._member} {self.rank} of {self.size}, "
        here += f"after {hop}" if hop else "before the first hop"
        error = RingTimeout(f"{here}: {self._others} did not answer (waited {waited:.1f} s): {cause}")
        self.end(error, None if suspects is None else [self._members[rank] for rank in suspects], ended=ended)
        return error

    def _last_hop(self) -> str:
        return "" if self._executor is None else self._executor.last_hop()

    def _collectively(self, operation: str, post: Callable[..., Any], *tensors: Any, group: Any) -> None:
        """Runs a torch.distributed collective. What the process group reports is the ring's failure; what is wrong
        before anything was posted is not."""
        start, posted = time.monotonic(), False
        recorded = 0 if self._executor is None else self._executor.begin_collective(operation)
        try:
            work = post(*tensors, group=group, async_op=True)
            posted = True
            work.wait()
        except RuntimeError as error:
            if not posted and not isinstance(error, dist.DistError):
                raise
            raise self._lost(operation, time.monotonic() - start, error) from error
        if self._executor is not None:
            self._executor.end_collective(recorded)

    @property
    def hosts(self) -> int:
        return self.placed.count

    @property
    def per_host(self) -> int | None:
        return self.placed.per_host

    @property
    def alone(self) -> bool:
        """Whether one process is the whole ring, emulated or not."""
        return self._world is None or self.size == 1

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's `value` (any picklable object), in ring order. Collective."""
        if self._executor is not None:
            self.check_alive("exchange")
        if self._control is None:
            return [value] * self.size
        mine = pickle.dumps(value)
        firsts = self._gather_bytes(len(mine).to_bytes(8, "little") + mine, _AT_FIRST)
        sizes = [int.from_bytes(first[:8], "little") for first in firsts]
        longest = 8 + max(sizes) - _AT_FIRST
        rests = self._gather_bytes(mine[_AT_FIRST - 8 :], longest) if longest > 0 else [b""] * self.size
        every = zip(firsts, rests, sizes, strict=True)
        return [pickle.loads((first[8:] + rest)[:size]) for first, rest, size in every]

    def _gather_bytes(self, mine: bytes, width: int) -> list[bytes]:
        """The first `width` bytes of every rank's, filled up with zeros. Collective."""
        padded = torch.frombuffer(bytearray(mine[:width].ljust(width, b"\0")), dtype=torch.uint8)
        answers = torch.empty(self.size * width, dtype=torch.uint8, device="cpu")  # whatever the default device is
        self._collectively("exchange", _all_gather_single, answers, padded, group=self._control)
        return [text.numpy().tobytes() for text in answers.view(self.size, width)]

    def all_gather(self, shard: torch.Tensor) -> torch.Tensor:
        """Shards [n] of equal size to [R, n]. For what is too small to rotate. Collective."""
        self.check_alive("all_gather")
        if self._collective is None:
            return shard.unsqueeze(0).repeat(self.size, 1)
        gathered = shard.new_empty(self.size, shard.numel())
        self._collectively("all_gather", _all_gather_single, gathered.view(-1), shard, group=self._collective)
        return gathered

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Sums `values` [...] over the ranks, in place. Collective."""
        self.check_alive("all_reduce")
        if self._collective is None:
            return values.mul_(self.size)
        self._collectively("all_reduce", dist.all_reduce, values, group=self._collective)
        return values


# By world: how many groups of rings were made there over the same ranks.
_made: weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def _counted_apart(members: list[int]) -> Iterator[None]:
    """Lets torch make a group that it does not count.

    It names a group by how many its process has made, and members wait for each other under that name. Of rings a
    process may have made more than another, as stages of a pipeline do, or ranks outside of all rings: the next group
    that both are in would never come about.
    """
    if not _NAMES_ARE_COUNTED:
        yield
        return
    state: Any = dist.distributed_c10d._world
    counts = _made.setdefault(dist.group.WORLD, Counter())
    counts[tuple(members)] += 1
    before, state.group_count = state.group_count, -counts[tuple(members)]  # torch's own are not negative
    try:
        yield
    finally:
        state.group_count = before


def _destroy(groups: list[dist.ProcessGroup], world: Any, owner: int, unclosed: bool = False) -> None:
    """Destroys the process groups of a ring, where they are this process's and torch still knows them.

    `unclosed`: the ring was dropped, at any time and on this rank alone perhaps, so that nothing may wait for others.
    """
    mine, groups[:] = groups[:], []
    if os.getpid() != owner or not dist.is_initialized() or world is not dist.group.WORLD:
        return
    for group in mine:
        if not unclosed or (_NAMES_ARE_COUNTED and dist.get_backend(group) == "gloo"):
            dist.destroy_process_group(group)
