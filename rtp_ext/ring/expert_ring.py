"""The ranks of a ring among which experts are divided, and the ring over which each part of the experts rotates."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rtp_ext._native import shard_sizes
from rtp_ext.ring.links.companion import Companion
from rtp_ext.ring.mesh import ExpertMesh


@dataclass(frozen=True)
class Division:
    """How E experts are divided over N ranks.

    Attributes:
        experts, parts: E, and how many of them each rank has.
        owners, numbers: for each expert, and for E, which selects none, the rank that has it, N for none, and its
            number among the experts of that rank: int64 [E + 1] on the device.
        places: for each of them its place in the order of ranks and their experts, E for none.
    """

    experts: int
    parts: tuple[int, ...]
    owners: torch.Tensor
    numbers: torch.Tensor
    places: torch.Tensor


class ExpertRing(Companion):
    """The ranks that tokens travel among, one from each of the rings of experts.

    Experts are DTensors of the whole ring, Shard(0) along the experts, like all its parameters; a rank of the whole
    ring has a rank here and one in `inner`, and its shard is that of both.

    Attributes:
        rank, size: index of this rank among those that experts are divided over, and their number N.
        inner: the Ring over which the experts of this rank's part rotate.
        places: for each rank of the whole ring its rank here and in `inner`.
        in_order: whether each part has experts in a row, in the order of ranks.
        capacity: see RotationDims.expert_capacity.
        calls: the number of calls of layers until now, the same on every rank.
        bytes_sent: the bytes that this rank has sent to those of other experts.
    """

    _member, _others = "expert rank", "a rank of other experts"

    def __init__(self, ring: Any, mesh: ExpertMesh, inner: Any) -> None:
        group = mesh.ranks.get_group()
        super().__init__(ring, dist.get_rank(group), dist.get_process_group_ranks(group))
        self.inner, self.places, self.capacity = inner, mesh.places, mesh.capacity
        self.in_order = list(mesh.places) == sorted(mesh.places)
        self.calls = self.bytes_sent = 0
        self._divisions: dict[int, Division] = {}  # by the number of experts
        whole, part = ring.communicator, inner.communicator
        whole.partners, part.partners = (weakref.ref(part),), (weakref.ref(whole),)
        # A failure of one is a failure of both, and any rank of the whole ring may be its cause.
        part.failure_report = inner.failure_report = whole.failure_report

    def meet(self, identity: str) -> None:
        """The ranks of the whole ring compare: all exchange at the same time, each with those of its column."""
        ring = self._ring()
        if ring is not None:
            ring.communicator.meet(identity)

    def divide(self, experts: int, name: str) -> Division:
        """Returns how the E experts of a layer, by its name, are divided. Raises ValueError where they cannot be."""
        if experts not in self._divisions:
            if (problem := indivisible(experts, self.places)) is not None:
                raise ValueError(f"{name}: where dims have expert, {problem}")
            ranks: list[int] = []
            numbers: list[int] = []
            known = [0] * self.size
            for (rank, _), size in zip(self.places, shard_sizes(experts, len(self.places)), strict=True):
                ranks += [rank] * size
                numbers += range(known[rank], known[rank] + size)
                known[rank] += size
            places = [sum(known[:rank]) + number for rank, number in zip(ranks, numbers, strict=True)]
            with torch.inference_mode(False):
                found = torch.tensor([[*ranks, self.size], [*numbers, 0], [*places, experts]], device=self.device)
            self._divisions[experts] = Division(experts, tuple(known), *found)
        return self._divisions[experts]


def part_sizes(experts: int, places: Sequence[tuple[int, int]], rank: int) -> list[int]:
    """Returns how many of E experts each rank of the ring of part `rank` has at home. places: see ExpertMesh."""
    sizes = zip(places, shard_sizes(experts, len(places)), strict=True)
    return [size for (part, _), size in sorted(sizes) if part == rank]


def indivisible(experts: int, places: Sequence[tuple[int, int]]) -> str | None:
    """Returns why experts cannot be divided over ranks at these places; None if they can."""
    parts = [part_sizes(experts, places, rank) for rank in range(1 + max(rank for rank, _ in places))]
    if all(sum(sizes) and sizes == shard_sizes(sum(sizes), len(sizes)) for sizes in parts):
        return None
    return (
        f"expected a multiple of {len(places)} experts, as many on every rank ({len(parts)} over expert times "
        f"{len(parts[0])} over ring), got {experts}, of which the rings would have {' and '.join(map(str, parts))}"
    )
