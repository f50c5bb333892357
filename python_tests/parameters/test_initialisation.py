"""Constructors of rotated modules: the values of the plain module under the same seed, and never a whole weight."""

import logging
from unittest import mock

import numpy as np
import pytest
import torch
from harness import Cases, on_ranks
from live_bytes import LiveBytes
from reference import chunk, full, local
from torch import nn

import rtp_ext
from rtp_ext.nn import (
    RotatedConv1d,
    RotatedConv2d,
    RotatedConv3d,
    RotatedEmbedding,
    RotatedExperts,
    RotatedLinear,
    RotatedLinearCrossEntropy,
    RotatedMLP,
    RotatedMultiheadAttention,
)
from rtp_ext.parameters import initial

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PIECE = 64  # bytes: 16, or even 8, elements
MLP_NAMES = {"gate_proj": 0, "up_proj": 1, "down_proj": 2}


class PlainExperts(nn.Module):
    """Draws every expert's weights like nn.Linear, stacked."""

    def __init__(self, experts: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner, dtype=dtype))
        for weight in self.parameters():
            bound = weight.shape[2] ** -0.5
            nn.init.uniform_(weight, -bound, bound)


def plain_mlp(features: int, hidden: int, dtype: torch.dtype) -> nn.Module:
    pair = [nn.Linear(features, hidden, dtype=dtype) for _ in range(2)]
    return nn.ModuleList([*pair, nn.Linear(hidden, features, dtype=dtype)])


# the rotated module, with further options; the plain module; arguments of both
MODULES = [
    (RotatedLinear, {}, nn.Linear, (5, 1), {}),
    (RotatedLinear, {"shard_dim": 1}, nn.Linear, (3, 5), {"bias": False}),
    (RotatedLinear, {}, nn.Linear, (37, 13), {}),
    (RotatedLinear, {"shard_dim": 1}, nn.Linear, (37, 13), {}),
    (RotatedLinear, {"shard_dim": 1}, nn.Linear, (2, 40), {}),
    (RotatedLinearCrossEntropy, {}, nn.Linear, (7, 11, True), {}),
    (RotatedEmbedding, {}, nn.Embedding, (5, 3), {}),  # below 16 elements normal_ is another function
    (RotatedEmbedding, {"shard_dim": 1}, nn.Embedding, (8, 4), {"padding_idx": 7}),
    (RotatedEmbedding, {}, nn.Embedding, (23, 7), {"padding_idx": -4}),  # 161 elements: a block and a rest
    (RotatedEmbedding, {"shard_dim": 1}, nn.Embedding, (23, 7), {"padding_idx": 0, "_freeze": True}),
    (RotatedConv1d, {}, nn.Conv1d, (4, 6, 3), {"groups": 2}),
    (RotatedConv2d, {}, nn.Conv2d, (3, 5, (2, 3)), {"bias": False}),
    (RotatedConv3d, {}, nn.Conv3d, (2, 3, 2), {}),
    (RotatedMultiheadAttention, {}, nn.MultiheadAttention, (8, 2), {"add_bias_kv": True}),
    (RotatedMultiheadAttention, {}, nn.MultiheadAttention, (6, 3), {"kdim": 5, "vdim": 7, "add_bias_kv": True}),
    (RotatedMultiheadAttention, {}, nn.MultiheadAttention, (6, 2), {"bias": False}),
    (RotatedExperts, {}, PlainExperts, (5, 3, 4), {}),
    (RotatedMLP, {"activation": "swiglu"}, plain_mlp, (5, 9), {}),
]


def seeded(seed: int) -> None:
    """In a state that normal_ has left: half of a pair of values is kept for the next call."""
    torch.manual_seed(seed)
    torch.randn(1)


def plain_name(name: str) -> str:
    for layer, number in MLP_NAMES.items():
        if name.startswith(f"{layer}."):
            return name.replace(layer, str(number))
    return name


def check_all(ring: rtp_ext.Ring, dtype: torch.dtype, cases: Cases) -> None:
    """All modules one after the other, from one seed, as the layers of a model are made."""
    seeded(int(dtype.itemsize))
    plains = []
    for _, _, plain, arguments, options in MODULES:
        plains.append((plain(*arguments, **options, dtype=dtype), torch.get_rng_state()))
    seeded(int(dtype.itemsize))
    for (plain, state), (kind, more, _, arguments, options) in zip(plains, MODULES, strict=True):
        with cases.case(f"{kind.__name__} {arguments} {options} {more} {dtype} rank {ring.rank} of {ring.size}"):
            module = kind(*arguments, **options, **more, dtype=dtype, ring=ring)
            right = dict(plain.named_parameters())
            assert sorted(map(plain_name, dict(module.named_parameters()))) == sorted(right)
            for name, parameter in module.named_parameters():
                whole = right[plain_name(name)]
                assert parameter.dtype == dtype and parameter.requires_grad == whole.requires_grad
                if ring.mesh is not None:
                    assert torch.equal(full(parameter), whole), name
                owner, _, key = name.rpartition(".")
                shard = chunk(whole, ring.size, ring.rank, module.get_submodule(owner).shard_dims[key])
                own = local(parameter)
                # an emulated ring has no other ranks to gather the biases of attention from
                assert torch.equal(own, shard if own.shape == shard.shape else whole), name
                assert own.untyped_storage().nbytes() == own.nbytes and own.device.type == "cpu"
            assert torch.equal(torch.get_rng_state(), state), "the next module would have other values"


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_values_are_those_of_the_plain_module(dtype, monkeypatch):
    cases = Cases()
    for piece in (PIECE, 48 * dtype.itemsize):
        monkeypatch.setattr(initial, "_PIECE", piece)
        for size in (1, 2, 3, 4):
            for rank in range(size):
                check_all(rtp_ext.Ring.emulated(size, rank=rank), dtype, cases)
    cases.finish()


@on_ranks([2, 3])
@mock.patch.object(initial, "_PIECE", PIECE)
def test_values_on_a_ring(ring, cases):
    for dtype in DTYPES[:3:2]:
        check_all(ring, dtype, cases)
    torch.manual_seed(1)
    plain = nn.Linear(6, 5)
    torch.manual_seed(1)
    with torch.inference_mode():
        module = RotatedLinear(6, 5, ring=ring)
    assert torch.equal(full(module.weight), plain.weight)


MANY = [  # all with a largest parameter of many pieces
    (RotatedLinear, nn.Linear, (2048, 2048), {}),
    (RotatedLinear, nn.Linear, (2048, 2048), {"shard_dim": 1}),
    (RotatedLinearCrossEntropy, nn.Linear, (256, 16384), {}),
    (RotatedEmbedding, nn.Embedding, (16384, 256, 5), {}),
    (RotatedConv2d, nn.Conv2d, (512, 768, 3), {}),
    (RotatedMultiheadAttention, nn.MultiheadAttention, (1024, 4), {}),
    (RotatedExperts, PlainExperts, (16, 256, 256), {}),
]


def test_at_most_the_shard_and_one_piece_are_alive():
    ring = rtp_ext.Ring.emulated(8, rank=3)
    for kind, plain, arguments, options in MANY:
        RotatedLinear(2, 2, ring=ring)  # whatever torch makes once
        with LiveBytes() as live:
            module = kind(*arguments, **options, dtype=torch.float32, ring=ring)
            layers = sum(getattr(each, "ring", None) is ring for each in module.modules())
            numbers = 8 * layers  # by which compiled graphs find them
            assert live.current == sum(parameter.nbytes for parameter in module.parameters()) + numbers, kind
            assert live.current < live.peak <= live.current + initial._PIECE + 64, f"{kind}: {live.peak}"
            with LiveBytes() as whole:
                plain(*arguments, dtype=torch.float32)
        assert live.current + initial._PIECE + 64 < whole.peak / 2, f"control: {kind}: {whole.peak}"


def test_meta_modules_stay_there_and_draw_nothing():
    ring = rtp_ext.Ring.emulated(2)
    before = torch.get_rng_state()
    with torch.device("meta"):
        modules = [RotatedLinear(4, 6, ring=ring), RotatedMLP(4, 6, ring=ring)]
    modules.append(RotatedEmbedding(8, 4, padding_idx=1, device="meta", ring=ring))
    assert all(parameter.is_meta for module in modules for parameter in module.parameters())
    assert modules[0].weight.shape == (3, 4) and modules[2].weight.shape == (4, 4)
    assert torch.equal(torch.get_rng_state(), before)


class FromNumpy(RotatedLinear):
    """Draws from a generator that torch does not register."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            nn.init.zeros_(self.bias)
            self.weight.copy_(torch.from_numpy(np.random.rand(*self.weight.shape)))


def test_what_does_not_come_in_pieces_is_drawn_whole_and_said_so(monkeypatch, caplog):
    ring = rtp_ext.Ring.emulated(3, rank=1)
    caplog.set_level(logging.INFO, logger="rtp_ext")
    np.random.seed(4)
    right = torch.from_numpy(np.random.rand(7, 5))
    np.random.seed(4)
    assert torch.equal(FromNumpy(5, 7, dtype=torch.float64, ring=ring).weight, chunk(right, 3, 1))
    assert "FromNumpy: initialised whole and then sharded: FromNumpy has a reset_parameters of its own" in caplog.text

    def trunc_normal(module: nn.Linear) -> None:  # it ignores the meta device
        nn.init.trunc_normal_(module.weight, std=1.0, a=-0.5, b=0.5)

    for reset in (trunc_normal, lambda module: nn.init.orthogonal_(module.weight)):
        monkeypatch.setattr(nn.Linear, "reset_parameters", reset)
        caplog.clear()
        torch.manual_seed(2)
        right, after = nn.Linear(5, 7, bias=False).weight, torch.get_rng_state()
        torch.manual_seed(2)
        assert torch.equal(RotatedLinear(5, 7, bias=False, ring=ring).weight, chunk(right, 3, 1))
        assert torch.equal(torch.get_rng_state(), after)
        assert "RotatedLinear: initialised whole and then sharded: it calls aten." in caplog.text

    caplog.clear()
    given = torch.randn(7, 4)
    assert torch.equal(RotatedEmbedding(7, 4, _weight=given, ring=ring).weight, chunk(given, 3, 1))
    assert not caplog.text
