"""Routes on one GPU: gathered, in halves, sent ahead, with a second compute stream: the plain layer's results."""

import pytest
import torch
from reference import TOLERANCE, assert_same, differs, random
from support import LINKS, emulated
from torch import nn

import rtp_ext
from rtp_ext.functional import rotated_linear, rotated_linears

RANKS = 4
WAYS = {
    "gather": {"route": "gather"},
    "halves": {"gradient_halves": True},
    "direct": {"route": "direct"},
    "halves direct": {"route": "direct", "gradient_halves": True},
}
# rows, in and out features of a shard: the second fill only part of their last wave, so two streams compute
SIZES = [(33, 7, 5), (640, 768, 384)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("link", LINKS)
def test_a_layer_of_repeated_shards(link, way, dtype):
    ring = emulated(RANKS, link=link, **WAYS[way])
    tolerance = TOLERANCE[dtype]
    for tokens, features, rows in SIZES:
        weight = random(rows, features, dtype=dtype, seed=1, scale=features**-0.5).cuda().requires_grad_()
        bias = random(rows, dtype=dtype, seed=2).cuda().requires_grad_()
        x = random(tokens, features, dtype=dtype, seed=3).cuda().requires_grad_()
        leaves = [leaf.detach().double().requires_grad_() for leaf in (x, weight, bias)]
        expected = nn.functional.linear(leaves[0], leaves[1].repeat(RANKS, 1), leaves[2].repeat(RANKS))
        y = rotated_linear(x, weight, bias, ring=ring)
        dy = random(*y.shape, dtype=dtype, seed=4).cuda()
        y.backward(dy)
        expected.backward(dy.double())
        where = f"{way} {link} {tokens}x{features}->{rows}"
        assert_same(y, expected, tolerance, f"output, {where}")
        assert_same(x.grad, leaves[0].grad, tolerance, f"input gradient, {where}")
        for mine, right in zip((weight, bias), leaves[1:], strict=True):
            assert_same(mine.grad, right.grad / RANKS, tolerance, f"gradient, {where}")
            assert differs(mine.grad, right.grad, tolerance), "control: summed instead of averaged"


def test_the_second_size_takes_two_lanes():
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    tokens, features, rows = SIZES[1]
    assert rtp_ext._native.wastes_last_wave(tokens, rows, multiprocessors)
    assert rtp_ext._native.wastes_last_wave(tokens, features, multiprocessors)


@pytest.mark.parametrize("link", LINKS)
def test_sent_ahead_or_not(link):
    """Bit for bit the same, and every hop that was sent ahead is used."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(256, 256) for _ in range(5))).cuda()
    x = random(96, 256, dtype=torch.float32, seed=1).cuda()
    results = []
    for prefetch in (0, 1):
        ring = emulated(RANKS, link=link, prefetch=prefetch)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(5))).cuda()
        model.load_state_dict(plain.state_dict())
        rtp_ext.fully_rotate(model, mesh=ring, bundle=False)
        torch.cuda._sleep(100_000_000)
        outputs = []
        for _ in range(6):
            y = model(x)
            y.square().mean().backward()
            outputs.append(y.detach())
        results.append(
            [*outputs, *(p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters())]
        )
        sent, used = ring.prefetched()
        assert sent == used and (sent > 0) == (prefetch == 1)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_three_that_travel_together_on_two_lanes(dtype):
    ring = emulated(RANKS)
    weights = [
        random(rows, 512, dtype=dtype, seed=rows, scale=512**-0.5).cuda().requires_grad_() for rows in (256, 64, 64)
    ]
    x = random(320, 512, dtype=dtype, seed=1).cuda().requires_grad_()
    outputs = rotated_linears([x], weights, ring=ring)
    leaves = [leaf.detach().double().requires_grad_() for leaf in (x, *weights)]
    right = [nn.functional.linear(leaves[0], leaf.repeat(RANKS, 1)) for leaf in leaves[1:]]
    sum(y.float().square().sum() for y in outputs).backward()
    sum(y.square().sum() for y in right).backward()
    for mine, expected in zip(outputs, right, strict=True):
        assert_same(mine, expected, TOLERANCE[dtype], "output")
    assert_same(x.grad, leaves[0].grad, 2 * TOLERANCE[dtype], "input gradient")
    for mine, leaf in zip(weights, leaves[1:], strict=True):
        assert_same(mine.grad, leaf.grad / RANKS, 2 * TOLERANCE[dtype], "gradient")
