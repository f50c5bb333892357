"""The hosts of a ring's ranks, and the conditions of two levels: rotation inside hosts, and between them."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rtp_ext._native import RotationError
from rtp_ext.ring.links.places import Place, describe


@dataclass(frozen=True)
class Hosts:
    """The hosts of a ring, the same on every rank.

    Attributes:
        of: for each rank, the number of its host, in the order of the ring.
        unlevel: why two levels are impossible; None if the ring has several hosts, each with the same number, at least
            two, of neighbouring ranks.
        spread: the hosts of the ranks, in words; None if all ranks are on one host.
    """

    of: tuple[int, ...]
    unlevel: str | None
    spread: str | None = None

    @property
    def count(self) -> int:
        return max(self.of) + 1

    @property
    def per_host(self) -> int | None:
        """The number of ranks on each host; None where the numbers differ."""
        sizes = self._sizes()
        return sizes[0] if len(set(sizes)) == 1 else None

    def _sizes(self) -> list[int]:
        return [self.of.count(host) for host in range(self.count)]

    @classmethod
    def among(cls, places: list[Any], spread: str | None = None) -> Hosts:
        """Returns the hosts of ranks, by any values that are equal for ranks that can access each other's memory."""
        numbers: dict[Any, int] = {}
        hosts = cls(tuple([numbers.setdefault(place, len(numbers)) for place in places]), None)
        return cls(hosts.of, hosts._unlevel(), spread)

    @classmethod
    def even(cls, ranks: int, hosts: int, route: str) -> Hosts:
        """Returns `hosts` hosts with equal numbers of neighbouring ranks. Raises ValueError where `ranks` is no
        multiple of `hosts`, or where they cannot take the route."""
        if hosts < 1 or ranks % hosts:
            raise ValueError(f"Ring: expected hosts of equally many of {ranks} ranks, got {hosts} hosts")
        made = cls.among([rank * hosts // ranks for rank in range(ranks)])
        if route == "two-level" and made.unlevel is not None:
            raise ValueError(f"Ring: route two-level cannot be taken: {made.unlevel}")
        return made

    def _unlevel(self) -> str | None:
        sizes = self._sizes()
        if len(sizes) == 1:
            return "its ranks are on one host"
        if list(self.of) != sorted(self.of):
            return f"ranks of one host are not neighbours in the ring: they are on hosts {', '.join(map(str, self.of))}"
        if len(set(sizes)) > 1:
            return f"its hosts have {', '.join(map(str, sizes))} ranks, not equally many"
        return f"each of its {len(sizes)} hosts has one rank" if sizes[0] == 1 else None


class Ranks(Protocol):
    """Ranks that exchange values; a Communicator is one."""

    rank: int

    def exchange(self, value: Any) -> list[Any]: ...


def find_hosts(ring: Ranks) -> Hosts:
    """Exchanges the places of all ranks. Collective.

    Ranks share a host where they can access each other's memory: they have the same kernel and the same namespace of
    processes, so that each container is a host of its own. A rank that cannot find its place counts as a host.
    """
    try:
        mine = Place.here()
    except RotationError as error:
        mine = Place(socket.gethostname(), f"rank {ring.rank} cannot tell: {error}", "")
    places = ring.exchange(mine)
    return Hosts.among([place.memory for place in places], describe(places))


def levels_refusal(hosts: Hosts, device: torch.device, transport: str, gradient_halves: bool | None) -> str | None:
    """Returns why a ring cannot take the route two-level; None if it can. The same on every rank."""
    if hosts.unlevel is not None:
        return hosts.unlevel
    if device.type != "cpu" and "+" not in transport:
        return f"hops between hosts would wait for those inside on transport {transport}, which has one stream for both"
    if gradient_halves:
        return "gradient_halves was asked for, and gradients of two levels travel whole"
    return None
