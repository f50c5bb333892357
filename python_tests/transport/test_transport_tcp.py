"""Sockets between CPU ranks: messages arrive, errors name a rank that is out of step or gone, strangers are refused."""

import contextlib
import os
import re
import resource
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import Cases, on_ranks
from models import batch_loss, make_model, mean_loss, train
from native_options import rotation_options
from reference import assert_same, full

import rtp_ext
from rtp_ext import RingTimeout, RotationError, _native
from rtp_ext.ring.links import host_address
from rtp_ext.ring.prepared import Prepared

CPU = torch.device("cpu")
TIMEOUT = 30.0  # of rings whose ranks answer
PROMPT = 10.0  # far below it
MIB = 1 << 20
HEADER = 256  # bytes before those of a hop


@contextlib.contextmanager
def two_ranks(host="127.0.0.1", timeout=TIMEOUT, between=lambda host_address: None):
    """The executors of a ring of two ranks in this process, and threads that they can run on."""
    ranks = [_native.TcpTransport(rank, 2, host, timedelta(seconds=timeout)) for rank in range(2)]
    told = [transport.address() for transport in ranks]
    between(told)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda transport: transport.connect(told), ranks))
        executors = [_native.Executor(transport, rank, 2, CPU) for rank, transport in enumerate(ranks)]
        yield executors, threads
        list(threads.map(lambda executor: executor.close(), executors))


def _drive(begin):
    """The owners' shards of one pass, as this rank saw them; an error instead."""
    try:
        execution = begin()
        seen = []
        while execution.next() is not None:
            seen.append([view.clone() for view in execution.weight()])
        execution.finish()
        return seen
    except RotationError as error:
        return error


def _rotations(executors, threads, sizes, name=None):
    """Rotates on each of two ranks one shard of `sizes[rank]` bytes each, or what `sizes` say that both have."""
    options = dict(route="ring", in_place=False, compute_dtype=torch.uint8, reduce_dtype=torch.uint8, slot_cap=0)

    def run(rank):
        both = sizes[rank]
        shard = torch.full((both[rank],), rank + 1, dtype=torch.uint8)
        shapes = [[[size] for size in both]]
        if name is None:
            return _drive(lambda: _native.Execution.rotate(executors[rank], [shard], shapes, "ring", False))
        chosen = _native.RotationOptions(**options, halves=False, name=name[rank])
        return _drive(lambda: _native.Execution.forward(executors[rank], [shard], shapes, chosen))

    return list(threads.map(run, range(2)))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_sizes_around_what_wakes_the_receiver(host):
    edges = [MIB - HEADER + off for off in (-1, 0, 1)] + [MIB + off for off in (-1, 0, 1)]
    with two_ranks(host) as (executors, threads):
        for size in (1, 7, *edges, 2 * MIB + 13, 9 * MIB + 1):
            for sizes in ([size, size], [size, 0], [3, size]):
                for rank, seen in enumerate(_rotations(executors, threads, [sizes, sizes])):
                    owners = [rank, 1 - rank]
                    for owner, (view,) in zip(owners, seen, strict=True):
                        assert view.numel() == sizes[owner] and bool((view == owner + 1).all()), (sizes, rank, owner)


def test_threads_have_names():
    with two_ranks():
        names = {name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm")}
    assert names >= {f"rtp_{channel}_{way}" for channel in ("weight", "gradient") for way in ("tx", "rx")}


def test_ranks_out_of_step_are_told_both_hops():
    for sizes, names, texts in (
        (
            [[64, 64], [64, 64]],
            ["one", "other"],
            [
                rf"{a} forward, weight hop 1 of 1: .*of step: rank . sent {b} forward, weight hop 1 of 1"
                for a, b in (("one", "other"), ("other", "one"))
            ],
        ),
        ([[64, 64], [64, 48]], None, ["rank 1 of the ring sent 48 bytes, expected 64"] * 2),
        # Far less than the receiver would be woken for.
        ([[64, 8 * MIB], [64, 48]], None, [f"rank 1 of the ring sent 48 bytes, expected {8 * MIB}"] * 2),
    ):
        with two_ranks() as (executors, threads):
            start = time.monotonic()
            errors = _rotations(executors, threads, sizes, names)
            assert time.monotonic() - start < PROMPT
            if not isinstance(errors[1], RotationError):  # its own receive was in order: the next one fails
                errors = _rotations(executors, threads, [[1, 1], [1, 1]])
            told = [texts[1], "rank 0 of the ring did not answer .*its ring failed"]
            assert any(re.search(text, str(errors[1])) for text in told), errors[1]


def test_a_close_that_waits_in_vain_ends_the_ring():
    """Rank 0 has sent ahead for a pass that rank 1 does not begin: what would still arrive has no place any more."""
    options = rotation_options("ring", "layer", torch.uint8)
    shards = [torch.ones(5, dtype=torch.uint8) for _ in range(2)]

    def run(rank, phase, serials):
        for serial in serials:
            executors[rank].enter(phase=phase if rank == 0 else 0, backward=False, serial=serial, watched=[])
            seen = _drive(lambda: _native.Execution.forward(executors[rank], [shards[rank]], [[[5], [5]]], options))
            assert not isinstance(seen, RotationError), seen

    with two_ranks(timeout=1.0) as (executors, threads):
        executors[0].prefetch(True)
        for phase, serials in ((1, (1, 2)), (2, (1,))):
            list(threads.map(lambda rank, phase=phase, serials=serials: run(rank, phase, serials), range(2)))
        assert executors[0].prefetched() == (1, 0)
        with pytest.raises(RingTimeout, match="layer forward, weight hop 1 of 1: rank 1 of the ring did not answer"):
            executors[0].close()
        assert not executors[0].alive
        for _ in range(2):  # messages sent ahead may arrive before the failure
            told = _drive(lambda: _native.Execution.forward(executors[1], [shards[1]], [[[5], [5]]], options))
            if isinstance(told, RotationError):
                break
        assert re.search("rank 0 of the ring did not answer .*its ring failed: layer forward", str(told)), told


MAGIC = 0x3270637470747230
WELCOME = 512  # bytes of the notice to a rank that is let in


def _hello(rank, to, purpose):
    return struct.pack("=QQIIII", MAGIC, 1, rank, to, purpose, 0)


class _Between:
    """Passes connections on to a rank, and keeps what both ends have said; or answers with what was said before."""

    def __init__(self, host, port):
        self.target, self.kept, self.repeats = (host, port), [], False
        self.listener = socket.create_server((host, 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            opener = self.listener.accept()[0]
            if self.repeats:
                opener.sendall(self.kept[0][1])
                continue
            said = [b"", b""]
            self.kept.append(said)
            ends = opener, socket.create_connection(self.target)
            for way in range(2):
                threading.Thread(target=self._pass_on, args=(ends[way], ends[1 - way], said, way), daemon=True).start()

    @staticmethod
    def _pass_on(source, target, said, way):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                said[way] += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def test_strangers_stay_outside():
    """Strangers may know addresses, protocol and all that others have said before, but not the key."""
    strangers, between = [], []

    def approach(told):
        host, port, *_ = told[0].split()
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n" + b"x" * 400, _hello(1, 0, 2) + bytes(8), _hello(9, 0, 2),
                     _hello(1, 1, 2), _hello(1, 0, 3), _hello(0, 0, 2)):  # fmt: skip
            strangers.append(socket.create_connection((host, int(port))))
            strangers[-1].sendall(said)
        between.append(_Between(host, int(port)))
        told[0] = told[0].replace(f" {port} ", f" {between[0].port} ")

    with two_ranks(between=approach) as (executors, threads):
        for seen in _rotations(executors, threads, [[5, 5], [5, 5]]):
            assert len(seen) == 2
        (_, answered), *hops = kept = between[0].kept
        assert len(answered) >= 16 + WELCOME and hops, "control: this rank was let in"
        for opened, _ in kept:
            strangers.append(socket.create_connection(between[0].target))
            strangers[-1].sendall(opened)  # once more
        for number, stranger in enumerate(strangers):
            stranger.settimeout(0.2 if number == 0 else PROMPT / 2)
            try:
                told = b""
                while data := stranger.recv(WELCOME):
                    told += data
                assert len(told) <= 16, f"stranger {number} was let in"
            except ConnectionResetError:
                pass
            except TimeoutError:
                assert number == 0, f"stranger {number} was not sent away"  # nothing was said; that is waited for
            stranger.close()


def test_who_answers_has_to_know_the_key():
    """What answers at the port of a rank repeats what the rank has said to another connection."""
    between = []

    def approach(told):
        host, port, *_ = told[0].split()
        between.append(_Between(host, int(port)))
        told[0] = told[0].replace(f" {port} ", f" {between[0].port} ")

    with two_ranks(timeout=2.0, between=approach) as (executors, threads):
        between[0].repeats = True
        errors = _rotations(executors, threads, [[5, 5], [5, 5]])
        assert "it does not know the key" in str(errors[1]), errors
        assert isinstance(errors[0], RotationError)


def test_a_listener_without_descriptors_waits_for_one():
    told = []
    with two_ranks(between=told.extend) as (executors, threads):
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        stranger = socket.socket()
        taken, used = [stranger.fileno()], max(map(int, os.listdir("/proc/self/fd")))
        while taken[-1] < used:  # no gaps
            taken.append(os.dup(taken[0]))
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1, before[1]))
        try:
            host, port, *_ = told[0].split()
            stranger.connect((host, int(port)))
            cpu = time.process_time()
            time.sleep(1.0)
            assert time.process_time() - cpu < 0.05, "it does not spin"  # on a loaded machine, too
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for each in taken[1:]:
                os.close(each)
        for rank, seen in enumerate(_rotations(executors, threads, [[5, 5], [5, 5]])):
            assert [int(view[0]) for (view,) in seen] == [rank + 1, 2 - rank], "connections come in again"
        stranger.close()


def test_addresses(monkeypatch):
    for text in ("", "here", "127.0.0.1 1 2", "127.0.0.1 1 2 3 4"):
        transport = _native.TcpTransport(0, 2, "127.0.0.1", timedelta(seconds=1))
        with pytest.raises(ValueError, match="expected an address 'host port token token', got"):
            transport.connect([transport.address(), text])
    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    transport = _native.TcpTransport(1, 2, "127.0.0.1", timedelta(seconds=1))
    with pytest.raises(RotationError, match=rf"rank 0 of the ring at 127\.0\.0\.1 port {port}: .*refused"):
        transport.connect([f"127.0.0.1 {port} 1 2", transport.address()])
    transport = _native.TcpTransport(0, 2, "127.0.0.1", timedelta(milliseconds=100))
    with pytest.raises(RotationError, match=r"rank 1 of the ring at .* did not join \(waited 0\.05 s\)"):
        transport.connect([transport.address(), f"127.0.0.1 {port} 1 2"])
    with pytest.raises(RotationError, match="cannot bind"):
        _native.TcpTransport(0, 2, "192.0.2.1", timedelta(seconds=1))

    assert _native.interface_address("lo") == "127.0.0.1" == _native.address_toward("127.0.0.1")
    assert _native.address_toward("::1") == "::1"
    asked = []

    def among(*others):
        return lambda mine: [*others, mine]

    monkeypatch.setattr(host_address, "_rendezvous", lambda: "meeting")
    monkeypatch.setattr(_native, "address_toward", lambda host: asked.append(host) or where[host])
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    where = {"meeting": "10.0.0.1"}
    assert host_address.own_address(among("10.0.0.2")) == "10.0.0.1"
    where = {"meeting": "127.0.1.1", "10.0.0.2": "10.0.0.1"}  # the rendezvous is here
    assert host_address.own_address(among("10.0.0.2")) == "10.0.0.1"
    assert host_address.own_address(among("127.0.0.1")) == "127.0.1.1"  # all ranks are
    assert asked == ["meeting", "meeting", "10.0.0.2", "meeting"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth9")
    assert host_address.own_address(among("10.0.0.2")) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(RotationError, match="network interface nowhere0"):
        host_address.own_address(among("10.0.0.2"))


@on_ranks(2)
def test_ranks_out_of_reach(rank, ranks):
    """Rank 0 publishes an address without a listener: all ranks use c10d and name the reason."""
    make = _native.TcpTransport

    class Elsewhere:
        def __init__(self, *arguments):
            self.native = make(*arguments)
            self.connect = self.native.connect

        def address(self):
            host, port, *token = self.native.address().split()
            return " ".join([host, "1" if rank == 0 else port, *token])

    def no_memory(*_):
        raise RotationError("no memory files here")

    _native.ShmTransport, _native.TcpTransport = no_memory, Elsewhere
    with rtp_ext.Ring(timeout=4.0) as ring:
        assert ring.transport == "c10d"
        assert re.search(
            r"tcp cannot be used .*rank [01] of the ring at .*(refused|did not join)", ring.transport_reason
        )
        assert len(list(ring.rotate(torch.ones(2)))) == ranks


@on_ranks([2, 3])
def test_training_and_a_failure_that_spreads(rank, ranks):
    """Models over sockets are the plain model, with copies or in place; a failure of one rank reaches the others."""
    cases = Cases()
    plain = make_model()
    train(plain, lambda step: mean_loss(plain, ranks, step), 2)
    for in_place in (False, True):
        model = rtp_ext.fully_rotate(make_model(), in_place=in_place, transport="tcp", timeout=TIMEOUT)
        train(model, lambda step, model=model: batch_loss(model, rank, step), 2)
        with cases.case(f"in place: {in_place}"):
            for name, parameter in plain.named_parameters():
                assert_same(full(model.get_parameter(name)), parameter, 1e-9, name)
    cases.finish()
    ring = rtp_ext.ring_of(model)
    assert (ring.transport, ring.transport_reason) == ("tcp", "as asked; sockets between CPUs of any hosts")
    shard, prepared = torch.ones(3), Prepared()
    list(ring.rotate(shard, prepared=prepared))  # the ranks agree on its shape
    dist.barrier()
    start = time.monotonic()
    if rank == 0:
        time.sleep(0.2)
        ring.communicator.executor.fail("planted")
    else:  # waits for a neighbour that is well itself, perhaps
        with pytest.raises(RingTimeout, match=r"weight hop \d of \d: rank \d of the ring did not answer .*planted"):
            list(ring.rotate(shard, prepared=prepared))
        assert time.monotonic() - start < PROMPT
    dist.barrier()


@on_ranks(2, lost={1}, transport="tcp")
def test_a_forked_process_keeps_no_connection_open(rank, ranks, ring):
    """A rank whose forked process lives on is missed at once: its connections are not kept open there."""
    shard, prepared = torch.ones(3), Prepared()
    list(ring.rotate(shard, prepared=prepared))
    child = os.fork() if rank == 1 else 0
    if rank == 1 and child == 0:
        for name in os.listdir("/proc/self/fd"):  # but for what others wait for, of this test and its harness
            with contextlib.suppress(OSError):
                family = socket.socket(fileno=os.dup(int(name))).family
                if family in (socket.AF_INET, socket.AF_INET6):
                    continue
            with contextlib.suppress(OSError):
                os.close(int(name))
        time.sleep(TIMEOUT)
        os._exit(0)
    told = [None] * ranks
    dist.all_gather_object(told, child)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        with pytest.raises(RingTimeout, match="rank 1 of the ring did not answer"):
            while True:
                list(ring.rotate(shard, prepared=prepared))
        assert time.monotonic() - start < PROMPT
        os.kill(told[1], 0)  # it is still there
    finally:
        os.kill(told[1], signal.SIGKILL)
