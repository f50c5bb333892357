"""The routes of one ring: what its weights and gradients take, and the options of each operation that follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rtp_ext import _native
from rtp_ext.ring.links.communicator import Communicator
from rtp_ext.ring.links.options import RingOptions, check_in_place
from rtp_ext.ring.routes.gradient_routes import GradientRoutes, choose_gradient_route
from rtp_ext.ring.routes.hops import choose_hops


@dataclass(frozen=True)
class RoutePlan:
    """What the weights and gradients of a ring take, the same on every rank.

    Attributes:
        route: `gather` where the options say so, else `hop_route`.
        hop_route: `ring`, `direct` or `two-level`: what the hops of a rotation take.
        travel: what weights travel in; None: as they are computed with.
        gradients: what gradients take and travel in, and why.
        missed: why a requested route is not taken; empty if it is.
    """

    route: str
    hop_route: str
    travel: str | None
    gradients: GradientRoutes
    missed: str = ""

    @classmethod
    def of(cls, options: RingOptions, hop_route: str, gradients: GradientRoutes, missed: str = "") -> RoutePlan:
        route = "gather" if options.route == "gather" else hop_route
        return cls(route, hop_route, options.travel, gradients, missed)

    def expect_in_place(self, name: str) -> None:
        """Raises ValueError where local shards cannot travel themselves."""
        check_in_place(name, self.travel, self.hop_route)

    def rotation(
        self,
        name: str,
        *,
        route: str,
        halves: bool,
        slot_cap: int,
        in_place: bool,
        compute_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        late: bool = False,
    ) -> Any:
        """The options of one operation, as the engine takes them.

        Args:
            route: of the weights: `gather` or that of the hops.
            halves: whether gradients travel in two halves, unless they take the direct route.
            slot_cap: bytes of a slot; 0: no cap.
            late: whether gradients may arrive after the pass.
        """
        direct = self.gradients.direct(route, reduce_dtype)
        return _native.RotationOptions(
            name=name,
            route=route,
            in_place=in_place,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            slot_cap=slot_cap,
            halves=halves and not direct,
            late=late,
            travel=self.travel,
            gradient_route="direct" if direct else "chain",
            gradients_quantized=direct and self.gradients.travel == "int8",
        )


def plan_routes(ring: Communicator, transport: str, options: RingOptions) -> RoutePlan:
    """The routes of a new ring over `transport`. Collective."""
    hop_route, missed = choose_hops(
        ring, transport, "auto" if options.route == "gather" else options.route, options.gradient_halves
    )
    gradients = choose_gradient_route(ring, transport, hop_route, options.gradient_route, options.gradient_travel)
    return RoutePlan.of(options, hop_route, gradients, missed)
