"""A process forked from a rank is no rank: its calls raise an error, and its end does not affect the rank's ring."""

import gc
import multiprocessing
import os
import signal
import time
import weakref
from pathlib import Path

import pytest
import torch
from grids import few
from harness import on_ranks
from models import batch_loss, make_batch, make_model
from torch.utils.data import DataLoader, Dataset

import rtp_ext

TIMEOUT = 30.0


class Embedded(Dataset):
    """A dataset whose items are a model's outputs, or do not use the model."""

    def __init__(self, model, calls):
        self.model, self.calls = model, calls

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.model(make_batch(0, 0)[0]) if self.calls else torch.full((2,), float(index))


def _told(model, ring, rank):
    """Returns the errors of all calls in a forked process."""
    told = []
    attempts = (
        lambda: model(make_batch(rank, 0)[0]),
        lambda: ring.rotate(torch.ones(2)),
        lambda: ring.collect(lambda *_: None, torch.ones(2)),
        lambda: ring.exchange(1),
        lambda: ring.all_reduce(torch.ones(2)),
        lambda: model.norm(torch.ones(2, 10, dtype=torch.float64)),
    )
    for attempt in attempts:
        try:
            told.append(f"no error: {attempt()}")
        except rtp_ext.RotationError as error:
            told.append(str(error))
    ring.close()
    return [*told, ring.alive]


def _report(model, ring, rank, queue):
    queue.put(_told(model, ring, rank))


def _check_ended(pid):
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0, f"exit code {os.waitstatus_to_exitcode(status)}"
            return
        time.sleep(0.02)
    stacks = []
    if "RTP_RECORD_DIR" in os.environ:  # forked from a rank, whose handler it has
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        stacks = [file.read_text() for file in Path(os.environ["RTP_RECORD_DIR"]).glob("stack*")]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("\n".join(["still there", *stacks]))


@pytest.mark.parametrize("transport", ["shm", "tcp", "c10d"])
@on_ranks(few([2], [2, 3]))
def test_a_forked_process_is_no_rank(rank, ranks, cases, transport):
    model = rtp_ext.fully_rotate(make_model(), transport=transport, timeout=TIMEOUT)
    ring = rtp_ext.ring_of(model)
    first = batch_loss(model, rank, 0)
    first.backward()
    model.zero_grad()
    context = multiprocessing.get_context("fork")
    with cases.case("multiprocessing"):
        queue = context.SimpleQueue()
        child = context.Process(target=_report, args=(model, ring, rank, queue))
        child.start()
        *told, alive = queue.get()
        child.join(TIMEOUT)
        assert child.exitcode == 0 and not alive
        for text in told:
            assert f"the ring belongs to process {os.getpid()}" in text and f"process {child.pid} was forked" in text
    with cases.case("a child that takes everything down"):
        pid = os.fork()
        if pid == 0:
            known = weakref.ref(ring)
            del model, ring, first, child
            gc.collect()
            os._exit(0 if known() is None else 3)
        _check_ended(pid)
    with cases.case("a child within a rotation"):
        rotation = ring.rotate(torch.ones(2))
        for owner, _ in rotation:
            if owner == rank:
                pid = os.fork()
                if pid == 0:
                    for attempt in (lambda: ring.rotate(torch.ones(2)), lambda: next(rotation)):
                        try:
                            gc.collect()
                            attempt()
                            os._exit(3)
                        except rtp_ext.RotationError:
                            pass
                    os._exit(0)
                _check_ended(pid)
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5  # its wait for a failed worker, otherwise 5 s
    with cases.case("workers of a DataLoader"):
        options = {"num_workers": 1, "batch_size": None, "multiprocessing_context": "fork"}
        loaded = [batch.tolist() for batch in DataLoader(Embedded(model, False), **options)]
        assert loaded == [[0.0, 0.0], [1.0, 1.0]]
        with pytest.raises(rtp_ext.RotationError, match="was forked from it and is no rank of the ring"):
            next(iter(DataLoader(Embedded(model, True), **options)))
    with cases.case("the ring afterwards"):
        assert not ring.failure_report._store.check([str(each) for each in range(ranks)]), "a child called the roll"
        again = batch_loss(model, rank, 0)
        again.backward()
        assert ring.alive and torch.equal(again, batch_loss(model, rank, 0))
        ring.close()


def test_a_ring_of_one_process_goes_with_a_fork():
    ring = rtp_ext.Ring.emulated(3)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if len(list(ring.rotate(torch.ones(2)))) == 3 else 3)
    _check_ended(pid)
