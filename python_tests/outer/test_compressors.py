"""Compressors, in one process: their exact properties."""

import math

import pytest
import torch

from rtp_ext.outer import EF21, Neolithic, PowerSGD, Quantize, RandomK, Sign, TopK


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def lost(compressor, values):
    """The share of the squared norm that is lost."""
    found = compressor.decompress(compressor.compress(values))
    assert found.shape == values.shape and found.dtype == values.dtype
    return ((values - found).square().sum() / values.square().sum()).item()


EVERY = [
    TopK(0.2),
    RandomK(0.2),
    Sign(),
    Quantize(4, 16),
    PowerSGD(2),
    EF21(TopK(0.2)),
    Neolithic(TopK(0.1), 3),
    Neolithic(PowerSGD(1), 2),
    EF21(RandomK(0.5)),
]


def test_top_k_loses_at_most_its_share():
    for fraction in (0.1, 0.5, 0.9):
        for seed in range(5):
            assert lost(TopK(fraction), normal(100, seed=seed)) < 1 - fraction
        equal = normal(100).sign() * 3.0
        assert abs(lost(TopK(fraction), equal) - (1 - fraction)) < 1e-15, "equal magnitudes lose exactly it"
    assert TopK(0.001).compress(normal(10)).parts[0].numel() == 1, "one at least"


def test_random_k_is_unbiased_with_the_exact_variance():
    values, fraction = normal(20), 0.25
    compressor = RandomK(fraction, error_feedback=False)
    draws = torch.stack([compressor.decompress(compressor.compress(values)) for _ in range(4000)])
    assert (draws.mean(0) - values).abs().max() < 0.15 * values.abs().max()
    omega = (draws - values).square().sum(1).mean() / values.square().sum()
    assert abs(omega / (1 / fraction - 1) - 1) < 0.05
    one = torch.zeros(20, dtype=torch.float64)
    one[3] = 2.0
    kept = [d for d in (compressor.decompress(compressor.compress(one)) for _ in range(40)) if d.any()]
    assert kept and all(d[3] == 8.0 for d in kept), "times d/k"
    contractive = RandomK(fraction)
    assert set(contractive.decompress(contractive.compress(one)).tolist()) <= {0.0, 2.0}
    first, second = RandomK(fraction, seed=1), RandomK(fraction, seed=1)
    drawn = []
    for _ in range(3):
        drawn.append(first.compress(values).note)
        assert torch.equal(drawn[-1], second.compress(values).note), "alike on all replicas"
    assert not torch.equal(drawn[0], drawn[1]), "and other places each time"


def test_sign_loses_exactly_what_the_norms_say():
    for seed in range(5):
        values = normal(101, seed=seed)
        delta = values.abs().sum() ** 2 / (101 * values.square().sum())
        assert abs(lost(Sign(), values) - (1 - delta.item())) < 1e-14
    payload = Sign().compress(normal(101))
    assert payload.nbytes == 13 + 8


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantize_is_within_half_a_level(bits):
    values = normal(5, 67, dtype=torch.float32) * torch.logspace(-3, 3, 67)
    values[0] = 0.0
    compressor = Quantize(bits, block=32)
    payload = compressor.compress(values)
    assert payload.nbytes == math.ceil(335 * bits / 8) + 4 * math.ceil(335 / 32)
    found, flat = compressor.decompress(payload).view(-1), values.view(-1)
    for block in range(0, 335, 32):
        most = flat[block : block + 32].abs().max()
        error = (flat[block : block + 32] - found[block : block + 32]).abs().max()
        assert error <= most / (2**bits - 2) * (1 + 1e-5), (block, error, most)
    assert (flat - found).abs().max() > 0, "control"


def test_power_sgd_is_exact_at_full_rank_and_warm():
    matrix = normal(12, 3) @ normal(3, 20, seed=1)
    assert lost(PowerSGD(3), matrix) < 1e-28, "one iteration"
    noisy = matrix + 0.1 * normal(12, 20, seed=2)
    values = torch.linalg.svdvals(noisy)
    best = values[3:].square().sum() / values.square().sum()
    warm = PowerSGD(3)
    losses = [lost(warm, noisy) for _ in range(30)]
    assert losses[0] > best * (1 + 1e-4) and abs(losses[-1] / best - 1) < 1e-6, (
        "warm starts end in the best of its rank"
    )
    payload = PowerSGD(2).compress(normal(40, 30))
    assert sum(part.numel() for part in payload.parts) == 2 * (40 + 30)
    assert round(4096 * 14336 / (2 * (4096 + 14336))) == 1593
    for plain in (normal(9), normal(2, 2)):
        assert torch.equal(PowerSGD(2).compress(plain).parts[0], plain), "what it would not make smaller"


@pytest.mark.parametrize("compressor", EVERY, ids=repr)
def test_error_feedback_telescopes(compressor):
    """The sent values and the error add up to the values to send; EF21's estimate converges to a constant value."""
    shape = (8, 10)
    memory = compressor.remember(shape, torch.float64)
    error = sent = given = torch.zeros(shape, dtype=torch.float64)
    if isinstance(compressor, EF21):
        values = normal(*shape)
        for _ in range(200):
            compressor.compress(values, memory)
        assert (memory["estimate"] - values).abs().max() < 1e-9
        return
    for step in range(200):
        values = normal(*shape, seed=step)
        told = compressor.decompress(compressor.compress(values + error, memory))
        error = values + error - told
        given, sent = given + values, sent + told
    assert (given - sent - error).abs().max() < 3e-13
    assert 1e-3 < error.norm() < 40 * values.norm(), "bounded, and there"


def test_neolithic_loses_less_with_every_round():
    values = normal(1000)
    losses = [lost(Neolithic(TopK(0.05), rounds), values) for rounds in (1, 2, 4)]
    assert losses[0] == lost(TopK(0.05), values)
    assert losses[0] > losses[1] > losses[2]
    assert abs(losses[2] - lost(TopK(0.2), values)) < 1e-12, "what is left has the next largest"


def test_the_known_loser():
    """Gradients of many workers that cancel: the largest value of each leads nowhere. With feedback it gets there."""

    def distance(feedback, steps=400, rate=0.02):
        big = 10.0
        centres = torch.tensor([[big, 1.0, 1.0], [-big, 1.0, 1.0]], dtype=torch.float64)
        x, errors = torch.zeros(3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
        top = TopK(1 / 3)
        for _ in range(steps):
            wanted = (x - centres) + errors
            told = torch.stack([top.decompress(top.compress(row)) for row in wanted])
            errors = wanted - told if feedback else errors
            x = x - rate * told.mean(0)
        return (x - centres.mean(0)).norm().item()

    assert distance(False) > 1.4, "has not moved where it had to"
    assert distance(True) < 0.3


def test_what_is_refused():
    for make, message in (
        (lambda: TopK(0.0), r"TopK: expected fraction in \(0, 1\], got 0.0"),
        (lambda: RandomK(1.5), r"RandomK: expected fraction in \(0, 1\]"),
        (lambda: Quantize(3), "expected bits to be 2, 4 or 8, got 3"),
        (lambda: Quantize(4, 0), "expected block >= 1, got 0"),
        (lambda: PowerSGD(0), "expected rank >= 1, got 0"),
        (lambda: Neolithic(Sign(), 0), "expected rounds >= 1, got 0"),
        (lambda: EF21(RandomK(0.5, error_feedback=False)), "error_feedback=True, the contractive form"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(TypeError, match="EF21: expected one of TopK"):
        EF21(EF21(Sign()))
