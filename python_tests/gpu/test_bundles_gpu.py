"""Bundles and other operations on one GPU: the emulated ring against plain layers made of repeated shards."""

import math

import pytest
import torch
from reference import TOLERANCE, assert_same, differs, random
from torch import nn
from torch.nn import functional as F

import rtp_ext
from rtp_ext.functional import (
    rotated_convolution,
    rotated_experts,
    rotated_linear_cross_entropy,
    rotated_linears,
    rotated_mlp,
)

DEVICE = "cuda"
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
ROUNDINGS = 9  # most bfloat16 roundings between an input and a gradient of one of these operations
TOKENS, FEATURES, HIDDEN, OUTPUTS = 700, 48, 40, 24  # more tokens than the vocabulary head looks at together


def tolerance_of(dtype: torch.dtype) -> float:
    return ROUNDINGS * 2.0**-8 if dtype == torch.bfloat16 else TOLERANCE[dtype]


def leaf(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return random(*shape, dtype=dtype, seed=seed, scale=shape[-1] ** -0.5).to(DEVICE).requires_grad_()


def repeated(parameter: torch.Tensor, ranks: int, dim: int) -> torch.Tensor:
    """The whole parameter whose shards are all `parameter`, in float64, differentiable."""
    times = [ranks if index == dim else 1 for index in range(parameter.dim())]
    return parameter.double().repeat(times)


def check(ranks, dtype, rotated, plain, inputs, parameters, dims):
    """`rotated(*inputs, *parameters)` against `plain` with the whole parameters: output and all gradients."""
    y = rotated(*inputs, *parameters)
    leaves = [x.detach().double().requires_grad_() for x in (*inputs, *parameters)]
    wholes = [repeated(p, ranks, dim) for p, dim in zip(leaves[len(inputs) :], dims, strict=True)]
    expected = plain(*leaves[: len(inputs)], *wholes)
    dy = random(*y.shape, dtype=dtype, seed=99).to(DEVICE)
    y.backward(dy.to(y.dtype))
    expected.backward(dy.double())
    tolerance = tolerance_of(dtype)
    assert_same(y, expected, tolerance, "output")
    for index, (mine, other) in enumerate(zip((*inputs, *parameters), leaves, strict=True)):
        scale = 1 if index < len(inputs) else ranks
        assert_same(mine.grad, other.grad / scale, tolerance, f"gradient {index}")
        if scale > 1:
            assert differs(mine.grad, other.grad, tolerance), "control: summed instead of averaged"


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_mlp(ranks, dtype, recompute):
    ring = rtp_ext.Ring.emulated(ranks, device=DEVICE)
    shapes = [(HIDDEN, FEATURES), (HIDDEN, FEATURES), (OUTPUTS, HIDDEN)]
    parameters = [leaf(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]
    for in_place in (False, True):
        ring.in_place = in_place
        for parameter in parameters:
            parameter.grad = None
        check(
            ranks,
            dtype,
            lambda x, u, g, d: rotated_mlp(x, u, d, g, activation="swiglu", ring=ring, recompute=recompute),
            lambda x, u, g, d: F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d),
            [leaf(TOKENS, FEATURES, dtype=dtype, seed=10)],
            parameters,
            [0, 0, 1],
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_projections(ranks, dtype):
    ring = rtp_ext.Ring.emulated(ranks, device=DEVICE)
    parameters = [leaf(rows, FEATURES, dtype=dtype, seed=rows) for rows in (32, 16, 16)]
    check(
        ranks,
        dtype,
        lambda x, *weights: torch.cat(rotated_linears([x], weights, ring=ring), 1),
        lambda x, *weights: torch.cat([F.linear(x, weight) for weight in weights], 1),
        [leaf(TOKENS, FEATURES, dtype=dtype, seed=10)],
        parameters,
        [0, 0, 0],
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_cross_entropy(ranks, dtype, smoothing):
    ring = rtp_ext.Ring.emulated(ranks, device=DEVICE)
    targets = torch.randint(80 * ranks, (TOKENS,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    targets[::7] = -100
    check(
        ranks,
        dtype,
        lambda x, w, b: rotated_linear_cross_entropy(x, w, targets, b, ring=ring, label_smoothing=smoothing),
        lambda x, w, b: F.cross_entropy(F.linear(x, w, b), targets, label_smoothing=smoothing),
        [leaf(TOKENS, FEATURES, dtype=dtype, seed=10)],
        [leaf(80, FEATURES, dtype=dtype, seed=1), leaf(80, dtype=dtype, seed=2)],
        [0, 0],
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_experts(ranks, dtype):
    ring = rtp_ext.Ring.emulated(ranks, device=DEVICE)
    local, choices = 3, 2
    generator = torch.Generator().manual_seed(1)
    index = torch.stack([torch.randperm(local * ranks, generator=generator)[:choices] for _ in range(TOKENS)])
    index[::5, 1] = local * ranks  # of no rank
    index = index.to(DEVICE)

    def plain(x, factors, up, down):
        y = torch.zeros_like(x)
        for choice in range(choices):
            for expert in range(local * ranks):
                here = (index[:, choice] == expert).nonzero().squeeze(1)
                gate, other = F.linear(x[here], up[expert]).chunk(2, -1)
                out = F.linear(F.silu(gate) * other, down[expert])
                y = y.index_add(0, here, factors[here, choice].unsqueeze(1) * out)
        return y

    check(
        ranks,
        dtype,
        lambda x, factors, up, down: rotated_experts(x, index, factors, up, down, ring=ring),
        plain,
        [leaf(TOKENS, FEATURES, dtype=dtype, seed=10), leaf(TOKENS, choices, dtype=dtype, seed=11)],
        [leaf(local, 2 * HIDDEN, FEATURES, dtype=dtype, seed=1), leaf(local, FEATURES, HIDDEN, dtype=dtype, seed=2)],
        [0, 0],
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_convolution(ranks, dtype):
    ring = rtp_ext.Ring.emulated(ranks, device=DEVICE)
    check(
        ranks,
        dtype,
        lambda x, w, b: rotated_convolution(x, w, b, ring=ring, stride=2, padding=1),
        lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1),
        [leaf(3, 5, 9, 9, dtype=dtype, seed=10)],
        [leaf(6, 5, 3, 3, dtype=dtype, seed=1), leaf(6, dtype=dtype, seed=2)],
        [0, 0],
    )


@pytest.mark.parametrize("fused", [False, True])
def test_a_llama_takes_steps_in_bfloat16(fused):
    """The numbers on the emulated ring are not those of a model; they are finite, and the loss falls."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    with torch.device(DEVICE):
        model = transformers.LlamaForCausalLM(config)
    ring = rtp_ext.Ring.emulated(4, device=DEVICE)
    rtp_ext.fully_rotate(model, mesh=ring, bundle="recompute", loss_head="fused" if fused else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.randint(128, (4, 32), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    losses = []
    for _ in range(20):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses)) and losses[-1] < 0.8 * losses[0], losses


def test_attention_module():
    ring = rtp_ext.Ring.emulated(1, device=DEVICE)
    for dtype in DTYPES:
        plain = nn.MultiheadAttention(30, 3, batch_first=True, device=DEVICE, dtype=dtype)
        module = rtp_ext.nn.RotatedMultiheadAttention.from_module(plain, ring)
        x = random(2, 7, 30, dtype=dtype, seed=1).to(DEVICE)
        expected = plain.double()(x.double(), x.double(), x.double())
        for actual, right in zip(module(x, x, x), expected, strict=True):
            assert_same(actual, right, tolerance_of(dtype), str(dtype))
