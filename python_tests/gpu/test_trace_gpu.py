"""Traces of CUDA streams: every step once, no step before its dependencies, and slow hops appear as waiting."""

import logging
from datetime import timedelta

import pytest
import torch
from reference import random
from support import emulated, record
from trace_checks import check_trace

from rtp_ext import trace
from rtp_ext.functional import rotated_linear

pytestmark = pytest.mark.alone

CLOCK = 5e-6  # seconds: timing events resolve half a microsecond
TOKENS, FEATURES, ROWS = 2048, 2048, 2048
HEAD_START = 10_000_000  # cycles in which the host gets ahead


def layer():
    x = random(TOKENS, FEATURES, dtype=torch.float32, seed=1).cuda().requires_grad_()
    return x, random(ROWS, FEATURES, dtype=torch.float32, seed=2).cuda().requires_grad_()


def step(ring, x, weight):
    rotated_linear(x, weight, ring=ring).square().mean().backward()


def recorded(ring, x, weight):
    for _ in range(2):
        step(ring, x, weight)
    with ring.trace() as found:
        torch.cuda._sleep(HEAD_START)
        step(ring, x, weight)
    return found


@pytest.mark.parametrize("link", ["sm-local", "ce-local:4"])
def test_a_step(link, tmp_path):
    ring = emulated(4, link=link)
    found = recorded(ring, *layer())
    assert [each.operation for each in found.passes] == ["rotated_linear forward", "rotated_linear backward"]
    check_trace(found, tolerance=CLOCK)
    for each in trace.summaries([found]):
        assert 0 < each.compute <= each.total * 1.01 and each.hops["weight"] > 0
        record(
            test="trace", link=link, pass_=each.operation, hidden=each.hidden, waiting=each.waiting, total=each.total
        )
    trace.plot(tmp_path / "trace.png", [found])
    trace.write_chrome(tmp_path / "trace.json", [found])


def test_slow_hops_are_seen_as_waiting():
    ring = emulated(4)
    x, weight = layer()
    quick = sum(each.waiting for each in trace.summaries([recorded(ring, x, weight)]))
    ring.communicator.executor.set_delay(timedelta(milliseconds=20))
    found = recorded(ring, x, weight)
    check_trace(found, tolerance=CLOCK)
    # 9 hops with delays of 10 ms on average
    assert sum(each.waiting for each in trace.summaries([found])) > quick + 10e-3


@pytest.mark.real_gpu("it captures")
def test_passes_of_a_graph_are_counted_and_not_recorded(caplog):
    ring = emulated(4)
    x, weight = layer()

    def forward():
        with torch.no_grad():
            return rotated_linear(x, weight, ring=ring)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            forward()
        stream.synchronize()
        with caplog.at_level(logging.WARNING, "rtp_ext"), ring.trace() as found:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                forward()
            graph.replay()
    assert found.captured == 1 and found.passes == [] and "1 passes were captured" in caplog.text
