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


def _grown(rank, ranks, shape, gradient_route, halves=None):
    """Returns the mapped bytes before and after steps of two layers, and the prediction."""
    torch.manual_seed(0)
    (outputs, width), how = shape, {"gradient_route": gradient_route, "gradient_halves": halves}
    model = nn.Sequential(nn.Linear(width, outputs, bias=False), nn.Linear(outputs, width, bias=False))
    with rtp_ext.Ring(transport="shm", route="ring", timeout=30.0, **how) as ring:
        rtp_ext.fully_rotate(model, mesh=ring, bundle=False)
        before = _mapped(ranks)
        for _ in range(6):
            model(torch.ones(2, width)).sum().backward()
        after = _mapped(ranks)
        ring.exchange("no rank closes before")
    rotations = [RotatedOperation("linear", (Weight(each),)) for each in (shape, shape[::-1])]
    options = {"gradient_route": gradient_route, "sends_anywhere": False}
    held = rtp_bytes(rotations, ranks, rank=rank, receives_anywhere=False, **options)
    other = rtp_bytes(rotations, ranks, rank=rank, **options)
    return before, after, held.mailbox_bytes, other.mailbox_bytes


def _cases(rank, ranks):
    even = [_grown(rank, ranks, (width, width), route) for width in (64, 128, 512) for route in ("chain", "direct")]
    return even, [_grown(rank, ranks, (97, 500), "direct"), _grown(rank, ranks, (200, 256), "chain", True)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_mailboxes_take_what_is_predicted(ranks):
    for cases, uneven in run_ranks(_cases, ranks):
        for before, after, predicted, elsewhere in (*cases, *uneven):
            assert elsewhere == 0, "other transports have no mailboxes"
            assert before < 40_000 and after - before <= predicted, (cases, uneven)
        small, large = cases[:4], cases[4:]
        assert all(0.5 * predicted < after - before for before, after, predicted, _ in small), cases
        for (_, after, _, _), (_, after_large, _, _) in zip(small[2:], large, strict=True):
            assert after > 4 * after_large, "control: 0.3 MiB do not wait there"
