"""Memory of the mailboxes of small messages over shm: predicted, and mapped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from torch import nn

import rtp_ext
from rtp_ext.planner import RotatedOperation, Weight, rtp_bytes

ENTRIES = 8 * (64 << 10)  # bytes of a mailbox without its headers


def _mapped(ranks: int) -> int:
    """Returns the bytes of the segment of mailboxes that memory has been allocated for."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            status, named = link.stat(), "memfd:rtp_ext" in os.readlink(link)
        except OSError:  # the descriptor of this loop
            continue
        if named and 1 < status.st_size / (2 * ranks * ENTRIES) < 1.1:
            found.append(status.st_blocks * 512)
    assert found, "the segment of this rank"
    return max(found)


def _grown(rank, ranks, width, gradient_route):
    """Returns the mapped bytes before and after steps of two layers, and the prediction."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2)))
    with rtp_ext.Ring(transport="shm", route="ring", gradient_route=gradient_route, timeout=30.0) as ring:
        rtp_ext.fully_rotate(model, mesh=ring, bundle=False)
        before = _mapped(ranks)
        for _ in range(6):
            model(torch.ones(2, width)).sum().backward()
        after = _mapped(ranks)
        ring.exchange("no rank closes before")
    rotations = [RotatedOperation("linear", (Weight((width, width)),))] * 2
    options = {"gradient_route": gradient_route, "sends_anywhere": False}
    held = rtp_bytes(rotations, ranks, rank=rank, receives_anywhere=False, **options)
    other = rtp_bytes(rotations, ranks, rank=rank, **options)
    return before, after, held.mailbox_bytes, other.mailbox_bytes


def _cases(rank, ranks):
    return [_grown(rank, ranks, width, route) for width in (64, 128, 512) for route in ("chain", "direct")]


@pytest.mark.parametrize("ranks", [2, 3])
def test_mailboxes_take_what_is_predicted(ranks):
    for cases in run_ranks(_cases, ranks):
        for before, after, predicted, elsewhere in cases:
            assert elsewhere == 0, "other transports have no mailboxes"
            assert before < 40_000 and 0.5 * predicted < after - before <= predicted, cases
        small, large = cases[2:4], cases[4:]
        for (_, after, predicted, _), (_, after_large, predicted_large, _) in zip(small, large, strict=True):
            assert after > 4 * after_large and predicted > 4 * predicted_large, "control: 0.3 MiB do not wait there"
