"""Blocking communicators on the simulated NCCL: passes are right without a thread for each group, and a call that waits
for a lost rank still ends with an error."""

import threading
import time
from datetime import timedelta

import pytest
from simulated_cuda import run_threads, skip_without_headers, values
from test_cuda_transports import TRANSPORTS, connected_news, passes, unique_ids, until_failure

from rtp_ext import RingTimeout
from rtp_ext.options import TransportOptions
from rtp_ext.ring.links import transports

skip_without_headers()

BLOCKING = {
    "blocking": {"blocking": True},
    "blocking, registered": {"blocking": True, "registered": True},
}


@pytest.fixture(autouse=True)
def kinds(monkeypatch):
    for name, kind in BLOCKING.items():
        monkeypatch.setitem(TRANSPORTS, name, kind)


@pytest.mark.parametrize("kind", BLOCKING)
def test_passes_give_what_one_process_gives(sim, kind):
    sim.controls.delay_us, sim.controls.launch_queue = 200, 8
    values(run_threads(passes, 3, sim, kind, unique_ids(sim), 3, 1))
    assert sim.mistakes() == []


@pytest.mark.parametrize("fault", ["leaves", "fails"])
def test_a_call_that_a_lost_rank_holds_up_is_given_up(sim, fault):
    """The launch queue is full, so that the host waits inside NCCL; a communicator may not be aborted under it."""
    sim.controls.launch_queue = 3
    timeout, kind = (1.0, 100.0)[fault == "fails"], "blocking"
    news = connected_news(3) if fault == "fails" else None
    arguments = (sim, kind, unique_ids(sim), 3, timedelta(seconds=timeout), fault, threading.Barrier(3), news)
    for error, waited, alive in values(run_threads(until_failure, 3, *arguments))[:-1]:
        assert isinstance(error, RingTimeout) and not alive and waited < min(timeout, 5) + 8, error
    assert sim.mistakes() == []


def test_without_a_way_to_end_a_call_nothing_is_freed_under_it(sim):
    """The control: where NCCL cannot revoke, a rank stays in its call, and its communicator is left as it is."""
    sim.controls.launch_queue, sim.controls.version = 3, 22803
    kind = "blocking"
    arguments = (sim, kind, unique_ids(sim), 2, timedelta(seconds=1), "leaves", threading.Barrier(2))
    with pytest.raises(AssertionError, match="did not end within 4"):
        run_threads(until_failure, 2, *arguments, timeout=4.0)
    assert not any("inside a call" in text for text in sim.mistakes())
    sim.reset(1)


def test_a_rank_that_does_not_come_to_the_start_is_a_timeout(sim):
    start = time.monotonic()
    with pytest.raises(RingTimeout, match="the start of a communicator: a rank of the ring did not answer"):
        sim.nccl(unique_ids(sim), 0, 2, timedelta(seconds=0.3), None, blocking=True)
    assert time.monotonic() - start < 10


class _Ranks:
    """A ring whose ranks have loaded these versions of NCCL."""

    def __init__(self, *versions):
        self.versions = versions

    def exchange(self, mine):
        return [mine, *self.versions]


@pytest.mark.parametrize(
    "mine, others, blocking",
    [(23007, [23007], True), (23007, [22809], True), (23007, [22803], False), (22803, [23100], False)],
)
def test_communicators_are_blocking_where_every_rank_can_end_their_calls(monkeypatch, mine, others, blocking):
    monkeypatch.setattr(transports._native, "nccl_versions", lambda: (22100, mine))
    settled = transports.settle(_Ranks(*others), TransportOptions.of(None))
    assert (settled.blocking, settled.min_ctas, settled.max_ctas) == (blocking, 0, transports.MOST_CTAS)
    wishes = {"blocking": not blocking, "max_ctas": 0, "min_ctas": 20}
    settled = transports.settle(_Ranks(*others), TransportOptions.of(wishes))
    assert (settled.blocking, settled.min_ctas, settled.max_ctas) == (not blocking, 20, 0)
    assert transports.settle(_Ranks(*others), TransportOptions.of({"min_ctas": 20})).max_ctas == 20


def test_the_option_is_a_bool():
    assert TransportOptions.of({"blocking": True}).blocking and TransportOptions.of(None).blocking is None
    with pytest.raises(TypeError, match="transport option blocking to be a bool or None, got 1"):
        TransportOptions.of({"blocking": 1})
