"""The transport and the route of rings of GPUs on several hosts. Ranks are threads; no GPU is needed: the calls of the
extension that need one are replaced."""

import itertools
import logging
import re
import threading
from datetime import timedelta

import pytest
import torch
from simulated_cuda import run_threads, values

from rtp_ext import RotationError, _native
from rtp_ext.options import RingOptions, TransportOptions
from rtp_ext.ring.links.gpu_links import Wiring
from rtp_ext.ring.links.hosts import Hosts
from rtp_ext.ring.links.transports import connect
from rtp_ext.ring.routes.plan import plan_routes


class ThreadRank:
    """A rank of a ring of GPUs whose exchanges are real."""

    device, timeout = torch.device("cuda", 0), timedelta(seconds=10)
    wiring = Wiring("network", "its GPUs are on several hosts")

    def __init__(self, rank, hosts, shared):
        self.rank, self.size, self.placed, self.shared = rank, len(hosts), Hosts.among(list(hosts)), shared

    def exchange(self, value):
        values_, barrier = self.shared
        values_[self.rank] = value
        barrier.wait(10)
        every = list(values_)
        barrier.wait(10)
        return every

    def new_group(self, backend):
        return backend


@pytest.fixture
def native(monkeypatch):
    """Replaces the native functions; returns their calls, and the problems that they report, by function and rank."""
    calls, problems, ids = [], {}, itertools.count()

    def function(name, text):
        def call(*arguments):
            rank = threading.current_thread().rank
            if problem := problems.get((name, rank)):
                raise RotationError(problem)
            calls.append((rank, name, *arguments))
            return text

        return call

    for name in ("ce_transport", "nccl_transport", "c10d_transport", "CompositeTransport"):
        monkeypatch.setattr(_native, name, function(name, name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_native, "host_id", lambda: f"host {threading.current_thread().host}")
    monkeypatch.setattr(_native, "nccl_versions", lambda: (23007, 23007))
    unique_id = function("nccl_unique_id", "id")
    monkeypatch.setattr(_native, "nccl_unique_id", lambda: f"{unique_id()} {next(ids)}".encode())
    monkeypatch.setattr(_native, "ring_end", lambda rank, *_: f"end {rank}")
    levels = function("ring_levels", "inside")
    monkeypatch.setattr(
        _native, "ring_levels", lambda end, per_host: (f"{levels(end, per_host)} {end}", f"between {end}")
    )
    monkeypatch.setattr(
        _native, "ce_refusal", lambda: problems.get(("ce_refusal", threading.current_thread().rank))
    )  # fmt: skip
    return calls, problems


def connections(hosts, requested="auto", **options):
    """Returns the connections of all ranks; `hosts`: a letter for each rank."""
    shared = [None] * len(hosts), threading.Barrier(len(hosts))

    def work(rank):
        thread = threading.current_thread()
        thread.rank, thread.host = rank, hosts[rank]
        return connect(ThreadRank(rank, hosts, shared), requested, TransportOptions.of(options))

    return run_threads(work, len(hosts))


def of(calls, name):
    return {rank: arguments for rank, called, *arguments in calls if called == name}


def test_copy_engines_inside_hosts_and_nccl_between_them(native):
    calls, _ = native
    for made in values(connections("aaabbb")):
        assert (made.name, made.native) == ("ce+nccl", "CompositeTransport")
        assert made.reason.startswith("copy engines inside hosts, direct NCCL between them; ce cannot be used")
    inner, outer = of(calls, "ce_transport"), of(calls, "nccl_transport")
    assert [inner[rank][1] for rank in range(6)] == [f"inside end {rank}" for rank in range(6)]
    ids = [inner[rank][0] for rank in range(6)]
    assert ids[0] == ids[1] == ids[2] != ids[3] == ids[4] == ids[5], "one communicator for each host"
    between = {tuple(outer[rank][0]) for rank in range(6)}
    assert len(between) == 1 and not {ids[0], ids[3]} & set(*between), "and others for the whole ring"
    assert of(calls, "CompositeTransport")[4] == ["ce_transport", "nccl_transport", 4, 3]


OTHERS = {
    "copy engines missing on one rank": ("aabb", {("ce_refusal", 3): "no flags"}, "nccl+nccl"),
    "no window on one host": ("aabb", {("ce_transport", 2): "NCCL gave no window"}, "nccl+nccl"),
    "no streams on one rank": ("aabb", {("ring_levels", 1): "no memory"}, "nccl"),
    "no id on a host": ("aabb", {("nccl_unique_id", 2): "no interface"}, "nccl"),
    "unequal hosts": ("aaab", {}, "nccl"),
    "hosts of one rank": ("abc", {}, "nccl"),
    "one host": ("aaaa", {}, "ce"),
    "one host without copy engines": ("aaaa", {("ce_refusal", 0): "no flags"}, "nccl"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_all_ranks_take_the_next_one(native, case):
    hosts, problems, name = OTHERS[case]
    native[1].update(problems)
    made = values(connections(hosts))
    assert {each.name for each in made} == {name} and len({each.reason for each in made}) == 1
    assert ("inside hosts" in made[0].reason) == ("+" in name or hosts == "aabb")
    for problem in problems.values():
        assert problem in made[0].reason


def test_a_failure_between_hosts_reaches_every_rank(native):
    native[1][("nccl_transport", 1)] = "no network"
    for error in connections("aabb", "ce+nccl"):
        assert isinstance(error, RotationError) and "no network" in str(error)


@pytest.mark.parametrize("requested", ["ce+nccl", "nccl+nccl"])
def test_two_levels_on_one_host_are_refused_where_they_are_requested(native, requested):
    for error in connections("aaaa", requested):
        assert isinstance(error, RotationError) and "its ranks are on one host" in str(error)


@pytest.mark.parametrize(
    ("hosts", "transport", "requested", "route", "warned"),
    [
        ("aabb", "ce+nccl", "auto", "two-level", None),
        ("aabb", "nccl+nccl", "two-level", "two-level", None),
        ("aaabbb", "ce+nccl", "ring", "ring", "route ring a pass sends 5 shards .* one rank; .* sends 1 shards"),
        ("aaabbb", "ce+nccl", "direct", "direct", "route direct a pass sends 9 shards .* of all its ranks"),
        ("aabb", "nccl", "auto", "ring", "4 on 2 hosts of 2 ranks"),
        ("aabb", "nccl", "two-level", "ring", "route two-level cannot be taken: .* on transport nccl"),
        ("aaab", "nccl", "auto", "ring", "on 2 hosts of unequally many ranks"),
        ("abc", "nccl", "auto", "ring", None),
        ("aaaa", "ce", "auto", "ring", None),
    ],
)
def test_a_flat_ring_over_hosts_warns_once(caplog, hosts, transport, requested, route, warned):
    """`auto` takes two levels wherever the transport has them; one rank warns."""
    shared = [None] * len(hosts), threading.Barrier(len(hosts))
    with caplog.at_level(logging.WARNING, logger="rtp_ext"):
        for rank in range(len(hosts)):
            plan = plan_routes(ThreadRank(rank, hosts, shared), transport, RingOptions(route=requested))
            assert plan.hop_route == route
    assert len(caplog.messages) == (warned is not None)
    if warned is not None:
        assert re.search(warned, caplog.messages[0]), caplog.messages[0]
