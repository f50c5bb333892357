"""Rotated linear layers on one GPU: the emulated ring and a ring of one rank against the plain layer."""

from itertools import product

import pytest
import torch
from reference import TOLERANCE, assert_same, differs, random
from torch import nn

import rtp_ext
from rtp_ext.functional import rotated_embedding, rotated_linear

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
SIZES = [(5, 7), (64, 48), (256, 128)]  # in, out features of one shard


def leaf(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf on the GPU and its twin in float64, both wanting gradients."""
    values = random(*shape, dtype=dtype, seed=seed, scale=scale).cuda()
    return values.clone().requires_grad_(), values.double().requires_grad_()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shard_dim", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_emulated_ring_is_a_layer_of_repeated_shards(ranks, shard_dim, in_place):
    ring = rtp_ext.Ring.emulated(ranks, device="cuda", in_place=in_place)
    for (features, rows), dtype in product(SIZES, DTYPES):
        rows_here = rows if shard_dim == 0 else rows * ranks
        weight, plain_weight = leaf(rows_here, features, dtype=dtype, seed=1, scale=features**-0.5)
        bias, plain_bias = leaf(rows, dtype=dtype, seed=2)
        x, plain_x = leaf(33, features * (ranks if shard_dim == 1 else 1), dtype=dtype, seed=3)
        y = rotated_linear(x, weight, bias, ring=ring, shard_dim=shard_dim)
        whole = plain_weight.repeat(*((ranks, 1) if shard_dim == 0 else (1, ranks)))
        expected = nn.functional.linear(plain_x, whole, plain_bias.repeat(ranks))
        dy = random(*y.shape, dtype=dtype, seed=4).cuda()
        y.backward(dy)
        expected.backward(dy.double())
        # Summed over up to eight shards; the reference sums in float64.
        tolerance = TOLERANCE[dtype]
        for actual, right, name in (
            (y, expected, "output"),
            (x.grad, plain_x.grad, "input gradient"),
            (weight.grad, plain_weight.grad / ranks, "weight gradient"),
            (bias.grad, plain_bias.grad / ranks, "bias gradient"),
        ):
            assert_same(actual, right, tolerance, f"{name} {dtype} {features}->{rows}")
        if ranks > 1:
            assert differs(weight.grad, plain_weight.grad, tolerance), "control: summed instead of averaged"


@pytest.mark.parametrize("shard_dim", [0, 1])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_emulated_ring_is_a_table_of_repeated_shards(ranks, shard_dim):
    ring = rtp_ext.Ring.emulated(ranks, device="cuda")
    for dtype in DTYPES:
        weight, plain_weight = leaf(40, 24, dtype=dtype, seed=1)
        ids = torch.randint(40 * (ranks if shard_dim == 0 else 1), (3, 50), device="cuda")
        y = rotated_embedding(ids, weight, ring=ring, shard_dim=shard_dim)
        whole = plain_weight.repeat(*((ranks, 1) if shard_dim == 0 else (1, ranks)))
        expected = nn.functional.embedding(ids, whole)
        dy = random(*y.shape, dtype=dtype, seed=4).cuda()
        y.backward(dy)
        expected.backward(dy.double())
        assert_same(y, expected, 0.0, "output")
        assert_same(weight.grad, plain_weight.grad / ranks, TOLERANCE[dtype], f"weight gradient {dtype}")


def test_many_steps_without_a_pause_race_with_nothing():
    """Passes are enqueued faster than they run: a slot reused too early would show in some of them."""
    ring = rtp_ext.Ring.emulated(4, device="cuda")
    x = random(512, 1024, dtype=torch.float32, seed=1).cuda()
    weights = [random(1024, 1024, dtype=torch.float32, seed=seed, scale=0.03).cuda() for seed in range(2, 8)]
    results = []
    torch.cuda._sleep(200_000_000)  # about 0.1 s of work ahead of everything that follows
    for _ in range(10):
        results += [rotated_linear(x, weight, ring=ring) for weight in weights]
    for number, y in enumerate(results):
        expected = (x @ weights[number % len(weights)].t()).repeat(1, 4)
        assert_same(y, expected, 1e-5, f"pass {number}")
    assert ring.slot_count("weight").allocations == 2


def test_no_host_synchronisation_in_a_step():
    ring = rtp_ext.Ring.emulated(4, device="cuda")
    weight = random(256, 256, dtype=torch.float32, seed=1).cuda().requires_grad_()
    x = random(64, 256, dtype=torch.float32, seed=2).cuda().requires_grad_()
    ids = torch.randint(1024, (64,), device="cuda")
    for _ in range(2):  # the first allocates
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            y = rotated_linear(x, weight, ring=ring)
            y = y.sum() + rotated_embedding(ids, weight, ring=ring).sum()
            y.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_operations_follow_the_current_stream():
    ring = rtp_ext.Ring.emulated(3, device="cuda")
    weight = random(512, 512, dtype=torch.float32, seed=1).cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x = random(64, 512, dtype=torch.float32, seed=2).cuda(non_blocking=True)
        y = rotated_linear(x, weight, ring=ring)
        expected = (x @ weight.t()).repeat(1, 3)
    stream.synchronize()
    assert_same(y, expected, 1e-5, "output")


@pytest.mark.real_gpu("two devices")
def test_wrong_devices_are_refused():
    ring = rtp_ext.Ring.emulated(2, device="cuda")
    x, weight = torch.zeros(3, 4), torch.zeros(5, 4)
    with pytest.raises(TypeError, match=r"cuda:0.*cpu"):
        rotated_linear(x, weight.cuda(), ring=ring)
    with pytest.raises(TypeError, match=r"cuda:0.*cpu"):
        rotated_linear(x.cuda(), weight, ring=ring)
