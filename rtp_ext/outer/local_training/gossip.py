"""Gossip: after its step every replica mixes its weights with those of a few others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from rtp_ext.outer.local_training.after_steps import AfterSteps
from rtp_ext.outer.local_training.layered import layered
from rtp_ext.outer.local_training.local_sgd import at_least
from rtp_ext.outer.local_training.means import BUCKET, IN_FLIGHT, wide, written
from rtp_ext.outer.local_training.mixing import check_topology, mixing_matrix
from rtp_ext.outer.local_training.peers import Swap
from rtp_ext.outer.policy import OuterPolicy
from rtp_ext.outer.travel import bucketed
from rtp_ext.parameters.sharding import held
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import as_gradient


class Gossip(AfterSteps):
    """After every `period` steps replica i takes the sum over j of W[i, j] x_j: adapt, then combine.

    W is `mixing_matrix(topology, K, n)` of the n-th time. Weights travel in their own dtype, straight from the replicas
    that have them to those that mix them in, and are added up in float32 at least; `complete` is a mean over all. The
    mean over replicas is that of their steps, but they agree only where they have converged on the same data: call
    `average()` at the end.

    Args:
        topology: one-peer, exponential, ring, grid or complete; see `mixing_matrix`.
        period: steps from one time to the next.
        global_period: steps from one mean over all replicas to the next, each in the place of mixing (Gossip-PGA); a
            multiple of period.
        overlap: weights travel while the next step is computed, and what mixing would have changed is added after it:
            x <- W x + (what the step does to x). It is then the older algorithm, D-PSGD, which combines beside
            the step: differences between replicas die out more slowly, and one more copy of the shards is held for
            each replica that sends here, and one that travels.

    Sources: Sayed, Adaptive networks (adapt then combine); Lian et al., D-PSGD (arXiv 1705.09056); Chen et al.,
    Gossip-PGA (arXiv 2105.09080).
    """

    def __init__(
        self,
        topology: str = "one-peer",
        period: int = 1,
        *,
        global_period: int | None = None,
        overlap: bool = False,
    ) -> None:
        super().__init__()
        check_topology(topology, 1)
        self.topology, self.period = topology, at_least("Gossip", "period", period, 1)
        self.global_period, self.overlap = global_period, overlap
        if global_period is not None and at_least("Gossip", "global_period", global_period, 1) % period:
            raise ValueError(f"Gossip: expected global_period to be a multiple of period {period}, got {global_period}")
        self._on_way: tuple[torch.Tensor, Swap, list[tuple[int, ...]]] | None = None  # matrix, buffers, their buckets
        self._moves: dict[int, torch.Tensor] = {}  # by number: what mixing changes, of what has arrived and is not due
        self._agreed: dict[int, tuple[int, int]] = {}  # by replica: what it was last seen to have in common with this

    def __repr__(self) -> str:
        more = f", global_period={self.global_period}" if self.global_period else ""
        return f"Gossip({self.topology!r}, period={self.period}{more}{', overlap=True' if self.overlap else ''})"

    def _anew(self) -> OuterPolicy:
        return Gossip(self.topology, self.period, global_period=self.global_period, overlap=self.overlap)

    def connect(self, ring: Ring) -> None:
        check_topology(self.topology, ring.replicas)
        super().connect(ring)

    def _has_to_verify(self) -> bool:
        # Once they have begun, tickets tell of what changes: who has changed alone would be alone in a comparison.
        return super()._has_to_verify() and (not self._verified or self._compared < len(self._members))

    def _act(self) -> None:
        if self.size == 1:
            return
        self._arrive()
        self._apply()
        if self._steps % self.period:
            return
        if self.topology == "complete" or (self.global_period and self._steps % self.global_period == 0):
            self._meet("the mean of weights")
            self._average_weights()
            return
        matrix = mixing_matrix(self.topology, self.size, self._steps // self.period - 1)
        common = self._common()
        if self.overlap:
            buckets = self._buckets(most=None)
            self._on_way = matrix, self._send(matrix, buckets, common), buckets
            return
        swaps: deque[tuple[torch.Tensor, Swap, list[tuple[int, ...]]]] = deque()
        for bucket in self._buckets(BUCKET):
            swaps.append((matrix, self._send(matrix, [bucket], common), [bucket]))
            if len(swaps) == IN_FLIGHT:
                self._mix(*swaps.popleft())
        for swap in swaps:
            self._mix(*swap)

    # -- what travels --------------------------------------------------------------------------------------------------

    def _buckets(self, most: int | None) -> list[tuple[int, ...]]:
        """Numbers of parameters that travel together. None: all of a dtype."""
        weights = self._weights()
        total = sum(held(p).nbytes for _, p in weights)
        return bucketed(((i, p.dtype, held(p).numel()) for i, p in weights), total if most is None else most)

    def _send(self, matrix: torch.Tensor, buckets: list[tuple[int, ...]], common: tuple[int, int]) -> Swap:
        me, weights = self.peers.rank, dict(self._weights())
        sources = [j for j in self.peers.others if matrix[me, j] != 0]
        targets = [j for j in self.peers.others if matrix[j, me] != 0]
        flats = [torch.cat([held(weights[index]).reshape(-1) for index in bucket]) for bucket in buckets]
        self._sent_bytes += len(targets) * sum(flat.nbytes for flat in flats)
        peers = {*sources, *targets}
        unsure = any(self._agreed.get(peer) != common for peer in peers)
        swap = self.peers.begin_swap("gossip", (self._steps, *common), flats, sources, targets, unsure)
        self._agreed |= dict.fromkeys(peers, common)
        return swap

    def _combined(
        self, matrix: torch.Tensor, swap: Swap, buckets: list[tuple[int, ...]]
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Waits: number, what was sent and what it is combined to, flat, of each parameter."""
        received = self.peers.end_swap(swap)
        me = self.peers.rank
        full = iter(swap.sent[1:])  # after the ticket; an empty bucket is not sent
        for bucket, theirs in zip(buckets, received, strict=True):
            sizes = [self._members[index].numel for index in bucket]
            if not sum(sizes):
                continue
            mine = next(full)
            every, total = {**theirs, me: mine}, torch.zeros_like(mine, dtype=wide(mine.dtype))
            agreed = torch.ones_like(mine, dtype=torch.bool)
            for replica in sorted(every):  # the same order everywhere
                total.add_(every[replica].to(total.dtype), alpha=float(matrix[me, replica]))
                agreed &= every[replica] == mine
            total = torch.where(agreed, mine.to(total.dtype), total)  # which is not narrow again in every step
            yield from zip(bucket, mine.split(sizes), total.split(sizes), strict=True)

    def _mix(self, matrix: torch.Tensor, swap: Swap, buckets: list[tuple[int, ...]]) -> None:
        weights = dict(self._weights())
        for index, _, mixed in self._combined(matrix, swap, buckets):
            shard = held(weights[index])
            shard.copy_(mixed.view(shard.shape))
        written([weights[index] for bucket in buckets for index in bucket])

    # -- what travels beside a step ------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        if self._on_way is None:
            return
        on_way, self._on_way = self._on_way, None
        for index, before, after in self._combined(*on_way):
            self._moves[index] = after - before.to(after.dtype)

    def _apply(self) -> None:
        weights = {index: weight for index, weight in self._weights() if index in self._moves}  # that it still has
        for index, weight in weights.items():
            shard = held(weight)
            shard.add_(self._moves[index].view(shard.shape))
        written([*weights.values()])
        self._moves.clear()

    def _own_state(self) -> dict[str, Any]:
        if not self.overlap:
            return {}
        moves: dict[str, Any] = {}
        for name, (index, parameter) in self._named().items():
            shard = held(parameter)
            move = self._moves.get(index, torch.zeros(shard.shape, dtype=wide(shard.dtype), device=shard.device))
            moves[name] = layered(as_gradient(move.view(shard.shape), parameter._spec), self._mesh)  # type: ignore[arg-type]
        return {"arrived": bool(self._moves), "moves": moves}

    def _load_own(self, state: dict[str, Any]) -> None:
        self._moves.clear()
        if not self.overlap or not state["arrived"]:
            return
        for name, (index, parameter) in self._named().items():
            if index in self._trained:
                like = as_gradient(held(parameter).to(wide(parameter.dtype)), parameter._spec)
                self._moves[index] = self._own_layer(state["moves"][name], like, name).clone()  # type: ignore[arg-type]
