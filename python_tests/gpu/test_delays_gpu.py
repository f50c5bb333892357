"""Races: with delays before the hops of a channel, or before computes, every result stays the same.

RTP_RACE_REPETITIONS sets how often (default 5).
"""

import os
import random as rng
from itertools import pairwise, product

import pytest
import torch
from reference import random
from support import LINKS, emulated

from rtp_ext.functional import rotated_linear

pytestmark = pytest.mark.alone

REPETITIONS = int(os.environ.get("RTP_RACE_REPETITIONS", "5"))
RANKS, TOKENS, FEATURES, ROWS = 4, 256, 512, 384
LONGEST = 2000  # microseconds; a GEMM here takes some ten
CYCLES = 2000  # of the GPU's clock in a microsecond, about


def layers(count: int) -> list[torch.Tensor]:
    return [
        random(ROWS, FEATURES, dtype=torch.float32, seed=seed, scale=FEATURES**-0.5).cuda().requires_grad_()
        for seed in range(count)
    ]


def passes(ring, x, weights, pauses):
    """Forward and backward of several layers that share the ring's slots, with pauses of the compute stream."""
    outputs = []
    for weight, pause in zip(weights, pauses, strict=True):
        if pause:
            torch.cuda._sleep(pause * CYCLES)
        outputs.append(rotated_linear(x, weight, ring=ring))
    total = sum(y.square().mean() for y in outputs)
    gradients = torch.autograd.grad(total, [x, *weights])
    return [y.detach() for y in outputs] + list(gradients)


def check(ring, undisturbed, generator, repetitions=REPETITIONS):
    """Every repetition, with new random pauses, ends bitwise like the undisturbed ring."""
    x = random(TOKENS, FEATURES, dtype=torch.float32, seed=99).cuda().requires_grad_()
    for in_place in (False, True):
        weights, ring.in_place = layers(4), in_place
        expected = passes(undisturbed, x, weights, [0] * 4)
        results = []
        for _ in range(repetitions):  # nothing waits for the GPU in between
            pauses = [generator.choice([0, 0, generator.randrange(LONGEST)]) for _ in weights]
            results.append(passes(ring, x, weights, pauses))
        for number, (result, part) in enumerate(product(results, range(len(expected)))):
            assert torch.equal(result[part], expected[part]), f"in_place {in_place}: result {number}, tensor {part}"
        assert not any(torch.equal(a, b) for a, b in pairwise(expected[:4])), "control: layers differ"


@pytest.mark.parametrize("link", LINKS)
def test_held_up_computes(link):
    check(emulated(RANKS, link=link), emulated(RANKS), rng.Random(0))


def milliseconds(ring, shard) -> float:
    """Returns the time of a rotation on the GPU."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _owner, _view in ring.rotate(shard):
        pass
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


@pytest.mark.parametrize("delay", [20, 200, LONGEST])
@pytest.mark.parametrize("link", LINKS)
def test_held_up_channels(link, delay, monkeypatch):
    """Before every hop the channel waits up to `delay` microseconds: what does not wait for it reads too early."""
    undisturbed = emulated(RANKS, link=link)
    monkeypatch.setenv("RTP_DEBUG_DELAY_US", str(delay))
    ring = emulated(RANKS, link=link)
    assert ring.options.transport_options.delay_us == delay
    if delay == LONGEST:
        shard = torch.ones(1 << 16, device="cuda")
        times = [[milliseconds(each, shard) for _ in range(10)] for each in (undisturbed, ring)]
        # 30 hops, each delayed by LONGEST / 2 on average; a tenth of that is far above their usual time
        assert sum(times[1]) > sum(times[0]) + 30 * LONGEST / 2 / 1000 / 10, "control: hops are not held up"
    repetitions = REPETITIONS if delay < LONGEST else max(1, REPETITIONS // 10)
    check(ring, undisturbed, rng.Random(delay), repetitions)


@pytest.mark.real_gpu("streams of the fake are in order")
def test_a_missing_wait_would_be_seen():
    """Control: the same reads and writes without the waits, on two streams, end differently under the same delays."""
    x = random(TOKENS, FEATURES, dtype=torch.float32, seed=99).cuda()
    shard = random(ROWS, FEATURES, dtype=torch.float32, seed=1).cuda()
    slot = torch.zeros_like(shard)
    expected = x @ shard.t()
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(LONGEST * CYCLES)
        slot.copy_(shard)
    too_early = x @ slot.t()
    torch.cuda.synchronize()
    assert not torch.equal(too_early, expected)
