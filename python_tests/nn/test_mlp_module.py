"""RotatedMLP: the module over rotated_mlp. test_operations.py tests the results of the operation."""

import pytest
import torch
from harness import on_ranks
from reference import TOLERANCE, adamw, assert_same, chunk, differs, full, local, random
from torch import nn

import rtp_ext
from rtp_ext.nn import RotatedMLP

FEATURES, HIDDEN, OUTPUTS = 5, 7, 3
KNOWN = {"gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "relu": nn.ReLU(), "silu": nn.SiLU()}


class GatedMLP(nn.Module):
    """The plain form of a gated MLP, with the names that RotatedMLP uses."""

    def __init__(self, activation, bias):
        super().__init__()
        self.gate_proj = nn.Linear(FEATURES, HIDDEN, bias)
        self.up_proj = nn.Linear(FEATURES, HIDDEN, bias)
        self.down_proj = nn.Linear(HIDDEN, OUTPUTS, bias)
        self.activation = activation

    def forward(self, x):
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


@on_ranks([1, 2, 3])
def test_constructed(rank, ranks, cases):
    """Built under the same seed as the plain layers, it starts from and trains to the same values."""
    for recompute in (False, True):
        for in_place, transport in ((False, "shm"), (True, "c10d")):
            ring = rtp_ext.Ring(transport=transport, in_place=in_place, timeout=30.0)
            for bias in (True, False):
                with cases.case(f"recompute={recompute} {transport} bias={bias}"):
                    torch.manual_seed(0)
                    plain = GatedMLP(nn.SiLU(), bias).double()
                    torch.manual_seed(0)
                    options = {"activation": "swiglu", "bias": bias, "recompute": recompute}
                    module = RotatedMLP(FEATURES, HIDDEN, OUTPUTS, ring=ring, **options).double()
                    assert [name for name, _ in module.named_parameters()] == [n for n, _ in plain.named_parameters()]
                    for name, parameter in plain.named_parameters():
                        assert torch.equal(full(module.get_parameter(name)), parameter), f"{name} at the start"
                    optimizers = adamw(module.parameters()), adamw(plain.parameters())
                    for step in range(5):
                        batches = [
                            random(4 + r, FEATURES, dtype=torch.float64, seed=9 * step + r) for r in range(ranks)
                        ]
                        for optimizer in optimizers:
                            optimizer.zero_grad()
                        y = module(batches[rank])
                        y.square().sum().backward()
                        expected = [plain(batch) for batch in batches]
                        (sum(out.square().sum() for out in expected) / ranks).backward()
                        assert_same(y, expected[rank], 1e-9, "output")
                        for optimizer in optimizers:
                            optimizer.step()
                    for name, parameter in plain.named_parameters():
                        assert_same(full(module.get_parameter(name)), parameter, 1e-9, name)
                    torch.manual_seed(0)
                    assert differs(full(module.up_proj.weight), GatedMLP(nn.SiLU(), bias).up_proj.weight, 1e-3)
            ring.close()


@on_ranks(3)
def test_from_module(rank, ranks, ring, cases):
    for name, function in KNOWN.items():
        with cases.case(name):
            plain = nn.Sequential(nn.Linear(FEATURES, HIDDEN), function, nn.Linear(HIDDEN, OUTPUTS))
            with torch.no_grad():
                for seed, parameter in enumerate(plain.parameters()):
                    parameter.copy_(random(*parameter.shape, dtype=torch.float32, seed=seed))
            module = RotatedMLP.from_module(plain, ring)
            assert module.spec.activation == name
            assert type(plain) is nn.Sequential and type(plain[0]) is nn.Linear
            assert torch.equal(local(module.down_proj.weight), chunk(plain[2].weight, ranks, rank, 1))
            x = random(2, 3, FEATURES, dtype=torch.float32, seed=50 + rank)
            assert_same(module(x), plain(x), TOLERANCE[torch.float32], "output")
    with cases.case("refused"):
        for wrong in (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), nn.Linear(5, 7)):
            with pytest.raises(ValueError, match=rf"from_module: .* got {type(wrong).__name__}"):
                RotatedMLP.from_module(wrong, ring)
        with pytest.raises(ValueError, match="swish"):
            RotatedMLP(5, 7, activation="swish", ring=ring)
