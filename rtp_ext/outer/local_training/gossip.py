"""Gossip: replicas average with few others."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any, get_args

import torch

from rtp_ext.outer.buckets import bucketed
from rtp_ext.outer.local_training.after_steps import AfterSteps
from rtp_ext.outer.local_training.diloco import at_least
from rtp_ext.outer.local_training.peers import BUCKET, IN_FLIGHT, Swap, mark_written, sum_dtype, with_replica_dim
from rtp_ext.outer.policy import OuterPolicy
from rtp_ext.parameters.sharding import held
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import as_gradient
from rtp_ext.words import Topology

# -- mixing matrices: doubly stochastic matrices over the replicas -----------------------------------------------------

TOPOLOGIES: tuple[str, ...] = get_args(Topology)


def mixing_matrix(topology: Topology, n: int, step: int = 0) -> torch.Tensor:
    """Returns W [n, n] in float64: replica i computes the sum over j of W[i, j] x_j. Rows and columns sum to 1.

    Topologies:
        ring: a third each of the replica itself and its two neighbours (two replicas: half each).
        grid: the neighbours above, below, left and right in the most square arrangement of n, without wrapping around;
            Metropolis weights.
        exponential: equal weights for the replica itself and those at distance 1, 2, 4, ...
        one-peer: half each of the replica itself and one at distance 1, 2, 4, ... at step 0, 1, 2, ... log2(n) steps
            give the exact mean, which requires n to be a power of two.
        complete: the mean of all.

    `step`: selects the peer of one-peer; other topologies ignore it.

    >>> rtp_ext.outer.mixing_matrix("one-peer", 2)
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]], dtype=torch.float64)

    Raises ValueError for an unknown topology, n < 1, and one-peer with an n that is no power of two.
    Source: Ying et al., Exponential graph is provably efficient for decentralized deep training (arXiv 2110.13363).
    """
    check_topology(topology, n)
    if topology == "complete":
        return torch.full((n, n), 1.0 / n, dtype=torch.float64)
    if topology == "grid":
        return _grid(n)
    if topology == "ring":
        return _circulant(n, sorted({0, 1, n - 1} - {n}))
    hops = [1 << power for power in range((n - 1).bit_length())]
    if topology == "exponential":
        return _circulant(n, [0, *hops])
    return _circulant(n, [0, hops[step % len(hops)]] if hops else [0])


def check_topology(topology: str, n: int) -> None:
    """Raises ValueError for the arguments that `mixing_matrix` refuses."""
    if topology not in TOPOLOGIES:
        raise ValueError(f"expected a topology of {', '.join(TOPOLOGIES)}, got {topology!r}")
    if n < 1:
        raise ValueError(f"expected at least one replica, got {n}")
    if topology == "one-peer" and n & (n - 1):
        below = 1 << (n.bit_length() - 1)
        others = ", ".join(repr(name) for name in TOPOLOGIES if name != topology)
        raise ValueError(
            f"topology 'one-peer' reaches the mean of a power of two replicas only: expected {below} or {2 * below}, "
            f"got {n}; for {n} take one of {others}"
        )


def _circulant(n: int, hops: list[int]) -> torch.Tensor:
    """Returns the matrix with equal weights for the replicas at distances `hops`; distance 0 is the replica itself."""
    matrix = torch.zeros(n, n, dtype=torch.float64)
    for replica in range(n):
        for hop in hops:
            matrix[replica, (replica + hop) % n] += 1.0 / len(hops)
    return matrix


def _grid(n: int) -> torch.Tensor:
    rows = next(count for count in range(math.isqrt(n), 0, -1) if n % count == 0)
    columns = n // rows
    neighbours = [
        [
            (row + down) * columns + column + right
            for down, right in ((-1, 0), (1, 0), (0, -1), (0, 1))
            if 0 <= row + down < rows and 0 <= column + right < columns
        ]
        for row in range(rows)
        for column in range(columns)
    ]
    matrix = torch.zeros(n, n, dtype=torch.float64)
    for replica, others in enumerate(neighbours):
        for other in others:
            matrix[replica, other] = 1.0 / (1 + max(len(others), len(neighbours[other])))
        matrix[replica, replica] = 1.0 - matrix[replica].sum()
    return matrix


# -- the policy --------------------------------------------------------------------------------------------------------


class Gossip(AfterSteps):
    """After every `period` steps, replica i computes the sum over j of W[i, j] x_j (adapt, then combine).

    The n-th mixing uses W = `mixing_matrix(topology, K, n)`. Weights travel in their own dtype, point to point, and are
    summed in float32 at least; `complete` averages over all replicas. Mixing preserves the mean over replicas, but the
    replicas agree only if they have converged on the same data: call `average()` at the end.

    Args:
        topology: one-peer, exponential, ring, grid or complete; see `mixing_matrix`.
        period: steps between mixings.
        global_period: steps between means over all replicas, which replace a mixing (Gossip-PGA); a multiple of period.
        overlap: weights travel while the next step is computed, and the change by mixing is added after that step:
            x <- W x + (change by the step). This is the older algorithm D-PSGD, which combines during the step:
            differences between replicas shrink more slowly. Memory: one more copy of the shards for each replica that
            sends here, and one for the copy in flight.

    Sources: Sayed, Adaptive networks (adapt then combine); Lian et al., D-PSGD (arXiv 1705.09056); Chen et al.,
    Gossip-PGA (arXiv 2105.09080).
    """

    def __init__(
        self,
        topology: Topology = "one-peer",
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
        # matrix, buffers, their buckets
        self._in_flight: tuple[torch.Tensor, Swap, list[tuple[int, ...]]] | None = None
        # by number: change by a mixing that has arrived and is not applied
        self._pending_changes: dict[int, torch.Tensor] = {}
        self._agreed: dict[int, tuple[int, int]] = {}  # by replica: the last hashes that were equal to this replica's

    def __repr__(self) -> str:
        more = f", global_period={self.global_period}" if self.global_period else ""
        return f"Gossip({self.topology!r}, period={self.period}{more}{', overlap=True' if self.overlap else ''})"

    def _with_same_settings(self) -> OuterPolicy:
        return Gossip(self.topology, self.period, global_period=self.global_period, overlap=self.overlap)

    def connect(self, ring: Ring) -> None:
        check_topology(self.topology, ring.replicas)
        super().connect(ring)

    def _has_to_verify(self) -> bool:
        # Tickets detect later changes; a comparison would hang where a single replica changed something.
        return super()._has_to_verify() and (not self._verified or self._compared < len(self._members))

    def _act(self) -> None:
        if self.size == 1:
            return
        self._wait_in_flight()
        self._apply()
        if self._steps % self.period:
            return
        if self.topology == "complete" or (self.global_period and self._steps % self.global_period == 0):
            self._agree("the mean of weights")
            self._average_weights()
            return
        matrix = mixing_matrix(self.topology, self.size, self._steps // self.period - 1)
        common = self._common()
        if self.overlap:
            buckets = self._buckets(most=None)
            self._in_flight = matrix, self._send(matrix, buckets, common), buckets
            return
        swaps: deque[tuple[torch.Tensor, Swap, list[tuple[int, ...]]]] = deque()
        for bucket in self._buckets(BUCKET):
            swaps.append((matrix, self._send(matrix, [bucket], common), [bucket]))
            if len(swaps) == IN_FLIGHT:
                self._mix(*swaps.popleft())
        for swap in swaps:
            self._mix(*swap)

    # -- communication -------------------------------------------------------------------------------------------------

    def _buckets(self, most: int | None) -> list[tuple[int, ...]]:
        """Groups parameter numbers into buckets of `most` bytes. None: one bucket per run of equal dtypes."""
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
        """Waits for a swap; yields number, sent values and mixed values (flat) of each parameter."""
        received = self.peers.end_swap(swap)
        me = self.peers.rank
        full = iter(swap.sent[1:])  # without the ticket; empty buckets are not sent
        for bucket, theirs in zip(buckets, received, strict=True):
            sizes = [self._members[index].numel for index in bucket]
            if not sum(sizes):
                continue
            mine = next(full)
            every, total = {**theirs, me: mine}, torch.zeros_like(mine, dtype=sum_dtype(mine.dtype))
            agreed = torch.ones_like(mine, dtype=torch.bool)
            for replica in sorted(every):  # the same order everywhere
                total.add_(every[replica].to(total.dtype), alpha=float(matrix[me, replica]))
                agreed &= every[replica] == mine
            total = torch.where(agreed, mine.to(total.dtype), total)  # avoids a rounding in every step
            yield from zip(bucket, mine.split(sizes), total.split(sizes), strict=True)

    def _mix(self, matrix: torch.Tensor, swap: Swap, buckets: list[tuple[int, ...]]) -> None:
        weights = dict(self._weights())
        for index, _, mixed in self._combined(matrix, swap, buckets):
            shard = held(weights[index])
            shard.copy_(mixed.view(shard.shape))
        mark_written([weights[index] for bucket in buckets for index in bucket])

    # -- overlap -------------------------------------------------------------------------------------------------------

    def _wait_in_flight(self) -> None:
        if self._in_flight is None:
            return
        in_flight, self._in_flight = self._in_flight, None
        for index, before, after in self._combined(*in_flight):
            self._pending_changes[index] = after - before.to(after.dtype)

    def _apply(self) -> None:
        # parameters may have left the model since
        weights = {index: weight for index, weight in self._weights() if index in self._pending_changes}
        for index, weight in weights.items():
            shard = held(weight)
            shard.add_(self._pending_changes[index].view(shard.shape))
        mark_written([*weights.values()])
        self._pending_changes.clear()

    def _own_state(self) -> dict[str, Any]:
        if not self.overlap:
            return {}
        moves: dict[str, Any] = {}
        for name, (index, parameter) in self._named().items():
            shard = held(parameter)
            move = self._pending_changes.get(
                index, torch.zeros(shard.shape, dtype=sum_dtype(shard.dtype), device=shard.device)
            )
            moves[name] = with_replica_dim(as_gradient(move.view(shard.shape), parameter._spec), self._mesh)  # type: ignore[arg-type]
        return {"arrived": bool(self._pending_changes), "moves": moves}

    def _load_own(self, state: dict[str, Any]) -> None:
        self._pending_changes.clear()
        if not self.overlap or not state["arrived"]:
            return
        for name, (index, parameter) in self._named().items():
            if index in self._trained:
                like = as_gradient(held(parameter).to(sum_dtype(parameter.dtype)), parameter._spec)
                self._pending_changes[index] = self._own_replica_slice(state["moves"][name], like, name).clone()  # type: ignore[arg-type]
