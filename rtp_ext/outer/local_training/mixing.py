"""Mixing matrices of gossip: doubly stochastic matrices over the replicas."""

from __future__ import annotations

import math
from typing import get_args

import torch

from rtp_ext.words import Topology

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
