"""Checks the schedules of a whole ring against the mathematics, independently of the code that makes or runs them.

`violations(case, ring)` returns what is wrong, as (check, text) pairs. The checks:

    computed once   every rank computes every wanted product with every owner's shard exactly once
    order           computes and hops in the order of DESIGN.md section 2
    wgrad inputs    in a bundle wgrad(j) follows dgrad(j) and reads the same buffer; elsewhere it reads no weight
    hop count       R - 1 hops of each kind that is needed, R weight hops in place, none of the others
    slots           at most two slots of each kind, one weight slot in place
    route           hops go to the neighbour, or weights come straight from their owner's home
    pairing         every send meets its receive at the same position on the peer, and both name the same shard
    contents        whatever is read is the shard that the step names
    overwritten     nobody overwrites a shard that a later step reads
    gradients       every gradient gets every rank's contribution once and ends at home
    homecoming      at the end every home holds its own weight; out of place nobody ever writes it
    race            accesses to one buffer that are in flight together, given what the executor waits for
    deadlock        ranks that wait for each other for ever
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

from schedule_races import LANES, Ring, Step, deadlocks, races

from rtp_ext.schedule import schedules


class Violation(NamedTuple):
    check: str
    text: str


@dataclass(frozen=True)
class Case:
    """A ring size and a variant."""

    ranks: int
    pass_: str
    route: str = "ring"
    in_place: bool = False
    dgrad: bool = True
    wgrad: bool = True
    receive_in_slots: bool = False
    bundle: bool = False

    def schedules(self) -> list:
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        return schedules(options.pop("ranks"), op="mlp" if options.pop("bundle") else "linear", **options)

    def ring(self) -> Ring:
        return [
            [Step(**{field.name: getattr(step, field.name) for field in fields(Step)}) for step in schedule.steps]
            for schedule in self.schedules()
        ]

    @property
    def products(self) -> list[str]:
        if self.pass_ == "forward":
            return ["forward"]
        return ["dgrad"] * (self.dgrad or self.bundle) + ["wgrad"] * self.wgrad

    @property
    def hops(self) -> dict[str, int]:
        weights = self.pass_ == "forward" or "dgrad" in self.products
        gradients = "wgrad" in self.products
        most = self.ranks - 1
        return {
            "weight": (most + (self.in_place and self.ranks > 1)) * weights,
            "gradient": most * gradients,
        }

    def expected_order(self, rank: int) -> list[str]:
        """DESIGN.md section 2, written down a second time."""
        if self.bundle and self.pass_ == "backward":
            return self._bundle_order(rank)
        ranks, direction = self.ranks, -1 if self.pass_ == "forward" else 1
        order = []
        hops = self.hops
        for s in range(ranks + 1):
            owner = (rank + direction * s) % ranks
            if "wgrad" in self.products and s > 0:
                order.append(f"wgrad {owner}")
                if s <= hops["gradient"]:
                    order.append(f"gradient hop {owner} {(owner + 1) % ranks}")
            if "forward" in self.products or "dgrad" in self.products:
                if s < hops["weight"]:
                    order.append(f"weight hop {(owner + direction) % ranks}")
                if s < ranks:
                    order.append(f"{'forward' if self.pass_ == 'forward' else 'dgrad'} {owner}")
        if hops["weight"] % 2 == 1 and self.in_place:
            order.append(f"copy {rank}")
        return order

    def _bundle_order(self, rank: int) -> list[str]:
        """dgrad(r) | dgrad(r+1) wgrad(r+1) | ... | dgrad(r-1) wgrad(r-1) | wgrad(r) from zero, then the sum."""
        order, hops = [], self.hops
        for s in range(self.ranks):
            owner, above = (rank + s) % self.ranks, (rank + s + 1) % self.ranks
            order += [f"weight hop {above}"] * (s < hops["weight"])
            order += [f"dgrad {owner}"]
            order += [f"wgrad {owner}", f"gradient hop {owner} {above}"] * (s > 0 and self.wgrad)
        order += [f"copy {rank}"] * (hops["weight"] % 2 == 1 and self.in_place)
        order += [f"wgrad {rank}"] * self.wgrad
        return order + [f"add {rank}"] * (hops["gradient"] > 0)


def case(ranks: int, pass_: str = "forward", **options) -> Case:
    """A case whose flags may be written 0 and 1."""
    return Case(ranks, pass_, **{key: bool(value) if value in (0, 1) else value for key, value in options.items()})


def violations(case: Case, ring: Ring) -> list[Violation]:
    """Everything that is wrong with the schedules of all ranks."""
    found = [Violation(check.__name__.replace("_", " "), text) for check in _LOCAL for text in check(case, ring)]
    found += simulate(case, ring)
    if not any(violation.check == "pairing" for violation in found):
        found += [Violation("race", text) for text in races(ring)]
    for name, lanes in LANES.items():
        found += [Violation("deadlock", f"{name}: {text}") for text in deadlocks(ring, lanes)]
    return found


# -- one rank at a time ----------------------------------------------------------------------------------------------


def computed_once(case: Case, ring: Ring) -> Iterator[str]:
    wanted = Counter((product, owner) for product in case.products for owner in range(case.ranks))
    for rank, steps in enumerate(ring):
        done = Counter((step.compute, step.owner) for step in steps if step.action == "compute")
        for key in sorted(wanted | done):
            if wanted[key] != done[key]:
                yield f"rank {rank}: expected {key[0]} {key[1]} {wanted[key]} times, got {done[key]}"


def _in_words(case: Case, step: Step) -> str:
    if step.action == "compute":
        return f"{step.compute} {step.owner}"
    if step.action in ("copy", "add"):
        return f"{step.action} {step.send_owner}"
    if step.channel == "gradient":
        return f"gradient hop {step.send_owner} {step.receive_owner}"
    return f"weight hop {step.receive_owner}"


def order(case: Case, ring: Ring) -> Iterator[str]:
    for rank, steps in enumerate(ring):
        expected, got = case.expected_order(rank), [_in_words(case, step) for step in steps]
        if expected != got:
            yield f"rank {rank}: expected {expected}, got {got}"


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
        done = Counter(step.channel for step in steps if step.action == "hop")
        for channel, count in case.hops.items():
            if done[channel] != count:
                yield f"rank {rank}: expected {count} {channel} hops, got {done[channel]}"


def slots(case: Case, ring: Ring) -> Iterator[str]:
    most = {"weight": 1 if case.in_place else 2, "gradient": 2}
    for rank, steps in enumerate(ring):
        used = {buffer for step in steps for buffer in step.reads + step.writes if "slot" in buffer}
        for channel, count in most.items():
            named = sorted(buffer for buffer in used if buffer.startswith(channel))
            if len(named) > count:
                yield f"rank {rank}: expected at most {count} {channel} slots, got {named}"


def route(case: Case, ring: Ring) -> Iterator[str]:
    for rank, steps in enumerate(ring):
        for position, step in enumerate(steps):
            if step.action != "hop":
                continue
            if case.route == "direct" and step.channel == "weight" and not case.in_place:
                if (step.send_owner, step.send, step.from_) != (rank, "weight home", step.receive_owner):
                    yield f"rank {rank}, step {position}: expected home to send and the owner to be received from"
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
            if step.action != "hop":
                continue
            for peer, back, sent, received in ((step.to, "from_", 0, 1), (step.from_, "to", 1, 0)):
                other = ring[peer][position] if position < len(ring[peer]) else None
                where = f"rank {rank}, step {position}: expected the {step.channel} hop to meet rank {peer}'s"
                if other is None or other.action != "hop" or other.channel != step.channel:
                    yield f"{where}, got {other and other.action}"
                elif getattr(other, back) != rank:
                    yield f"{where}, which goes {back.strip('_')} {getattr(other, back)}"
                else:
                    owners = [(step.send_owner, step.receive_owner), (other.send_owner, other.receive_owner)]
                    if owners[0][sent] != owners[1][received]:
                        yield f"{where} with one shard, got {owners[0][sent]} and {owners[1][received]}"


Check = Callable[[Case, Ring], Iterator[str]]
_LOCAL: list[Check] = [computed_once, order, wgrad_inputs, hop_count, slots, route, pairing]


# -- what each buffer holds ------------------------------------------------------------------------------------------


class Value(NamedTuple):
    channel: str
    owner: int
    ranks: tuple[int, ...] = ()  # whose contributions a gradient holds


class _Memory:
    """The buffers of one rank, and what they held before."""

    def __init__(self, case: Case, rank: int, found: list[Violation]):
        self.case, self.rank, self.found = case, rank, found
        self.now: dict[str, Value] = {"weight home": Value("weight", rank)}
        self.past: dict[str, list[Value]] = {}

    def read(self, position: int, buffer: str, channel: str, owner: int) -> Value | None:
        value = self.now.get(buffer)
        if value is None or value[:2] != (channel, owner):
            was_there = any(old[:2] == (channel, owner) for old in self.past.get(buffer, []))
            text = f"rank {self.rank}, step {position}: expected {channel} {owner} in {buffer}, got {value}"
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


def simulate(case: Case, ring: Ring) -> list[Violation]:
    """Runs all ranks with symbols for shards. Messages of a channel between two ranks keep their order."""
    found: list[Violation] = []
    memory = [_Memory(case, rank, found) for rank in range(len(ring))]
    positions = [0] * len(ring)
    waiting = [False] * len(ring)  # has sent the message of its hop and waits for the one it receives
    messages: dict[tuple[int, int, str | None], list[Value | None]] = {}

    def advance(rank: int) -> bool:
        position, own = positions[rank], memory[rank]
        if position == len(ring[rank]):
            return False
        step = ring[rank][position]
        if step.action == "hop":
            if not waiting[rank]:
                value = own.read(position, step.send, step.channel, step.send_owner)
                messages.setdefault((rank, step.to, step.channel), []).append(value)
                waiting[rank] = True
            queue = messages.get((step.from_, rank, step.channel))
            if not queue:
                return False
            own.write(position, step.receive, queue.pop(0))
            waiting[rank] = False
        elif step.action == "copy":
            own.write(position, step.receive, own.read(position, step.send, step.channel, step.send_owner))
        elif step.action == "add":
            arrived = own.read(position, step.send, step.channel, step.send_owner)
            there = own.read(position, step.receive, step.channel, step.receive_owner)
            ranks = (arrived.ranks if arrived else ()) + (there.ranks if there else ())
            own.write(position, step.receive, Value(step.channel, step.receive_owner, ranks))
        else:
            if step.weight is not None:
                own.read(position, step.weight, "weight", step.owner)
            if step.compute == "wgrad":
                partial = None
                if step.gradient_in is not None:
                    partial = own.read(position, step.gradient_in, "gradient", step.owner)
                ranks = (*(partial.ranks if partial else ()), rank)
                own.write(position, step.gradient_out, Value("gradient", step.owner, ranks))
            elif step.weight is None:
                found.append(Violation("contents", f"rank {rank}, step {position}: {step.compute} reads no weight"))
        positions[rank] += 1
        return True

    while any([advance(rank) for rank in range(len(ring))]):
        pass
    for rank, position in enumerate(positions):
        if position < len(ring[rank]):
            found.append(Violation("pairing", f"rank {rank}, step {position}: nothing arrives"))
    for rank, own in enumerate(memory):
        home = own.now.get("weight home")
        if home != Value("weight", rank):
            found.append(Violation("homecoming", f"rank {rank}: expected its own weight at home, got {home}"))
        if "wgrad" in case.products:
            gradient = own.now.get("gradient home")
            everyone = list(range(len(ring)))
            if gradient is None or gradient.owner != rank or sorted(gradient.ranks) != everyone:
                found.append(Violation("gradients", f"rank {rank}: expected one part of each rank, got {gradient}"))
    left = {key: len(values) for key, values in messages.items() if values}
    if left:
        found.append(Violation("pairing", f"sent but never received (from, to, channel): {left}"))
    return found
