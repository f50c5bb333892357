"""Rings that are made where descriptors or threads run out: an error on every rank, and no process ends."""

import contextlib
import ctypes
import os
import re
import resource
import time

import pytest
import torch
import torch.distributed as dist
from grids import few
from harness import Cases, on_ranks, run_ranks
from torch import nn

import rtp_ext
from rtp_ext.inference.ring import InferenceRing
from rtp_ext.ring import bootstrap, ring

TIMEOUT = 10.0
PROMPT = 6.0  # below it
NEEDED = {"descriptors": 64, "threads": 32}  # more than a ring of two ranks takes
SYS_ADMIN, SYS_RESOURCE = 21, 24  # capabilities of root that exempt it from the limit of threads


def count_threads() -> None:
    """Makes the kernel count the threads of this process alone, as of a user who is not root."""
    os.setresuid(41000 + os.getpid() % 20000, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    sets[0] &= ~(1 << SYS_ADMIN | 1 << SYS_RESOURCE)
    assert libc.capset(header, sets) == 0


@contextlib.contextmanager
def room(what: str, more: int):
    """Limits this process to so many more descriptors or threads."""
    if what == "threads":
        kind, used = resource.RLIMIT_NPROC, len(os.listdir("/proc/self/task"))
    else:
        kind, used = resource.RLIMIT_NOFILE, max(map(int, os.listdir("/proc/self/fd"))) + 1
        taken = [os.open(os.devnull, os.O_RDONLY)]
        while max(taken) < used:  # no gaps
            taken.append(os.open(os.devnull, os.O_RDONLY))
        used = max(taken) + 1
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (used + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)
        if what == "descriptors":
            for each in taken:
                os.close(each)


def limits(function, what, more):
    """The function, with rank 1 limited meanwhile."""

    def limited(*arguments, **options):
        with room(what, more) if dist.get_rank() == 1 else contextlib.nullcontext():
            return function(*arguments, **options)

    return limited


def make(transport, inference):
    if inference:
        model = rtp_ext.rotate_for_inference(nn.Sequential(nn.Linear(4, 4)), transport=transport, timeout=TIMEOUT)
        model(torch.ones(1, 4))
        dist.barrier()
        return rtp_ext.ring_of(model)
    made = rtp_ext.Ring(transport=transport, timeout=TIMEOUT)
    list(made.rotate(torch.ones(2)))
    return made


def runs_out(rank, ranks, what, everything):
    cases = Cases()
    if what == "threads" and rank == 1:
        count_threads()
    for more in everything:
        with cases.case(f"{more} {what} for a ring"):
            problem = "expected room for .* descriptors and .* threads, got"
            start = time.monotonic()
            with pytest.raises(rtp_ext.RotationError, match=problem if rank else f"on global rank 1: {problem}"):
                limits(make, what, more + 1)("shm", False)  # the test's store is a file, which takes a descriptor
            assert time.monotonic() - start < PROMPT, "in time"
    connect, share = ring.connect, InferenceRing.share
    for transport, inference in (("shm", False), ("tcp", False), ("shm", True), ("tcp", True)):
        fine = 0
        for more in (*everything, NEEDED[what]):
            with cases.case(f"{more} {what} for {transport}, {inference}"):
                ring.connect, InferenceRing.share = limits(connect, what, more), limits(share, what, more)
                start = time.monotonic()
                try:
                    make(transport, inference).close()
                    fine += 1
                except rtp_ext.RotationError as error:
                    assert more < NEEDED[what], str(error)
                    assert re.search("cannot|did not join|Too many open files", str(error)), error
                assert time.monotonic() - start < PROMPT, "in time"
                dist.barrier()
        assert fine >= 1, "control: there is room enough"
    cases.finish()


@pytest.mark.parametrize("what", ["descriptors", "threads"])
def test_an_error_on_every_rank(what):
    if what == "threads" and os.geteuid() != 0:
        pytest.skip("the kernel counts the threads of all processes of a user")
    run_ranks(runs_out, 2, what, few([0, 3], range(12)))


@on_ranks(2)
def test_a_rank_that_does_not_call_is_named(rank, ranks):
    assert bootstrap.lacks_room(2, ranks) is None, "control"
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(rtp_ext.RingTimeout, match=r"expected a call on every rank, got none on global ranks 1"):
            rtp_ext.Ring(timeout=1.0)
        assert time.monotonic() - start < PROMPT
    dist.barrier()
