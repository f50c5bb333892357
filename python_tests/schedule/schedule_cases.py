"""The cases of schedules: a ring size and a variant, with the expected properties."""

from __future__ import annotations

from dataclasses import dataclass, fields

from schedule_races import HALVES, Ring, Step

from rtp_ext.observe.schedule import schedules


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
    halves: bool = False
    two_lanes: bool = False
    late: bool = False
    hosts: int = 1
    gradient_route: str = "chain"
    narrow: bool = False
    apart: bool = False
    group: int = 1
    collective: bool = False

    def schedules(self) -> list:
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        return schedules(options.pop("ranks"), op="mlp" if options.pop("bundle") else "linear", **options)

    def ring(self) -> Ring:
        """The steps of all ranks, whose buffers name the owners of a group."""
        named = ("send", "receive", "weight", "gradient_in", "gradient_out")
        return [
            [
                Step(
                    **{field.name: getattr(step, field.name) for field in fields(Step)}
                    | dict(zip(named, step.groups(self.ranks), strict=True))
                )
                for step in schedule.steps
            ]
            for schedule in self.schedules()
        ]

    @property
    def taken(self) -> str:
        """The route that is taken."""
        if self.in_place or (self.route == "two-level" and self.hosts in (1, self.ranks)):
            return "ring"
        return "direct" if self.route == "gather" else self.route

    @property
    def shards(self) -> int:
        """Shards in a product, at most."""
        if self.in_place or self.taken == "two-level":
            return 1
        return self.ranks if self.route == "gather" else min(self.group, self.ranks)

    def groups(self, rank: int) -> list[list[int]]:
        """The owners of each product in order of arrival: the own shard in the first group, which may be smaller."""
        up = -1 if self.pass_ == "forward" else 1
        owners = [(rank + up * s) % self.ranks for s in range(self.ranks)]
        count = -(-self.ranks // self.shards)
        first = self.ranks - (count - 1) * self.shards
        starts = [0, *range(first, self.ranks, self.shards)]
        return [owners[start:end] for start, end in zip(starts, [*starts[1:], self.ranks], strict=True)]

    @property
    def parts(self) -> tuple[int, ...]:
        """The halves that gradients travel in; 0: as a whole."""
        whole = self.direct or self.at_once or self.taken not in ("ring", "direct") or "wgrad" not in self.products
        return (1, 2) if self.halves and not whole else (0,)

    @property
    def at_once(self) -> bool:
        """Whether collectives bring and send all shards."""
        return self.collective and self.shards == self.ranks > 1

    @property
    def fused(self) -> bool:
        """Whether wgrads add to the sums of the chain."""
        return not self.direct and self.shards == 1 and not (self.bundle and self.parts != (0,))

    @property
    def direct(self) -> bool:
        """Whether contributions to gradients go straight to their owners."""
        applies = self.gradient_route == "direct" and "wgrad" in self.products and self.taken in ("ring", "direct")
        return applies and self.ranks > (1 if self.narrow else 2)

    @property
    def added_once(self) -> bool:
        """Whether contributions arrive in slots of their own."""
        return self.direct and self.apart and self.ranks > 2

    @property
    def places(self) -> int:
        """Ranks of each host."""
        return self.ranks // self.hosts

    def at(self, rank: int, hosts: int, places: int) -> int:
        """The rank so many hosts, and places on a host, up the ring."""
        host, place = divmod(rank, self.places)
        return (host + hosts) % self.hosts * self.places + (place + places) % self.places

    @property
    def products(self) -> list[str]:
        if self.pass_ == "forward":
            return ["forward"]
        return ["dgrad"] * (self.dgrad or self.bundle) + ["wgrad"] * self.wgrad

    @property
    def multiplies_weights(self) -> bool:
        return bool({"forward", "dgrad"} & set(self.products))

    @property
    def hops(self) -> dict[str, int]:
        weights = self.multiplies_weights
        gradients = "wgrad" in self.products
        most = 0 if self.at_once else self.ranks - 1
        return {
            "weight": (most + (self.in_place and self.ranks > 1)) * weights,
            "gradient": most * gradients * len(self.parts),
        }

    def expected_order(self, rank: int) -> list[str]:
        """DESIGN.md section 2, written down a second time: group after group. Contributions leave one by one; the own
        shard alone comes last."""
        if self.taken == "two-level":
            return self._two_level_order(rank)
        if self.at_once:
            return self._collective_order(rank)
        ranks, groups, hops = self.ranks, self.groups(rank), self.hops
        bundle, wgrad = self.bundle and self.pass_ == "backward", "wgrad" in self.products
        order: list[str] = []
        after: list[str] = []  # the next product
        unadded, summed = 0, False

        def arrive(group: list[int]) -> None:
            if len(group) > 1 and group[0] == rank:
                order.append(f"copy weight {rank}")
            order.extend(f"weight hop {owner}" for owner in group if owner != rank or (self.in_place and len(order)))

        def travel(owner: int) -> list[str]:
            steps = []
            for half in self.parts:
                if self.fused or owner != (rank + 1) % ranks:
                    steps.append(f"{'wgrad' if self.fused else 'add gradient'} {owner} {HALVES[half]}".strip())
                steps.append(f"gradient hop {owner} {(owner + 1) % ranks} {HALVES[half]}".strip())
            return steps

        def contribute(group: list[int]) -> None:
            nonlocal unadded, summed
            others = [owner for owner in group if owner != rank]
            if others and not self.fused:
                order.append(f"wgrad {' '.join(map(str, sorted(group)))}")
            if others and others != group:
                order.append(f"copy gradient {rank}")
                summed = True
            if self.direct:
                if unadded and others and not self.added_once:
                    order.append(f"{'add' if summed else 'copy'} gradient {rank}")
                    summed = True
                order.extend(f"gradient hop {owner} {rank}" for owner in others)
                unadded += len(others)
            else:
                order.extend(step for owner in others[:1] for step in travel(owner))
                after.extend(step for owner in others[1:] for step in travel(owner))

        if self.multiplies_weights:
            arrive(groups[0])
        for at, group in enumerate(groups):
            if wgrad and not bundle:
                contribute(group)
            if self.multiplies_weights:
                arrive([*groups, [rank] if self.in_place and ranks > 1 else []][at + 1])
                order.append(f"{self.products[0]} {' '.join(map(str, sorted(group)))}")
            order += after
            after.clear()
            if wgrad and bundle:
                contribute(group)
        copied = [f"copy weight {rank}"] * (hops["weight"] % 2 == 1 and self.in_place)
        order += [*after, *copied * bundle]
        if wgrad and len(groups[0]) == 1:
            order += [f"wgrad {rank} {HALVES[half]}".strip() for half in (self.parts if self.fused else (0,))]
        order += copied * (not bundle)
        lands = not self.fused or bundle or self.late
        return order + [f"add gradient {rank}"] * (lands and hops["gradient"] > 0)

    def _collective_order(self, rank: int) -> list[str]:
        every = " ".join(map(str, range(self.ranks)))
        products = {product: [f"{product} {every}"] for product in self.products}
        if "wgrad" in products:
            products["wgrad"].append("scatter gradient")
        if not self.bundle:  # wgrad first
            products = dict(reversed(products.items()))
        arrive = [f"copy weight {rank}", "gather weight"] if self.multiplies_weights else []
        order = [*arrive, *(step for steps in products.values() for step in steps)]
        return order + [f"copy gradient {rank}"] * ("wgrad" in products)

    def _two_level_order(self, rank: int) -> list[str]:
        """DESIGN.md section 8, written down a second time."""
        up = -1 if self.pass_ == "forward" else 1
        phases, steps, order = self.hosts, self.places, []

        def owner(phase: int, step: int) -> int:
            return self.at(rank, up * phase, up * step)

        def multiply(phase: int, step: int) -> None:
            if not self.multiplies_weights:
                return
            order.extend([f"outer weight hop {owner(phase + 1, 0)}"] * (step == 0 and phase + 1 < phases))
            order.extend([f"weight hop {owner(phase, step + 1)}"] * (step + 1 < steps))
            order.append(f"{self.products[0]} {owner(phase, step)}")

        def add_up(phase: int, step: int) -> None:
            """Step 0 (of a bundle) or `steps` (of others) is the last of a phase."""
            mine = owner(phase, step)
            order.append(f"wgrad {mine}")
            if step % steps:
                order.append(f"gradient hop {mine} {owner(phase, step + 1)}")
                return
            local = phase % phases == 0
            order.extend([f"add gradient {mine}"] * (self.bundle or phase > 1))
            order.extend([f"outer gradient hop {mine} {owner(phase + 1, 0)}"] * (not local))

        if self.bundle and self.pass_ == "backward":
            for phase in range(phases):
                for step in range(steps):
                    multiply(phase, step)
                    if step and self.wgrad:
                        add_up(phase, step)
                if self.wgrad:
                    add_up(phase, 0)
            return order + [f"add gradient {rank}"] * self.wgrad
        for at in range(self.ranks + 1):
            if "wgrad" in self.products and at > 0:
                add_up(1 + (at - 1) // steps, 1 + (at - 1) % steps)
            if at < self.ranks:
                multiply(*divmod(at, steps))
        return order


def case(ranks: int, pass_: str = "forward", **options) -> Case:
    """A case whose flags may be written 0 and 1."""
    flags = {key: bool(value) for key, value in options.items() if value in (0, 1) and key != "hosts"}
    return Case(ranks, pass_, **{**options, **flags})
