"""The agreement of a ring on a transport, without real ranks."""

import pytest
import torch

from rtp_ext import RotationError, _native
from rtp_ext.options import TransportOptions
from rtp_ext.ring.links import transports
from rtp_ext.ring.links.hosts import Hosts
from rtp_ext.ring.links.transports import Candidate


class StandIn:
    """A rank of a ring of two whose other rank answers `others`, in turn; by default the same as this one."""

    def __init__(self, device="cuda", others=None, options=None):
        self.rank, self.size = 0, 2
        self.device = torch.device(device)
        self.transport_options = TransportOptions.of(options)
        self.others = iter(others or [])
        self.asked = []
        self.placed = Hosts.even(2, 1, "ring")

    def exchange(self, value):
        self.asked.append(value)
        return [value, next(self.others, value)]


def connect(ring, requested):
    return transports.connect(ring, requested, ring.transport_options)


def make(name):
    return lambda ring: f"native {name}"


def fail(ring):
    raise RotationError("no memory")


@pytest.fixture
def offered(monkeypatch):
    def set_candidates(*candidates):
        monkeypatch.setattr(transports, "candidates", lambda ring, options: list(candidates))

    return set_candidates


def test_the_first_candidate_that_every_rank_can_use(offered):
    offered(
        Candidate("fast", "no SMs", lambda: "no GPU", make("fast")),
        Candidate("middle", "direct", lambda: None, fail),
        Candidate("last", "anything", lambda: None, make("last")),
    )
    chosen = connect(StandIn(), "auto")
    assert (chosen.name, chosen.native) == ("last", "native last")
    assert chosen.reason == (
        "anything; fast cannot be used (no SMs): no GPU; middle cannot be used (direct): no memory"
    )


def test_a_refusal_of_another_rank_counts(offered):
    offered(
        Candidate("fast", "no SMs", lambda: None, make("fast")),
        Candidate("last", "anything", lambda: None, make("last")),
    )
    assert connect(StandIn(), "auto").name == "fast"
    refused = connect(StandIn(others=["its GPU is old"]), "auto")
    assert refused.name == "last" and "its GPU is old" in refused.reason
    failed = connect(StandIn(others=[None, "its memory is full"]), "auto")
    assert failed.name == "last" and "its memory is full" in failed.reason


def test_what_is_asked_for_has_no_fallback(offered):
    offered(
        Candidate("fast", "no SMs", lambda: None, fail),
        Candidate("last", "anything", lambda: None, make("last")),
        Candidate("odd", "for the brave", lambda: None, make("odd"), automatic=False),
    )
    with pytest.raises(RotationError, match=r"transport fast cannot be used .*: no memory"):
        connect(StandIn(), "fast")
    assert connect(StandIn(), "odd").reason == "as asked; for the brave"
    assert connect(StandIn(), "auto").name == "last"
    with pytest.raises(ValueError, match="transport shm does not work on device type cuda"):
        connect(StandIn(), "shm")


def names(ring):
    return [(each.name, each.automatic) for each in transports.candidates(ring, ring.transport_options)]


def test_candidates_by_device_and_options():
    both = [("shm+tcp", True), ("shm+c10d", True)]
    assert names(StandIn("cpu")) == [("shm", True), *both, ("tcp", True), ("c10d", True)]
    levels, single = [("ce+nccl", False), ("nccl+nccl", False)], [("nccl", True), ("c10d", True)]
    assert names(StandIn()) == [("ce", True), *levels, ("nccl", True), *single]
    for registered in (True, False):
        assert names(StandIn(options={"registered": registered})) == [("ce", True), *levels, *single]
    assert names(StandIn("meta")) == [("c10d", True)]


def test_an_older_nccl_registers_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_native, "nccl_versions", lambda: (22205, 22205))
    assert transports.nccl_refusal() is None
    assert "NCCL 2.23.0 or newer, and torch loaded 2.22.5" in transports.registered_nccl_refusal()
    monkeypatch.setattr(_native, "nccl_versions", lambda: (23007, 23007))
    assert transports.registered_nccl_refusal() is None
    monkeypatch.setattr(_native, "nccl_versions", lambda: None)
    assert transports.registered_nccl_refusal() == "rtp_ext was built without CUDA"


def test_options_are_checked(monkeypatch):
    monkeypatch.delenv("RTP_DEBUG_DELAY_US", raising=False)
    assert TransportOptions.of(None) == TransportOptions(0, None, None, None, 0)
    assert TransportOptions.of({"max_ctas": 4, "registered": False}) == TransportOptions(0, 4, None, False, 0)
    monkeypatch.setenv("RTP_DEBUG_DELAY_US", "30")
    assert TransportOptions.of({}).delay_us == 30
    assert TransportOptions.of({"delay_us": 0}).delay_us == 0
    for given, error, text in [
        ({"ctas": 1}, ValueError, "among min_ctas, max_ctas, blocking, registered, delay_us, ce_mode, got 'ctas'"),
        ({"max_ctas": "4"}, TypeError, "max_ctas to be an int, got '4'"),
        ({"max_ctas": True}, TypeError, "max_ctas to be an int, got True"),
        ({"delay_us": -1}, ValueError, "delay_us >= 0, got -1"),
        ({"registered": 1}, TypeError, "registered to be a bool or None, got 1"),
        ({"blocking": 0}, TypeError, "blocking to be a bool or None, got 0"),
    ]:
        with pytest.raises(error, match=text):
            TransportOptions.of(given)
    monkeypatch.setenv("RTP_DEBUG_DELAY_US", "soon")
    with pytest.raises(ValueError, match="RTP_DEBUG_DELAY_US to be a number of microseconds, got 'soon'"):
        TransportOptions.of({})
