"""Which ranks share a host, and what a ring of several hosts may do."""

import pytest
import torch

import rtp_ext
from rtp_ext import RotationError, _native
from rtp_ext.functional import rotated_linear, rotated_mlp
from rtp_ext.ring.links.hosts import Hosts, find_hosts, levels_refusal
from rtp_ext.ring.links.places import Place

PLACES = {
    "aabb": (2, 2, None),
    "aaabbbccc": (3, 3, None),
    "aaaa": (1, 4, "on one host"),
    "abc": (3, 1, "each of its 3 hosts has one rank"),
    "aab": (2, None, "2, 1 ranks, not equally many"),
    "abab": (2, 2, "not neighbours in the ring: they are on hosts 0, 1, 0, 1"),
    "abba": (2, 2, "not neighbours in the ring: they are on hosts 0, 1, 1, 0"),
    "baab": (2, 2, "not neighbours in the ring"),
    "a": (1, 1, "on one host"),
}


@pytest.mark.parametrize("places", PLACES)
def test_hosts_of_ranks(places):
    count, per_host, unlevel = PLACES[places]
    hosts = Hosts.among(list(places))
    assert (hosts.count, hosts.per_host) == (count, per_host)
    assert hosts.unlevel is unlevel or unlevel in hosts.unlevel
    assert (levels_refusal(hosts, torch.device("cpu"), None) is None) == (unlevel is None)


def test_what_else_keeps_a_ring_flat():
    hosts = Hosts.even(6, 2, "two-level")
    assert (hosts.of, hosts.unlevel) == ((0, 0, 0, 1, 1, 1), None)
    assert levels_refusal(hosts, torch.device("cpu"), False) is None
    assert "gradient_halves" in levels_refusal(hosts, torch.device("cpu"), True)
    assert "on cuda devices" in levels_refusal(hosts, torch.device("cuda", 0), None)
    with pytest.raises(ValueError, match="hosts of equally many of 6 ranks, got 4 hosts"):
        Hosts.even(6, 4, "ring")


class Alone:
    rank = 1

    def exchange(self, value):
        return [Place("another", "kernel", "processes"), value, value]


def test_containers_and_pretended_hosts_are_hosts(monkeypatch):
    """One kernel and one namespace of processes make a host; a rank that cannot tell is one of its own."""
    told = []
    monkeypatch.setattr(Alone, "exchange", lambda self, value: told.append(value) or [value])
    for host, processes, pretended in (("a", "1", ""), ("b", "1", ""), ("a", "2", ""), ("a", "1", "x")):
        monkeypatch.setattr(_native, "host_id", lambda host=host: host)
        monkeypatch.setattr(_native, "processes_id", lambda processes=processes: processes)
        monkeypatch.setenv("RTP_DEBUG_HOST", pretended)
        assert find_hosts(Alone()).count == 1

    def fail():
        raise RotationError("too many open files")

    monkeypatch.setattr(_native, "host_id", fail)
    find_hosts(Alone())
    assert len({place.memory for place in told}) == 5
    assert told[-1].kernel == "rank 1 cannot tell: too many open files"


def test_this_process_knows_where_it_is():
    assert _native.processes_id().startswith("pid:[")
    found = find_hosts(Alone())
    assert found.of == (0, 1, 1)
    assert found.spread.startswith("rank 0 on another, ranks 1, 2 on ")


def test_an_emulated_ring_of_hosts():
    """Every shard is this rank's own; slots are those of the schedule."""
    with rtp_ext.Ring.emulated(9, route="two-level", hosts=3) as ring:
        assert (ring.hosts, ring.per_host, ring.hop_route) == (3, 3, "two-level")
        x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(5, 6, requires_grad=True)
        y = rotated_linear(x, weight, ring=ring)
        assert torch.allclose(y, (x @ weight.t()).repeat(1, 9))
        y.sum().backward()
        assert torch.allclose(weight.grad, x.detach().sum(0).expand(5, 6))
        assert [ring.hops(channel) for channel in ("weight", "gradient")] == [16, 8]
        assert [ring.slot_count(channel).peak_slots for channel in ("weight", "gradient")] == [4, 4]
        with pytest.raises(ValueError, match="rotated_linear: expected in_place=False on route two-level"):
            rotated_linear(x, weight, ring=ring, in_place=True)
        up, down = torch.randn(3, 6), torch.randn(6, 3)
        assert rotated_mlp(x, up, down, activation="relu", ring=ring).shape == x.shape
    with pytest.raises(ValueError, match="hosts of equally many of 9 ranks, got 2 hosts"):
        rtp_ext.Ring.emulated(9, route="two-level", hosts=2)
    for hosts, why in ((1, "its ranks are on one host"), (9, "each of its 9 hosts has one rank")):
        with pytest.raises(ValueError, match=f"route two-level cannot be taken: {why}"):
            rtp_ext.Ring.emulated(9, route="two-level", hosts=hosts)
