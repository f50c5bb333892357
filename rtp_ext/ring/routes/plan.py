"""The routes of one ring's weights and gradients, and the options of operations that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rtp_ext import _native
from rtp_ext.options import RingOptions, check_in_place
from rtp_ext.ring.links.communicator import Communicator
from rtp_ext.ring.routes.gradient_routes import GradientRoutes, choose_gradient_route
from rtp_ext.ring.routes.weight_routes import choose_hops, warn_of_flat_ring


@dataclass(frozen=True)
class RoutePlan:
    """The routes of a ring's weights and gradients, the same on every rank.

    Attributes:
        route: the requested `gather`, else `hop_route`.
        hop_route: `ring`, `direct` or `two-level`: the route of the hops of a rotation.
        travel: the dtype in which weights travel; None: the compute dtype.
        gradients: the route and dtype of gradients, and the reason.
        group: shards in a product, at most, of operations that take groups.
        missed: why the ring does not take the requested route; empty if it does.
        buffers, collective: as in RingOptions.
    """

    route: str
    hop_route: str
    travel: str | None
    gradients: GradientRoutes
    group: int = 1
    missed: str = ""
    buffers: str | int = "auto"
    collective: bool = False

    @classmethod
    def of(cls, options: RingOptions, hop_route: str, gradients: GradientRoutes, missed: str = "") -> RoutePlan:
        route = "gather" if options.route == "gather" else hop_route
        return cls(
            route, hop_route, options.travel, gradients, options.group or 1, missed, options.buffers, options.collective
        )

    def expect_in_place(self, name: str) -> None:
        """Raises ValueError where local shards cannot travel themselves."""
        check_in_place(name, self.travel, self.hop_route, self.group)

    def rotation(
        self,
        name: str,
        *,
        route: str,
        halves: bool,
        group: int | None = None,
        slot_cap: int,
        in_place: bool,
        compute_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        late: bool = False,
        ranks: int = 1,
        gradient_bytes: float = 0,
    ) -> Any:
        """Returns the engine's options for one operation.

        Args:
            route: the route of the weights: `gather` or that of the hops.
            halves: whether gradients travel in two halves, unless they take the direct route.
            group: shards in a product; None: as of the ring.
            slot_cap: bytes of a slot; 0: no cap.
            late: whether gradients may arrive after the pass.
            ranks, gradient_bytes: of the ring, and of the gradients of all shards in the reduce dtype: whether there is
                room for the contributions of all ranks.
        """
        group = self.group if group is None else group
        room = self.has_room(ranks, gradient_bytes, route, group)
        direct = self.gradients.direct(route, reduce_dtype, room)
        return _native.RotationOptions(
            name=name,
            route=route,
            group=group,
            in_place=in_place,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            slot_cap=slot_cap,
            halves=halves and not direct,
            late=late,
            travel=self.travel,
            gradient_route="direct" if direct else "chain",
            gradients_quantized=direct and self.gradients.travel == "int8",
            gradients_apart=direct and room,
            collective=self.collective,
        )

    def has_room(self, ranks: int, gradient_bytes: float, route: str, group: int) -> bool:
        """Returns whether `buffers` permit slots for the contributions of all other ranks, and for two groups of this
        one's."""
        if isinstance(self.buffers, str):
            return self.buffers == "auto"
        group = ranks if route == "gather" else min(group, ranks)
        groups = -(-ranks // group) - (ranks % group == 1 or group == 1)  # the own shard alone needs no slot
        return (ranks - 1 + min(groups, 2) * group) * gradient_bytes / ranks <= self.buffers


def plan_routes(ring: Communicator, transport: str, options: RingOptions) -> RoutePlan:
    """Selects the routes of a new ring over `transport`. Collective."""
    hop_route, missed = choose_hops(
        ring, transport, "auto" if options.route == "gather" else options.route, options.gradient_halves
    )
    if ring.device.type == "cuda" and hop_route != "two-level" and ring.rank == 0:
        warn_of_flat_ring(ring, hop_route, missed)
    if options.collective:
        expect_whole_groups(ring.size, ring.device.type, options.route, options.group, hop_route)
        gradients = GradientRoutes("chain", None, "those of all shards at once are added up by collectives")
        return RoutePlan.of(options, hop_route, gradients, missed)
    wide = options.buffers != "lean" and not options.gradient_halves
    gradients = choose_gradient_route(ring, transport, hop_route, options.gradient_route, options.gradient_travel, wide)
    return RoutePlan.of(options, hop_route, gradients, missed)


def expect_whole_groups(ranks: int, device: str, route: str, group: int | None, hop_route: str) -> None:
    """Raises ValueError where no operation of a ring can have all its shards in one group. The same on every rank.
    device: its type. route, group: as asked."""
    planned = device == "cuda" and group is None and route == "auto"
    grouped = hop_route != "two-level" and (group == ranks or planned)
    if ranks > 1 and route != "gather" and not grouped:
        raise ValueError(
            f"Ring: expected group={ranks}, all shards, or route='gather' with collective=True, got group {group} on "
            f"route {hop_route}"
        )
