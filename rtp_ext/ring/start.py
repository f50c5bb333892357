"""How a ring is made: its options, what its ranks agree on, its transport and routes, its executor."""

from __future__ import annotations

import collections
import contextlib
import datetime
import itertools
import logging
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from rtp_ext import _native
from rtp_ext.ring.graphs import PassGraphs, begin_graphs
from rtp_ext.ring.links.failure_report import Process, this_process
from rtp_ext.ring.links.groups import Groups
from rtp_ext.ring.links.hosts import find_hosts
from rtp_ext.ring.links.options import check_travel
from rtp_ext.ring.links.transports import NETWORKED, connect
from rtp_ext.ring.patches.dynamo import keep_compilers_out
from rtp_ext.ring.prepared import Ledger, Prepared
from rtp_ext.ring.routes.gradient_routes import GradientRoutes, choose_gradient_route
from rtp_ext.ring.routes.hops import choose_ce_modes, choose_hops
from rtp_ext.ring.routes.route_planner import RoutePlanner, kind_of, nvlinks_of

logger = logging.getLogger("rtp_ext")


def check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"Ring: expected {what} to be one of {', '.join(choices)}, got {value!r}")


class Start(Groups):
    """For the class Ring."""

    size: int
    token: str
    travel: str | None
    route: str
    hop_route: str
    transport_reason: str
    gradients: GradientRoutes
    gradient_route: Any
    gradient_travel: Any
    gate: RoutePlanner
    graphs: PassGraphs
    measure_link: Callable[..., Any]
    _begin_record: Callable[[], None]
    _native: Any
    _processes: tuple[Process | None, ...]

    @contextlib.contextmanager
    def _whole_or_closed(self) -> Iterator[None]:
        """Whoever is refused a ring has nothing to close: what was made of it by then ends here."""
        try:
            yield
        except Exception:
            try:
                if self._executor is not None:
                    self._executor.close()
            finally:
                self.drop_groups()
            raise

    def _take(
        self, slot_cap: int, prefetch: int, late_gradients: int | None, travel: str | None, route: str, graphs: str
    ) -> None:
        """Takes the options that need no other rank."""
        self._graphs_wanted = graphs
        if slot_cap < 0:
            raise ValueError(f"Ring: expected slot_cap >= 0, got {slot_cap}")
        if prefetch not in (0, 1):
            raise ValueError(f"Ring: expected prefetch 0 or 1, got {prefetch!r}")
        if late_gradients is not None and (isinstance(late_gradients, bool) or late_gradients < 0):
            raise ValueError(f"Ring: expected late_gradients >= 0 or None, got {late_gradients!r}")
        check_travel(travel, route)
        keep_compilers_out()
        self.travel = travel
        self.slot_cap, self.prefetch, self.late_gradients = slot_cap, prefetch, late_gradients or 0
        self._agreements = itertools.count(1)
        self._forward_phase = 0
        self._passing_by = -1  # id of the backward that told nothing of the order of others
        self._forwards = 0  # of models, one within another, that are running
        self._ledger = Ledger()
        self.common = Prepared()

    def _build(self, native: Any, route: str, gradient_halves: bool | None) -> None:
        """The executor and the gate, once transport and routes are known."""
        self.gate = RoutePlanner(
            self.size, self.device, self.hop_route, route, gradient_halves, gathers=self.travel is None
        )
        self._executor = _native.Executor(native, self.rank, self.size, self.device, self.placed.count)
        self._executor.prefetch(self.prefetch > 0)
        self._executor.allow_deferred(self.late_gradients)
        # Numbers in autograd's order: when each of the newest operations whose gradients may land late was called.
        self._called: collections.deque[int] = collections.deque(maxlen=self.late_gradients)
        self._executor.set_delay(datetime.timedelta(microseconds=self.transport_options.delay_us))
        self.graphs = begin_graphs(self, self._executor, self._graphs_wanted)
        self._begin_record()

    def _agree_on_options(self, mine: str) -> None:
        answers, tokens, self._processes = zip(
            *self.exchange((mine, secrets.token_hex(4), this_process())), strict=True
        )
        for rank, theirs in enumerate(answers):
            if theirs != answers[0]:
                raise ValueError(f"Ring: ranks disagree: expected {answers[0]} (rank 0), got {theirs} on rank {rank}")
        self.token = tokens[0]

    def _start(
        self,
        transport: str,
        route: str,
        checksum: bool,
        gradient_halves: bool | None,
        late_gradients: int | None,
        *gradients: Any,
    ) -> None:
        self.placed = find_hosts(self)
        if self.failure_report is not None:
            self.failure_report.know(self._members, self._processes, self.placed.of)
        connection = connect(self, transport)
        self._native, self.transport = connection.native, connection.name
        self.transport_reason = connection.reason
        self.hop_route, missed = choose_hops(
            self, self.transport, "auto" if route == "gather" else route, gradient_halves
        )
        self.transport_reason += missed
        self.route = "gather" if route == "gather" else self.hop_route
        self.gradients = choose_gradient_route(self, self.transport, self.hop_route, *gradients)
        if self.transport == "ce":
            choose_ce_modes(connection.native, self.hop_route, self.transport_options.ce_mode)
        if late_gradients is None and self.device.type == "cpu" and self.transport in NETWORKED:
            self.late_gradients = 1
        native = _native.CheckedTransport(connection.native, self.size) if checksum else connection.native
        self._build(native, route, gradient_halves)
        if self.device.type == "cuda":
            self.gate.alike = len(set(self.exchange(kind_of(self.device)))) == 1
            if self.gate.decides and not self.gate.take_nvlinks(self.exchange(nvlinks_of(self.device))):
                self.measure_link()
        logger.info(
            "ring of %d: transport %s (%s), route %s, gradients %s (%s)",
            *(self.size, self.transport, self.transport_reason, self.route),
            *(self.gradient_travel or self.gradient_route, self.gradients.reason),
        )
