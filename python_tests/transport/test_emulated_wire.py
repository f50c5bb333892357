"""The wire of an emulated ring on a CPU: results as without it, and no hop arrives earlier than its rate allows."""

import time

import pytest
import torch

import rtp_ext
from rtp_ext.schedule import make_schedule
from rtp_ext.timeline import Lockstep

RANKS, LATENCY = 4, 4e-3


def step(link, **options):
    """Returns the results of a forward and backward, and the seconds of each."""
    generator = torch.Generator().manual_seed(0)
    x, shard = (torch.randn(5, 16, generator=generator).requires_grad_() for _ in range(2))
    seconds = []
    with rtp_ext.Ring.emulated(RANKS, link=link, prefetch=0, **options) as ring:
        for _ in range(2):  # the first pass also allocates
            begun = time.perf_counter()
            y = rtp_ext.functional.rotated_linear(x, shard, ring=ring)
            between = time.perf_counter()
            gradients = torch.autograd.grad(y.square().sum(), (x, shard))
            seconds = [between - begun, time.perf_counter() - between]
    return (y.detach(), *gradients), seconds


@pytest.mark.parametrize("group", [1, 2, RANKS])
@pytest.mark.parametrize("gradient_route", ["chain", "direct"])
def test_a_wire_changes_times_alone(group, gradient_route):
    options = {"group": group, "gradient_route": gradient_route}
    plain, _ = step(None, **options)
    wired, seconds = step(f"wire:1e9:{LATENCY}", **options)
    for expected, actual in zip(plain, wired, strict=True):
        assert torch.equal(expected, actual)
    assert min(seconds) >= (RANKS - 1) * LATENCY
    bytes_ = 5 * 16 * 4
    _, slow = step(f"wire:{bytes_ / LATENCY}", **options)
    assert min(slow) >= (RANKS - 1) * LATENCY


def test_a_host_that_computes_and_posts_waits_in_between():
    """By hand: the hops of one group of four shards, each of which sends what the one before brought."""
    step = Lockstep(make_schedule(4, 0, pass_="backward", group=4))
    durations = {"dgrad": 1.0, "wgrad": 1.0, "copy": 0.0, "add": 0.0, "weight": 2.0, "gradient": 1.0}
    # streams: dgrad from max(wgrad 4, weights 6), 10, then two hops of gradients
    assert step.makespan(durations) == 12.0
    # a host posts the third hop of weights at 4: wgrad to 8, dgrad to 12, then the same hops
    assert step.makespan(durations, by_host=True) == 14.0
    forward = Lockstep(make_schedule(4, 0, pass_="forward"))
    assert [forward.makespan({"forward": 1.0, "weight": 2.0}, by_host=host) for host in (False, True)] == [7.0, 7.0]
