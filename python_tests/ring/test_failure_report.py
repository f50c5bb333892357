"""Failure reports: they name the rank that caused the failure of a collective."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
import unittest.mock
import weakref

import pytest
import torch
import torch.distributed as dist
from harness import Cases, on_ranks, run_ranks
from torch.distributed.tensor import Shard, distribute_tensor

from rtp_ext import Ring, RingTimeout
from rtp_ext.ring.links.failure_report import FailureReport, _links, broken_links, this_process

TIMEOUT = 2.0
LOADED = 15.0  # seconds that a busy machine may add


def _ring(group):
    """A ring over some ranks, after one round of it, which all have ended."""
    members = dist.get_process_group_ranks(group)
    _meet(members)  # they come from different cases
    ring = Ring(group, transport="shm", timeout=TIMEOUT)
    for _ in ring.rotate(torch.ones(3)):
        pass
    _meet(members)
    return ring


def _meet(members):
    store = dist.distributed_c10d._get_default_store()
    turn = store.add(f"{dist.get_rank()} in {members}", 1)
    store.set(f"{dist.get_rank()} in {members} at {turn}", "")
    store.wait([f"{member} in {members} at {turn}" for member in members])


def _lose_sockets():
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as each:
            if each.family in (socket.AF_INET, socket.AF_INET6) and each.getpeername():
                each.shutdown(socket.SHUT_RDWR)


def _error_of(ring, cases, name, who, operation="all_reduce of values", collective=None):
    """A collective of the ring fails, and its error names the place, the last hop and the failed rank."""
    start = time.monotonic()
    with pytest.raises(RingTimeout) as caught:
        collective() if collective else ring.all_reduce(torch.ones(5))
    text, took = str(caught.value), time.monotonic() - start
    with cases.case(name):
        assert text.startswith(f"{operation} on rank {ring.rank} of {ring.size}, after rotate, weight hop "), text
        assert who in text, text
        assert took < TIMEOUT + 1.0 + LOADED, took
    return text


def _faults(rank, ranks):
    cases = Cases()
    all_four, last_three, last_two, first_three, first_two = (
        dist.new_group(members) for members in ([0, 1, 2, 3], [1, 2, 3], [2, 3], [0, 1, 2], [0, 1])
    )
    # a live rank that does not come, with a failure report of an earlier run of these ranks in the same store
    with unittest.mock.patch("rtp_ext.ring.links.failure_report._made", weakref.WeakKeyDictionary()):
        earlier = FailureReport([0, 1, 2, 3])
    for key, said in ((rank, "{}"), ("found", "; who failed: global rank 9")):
        earlier._store.set(str(key), said)
    ring = _ring(all_four)
    if rank == 3:
        time.sleep(TIMEOUT + 1.5)
        text = _error_of(ring, cases, "late", "who failed: global rank 3 (no report")
    else:
        text = _error_of(ring, cases, "absent", "who failed: global rank 3 (no report within 0.6 s)")
    assert "; what this rank did last: " in text, text

    # a rank whose connections all break, in a ring with another order of ranks
    if rank > 0:
        if rank > 1:  # in a collective of torch's own over the ring's mesh
            ring = _ring(last_two)
            whole = torch.nn.Parameter(distribute_tensor(torch.ones(4, 3), ring.mesh, [Shard(0)])).full_tensor()
            if rank == 3:
                _lose_sockets()
            who = "who failed: global ranks 2, 3 (the connection between them broke)"
            _error_of(ring, cases, "connection", who, "full_tensor backward", whole.sum().backward)
        ring = _ring(last_three)
        if rank == 3:
            _lose_sockets()
        _error_of(ring, cases, "connections", "who failed: global rank 3 (its connections broke)")
        # a rank with its own error
        ring = _ring(last_three)
        if rank == 3:
            error = MemoryError("planted")
            ring.end(error)
            assert "who failed" not in str(error) and "planted" in str(error), error
        else:
            _error_of(ring, cases, "own", "all ranks report, and the first error was that of global rank 3: planted")

    # one that is stopped
    if rank == 3:
        return cases.finish()
    ring = _ring(first_three)
    if rank == 2:
        cases.finish()
        os.kill(os.getpid(), signal.SIGSTOP)
    _error_of(ring, cases, "stopped", "who failed: global rank 2 (its process is stopped)")

    # the rank that hosts the store: stopped, it does not answer; ended, its absence is detected
    if rank == 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        dist.distributed_c10d._get_default_store().set("port", str(store.port))
    else:
        port = int(dist.distributed_c10d._get_default_store().get("port"))
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    ring = _ring(first_two)
    if rank == 1:
        cases.finish()
        os.kill(os.getpid(), signal.SIGSTOP)
    keeper = ring.failure_report.neighbours[1]
    ring.failure_report._store, ring.failure_report._keeper, ring.failure_report.neighbours = store, 1, {}
    _error_of(ring, cases, "store", "global rank 1 (it keeps the store of the process group, which does not answer: no")
    os.kill(keeper[0], signal.SIGKILL)
    ring.failure_report.neighbours = {1: keeper}
    while ring.failure_report._state(1) != "its process has ended":
        time.sleep(0.01)
    for neighbours, who in (({}, "(it keeps the store"), ({1: keeper}, "(its process has ended)")):
        failure_report = FailureReport([0, 1])
        failure_report._store, failure_report._keeper, failure_report.neighbours = (
            dist.PrefixStore("gone", store),
            1,
            neighbours,
        )
        with cases.case(f"store gone, {who}"):
            assert f"; who failed: global rank 1 {who}" in failure_report.call("text", False, (), 0.0)
            assert failure_report.call("text", False, (), 0.0) == "", "once"
    cases.finish()


def test_every_survivor_names_who_failed():
    run_ranks(_faults, 4, lost={1, 2})


@on_ranks(1)
def test_who_keeps_the_store(rank, ranks):
    """Rank 0 hosts the store of a rendezvous; the host of a store that the caller passes is unknown."""
    dist.destroy_process_group()
    brought = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(brought.port)}
    for how, environment, keeper in (
        ({"store": brought}, {}, None),
        ({"store": brought}, there, 0),
        ({"store": brought}, {**there, "TORCHELASTIC_USE_AGENT_STORE": "True"}, None),
        ({"init_method": "tcp://127.0.0.1:0"}, {}, 0),
        ({"init_method": "tcp://127.0.0.1:0"}, there, 0),
    ):
        with unittest.mock.patch.dict(os.environ, environment):
            dist.init_process_group("gloo", rank=rank, world_size=ranks, **how)
            assert FailureReport([0])._keeper == keeper, (how, environment)
            dist.destroy_process_group()


def _told(**broken):
    """Reports of ranks in the order in which they gave up."""
    return {
        int(rank[1:]): {"text": rank, "own": False, "broken": others, "seen": time_, "ended": time_, "left": []}
        for time_, (rank, others) in enumerate(broken.items())
    }


def test_connections_that_broke():
    assert "ranks 0, 1 (the connection between them" in _links(_told(r0=[1], r1=[0]))
    for order in (dict(r0=[1], r2=[0, 1], r1=[0, 2]), dict(r1=[0, 2], r0=[1], r2=[0, 1]),
                  dict(r2=[1], r1=[0, 2], r0=[1, 2])):  # fmt: skip
        assert "global rank 1 (its connections" in _links(_told(**order)), order
    # a connection that broke because its other end had given up before blames no rank
    assert "ranks 0, 1 (the connection" in _links(_told(r0=[1], r3=[0], r1=[0, 3], r2=[0, 1, 3]))
    assert "the first error was that of global rank 2: r2" in _links(_told(r2=[], r0=[2]))


def test_a_process_is_told_from_another_with_its_number():
    process, start = this_process()
    failure_report = FailureReport.__new__(FailureReport)
    failure_report.neighbours = {0: (process, start), 1: (process, start - 1)}
    assert failure_report._state(0) is None and failure_report._state(1) == "its process has ended"
    assert broken_links([]) == set()


class _Slow(dist.HashStore):
    """A store that needs some time for its second answer."""

    asked = 0

    def check(self, keys):
        self.asked += 1
        time.sleep(1.0 if self.asked == 2 else 0.0)
        return super().check(keys)


def _answer(text="theirs", broken=(), seen=0.0, ended=0.0):
    return json.dumps({"text": text, "own": False, "broken": [*broken], "seen": seen, "ended": ended, "left": []})


def _alone(store, me, ranks):
    """The failure report of a rank that sees no process of the others; the first rank hosts its store."""
    failure_report = FailureReport.__new__(FailureReport)
    failure_report.ranks, failure_report.me, failure_report.neighbours, failure_report._called = (
        tuple(ranks),
        me,
        {},
        False,
    )
    failure_report._store, failure_report._keeper = store, 0
    return failure_report


def test_a_store_that_is_slow_is_not_taken_for_one_that_does_not_answer(monkeypatch):
    said = _alone(_Slow(), 1, [0, 1, 2]).call("text", False, (), 0.0)
    for thread in threading.enumerate():
        if thread.name == "rtp failure report":
            thread.join()
    assert said == "; the rank that failed is unknown: the store of the process group answers too slowly"
    # suspects that answer just before their deadline: then some time remains for their findings
    monkeypatch.setattr("rtp_ext.ring.links.failure_report.PATIENCE", 1.5)
    monkeypatch.setattr("rtp_ext.ring.links.failure_report.GRACE", 1.5)
    store = dist.HashStore()
    answer = _answer()
    threading.Timer(1.0, store.set, ("2", answer)).start()
    threading.Timer(2.0, store.set, ("found", "; who failed: global rank 3")).start()
    assert _alone(store, 1, range(4)).call("text", False, (), 1.0, [2]) == "; who failed: global rank 3"


def test_who_fails_for_a_reason_of_its_own_names_nobody():
    store = dist.HashStore()
    with unittest.mock.patch.object(FailureReport, "_ask", side_effect=dist.DistError("planted")):
        assert _alone(store, 1, [0, 1]).call("text", True, (), 0.0) == ""
        assert "global rank 0 (it keeps" in _alone(store, 1, [0, 1]).call("text", False, (), 0.0)


def test_a_rank_of_another_ring_that_is_busy_is_not_missed():
    absent = "; who failed: global rank{} (no report within 0.6 s)"
    told = []
    for answered in ((), (3,)):  # rings 0, 1 and 2, 3 of a mesh, on hosts that cannot be observed
        store = dist.HashStore()
        for rank in answered:
            store.set(str(rank), _answer())
        told.append(_alone(store, 2, range(4)).call("text", False, (), 0.0, None, [2, 3]))
    assert told == [absent.format(" 3"), absent.format("s 0, 1")]


def test_connections_that_a_timeout_ended_did_not_break():
    """Two ranks wait for a third and time out at the same moment: each finds its connection closed by the other's
    timeout, before the other has reported."""
    for ended, who in ((10.0, "rank 1 (no report"), (None, "ranks 0, 2 (the connection between")):
        store, here = dist.HashStore(), this_process()
        store.set("2", _answer(broken=[0], seen=10.01, ended=10.0))
        failure_report = _alone(store, 0, [0, 1, 2])
        failure_report.neighbours = {1: here, 2: here}
        assert f"; who failed: global {who}" in failure_report.call("text", False, [2], 10.02, ended=ended), ended


def test_ranks_that_are_out_of_step_are_told_where_they_waited():
    store = dist.HashStore()
    store.set("1", _answer("head backward, weight hop 1 of 2: rank 2 of the ring did not answer", seen=1.0))
    store.set("2", _answer("all_gather on rank 2 of 3, after head forward: a rank did not answer", seen=2.0))
    said = _alone(store, 0, [0, 1, 2]).call("head backward, gradient hop 1 of 2: late", False, (), 3.0)
    assert "the first error was that of global rank 1: head backward" in said, said
    expected = (
        "; the ranks are out of step, and waited in head backward (global ranks 0, 1), all_gather (global ranks 2)"
    )
    assert said.endswith(expected), said


def _left(rank, ranks, transport, killed):
    """Rank 0 has fewer batches: it ends its ring in good order, or is killed."""
    ring = Ring(transport=transport, timeout=TIMEOUT)
    for _ in range(2):
        ring.all_reduce(torch.ones(3))
    if rank == 0:
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return ring.close()
    with pytest.raises(RingTimeout) as caught:
        ring.all_reduce(torch.ones(3))
    text = str(caught.value)
    assert ("global rank 0 had left: closed the ring" in text) is not killed, text
    assert ("who failed: global rank 0" in text) is killed, text


@pytest.mark.parametrize(("transport", "ranks"), [("shm", 2), ("tcp", 2), ("shm", 3)])
@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
def test_a_rank_that_has_finished_did_not_fail(transport, ranks, killed):
    run_ranks(_left, ranks, transport, killed, lost=[0] if killed else [])
