"""Mixing matrices: their exact properties."""

import math

import pytest
import torch

from rtp_ext.outer import mixing_matrix

TOPOLOGIES = ("one-peer", "exponential", "ring", "grid", "complete")


def second(matrix):
    """The second singular value."""
    return torch.linalg.svdvals(matrix)[1].item()


def test_rows_and_columns_sum_to_one():
    for topology in TOPOLOGIES:
        for n in (1, 2, 3, 4, 5, 6, 8, 12, 16):
            if topology == "one-peer" and n & (n - 1):
                continue
            for step in range(3):
                matrix = mixing_matrix(topology, n, step)
                assert matrix.shape == (n, n) and matrix.dtype == torch.float64 and (matrix >= 0).all()
                ones = torch.ones(n, dtype=torch.float64)
                assert torch.allclose(matrix.sum(0), ones, atol=1e-15, rtol=0), (topology, n)
                assert torch.allclose(matrix.sum(1), ones, atol=1e-15, rtol=0), (topology, n)


def test_a_ring_of_thirds():
    for n in (2, 3, 8, 13):
        matrix = mixing_matrix("ring", n)
        weights = sorted(set(matrix.flatten().tolist()) - {0.0})
        assert weights == ([0.5] if n == 2 else [1 / 3]), n
    n = 8
    x = torch.cos(2 * math.pi * torch.arange(n, dtype=torch.float64) / n)  # the second eigenvector
    rate = 1 / 3 + 2 / 3 * math.cos(2 * math.pi / n)
    assert round(rate, 6) == 0.804738
    for steps in (1, 7):
        mixed = torch.linalg.matrix_power(mixing_matrix("ring", n), steps) @ x
        assert torch.allclose(mixed, x * rate**steps, atol=1e-14, rtol=0)
    assert abs(second(mixing_matrix("ring", n)) - rate) < 1e-14


def test_the_static_exponential_graph():
    for power in range(2, 9):
        found = second(mixing_matrix("exponential", 1 << power))
        assert abs(found - (power - 1) / (power + 1)) < 1e-12, (power, found)


def test_one_peer_reaches_the_mean_exactly():
    for power in range(1, 9):
        n = 1 << power
        x = torch.randint(-50, 50, (n, 3), generator=torch.Generator().manual_seed(n)).double()
        mean = x.mean(0).expand(n, 3)
        for step in range(power):
            matrix = mixing_matrix("one-peer", n, step + 5 * power)
            assert (matrix != 0).sum(1).tolist() == [2] * n and (matrix != 0).sum(0).tolist() == [2] * n
            x = matrix @ x
            assert torch.equal(x, mean) == (step == power - 1), "the last step reaches it, and no other"


@pytest.mark.parametrize("n", [3, 5, 6, 7, 12, 24])
def test_one_peer_is_refused_where_it_reaches_no_mean(n):
    below = 1 << (n.bit_length() - 1)
    message = f"expected {below} or {2 * below}, got {n}; for {n} take one of 'exponential', 'ring', 'grid', 'complete'"
    with pytest.raises(ValueError, match=message):
        mixing_matrix("one-peer", n)
    matrix = torch.eye(n, dtype=torch.float64)
    for step in range((n - 1).bit_length()):  # the product of the refused steps
        shifted = torch.eye(n, dtype=torch.float64).roll(1 << step, 1)
        matrix = (torch.eye(n, dtype=torch.float64) + shifted) / 2 @ matrix
    assert (matrix * n - 1).abs().max() > 0.2


def test_the_grid_and_what_is_refused():
    matrix = mixing_matrix("grid", 6)  # 2 x 3
    assert torch.equal(matrix, matrix.T)
    assert (matrix[0] != 0).tolist() == [True, True, False, True, False, False]
    assert matrix[0, 1].item() == 1 / 4, "1 over 1 and the larger number of neighbours, 3"
    assert second(matrix) < 1 - 1e-3
    assert torch.equal(mixing_matrix("complete", 4), torch.full((4, 4), 0.25, dtype=torch.float64))
    with pytest.raises(ValueError, match="one-peer, exponential, ring, grid, complete, got 'star'"):
        mixing_matrix("star", 4)
    with pytest.raises(ValueError, match="at least one replica, got 0"):
        mixing_matrix("ring", 0)


def test_the_fixed_points_of_decentralised_sgd():
    """On f_i(x) = (x - b_i)^2 / 2: mixed after the step, and beside it. Both keep the mean of b; neither agrees."""
    n, rate = 8, 0.3
    b = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    eye, matrix = torch.eye(n, dtype=torch.float64), mixing_matrix("ring", n)
    after = torch.linalg.solve(eye - (1 - rate) * matrix, rate * matrix @ b)
    beside = torch.linalg.solve(eye - matrix + rate * eye, rate * b)
    x = y = torch.zeros(n, dtype=torch.float64)
    for _ in range(300):
        x = matrix @ (x - rate * (x - b))
        y = matrix @ y - rate * (y - b)
    for found, expected in ((x, after), (y, beside)):
        assert (found - expected).abs().max() < 2e-15
        assert (expected.mean() - b.mean()).abs() < 1e-15
        assert (expected - b.mean()).abs().max() > 0.05, "no consensus"
