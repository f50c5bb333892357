"""A signal during a wait for another rank: its handler runs within a moment. If it raises, as Ctrl-C does, the ring
ends on every rank."""

import os
import signal
import threading
import time

import pytest
import torch
from harness import on_ranks
from reference import random

import rtp_ext
from rtp_ext.functional import Prepared
from rtp_ext.nn import RotatedLinear

TIMEOUT = 60.0  # of the rings: nothing here may take so long
AFTER = 0.4  # seconds until the signal
PROMPT = 2.0  # seconds that it may take from there; one, and some for the scheduler
ABSENT, INTERRUPTED = 2, 0


class Ended(Exception):
    """What a handler raises."""


def _forward(ring):
    linear = RotatedLinear(5, 7, ring=ring)
    linear(torch.ones(2, 5))  # the ranks agree
    return lambda: linear(torch.ones(2, 5))


def _backward(ring):
    y = RotatedLinear(5, 7, ring=ring)(torch.ones(2, 5))
    return lambda: y.sum().backward(retain_graph=True)


def _driven_from_python(ring):
    prepared = Prepared()
    list(ring.rotate(torch.ones(3), prepared=prepared))
    return lambda: list(ring.rotate(torch.ones(3), prepared=prepared))


def _exchanged(ring):
    return lambda: ring.exchange(None)


def _gathered(ring):
    ring.all_gather(torch.ones(3))
    return lambda: ring.all_gather(torch.ones(3))


def _whole_model(ring):
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.LayerNorm(6))
    rtp_ext.fully_rotate(model, mesh=ring)
    loss = model(torch.ones(2, 5)).sum()
    return lambda: loss.backward(retain_graph=True)


WAITS = [_backward, _driven_from_python, _exchanged, _gathered, _whole_model]


def _raise(*_):
    raise Ended


@on_ranks(3)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_signal_ends_a_wait_and_the_ring(rank, cases, transport):
    every = [(wait, KeyboardInterrupt) for wait in WAITS]
    if transport == "tcp":
        every = [(_forward, KeyboardInterrupt), (_backward, Ended)]
    for wait, error in every:
        with cases.case(f"{wait.__name__} {error.__name__}"):
            signal.signal(signal.SIGINT, _raise if error is Ended else signal.default_int_handler)
            ring = rtp_ext.Ring(transport=transport, timeout=TIMEOUT)
            call = wait(ring)
            ring.exchange(None)
            if rank == ABSENT:
                time.sleep(AFTER + PROMPT)
            start = time.monotonic()
            if rank == INTERRUPTED:
                threading.Timer(AFTER, os.kill, (os.getpid(), signal.SIGINT)).start()
                with pytest.raises(error):
                    call()
            else:
                with pytest.raises(rtp_ext.RotationError, match=f"this rank failed: {error.__name__}"):
                    for _ in range(2):  # what the others had sent may be all that the first call needs
                        call()
            waited = time.monotonic() - start
            # Gloo sends to the absent rank, which keeps rank 1 from seeing that rank 0 has gone.
            longest = AFTER + PROMPT if wait is not _exchanged or rank == INTERRUPTED else 2 * (AFTER + PROMPT)
            assert waited < longest, f"rank {rank} waited {waited} s"
            with pytest.raises(rtp_ext.RotationError, match="cannot be used any more"):
                call()


@on_ranks(2)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_handler_that_returns_lets_the_wait_go_on(rank, transport):
    """A handler that returns runs during the wait, and the wait goes on."""
    ran = []
    signal.signal(signal.SIGUSR2, lambda *_: ran.append(time.monotonic()))
    with rtp_ext.Ring(transport=transport, timeout=TIMEOUT) as ring:
        linear = RotatedLinear(5, 7, ring=ring)
        x = random(2, 5, dtype=torch.float32, seed=1)
        expected = linear(x)
        ring.exchange(None)
        if rank == 0:
            threading.Timer(AFTER, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        else:
            time.sleep(AFTER + PROMPT)
        assert torch.equal(linear(x), expected)
        finished = time.monotonic()
    assert rank != 0 or (len(ran) == 1 and ran[0] < finished - PROMPT / 2)
