"""Checks the schedules of a whole ring against the mathematics, independently of the code that makes or runs them.

`violations(case, ring)` returns what is wrong, as (check, text) pairs. The checks:

    computed once   every rank computes every wanted product with every owner's shard exactly once
    order           computes and hops in the order of DESIGN.md section 2
    lanes           with two streams forwards alternate, dgrads are on stream 0, wgrads and additions of gradients on
                    stream 1; otherwise all are on stream 0, groups too
    wgrad inputs    in a bundle wgrad(j) follows dgrad(j) and reads the same buffer; elsewhere it reads no weight
    hop count       one gather and one scatter by collectives, else
                    R - 1 hops of each kind that is needed, R weight hops in place, twice as many of half gradients,
                    none of the others; R - 1 shards (in place R) in all; of K hosts K - 1 between them, on two levels
    slots           at most two slots of each kind, one weight slot in place; one of groups if there is one group; where
                    wgrads do not add to what arrived, also two for gradients that arrive, one on the direct route; two
                    more of each kind on two levels, minus a weight slot if a host has two ranks, and minus one if
                    there are two hosts
    parts           all buffers of gradients are used in halves, or none
    route           hops go to the neighbour (on two levels to that of the host, or the same place of the next host), or
                    weights come directly from their owner's local shard (in one group, from its place there),
                    and gradients go directly to it
    pairing         every send meets its receive at the same position on the peer, and both name the same shard or half;
                    all ranks come to a collective at the same position
    contents        every read gets the shard that the step names
    overwritten     no step overwrites a shard that a later step reads
    gradients       every gradient gets every rank's contribution once and ends at its owner
    homecoming      at the end every local shard holds its own weight; out of place no step ever writes it
    race            accesses to one buffer that are in flight together, given what the executor waits for
    deadlock        ranks that wait for each other for ever
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from schedule_cases import Case
from schedule_races import COLLECTIVES, HALVES, LANES, Ring, Step, deadlocks, races, waits_of


class Violation(NamedTuple):
    check: str
    text: str


def violations(case: Case, ring: Ring) -> list[Violation]:
    """Everything that is wrong with the schedules of all ranks."""
    found = [Violation(check.__name__.replace("_", " "), text) for check in _LOCAL for text in check(case, ring)]
    found += simulate(case, ring)
    waits = [waits_of(steps, len(ring)) for steps in ring]
    if not any(violation.check == "pairing" for violation in found):
        found += [Violation("race", text) for text in races(ring, waits=waits)]
    for name, runners in LANES.items():
        found += [Violation("deadlock", f"{name}: {text}") for text in deadlocks(ring, runners, waits=waits)]
    return found


# -- one rank at a time ----------------------------------------------------------------------------------------------


def computed_once(case: Case, ring: Ring) -> Iterator[str]:
    wanted = Counter(
        (product, tuple(sorted(group)), half)
        for product in case.products
        for group in case.groups(0)
        for half in (case.parts if product == "wgrad" and case.fused else (0,))
    )
    for rank, steps in enumerate(ring):
        expected = Counter(
            {
                (product, tuple(sorted((owner + rank) % case.ranks for owner in group)), half): count
                for (product, group, half), count in wanted.items()
            }
        )
        done = Counter(
            (step.compute, tuple(sorted(step.members(case.ranks))), step.half)
            for step in steps
            if step.action == "compute"
        )
        for key in sorted(expected | done):
            if expected[key] != done[key]:
                text = f"{key[0]} {key[1]} {HALVES[key[2]]}".strip()
                yield f"rank {rank}: expected {text} {expected[key]} times, got {done[key]}"


def _in_words(case: Case, step: Step) -> str:
    if step.action == "compute":
        words = f"{step.compute} {' '.join(map(str, sorted(step.members(case.ranks))))}"
    elif step.action in ("copy", "add"):
        words = f"{step.action} {step.channel} {step.send_owner}"
    elif step.action in COLLECTIVES:
        words = f"{step.action} {step.channel}"
    elif step.channel == "gradient":
        words = f"gradient hop {step.send_owner} {step.receive_owner}"
    else:
        words = f"weight hop {step.receive_owner}"
    words = "outer " * step.outer + words
    return f"{words} {HALVES[step.half]}".strip()


def order(case: Case, ring: Ring) -> Iterator[str]:
    for rank, steps in enumerate(ring):
        expected, got = case.expected_order(rank), [_in_words(case, step) for step in steps]
        if expected != got:
            yield f"rank {rank}: expected {expected}, got {got}"


def lanes(case: Case, ring: Ring) -> Iterator[str]:
    two = case.two_lanes and not case.bundle and case.shards == 1
    for rank, steps in enumerate(ring):
        forwards = 0
        for position, step in enumerate(steps):
            expected = 0
            if two and step.action == "compute":
                expected = forwards % 2 if step.compute == "forward" else int(step.compute == "wgrad")
            elif two and step.action != "hop" and step.channel == "gradient":
                expected = 1
            forwards += step.compute == "forward"
            if step.lane != expected:
                yield f"rank {rank}, step {position}: expected lane {expected}, got {step.lane}"


def wgrad_inputs(case: Case, ring: Ring) -> Iterator[str]:
    for rank, steps in enumerate(ring):
        used: dict[int, str | None] = {}  # by dgrad, for every owner
        for position, step in enumerate(steps):
            if step.compute == "dgrad":
                used[step.owner] = step.weight
            elif step.compute == "wgrad":
                expected = used.get(step.owner, "its dgrad first") if case.bundle else None
                if step.weight != expected:
                    where = f"rank {rank}, step {position}: wgrad {step.owner}"
                    yield f"{where}: expected as its weight {expected}, got {step.weight}"


def hop_count(case: Case, ring: Ring) -> Iterator[str]:
    for rank, steps in enumerate(ring):
        hops = [step for step in steps if step.action == "hop"]
        wanted = ["gather"] * (case.at_once and case.multiplies_weights) + ["scatter"] * (
            case.at_once and "wgrad" in case.products
        )
        if wanted != (made := [step.action for step in steps if step.action in COLLECTIVES]):
            yield f"rank {rank}: expected the collectives {wanted}, got {made}"
        for channel, count in case.hops.items():
            done = [step for step in hops if step.channel == channel]
            if len(done) != count:
                yield f"rank {rank}: expected {count} {channel} hops, got {len(done)}"
            expected, shards = count / (len(case.parts) if channel == "gradient" else 1), 0.0
            outer = (case.hosts - 1) * bool(count) * (case.taken == "two-level")
            if outer != (found := sum(step.outer for step in done)):
                yield f"rank {rank}: expected {outer} {channel} hops between hosts, got {found}"
            shards += sum(0.5 if step.half else 1.0 for step in done)
            if shards != expected:
                yield f"rank {rank}: expected {expected} {channel} shards to be sent, got {shards}"


def slots(case: Case, ring: Ring) -> Iterator[str]:
    of_groups = min(2, sum(group != [0] for group in case.groups(0)))
    most = {"weight slot": 1 if case.in_place else of_groups, "gradient slot": 2}
    if case.taken == "two-level":
        most["weight slot"] = min(2, case.places - 1) + min(2, case.hosts - 1)
        most["gradient slot"] = 4
    elif case.at_once:
        most["gradient slot"] = 1
    elif not case.fused:
        most["gradient slot"] = of_groups + (1 if case.direct else min(2, case.ranks - 1))
    for rank, steps in enumerate(ring):
        used = _buffers(steps)
        for kind, count in most.items():
            named = sorted({" ".join(buffer.split(" ")[:3]) for buffer in used if buffer.startswith(kind)})
            if len(named) > count:
                yield f"rank {rank}: expected at most {count} of {kind}, got {named}"


def _buffers(steps: list[Step]) -> set[str]:
    named = {name for step in steps for name in (step.send, step.receive, step.weight, step.gradient_in)}
    return {name for name in named | {step.gradient_out for step in steps} if name is not None}


def parts(case: Case, ring: Ring) -> Iterator[str]:
    for rank, steps in enumerate(ring):
        for name in _buffers(steps):
            if name.startswith("gradient") and (" in halves" in name) != (case.parts != (0,)):
                yield f"rank {rank}: expected halves of every gradient or of none, got {name}"


def route(case: Case, ring: Ring) -> Iterator[str]:
    for rank, steps in enumerate(ring):
        for position, step in enumerate(steps):
            if step.action != "hop":
                continue
            if case.taken == "direct" and step.channel == "weight":
                source = "weight slot 0" if case.shards == case.ranks > 1 else "weight home"
                if (step.send_owner, str(step.send).partition(" of ")[0], step.from_) != (
                    rank,
                    source,
                    step.receive_owner,
                ):
                    yield f"rank {rank}, step {position}: expected {source} to send and the owner to be received from"
            elif case.taken == "two-level":
                away = 1 if case.pass_ == "forward" else -1
                by = (away, 0) if step.outer else (0, away)
                to, from_ = case.at(rank, *by), case.at(rank, *(-distance for distance in by))
                if (step.to, step.from_) != (to, from_):
                    where = f"rank {rank}, step {position}, outer {step.outer}"
                    yield f"{where}: expected a hop to {to} and from {from_}, got {step.to} and {step.from_}"
            elif case.direct and step.channel == "gradient":
                ways = (step.to, step.from_, step.receive_owner)
                expected = (step.send_owner, (2 * rank - step.send_owner) % case.ranks, rank)
                if ways != expected:
                    where = f"rank {rank}, step {position}"
                    yield f"{where}: expected a hop to, from and with a gradient of {expected}, got {ways}"
            else:
                up, down = (rank + 1) % case.ranks, (rank - 1) % case.ranks
                to, from_ = (up, down) if case.pass_ == "forward" else (down, up)
                if (step.to, step.from_) != (to, from_):
                    where = f"rank {rank}, step {position}"
                    yield f"{where}: expected a hop to {to} and from {from_}, got {step.to} and {step.from_}"


def pairing(case: Case, ring: Ring) -> Iterator[str]:
    for rank, steps in enumerate(ring):
        if len(steps) != len(ring[0]):
            yield f"rank {rank}: expected as many steps as rank 0, {len(ring[0])}, got {len(steps)}"
        for position, step in enumerate(steps):
            if step.action in COLLECTIVES:
                for peer, others in enumerate(ring):
                    if [each.action for each in others[position : position + 1]] != [step.action]:
                        yield f"rank {rank}, step {position}: expected rank {peer} to come to the {step.action}"
            if step.action != "hop":
                continue
            for peer, back, sent, received in ((step.to, "from_", 0, 1), (step.from_, "to", 1, 0)):
                other = ring[peer][position] if position < len(ring[peer]) else None
                where = f"rank {rank}, step {position}: expected the {step.channel} hop to meet rank {peer}'s"
                if other is None or other.action != "hop" or other.channel != step.channel:
                    yield f"{where}, got {other and other.action}"
                elif getattr(other, back) != rank:
                    yield f"{where}, which goes {back.strip('_')} {getattr(other, back)}"
                elif other.half != step.half:
                    yield f"{where} with one half, got {step.half} and {other.half}"
                else:
                    owners = [(step.send_owner, step.receive_owner), (other.send_owner, other.receive_owner)]
                    if owners[0][sent] != owners[1][received]:
                        yield f"{where} with one shard, got {owners[0][sent]} and {owners[1][received]}"


Check = Callable[[Case, Ring], Iterator[str]]
_LOCAL: list[Check] = [computed_once, order, lanes, wgrad_inputs, hop_count, slots, parts, route, pairing]


# -- what each buffer holds ------------------------------------------------------------------------------------------


class Value(NamedTuple):
    channel: str
    owner: int
    half: int = 0
    ranks: tuple[int, ...] = ()  # whose contributions a gradient holds


class _Memory:
    """The buffers of one rank, and their previous contents."""

    def __init__(self, case: Case, rank: int, found: list[Violation]):
        self.case, self.rank, self.found = case, rank, found
        self.now: dict[str, Value] = {"weight home": Value("weight", rank)}
        self.past: dict[str, list[Value]] = {}

    def read(self, position: int, buffer: str, expected: Value) -> Value | None:
        """Returns the contents of a buffer, which must belong to the shard, or half, of `expected`."""
        value = self.now.get(buffer)
        if value is None or value[:3] != expected[:3]:
            was_there = any(old[:3] == expected[:3] for old in self.past.get(buffer, []))
            text = f"rank {self.rank}, step {position}: expected {expected[:3]} in {buffer}, got {value}"
            self.found.append(Violation("overwritten" if was_there else "contents", text))
        return value

    def write(self, position: int, buffer: str, value: Value | None) -> None:
        if buffer == "weight home" and not self.case.in_place:
            self.found.append(Violation("homecoming", f"rank {self.rank}, step {position}: home is written"))
        old = self.now.pop(buffer, None)
        if old is not None:
            self.past.setdefault(buffer, []).append(old)
        if value is not None:
            self.now[buffer] = value


def half_of(part: str) -> int:
    """Returns the half that the part of a buffer is; 0: not in halves."""
    return HALVES.index(part.split(" ")[-1]) if part.endswith(HALVES[1:]) else 0


def held(step: Step, channel: str, buffer: str | None, owners: list[int]) -> list[tuple[str, Value]]:
    """Returns the parts of a buffer that a step uses, and what belongs there, without contributions."""
    parts = step.parts(buffer, owners)
    each = max(len(parts) // len(owners), 1)
    return [(part, Value(channel, owners[at // each], half_of(part))) for at, part in enumerate(parts)]


def simulate(case: Case, ring: Ring) -> list[Violation]:
    """Runs all ranks with symbols for shards. Messages of a channel between two ranks keep their order."""
    found: list[Violation] = []
    ranks = len(ring)
    memory = [_Memory(case, rank, found) for rank in range(ranks)]
    positions = [0] * ranks
    waiting = [False] * ranks  # has sent the message of its hop and waits for the one it receives
    messages: dict[tuple[int, int, str | None], list[list[Value | None]]] = {}
    gathered: dict[int, dict[int, list[Value | None]]] = {}  # by position and rank: what a collective takes

    def compute(own: _Memory, position: int, step: Step) -> None:
        owners = step.members(ranks)
        if step.weight is not None:
            for owner, name in zip(owners, step.parts(step.weight, owners), strict=True):
                own.read(position, name, Value("weight", owner))
        elif step.compute != "wgrad":
            found.append(Violation("contents", f"rank {own.rank}, step {position}: {step.compute} reads no weight"))
        if step.compute != "wgrad":
            return
        sums: dict[Value, tuple[int, ...]] = {}
        for name, value in held(step, "gradient", step.gradient_in, owners):
            partial = own.read(position, name, value)
            sums[value] = partial.ranks if partial else ()
        for name, value in held(step, "gradient", step.gradient_out, owners):
            own.write(position, name, value._replace(ranks=(*sums.get(value, ()), own.rank)))

    def advance(rank: int) -> bool:
        position, own = positions[rank], memory[rank]
        if position == len(ring[rank]):
            return False
        step = ring[rank][position]
        if step.action == "compute":
            compute(own, position, step)
            positions[rank] += 1
            return True
        channel = str(step.channel)
        if step.action in COLLECTIVES:
            taken = gathered.setdefault(position, {})
            if rank not in taken:
                owners = [step.send_owner] if step.action == "gather" else list(range(ranks))
                taken[rank] = [own.read(position, *each) for each in held(step, channel, step.send, owners)]
                return True
            if len(taken) < ranks:
                return False
            for owner in range(ranks):
                (place,) = step.parts(step.receive, [owner])
                if step.action == "gather" and owner != rank:
                    own.write(position, place, taken[owner][0])
                if step.action == "scatter" and owner == rank:
                    of = sum((value.ranks for each in taken.values() if (value := each[rank])), ())
                    own.write(position, place, Value(channel, rank, 0, of))
            positions[rank] += 1
            return True
        received = held(step, channel, step.receive, [step.receive_owner])
        if step.action == "hop":
            if not waiting[rank]:
                sent = [own.read(position, *each) for each in held(step, channel, step.send, [step.send_owner])]
                messages.setdefault((rank, step.to, channel), []).append(sent)
                waiting[rank] = True
            queue = messages.get((step.from_, rank, channel))
            if not queue:
                return False
            for (name, _), value in zip(received, queue.pop(0), strict=True):
                own.write(position, name, value)
            waiting[rank] = False
            positions[rank] += 1
            return True
        for name, there in received:
            sources = [each for each in step.sent() if half_of(each) == there.half]
            added = [own.read(position, each, there._replace(owner=step.send_owner)) for each in sources]
            if step.action == "add":
                added.append(own.read(position, name, there))
            of = sum((value.ranks for value in added if value), ())
            own.write(
                position,
                name,
                there._replace(ranks=of, owner=step.send_owner if step.action == "copy" else there.owner),
            )
        positions[rank] += 1
        return True

    while any([advance(rank) for rank in range(ranks)]):
        pass
    for rank, position in enumerate(positions):
        if position < len(ring[rank]):
            found.append(Violation("pairing", f"rank {rank}, step {position}: nothing arrives"))
    for rank, own in enumerate(memory):
        local = own.now.get("weight home")
        if local != Value("weight", rank):
            found.append(Violation("homecoming", f"rank {rank}: expected its own weight at home, got {local}"))
        for half in case.parts if "wgrad" in case.products else ():
            gradient = own.now.get(f"gradient home {HALVES[half]}".strip())
            expected = Value("gradient", rank, half, tuple(range(ranks)))
            if gradient is None or gradient._replace(ranks=tuple(sorted(gradient.ranks))) != expected:
                found.append(Violation("gradients", f"rank {rank}: expected one part of each rank, got {gradient}"))
    left = {key: len(values) for key, values in messages.items() if values}
    if left:
        found.append(Violation("pairing", f"sent but never received (from, to, channel): {left}"))
    return found
