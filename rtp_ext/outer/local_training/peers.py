"""Replicas that act together now and then: buffers from one to another, and who it was that did not answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from rtp_ext.outer.replicas import Replicas


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
    """Replicas that may be many steps apart when one of them dies: those that a rank did not wait for may not know."""

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
            raise self._lost(swap.what, 0.0, error, peers) from error
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
                error = ValueError(
                    f"replicas disagree: expected {swap.what} with ticket {mine.tolist()} (step, model, what travels), "
                    f"got {ticket.tolist()} from replica {source}: every rank has to call its optimizer as often, with "
                    "the same model and policy, and to freeze the same at the same step"
                )
                swap.works.clear()  # a kept traceback would keep connections, whose end is what tells the others
                self.end(error)
                raise error

    # -- all of them ---------------------------------------------------------------------------------------------------

    def end_sum(self, work: Any) -> None:
        self._wait("a mean over replicas", work.wait, self.others)

    # -- who did not answer --------------------------------------------------------------------------------------------

    def _wait(self, what: str, wait: Callable[[], Any], peers: Sequence[int]) -> None:
        start = time.monotonic()
        try:
            wait()
        except RuntimeError as error:
            raise self._lost(what, time.monotonic() - start, error, peers) from error

    def _lost(
        self, operation: str, waited: float, cause: Exception, suspects: Sequence[int] | None = None
    ) -> Exception:
        return super()._lost(operation, waited, cause, self.others if suspects is None else suspects)
