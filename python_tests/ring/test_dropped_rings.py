"""Rings that are dropped without close() release their resources, at any time of the ranks' garbage collections."""

import copy
import gc
import os
import sys
import time

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from models import batch_loss, make_model

import rtp_ext
from rtp_ext.dtensor_hooks import GROUPS_ARE_COUNTED

TIMEOUT = 30.0


def _held():
    """Waits for 5 equal counts in a row: the kernel lists a thread for some time after it was joined."""
    gc.collect()
    if not GROUPS_ARE_COUNTED:
        return {}  # torch before 2.14: the process groups of dropped rings stay, as rtp_ext/ring/links/groups.py says
    counts = []
    while len(counts) < 5 or counts[-5:] != counts[-1:] * 5:
        counts.append({name: len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")})
        time.sleep(0.02)
    return counts[-1]


def _check_held(before):
    now = _held()
    assert now == before, f"{now}, before {before}"


def _use(rank, transport, whole):
    """Returns a used ring, or a model on one, without other references."""
    if not whole:
        ring = rtp_ext.Ring(transport=transport, timeout=TIMEOUT)
        assert len(list(ring.rotate(torch.ones(3)))) == ring.size
        return ring
    model = rtp_ext.fully_rotate(make_model(), transport=transport, timeout=TIMEOUT)
    batch_loss(model, rank, 0).backward()
    batch_loss(copy.deepcopy(model), rank, 0).backward()
    return model


@pytest.mark.parametrize("transport", ["shm", "tcp", "c10d"])
@on_ranks([2, 3])
def test_dropped_rings_leave_nothing(rank, cases, transport):
    unraisable = []
    sys.unraisablehook = lambda caught: unraisable.append(str(caught.exc_value))
    for whole in (False, True):
        _use(rank, transport, whole)  # creates the state that all rings share
        dist.barrier()
        before = _held()
        for _ in range(5):
            _use(rank, transport, whole)
        with cases.case(f"dropped, with a model: {whole}"):
            dist.barrier()
            _check_held(before)
        kept = [_use(rank, transport, whole) for _ in range(3)]
        dist.barrier()
        del kept[rank : rank + 1]  # a different one on each rank
        gc.collect()
        dist.barrier()
        with cases.case(f"dropped at other times on other ranks, with a model: {whole}"):
            kept.append(_use(rank, transport, whole))
            dist.barrier()
            kept.clear()
            dist.barrier()
            _check_held(before)
    ring = _use(rank, transport, False)
    if rank == 0:
        del ring
        gc.collect()
    dist.barrier()
    if rank > 0:
        with cases.case("a rank that left is missed"), pytest.raises(rtp_ext.RingTimeout, match=r"a rank|rank 0"):
            while True:
                list(ring.rotate(torch.ones(3)))
    last = rtp_ext.Ring(transport=transport, timeout=TIMEOUT)
    dist.barrier()
    dist.destroy_process_group()
    with cases.case("after the process group"):
        del last
        gc.collect()
        assert not unraisable, unraisable


@on_ranks(2)
def test_rings_at_the_end_of_the_interpreter(rank):
    """A ring, a model and a hop sent ahead that still exist when the interpreter ends."""
    globals()["kept"] = _use(rank, "shm", True)
