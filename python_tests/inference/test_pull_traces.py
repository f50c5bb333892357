"""Traces of forwards whose shards are pulled: waiting for them counts as waiting for weights."""

from __future__ import annotations

import copy
import os
import signal
import threading
from itertools import pairwise

import torch
import torch.distributed as dist
from harness import on_ranks
from reference import assert_same, random
from torch import nn

import rtp_ext
from rtp_ext import trace

STOPPED = 1.0  # seconds in which the owner of the shards does not answer
LAYERS = 3


def _waits(recorded):
    return [event for event in recorded.events if event.kind == "wait"]


@on_ranks(2)
@torch.no_grad()
def test_waits_for_pulled_shards_are_traced(rank, cases):
    plain = nn.Sequential(*(nn.Linear(32, 32, dtype=torch.float64) for _ in range(LAYERS)))
    x = random(3, 32, dtype=torch.float64, seed=rank)
    for transport, weights in (("tcp", None), ("tcp", "int8"), ("shm", None)):
        model = copy.deepcopy(plain).to(torch.float32 if weights else torch.float64)
        model = rtp_ext.rotate_for_inference(model, transport=transport, weights=weights, timeout=60.0)
        ring = rtp_ext.ring_of(model)
        pids = ring.exchange(os.getpid())
        with ring.trace() as recorded:
            if transport == "tcp" and rank == 0:
                os.kill(pids[1], signal.SIGSTOP)
                threading.Timer(STOPPED, os.kill, (pids[1], signal.SIGCONT)).start()
            if rank == 0:
                y = model(x.to(model[0].weight.dtype if weights is None else torch.float32))
        with cases.case(f"{transport} {weights}"):
            if rank == 0:
                _check(recorded, transport, weights)
                if weights is None:
                    assert_same(y, plain(x), 1e-12, "values")
        dist.barrier()
        ring.close()


def _check(recorded, transport, weights):
    found, waits = trace.causes(recorded), _waits(recorded)
    total = sum(each.end - each.start for each in recorded.passes)
    assert len(recorded.passes) == LAYERS and all(each.options["sourced"] for each in recorded.passes)
    own = sorted((e for e in recorded.events if e.lane == "compute"), key=lambda event: event.start)
    assert all(after.start >= before.end for before, after in pairwise(own)), "no time counts twice"
    pulled = [event for event in waits if event.label.startswith("wait: forward")]
    if transport == "shm":
        assert not pulled and found["weights"] == 0, "control: nothing is pulled"
        return
    assert len(pulled) == LAYERS, "one other rank"
    assert 0.5 * STOPPED < found["weights"] <= total and found["products"] < 0.5 * STOPPED, found
    assert (found["conversions"] > 0) == (weights is not None), found
    assert sum(each.waiting for each in trace.summaries([recorded])) >= 0.5 * STOPPED
