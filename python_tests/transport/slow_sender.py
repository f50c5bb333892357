"""Two ranks over shared memory. The sender thread of rank 0, whose clock is slow (see the test), still announces a
large message when its next one, a small one, is posted."""

import os
import sys
import time
from datetime import timedelta

import torch

from rtp_ext import _native

LARGE, SMALL = 100_000, 100  # bytes of a shard


def rotated(executor, rank, size):
    """Returns the values of the shard that arrives."""
    shard = torch.full((size,), size % 200 + rank, dtype=torch.uint8)
    execution = _native.Execution.rotate(executor, [shard], [[[size]] * 2], "ring", False)
    found = {}
    while (step := execution.next()) is not None:
        (view,) = execution.weight()
        found[step.owner] = set(view.tolist())
    execution.finish()
    return found[1 - rank]


def main():
    ends = [os.pipe(), os.pipe()]  # to rank 0 and 1
    child = os.fork()
    rank = 0 if child else 1
    transport = _native.ShmTransport(rank, 2, timedelta(seconds=3))
    addresses = [transport.address()] * 2
    os.write(ends[1 - rank][1], addresses[0].encode())
    addresses[1 - rank] = os.read(ends[rank][0], 4096).decode()
    transport.connect(addresses)
    executor = _native.Executor(transport, rank, 2, torch.device("cpu"))
    if rank == 0:
        os.environ["SLOW_CLOCK"] = "1"
    assert rotated(executor, rank, LARGE) == {LARGE % 200 + 1 - rank}
    if rank == 1:
        time.sleep(0.3)  # looks for the small message when the large one has been announced
    assert rotated(executor, rank, SMALL) == {SMALL % 200 + 1 - rank}
    if rank == 0:
        os.environ.pop("SLOW_CLOCK")
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


main()
