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
        sliced: whether they are cut along their hidden features: see functional/sliced.py.
        owners, numbers: for each expert, and for E, which selects none, the rank that has it, N for none, and its
            number among the experts of that rank: int64 [E + 1] on the device.
        places: for each of them its place in the order of ranks and their experts, E for none.
    """

    experts: int
    parts: tuple[int, ...]
    sliced: bool
    owners: torch.Tensor
    numbers: torch.Tensor
    places: torch.Tensor


class ExpertRing(Companion):
    """The ranks that tokens travel among, one from each of the rings of experts.

    Experts are DTensors of the whole ring, Shard(0) along the experts, like all its parameters; a rank of the whole
    ring has a rank here and one in `inner`, and its shard is that of both. Where there are too few whole experts, they
    are cut along their hidden features.

    Attributes:
        rank, size: index of this rank among those that experts are divided over, and their number N.
        inner: the Ring over which the experts of this rank's part rotate.
        places: for each rank of the whole ring its rank here and in `inner`.
        in_order: whether each part has experts in a row, in the order of ranks.
        capacity: see RotationDims.expert_capacity.
        calls: the number of calls of layers until now, the same on every rank.
        bytes_sent: the bytes that this rank has sent to those of other experts.
        slice_bytes_sent: the bytes that it has sent of experts that are cut along their hidden features, and of their
            gradients, besides hops.
        slicings: how the slices of such experts are made, by the shapes of parameters.
    """

    _member, _others = "expert rank", "a rank of other experts"

    def __init__(self, ring: Any, mesh: ExpertMesh, inner: Any) -> None:
        group = mesh.ranks.get_group()
        super().__init__(ring, dist.get_rank(group), dist.get_process_group_ranks(group))
        self.inner, self.places, self.capacity = inner, mesh.places, mesh.capacity
        self.in_order = in_order(mesh.places)
        self.calls = self.bytes_sent = self.slice_bytes_sent = 0
        self._divisions: dict[int, Division] = {}  # by the number of experts
        self.slicings: dict[Any, Any] = {}  # of functional/sliced.py, by the shapes of parameters
        whole, part = ring.communicator, inner.communicator
        whole.partners, part.partners = (weakref.ref(part),), (weakref.ref(whole),)
        # A failure of one is a failure of both, and any rank of the whole ring may be its cause.
        part.failure_report = inner.failure_report = whole.failure_report

    def meet(self, identity: str) -> None:
        """The ranks of the whole ring compare: all exchange at the same time, each with those of its column."""
        ring = self._ring()
        if ring is not None:
            ring.communicator.meet(identity)

    def divide(self, experts: int) -> Division:
        """Returns how the E experts of a layer are divided."""
        if experts not in self._divisions:
            sliced = not whole_experts(experts, self.places)
            owners = range(self.size) if sliced else [rank for rank, _ in self.places]
            ranks: list[int] = []
            numbers: list[int] = []
            known = [0] * self.size
            for rank, size in zip(owners, shard_sizes(experts, len(owners)), strict=True):
                ranks += [rank] * size
                numbers += range(known[rank], known[rank] + size)
                known[rank] += size
            places = [sum(known[:rank]) + number for rank, number in zip(ranks, numbers, strict=True)]
            with torch.inference_mode(False):
                found = torch.tensor([[*ranks, self.size], [*numbers, 0], [*places, experts]], device=self.device)
            self._divisions[experts] = Division(experts, tuple(known), sliced, *found)
        return self._divisions[experts]


def in_order(places: Sequence[tuple[int, int]]) -> bool:
    """Returns whether each part has experts in a row, in the order of ranks. places: see ExpertMesh."""
    return list(places) == sorted(places)


def part_sizes(experts: int, places: Sequence[tuple[int, int]], rank: int) -> list[int]:
    """Returns how many of E whole experts each rank of the ring of part `rank` has at home. places: see ExpertMesh."""
    sizes = zip(places, shard_sizes(experts, len(places)), strict=True)
    return [size for (part, _), size in sorted(sizes) if part == rank]


def whole_experts(experts: int, places: Sequence[tuple[int, int]]) -> bool:
    """Returns whether ranks at these places have whole experts: there are as many as ranks, and the chunks of E over
    all ranks are also those of each part. Else experts are cut along their hidden features."""
    parts = [part_sizes(experts, places, rank) for rank in range(1 + max(rank for rank, _ in places))]
    enough = experts >= len(places)
    return enough and all(sum(sizes) and sizes == shard_sizes(sum(sizes), len(sizes)) for sizes in parts)
