"""examples/diloco.py, on ranks of the harness."""

import importlib.util
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from torch import nn

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/diloco.py"


def _trains(rank, ranks):
    spec = importlib.util.spec_from_file_location("diloco_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [module.main(["--ring", str(ring), "--steps", "20", "--period", "5"]) for ring in (2, 1)]


def test_it_learns_and_sends_once_a_period():
    sizes = [layer.weight.numel() + layer.bias.numel() for layer in (nn.Linear(16, 64), nn.Linear(64, 64))]
    sizes += [2 * 64, nn.Linear(64, 4).weight.numel() + 4]
    bytes_ = sum(sizes) * torch.float32.itemsize
    for ring, runs in zip((2, 1), zip(*run_ranks(_trains, 4), strict=True), strict=True):
        assert len({tuple(losses) for losses, _ in runs}) == 1, "the mean of all ranks"
        losses = runs[0][0]
        assert losses[-1] < 0.6 * losses[0], f"expected less than 0.6 of {losses[0]}, got {losses[-1]}"
        replicas = 4 // ring
        expected = 4 * 2 * (replicas - 1) / replicas * bytes_ / ring  # four outer steps
        assert [sent for _, sent in runs] == pytest.approx([expected] * 4, rel=1e-3)
