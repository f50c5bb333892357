"""The waits between ranks when the schedules of a ring run asynchronously: races and deadlocks.

The waits repeat those of csrc/schedule/uses.h independently, one name for each. So do the reads and writes of a step:
see csrc/schedule/schedule.h.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

HALVES = ("", "first", "second")
COLLECTIVES = ("gather", "scatter")
TRAVELS = ("hop", *COLLECTIVES)


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
    lane: int
    half: int
    label: str
    outer: bool = False
    count: int = 1
    owners: int = 1

    def members(self, ranks: int) -> list[int]:
        """Returns the owners of a compute."""
        return [(self.owner + each) % ranks for each in range(self.owners)]

    @property
    def link(self) -> str:
        """Returns the link of a hop: hops of one link are in order."""
        return f"{'outer ' * self.outer}{self.channel}"

    def parts(self, buffer: str | None, owners: list[int]) -> list[str]:
        """Returns the parts of a buffer that a step with the shards of `owners` uses: places in the slot of a group
        ("weight slot 0 of 3 4 0"), where the shards are in the order of owners, or a place ("gradient slot 2 at 1");
        and the halves of a gradient ("gradient slot 0 in halves"), or one of them."""
        if buffer is None:
            return []
        buffer, _, halved = buffer.partition(" in ")
        if " at " in buffer:
            places = [buffer.replace(" at ", " place ")]
        elif " of " in buffer:
            name, _, group = buffer.partition(" of ")
            order = sorted(map(int, group.split()))
            places = [f"{name} place {order.index(owner) if owner in order else owner}" for owner in owners]
        else:
            places = [buffer]
        if not halved:
            return places
        return [f"{place} {HALVES[half]}" for place in places for half in ((self.half,) if self.half else (1, 2))]

    def sent(self) -> list[str]:
        """Returns the parts of the buffers that a hop, a copy or an addition takes."""
        found = self.parts(self.send, [self.send_owner])
        for each in range(1, self.count):
            name, _, place = str(self.send).partition(" at ")
            found += self.parts(f"{name} at {int(place) + each}", [self.send_owner])
        return found

    def reads(self, ranks: int) -> list[str]:
        if self.action == "compute":
            mine = self.members(ranks)
            return [*self.parts(self.weight, mine), *self.parts(self.gradient_in, mine)]
        if self.action == "scatter":
            return self.parts(self.send, list(range(ranks)))
        added = self.receive if self.action == "add" else None
        return [*self.sent(), *self.parts(added, [self.receive_owner])]

    def writes(self, ranks: int) -> list[str]:
        if self.action == "compute":
            return self.parts(self.gradient_out, self.members(ranks))
        if self.action == "gather":
            return self.parts(self.receive, [(self.receive_owner + each) % ranks for each in range(1, ranks)])
        return self.parts(self.receive, [self.receive_owner])


Ring = list[list[Step]]  # the steps of every rank


def hops(ring: Ring, rank: int, channel: str) -> list[int]:
    """Positions of the hops of a channel."""
    return [at for at, step in enumerate(ring[rank]) if step.action == "hop" and step.channel == channel]


def computes(ring: Ring, rank: int, kind: str) -> list[int]:
    """Positions of the computes of a kind."""
    return [at for at, step in enumerate(ring[rank]) if step.compute == kind]


# rank, position, event: posted, sent, received (hops, collectives), done (all others)
Node = tuple[int, int, str]

WAITS = (
    "hop for arrival in its source",
    "hop for the compute that wrote its source",
    "hop for arrival in its target",
    "hop for the compute that wrote its target",
    "hop for computes that read its target",
    "hop for hops that leave its target",
    "compute for arrival in what it uses",
    "compute for hops that leave what it writes",
    "compute for the compute that wrote what it uses",
    "compute for computes that read what it writes",
    "end for what is in flight",
)


@dataclass
class _Buffer:
    arrived: int | None = None
    written: int | None = None
    departing: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)


Waits = list[list[tuple[int, str]]]


def waits_of(steps: list[Step], ranks: int, without: Collection[str] = ()) -> Waits:
    """For each step, and for the end, the (position, happening) pairs that it waits for, without the named waits."""
    buffers: dict[str, _Buffer] = {}
    result: Waits = []

    def keep(needed: list[tuple[str, int | None, str]]) -> None:
        result.append([(at, what) for wait, at, what in needed if at is not None and wait not in without])

    for position, step in enumerate(steps):
        needed: list[tuple[str, int | None, str]] = []
        reads, writes = step.reads(ranks), step.writes(ranks)
        source = [buffers.setdefault(name, _Buffer()) for name in reads]
        target = [buffers.setdefault(name, _Buffer()) for name in writes]
        if step.action in TRAVELS:
            needed += [(WAITS[0], buffer.arrived, "received") for buffer in source]
            needed += [(WAITS[1], buffer.written, "done") for buffer in source]
            needed += [(WAITS[2], buffer.arrived, "received") for buffer in target]
            needed += [(WAITS[3], buffer.written, "done") for buffer in target]
            needed += [(WAITS[4], reader, "done") for buffer in target for reader in buffer.read]
            needed += [(WAITS[5], hop, "sent") for buffer in target for hop in buffer.departing]
        else:
            needed += [(WAITS[6], buffer.arrived, "received") for buffer in source + target]
            needed += [(WAITS[7], hop, "sent") for buffer in target for hop in buffer.departing]
            needed += [(WAITS[8], buffer.written, "done") for buffer in source + target]
            needed += [(WAITS[9], reader, "done") for buffer in target for reader in buffer.read]
        keep(needed)
        for name in reads:
            (buffers[name].departing if step.action in TRAVELS else buffers[name].read).append(position)
        for name in writes:
            buffers[name] = _Buffer(arrived=position) if step.action in TRAVELS else _Buffer(written=position)
    needed = []
    for buffer in buffers.values():
        needed += [(WAITS[10], buffer.arrived, "received"), (WAITS[10], buffer.written, "done")]
        needed += [(WAITS[10], hop, "sent") for hop in buffer.departing]
        needed += [(WAITS[10], reader, "done") for reader in buffer.read]
    keep(needed)
    return result


def _happens_before(ring: Ring, waits: list[Waits]) -> dict[Node, int]:
    """For each node the set (bits) of nodes that must have happened before it, itself included.

    The order assumes only the guarantees of all transports: hops of one link are posted in order but may overlap; a
    message arrives after its send and its receive were posted; a sent message may still be under way. Computes of one
    stream are in order, those of different streams run concurrently. The end, the step after the last one, is on
    stream 0.
    """
    before: dict[Node, list[Node]] = {}
    for rank, steps in enumerate(ring):
        last: dict[str, Node] = {}  # newest compute of each stream, newest post on each link
        for position, (step, needed) in enumerate(zip([*steps, None], waits[rank], strict=True)):
            hop = step is not None and step.action in TRAVELS
            first: Node = (rank, position, "posted" if hop else "done")
            lane = f"compute {step.lane if step else 0}" if not hop else step.link
            before[first] = [(rank, at, what) for at, what in needed]
            if lane in last:
                before[first].append(last[lane])
            last[lane] = first
            if hop:
                before[rank, position, "sent"] = [first]
                senders = range(len(ring)) if step.action in COLLECTIVES else [step.from_]
                before[rank, position, "received"] = [first, *((each, position, "posted") for each in senders)]
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


def races(ring: Ring, without: Collection[str] = (), waits: list[Waits] | None = None) -> Iterator[str]:
    """Pairs of accesses to one buffer, at least one of them a write, that nothing keeps in order; and late accesses.

    Args:
        without: names out of WAITS that the executor is supposed to have forgotten.
        waits: those of every rank, if they are known already.
    """
    ranks = len(ring)
    reached = _happens_before(ring, waits or [waits_of(steps, ranks, without) for steps in ring])
    own = {node: 1 << (bits.bit_length() - 1) for node, bits in reached.items()}

    def ordered(earlier: Node, later: Node) -> bool:
        return later in reached and earlier in reached and bool(reached[later] & own[earlier])

    for rank, steps in enumerate(ring):
        end: Node = (rank, len(steps), "done")
        readers: dict[str, list[Node]] = {}
        writer: dict[str, Node] = {}
        for position, step in enumerate(steps):
            reads, writes = step.reads(ranks), step.writes(ranks)
            reading: Node = (rank, position, "sent" if step.action in TRAVELS else "done")
            writing: Node = (rank, position, "received" if step.action in TRAVELS else "done")
            pairs = [(writer[name], reading, name) for name in reads if name in writer]
            pairs += [(writer[name], writing, name) for name in writes if name in writer]
            pairs += [(reader, writing, name) for name in writes for reader in readers.get(name, [])]
            for earlier, later, name in pairs:
                if not ordered(earlier, later):
                    yield f"rank {rank}: steps {earlier[1]} and {later[1]} use {name} at the same time"
            if not all(ordered(node, end) for node in {reading, writing}):
                yield f"rank {rank}: step {position} may outlast the pass"
            for name in reads:
                readers.setdefault(name, []).append(reading)
            for name in writes:
                if name in reads and step.action == "hop":
                    yield f"rank {rank}: step {position} sends from and receives in {name}"
                writer[name], readers[name] = writing, []


# Executors of the steps, in order. `blocking`: the next step starts after this one has ended, not when it is posted.
Lane = Callable[[Step], str]
LANES: dict[str, tuple[Lane, bool]] = {
    "communicators of both levels": (
        lambda step: step.link if step.action in TRAVELS else f"compute {step.lane}",
        True,
    ),
    "two communicators": (lambda step: str(step.channel) if step.action in TRAVELS else f"compute {step.lane}", True),
    "one communicator": (lambda step: "hop" if step.action in TRAVELS else f"compute {step.lane}", True),
    "posting host": (lambda step: "host", False),
}


def deadlocks(
    ring: Ring,
    lanes: tuple[Lane, bool],
    enqueue: Callable[[list[int], list[Step]], list[int]] | None = None,
    waits: list[Waits] | None = None,
) -> Iterator[str]:
    """Runs all ranks until none can advance, and yields where each executor is stuck.

    A hop is a rendezvous: it ends when its two peers have started hops that name this rank, with the same index among
    the hops of its link; a collective, when all ranks have started it.

    Args:
        lanes: one of LANES.
        enqueue: reorders the positions of the hops of an executor, given them and all steps of the rank.
        waits: those of every rank, if they are known already.
    """
    lane_of, blocking = lanes
    queues: dict[tuple[int, str], list[int]] = {}
    for rank, steps in enumerate(ring):
        for position, step in enumerate(steps):
            queues.setdefault((rank, lane_of(step)), []).append(position)
    if enqueue is not None:
        queues = {key: enqueue(queue, ring[key[0]]) for key, queue in queues.items()}
    waits = waits or [waits_of(steps, len(ring)) for steps in ring]
    channels: dict[tuple[int, str], list[int]] = {}
    index: dict[tuple[int, int], int] = {}  # of a hop on its link
    for rank, steps in enumerate(ring):
        for position, step in enumerate(steps):
            if step.action in TRAVELS:
                index[rank, position] = len(channels.setdefault((rank, step.link), []))
                channels[rank, step.link].append(position)
    heads = dict.fromkeys(queues, 0)
    started: set[tuple[int, int]] = set()
    ended: set[tuple[int, int]] = set()

    def meets(rank: int, position: int) -> bool:
        step = ring[rank][position]
        if step.action in COLLECTIVES:
            every = [channels.get((peer, step.link), [])[index[rank, position] :][:1] for peer in range(len(ring))]
            return all(at and (peer, at[0]) in started for peer, at in enumerate(every))
        for peer, back in ((step.to, "from_"), (step.from_, "to")):
            theirs = channels.get((peer, step.link), [])[index[rank, position] :][:1]
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
            if ring[rank][position].action not in TRAVELS or meets(rank, position):
                ended.add((rank, position))
                moved = True
    for (rank, name), queue in queues.items():
        if heads[rank, name] < len(queue):
            yield f"rank {rank}, lane {name}: stuck at step {queue[heads[rank, name]]}"
    for rank, position in sorted(started - ended):
        yield f"rank {rank}: the hop of step {position} never ends"
