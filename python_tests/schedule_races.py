"""Who waits for whom when the schedules of a ring run asynchronously: races and deadlocks.

The waits are those of `Execution` in csrc/executor.cpp, written down a second time, one name for each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field


@dataclass
class Step:
    """A step of a schedule that can be changed."""

    action: str
    channel: str | None
    to: int
    from_: int
    send_owner: int
    receive_owner: int
    send: str | None
    receive: str | None
    compute: str | None
    owner: int
    weight: str | None
    gradient_in: str | None
    gradient_out: str | None

    @property
    def reads(self) -> list[str]:
        if self.action == "compute":
            buffers = [self.weight, self.gradient_in]
        else:
            buffers = [self.send, self.receive] if self.action == "add" else [self.send]
        return [buffer for buffer in buffers if buffer is not None]

    @property
    def writes(self) -> list[str]:
        buffer = self.gradient_out if self.action == "compute" else self.receive
        return [] if buffer is None else [buffer]


Ring = list[list[Step]]  # the steps of every rank


def hops(ring: Ring, rank: int, channel: str) -> list[int]:
    """Positions of the hops of a channel."""
    return [at for at, step in enumerate(ring[rank]) if step.action == "hop" and step.channel == channel]


def computes(ring: Ring, rank: int, kind: str) -> list[int]:
    """Positions of the computes of a kind."""
    return [at for at, step in enumerate(ring[rank]) if step.compute == kind]


Node = tuple[int, int, str]  # rank, position, what has happened: posted, sent, received (hops), done (all others)

WAITS = (
    "hop for arrival in its source",
    "hop for the compute that wrote its source",
    "hop for arrival in its target",
    "hop for the compute that wrote its target",
    "hop for computes that read its target",
    "hop for hops that leave its target",
    "compute for arrival in what it uses",
    "compute for hops that leave what it writes",
)


@dataclass
class _Buffer:
    arrived: int | None = None
    written: int | None = None
    departing: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)


def _waits(steps: list[Step], without: Collection[str]) -> list[list[tuple[int, str]]]:
    """For each step the (position, happening) pairs that it waits for, without the named waits."""
    buffers: dict[str, _Buffer] = {}
    result = []
    for position, step in enumerate(steps):
        needed: list[tuple[str, int | None, str]] = []
        source = [buffers.setdefault(name, _Buffer()) for name in step.reads]
        target = [buffers.setdefault(name, _Buffer()) for name in step.writes]
        if step.action == "hop":
            needed += [(WAITS[0], buffer.arrived, "received") for buffer in source]
            needed += [(WAITS[1], buffer.written, "done") for buffer in source]
            needed += [(WAITS[2], buffer.arrived, "received") for buffer in target]
            needed += [(WAITS[3], buffer.written, "done") for buffer in target]
            needed += [(WAITS[4], reader, "done") for buffer in target for reader in buffer.read]
            needed += [(WAITS[5], hop, "sent") for buffer in target for hop in buffer.departing]
        else:
            needed += [(WAITS[6], buffer.arrived, "received") for buffer in source + target]
            needed += [(WAITS[7], hop, "sent") for buffer in target for hop in buffer.departing]
        result.append([(at, what) for wait, at, what in needed if at is not None and wait not in without])
        for name in step.reads:
            (buffers[name].departing if step.action == "hop" else buffers[name].read).append(position)
        for name in step.writes:
            buffers[name] = _Buffer(arrived=position) if step.action == "hop" else _Buffer(written=position)
    return result


def _happens_before(ring: Ring, without: Collection[str]) -> dict[Node, int]:
    """For each node the set (bits) of nodes that must have happened before it, itself included.

    As little as any transport promises: hops of one channel are posted in order but may overlap; a message arrives
    after it was sent for and after the receiver has posted; a sent message may still be under way.
    """
    before: dict[Node, list[Node]] = {}
    for rank, steps in enumerate(ring):
        last: dict[str, Node] = {}  # newest compute, newest post on each channel
        for position, (step, needed) in enumerate(zip(steps, _waits(steps, without), strict=True)):
            first: Node = (rank, position, "posted" if step.action == "hop" else "done")
            lane = str(step.channel) if step.action == "hop" else "compute"
            before[first] = [(rank, at, what) for at, what in needed]
            if lane in last:
                before[first].append(last[lane])
            last[lane] = first
            if step.action == "hop":
                before[rank, position, "sent"] = [first]
                before[rank, position, "received"] = [first, (step.from_, position, "posted")]
    after: dict[Node, list[Node]] = {node: [] for node in before}
    for node, earlier in before.items():
        for other in earlier:
            after[other].append(node)
    missing = {node: len(earlier) for node, earlier in before.items()}
    ready = deque(node for node, count in missing.items() if count == 0)
    bits: dict[Node, int] = {}
    while ready:
        node = ready.popleft()
        bits[node] = 1 << len(bits)
        for other in before[node]:
            bits[node] |= bits[other]
        for other in after[node]:
            missing[other] -= 1
            if missing[other] == 0:
                ready.append(other)
    return bits


def races(ring: Ring, without: Collection[str] = ()) -> Iterator[str]:
    """Pairs of accesses to one buffer, at least one of them a write, that nothing keeps in order.

    Args:
        without: names out of WAITS that the executor is supposed to have forgotten.
    """
    reached = _happens_before(ring, without)
    own = {node: 1 << (bits.bit_length() - 1) for node, bits in reached.items()}
    for rank, steps in enumerate(ring):
        readers: dict[str, list[Node]] = {}
        writer: dict[str, Node] = {}
        for position, step in enumerate(steps):
            reading: Node = (rank, position, "sent" if step.action == "hop" else "done")
            writing: Node = (rank, position, "received" if step.action == "hop" else "done")
            pairs = [(writer[name], reading, name) for name in step.reads if name in writer]
            pairs += [(writer[name], writing, name) for name in step.writes if name in writer]
            pairs += [(reader, writing, name) for name in step.writes for reader in readers.get(name, [])]
            for earlier, later, name in pairs:
                if later not in reached or earlier not in reached or not reached[later] & own[earlier]:
                    yield f"rank {rank}: steps {earlier[1]} and {later[1]} use {name} at the same time"
            for name in step.reads:
                readers.setdefault(name, []).append(reading)
            for name in step.writes:
                if name in step.reads and step.action == "hop":
                    yield f"rank {rank}: step {position} sends from and receives in {name}"
                writer[name], readers[name] = writing, []


# Who executes the steps, in order. `blocking`: the next step starts after this one has ended, not when it is posted.
Lane = Callable[[Step], str]
LANES: dict[str, tuple[Lane, bool]] = {
    "two communicators": (lambda step: str(step.channel) if step.action == "hop" else "compute", True),
    "one communicator": (lambda step: "hop" if step.action == "hop" else "compute", True),
    "posting host": (lambda step: "host", False),
}


def deadlocks(
    ring: Ring, lanes: tuple[Lane, bool], enqueue: Callable[[list[int], list[Step]], list[int]] | None = None
) -> Iterator[str]:
    """Runs all ranks until nothing moves, and yields where each lane is stuck.

    A hop is a rendezvous: it ends when its two peers have started hops that name this rank, with the same index among
    the hops of its channel.

    Args:
        lanes: one of LANES.
        enqueue: reorders the positions of the hops of a lane, given them and all steps of the rank.
    """
    lane_of, blocking = lanes
    queues: dict[tuple[int, str], list[int]] = {}
    for rank, steps in enumerate(ring):
        for position, step in enumerate(steps):
            queues.setdefault((rank, lane_of(step)), []).append(position)
    if enqueue is not None:
        queues = {key: enqueue(queue, ring[key[0]]) for key, queue in queues.items()}
    waits = [_waits(steps, ()) for steps in ring]
    channels: dict[tuple[int, str | None], list[int]] = {}
    index: dict[tuple[int, int], int] = {}  # of a hop on its channel
    for rank, steps in enumerate(ring):
        for position, step in enumerate(steps):
            if step.action == "hop":
                index[rank, position] = len(channels.setdefault((rank, step.channel), []))
                channels[rank, step.channel].append(position)
    heads = dict.fromkeys(queues, 0)
    started: set[tuple[int, int]] = set()
    ended: set[tuple[int, int]] = set()

    def meets(rank: int, position: int) -> bool:
        step = ring[rank][position]
        for peer, back in ((step.to, "from_"), (step.from_, "to")):
            theirs = channels.get((peer, step.channel), [])[index[rank, position] :][:1]
            if not theirs or (peer, theirs[0]) not in started or getattr(ring[peer][theirs[0]], back) != rank:
                return False
        return True

    moved = True
    while moved:
        moved = False
        for (rank, name), queue in queues.items():
            if (head := heads[rank, name]) == len(queue):
                continue
            key = (rank, queue[head])
            if key not in started and all((rank, at) in ended for at, _ in waits[rank][key[1]]):
                started.add(key)
                moved = True
            if key in ended or (key in started and not blocking):
                heads[rank, name] += 1
                moved = True
        for rank, position in started - ended:
            if ring[rank][position].action != "hop" or meets(rank, position):
                ended.add((rank, position))
                moved = True
    for (rank, name), queue in queues.items():
        if heads[rank, name] < len(queue):
            yield f"rank {rank}, lane {name}: stuck at step {queue[heads[rank, name]]}"
    for rank, position in sorted(started - ended):
        yield f"rank {rank}: the hop of step {position} never ends"
