"""Replicas that act together now and then: buffers from one to another, and who it was that did not answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from rtp_ext._native import RingTimeout
from rtp_ext.outer.replicas import Replicas
from rtp_ext.ring import Ring
from rtp_ext.ring.links.groups import Groups

_POLL = 0.05  # seconds


@dataclass
class Swap:
    """Buffers on their way between replicas."""

    what: str
    sent: list[torch.Tensor] = field(default_factory=list)  # alive until they have arrived
    received: list[dict[int, torch.Tensor]] = field(default_factory=list)  # for each buffer, by replica
    tickets: dict[int, torch.Tensor] = field(default_factory=dict)  # by replica, of all that send or receive
    untold: int = 0  # works, the first ones, that bring tickets which have not been compared
    works: list[tuple[Sequence[int], Any]] = field(default_factory=list)  # with the replicas that they wait for


class Peers(Replicas):
    """Replicas that may be many steps apart when one of them dies: the others ask for signs of life, so that the error
    names it.

    Attributes:
        grace: seconds within which a replica that lives says so once another has failed to answer.
    """

    grace = 5.0

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring)
        assert self._control is not None, "several replicas"
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"rtp_ext/{self._control.group_name}", store)

    @property
    def others(self) -> list[int]:
        return [replica for replica in range(self.size) if replica != self.rank]

    # -- from one to another -------------------------------------------------------------------------------------------

    def begin_swap(
        self,
        what: str,
        ticket: Sequence[int],
        buffers: Iterable[torch.Tensor],
        sources: list[int],
        targets: list[int],
        unsure: bool,
    ) -> Swap:
        """Starts to send buffers to `targets`, and to receive those of `sources`; `end_swap` compares the tickets.

        `unsure`: some of them may be about to swap something else. Tickets are then compared before a buffer leaves:
        gloo ends the process that receives a longer one than it waits for.
        """
        self.check_alive(what)
        swap = Swap(what, [torch.tensor(ticket, dtype=torch.int64, device="cpu")])
        peers = sorted({*sources, *targets})
        swap.tickets = {peer: torch.zeros_like(swap.sent[0]) for peer in peers}
        self._post(swap, self._control, swap.sent[0], swap.tickets, peers)
        swap.untold = len(swap.works)
        if unsure:
            self._compare(swap)
        for buffer in buffers:
            if not buffer.numel():
                swap.received.append({source: buffer for source in sources})
                continue
            received = {source: torch.empty_like(buffer) for source in sources}
            swap.sent.append(buffer)
            swap.received.append(received)
            self._post(swap, self._collective, buffer, received, targets)
        return swap

    def _post(
        self, swap: Swap, group: Any, buffer: torch.Tensor, received: dict[int, torch.Tensor], targets: list[int]
    ) -> None:
        asked = [dist.P2POp(dist.irecv, into, group=group, group_peer=source) for source, into in received.items()]
        given = [dist.P2POp(dist.isend, buffer, group=group, group_peer=target) for target in targets]
        peers = [*received, *targets]
        if not peers:
            return
        try:
            works = dist.batch_isend_irecv([*asked, *given])
        except RuntimeError as error:  # a connection that is known to be broken
            self._lost(swap.what, peers, error)
        one_for_each = len(works) == len(peers)
        for number, work in enumerate(works):
            swap.works.append(([peers[number]] if one_for_each else peers, work))

    def end_swap(self, swap: Swap) -> list[dict[int, torch.Tensor]]:
        """Waits: for each buffer what the sources sent, by replica. Raises ValueError where a ticket is another."""
        self._compare(swap)
        self._wait_for(swap.what, swap.works)
        return swap.received

    def _wait_for(self, what: str, works: Sequence[tuple[Sequence[int], Any]]) -> None:
        for peers, work in works:
            self._wait(what, work.wait, peers)

    def _compare(self, swap: Swap) -> None:
        """Waits for the tickets, once. Raises ValueError where one is another."""
        self._wait_for(swap.what, swap.works[: swap.untold])
        del swap.works[: swap.untold]
        swap.untold = 0
        mine = swap.sent[0]
        for source, ticket in swap.tickets.items():
            if not torch.equal(ticket, mine):
                message = (
                    f"replicas disagree: expected {swap.what} with ticket {mine.tolist()} (step, model, what travels), "
                    f"got {ticket.tolist()} from replica {source}: every rank has to call its optimizer as often, with "
                    "the same model and policy, and to freeze the same at the same step"
                )
                swap.works.clear()  # a kept traceback would keep connections, whose end is what tells the others
                self.fail(message)
                raise ValueError(message)

    # -- all of them ---------------------------------------------------------------------------------------------------

    def exchange(self, value: Any) -> list[Any]:
        self.check_alive("replicas")
        try:
            return Groups.exchange(self, value)
        except RingTimeout as error:
            self._lost("replicas", self.others, error)

    def end_sum(self, work: Any) -> None:
        self._wait("a mean over replicas", work.wait, self.others)

    # -- who did not answer --------------------------------------------------------------------------------------------

    def _wait(self, what: str, wait: Callable[[], Any], peers: Sequence[int]) -> None:
        try:
            wait()
        except RuntimeError as error:
            self._lost(what, peers, error)

    def _lost(self, what: str, suspects: Sequence[int], error: Exception) -> NoReturn:
        """Ends the ring and raises RingTimeout that names the replicas that are gone."""
        start = time.monotonic()
        self.drop_groups()  # others that wait for this rank learn of it, and answer the roll call
        gone = self._roll_call(suspects)
        named = f"replica{'s' * (len(gone) > 1)} {', '.join(map(str, gone))} of {self.size}"
        waited = time.monotonic() - start
        message = f"{what}: {named} did not answer (no sign of life within {waited:.1f} s): {error}"
        self.fail(message)
        raise RingTimeout(message) from error

    def _roll_call(self, suspects: Sequence[int]) -> list[int]:
        """The replicas that are gone: those of `suspects` that do not say that they live; where all do, those that
        they have found to be gone."""
        try:
            self._store.set(f"{self.rank}/lives", "")
            gone = [peer for peer in suspects if not self._hear(f"{peer}/lives", self.grace)]
            if not gone:
                for peer in suspects:
                    if self._hear(f"{peer}/gone", 3 * self.grace):
                        told = self._store.get(f"{peer}/gone").decode()
                        gone += [int(number) for number in told.split(",") if number]
            gone = sorted(set(gone)) or list(suspects)
            self._store.set(f"{self.rank}/gone", ",".join(map(str, gone)))
        except RuntimeError:  # whoever kept the store is gone too
            return list(suspects)
        return gone

    def _hear(self, key: str, seconds: float) -> bool:
        deadline = time.monotonic() + min(seconds, self.timeout.total_seconds())
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL)
        return True
