"""Pulls of shards: a signal and the death of the owner end one, strangers get none, what answers in the place of an
owner that has ended is not asked, what is changed in transit is an error, and a forked process pulls nothing."""

import contextlib
import copy
import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from models import make_model
from reference import assert_same
from test_forwards import ended, logits

import rtp_ext
from rtp_ext.inference.ring import InferenceRing

MAGIC = 0x3270637470747230  # of the connections between ranks
AFTER = 0.4  # seconds until a signal
PROMPT = 4.0  # seconds that it may take from there, of a timeout of 60


def stop(pid: int) -> None:
    """Stops a process, and returns when it is."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "T":
        time.sleep(0.01)


@on_ranks(3, lost=[1])
def test_a_signal_and_the_death_of_the_owner_end_a_pull(rank):
    plain = make_model()
    model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), transport="tcp", timeout=60.0)
    ring, store = rtp_ext.ring_of(model), dist.distributed_c10d._get_default_store()
    pids = ring.exchange(os.getpid())
    if rank == 1:
        time.sleep(300.0)

    def both_at(point):
        store.set(f"{point} {rank}", "")
        store.wait([f"{point} {each}" for each in (0, 2)])

    def ended_pull(error, match, sent, pid, number):
        """Sends a signal while this rank is in a pull, which raises an error."""
        before = ring.pulled_bytes
        if sent:
            threading.Timer(AFTER, os.kill, (pid, number)).start()
        start = time.monotonic()
        with torch.no_grad(), pytest.raises(error, match=match):
            logits(model, "small", rank, 0)
        assert time.monotonic() - start < AFTER + PROMPT
        assert ring.pulled_bytes - before < once, "control: it was in the middle"

    with torch.no_grad():
        expected = logits(plain, "small", rank, 0)
        assert_same(logits(model, "small", rank, 0), expected, 1e-12, "before")
        once = ring.pulled_bytes
        both_at("pulled")
        if rank == 0:
            stop(pids[1])
        both_at("stopped")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ended_pull(KeyboardInterrupt, None, True, os.getpid(), signal.SIGINT)
        both_at("interrupted")
        if rank == 0:
            os.kill(pids[1], signal.SIGCONT)
        assert_same(logits(model, "small", rank, 0), expected, 1e-12, "the ring goes on")
        both_at("pulled again")
        if rank == 0:
            stop(pids[1])
        both_at("stopped again")
    ended_pull(
        rtp_ext.RotationError,
        r"a pull of shards from rank 1 of the ring at \S+ port \d+: its process has ended",
        *(rank == 0, pids[1], signal.SIGKILL),
    )
    ring.close()


@on_ranks(2)
def test_a_stranger_without_the_key_gets_no_shard(rank):
    """It knows the address of an owner, the protocol, and where a shard lies."""
    plain = make_model()
    model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), transport="tcp", timeout=30.0)
    ring = rtp_ext.ring_of(model)
    addresses = ring.exchange(ring._source.address())
    if rank == 1:
        host, port, *_ = addresses[0].split()
        with socket.create_connection((host, int(port))) as stranger:
            stranger.settimeout(20.0)
            stranger.sendall(struct.pack("=QQIIII", MAGIC, 1, 1, 0, 0, 0))  # rank 1 opens a connection for pulls
            assert len(stranger.recv(16, socket.MSG_WAITALL)) == 16, "control: it is asked for its proof"
            told = b""
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                stranger.sendall(struct.pack("=Qqq", 1, 0, 64))  # no proof, and a request
                told = stranger.recv(1 << 16)
            assert told == b""
    ring.exchange("turned away")
    with torch.no_grad():
        assert_same(logits(model, "small", rank, 0), logits(plain, "small", rank, 0), 1e-12, "pulls of ranks")
    ring.exchange("pulled")
    ring.close()


class Changes:
    """A link in front of this rank that may swap two words of what is pulled."""

    def __init__(self) -> None:
        self.swaps = False

    def in_front(self, ring, value):
        """Replaces the `exchange` of an InferenceRing, by which ranks tell their addresses."""
        if isinstance(value, tuple) and isinstance(value[0], str) and value[0].startswith("127.0.0.1 "):
            host, port, *key = value[0].split()
            listener = socket.create_server((host, 0))
            threading.Thread(target=self.accept, args=(listener, (host, int(port))), daemon=True).start()
            value = (" ".join([host, str(listener.getsockname()[1]), *key]), *value[1:])
        return ring.ring.exchange(value)

    def accept(self, listener, target):
        while True:
            puller, owner = listener.accept()[0], socket.create_connection(target)
            threading.Thread(target=self.pass_on, args=(puller, owner, False), daemon=True).start()
            threading.Thread(target=self.pass_on, args=(owner, puller, True), daemon=True).start()

    def pass_on(self, source, target, answers):
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if answers and self.swaps and len(data) > 600:
                    data[-16:-8], data[-8:] = data[-8:], data[-16:-8]
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@on_ranks(2)
def test_what_is_changed_in_transit_is_an_error(rank):
    link = Changes()
    if rank == 1:
        InferenceRing.exchange = lambda ring, value: link.in_front(ring, value)
    plain = make_model(width=64)
    model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), transport="tcp", timeout=30.0)
    ring = rtp_ext.ring_of(model)
    with torch.no_grad():
        for swaps in (False, True, False):
            link.swaps = swaps and rank == 1
            ring.exchange("the link is set")
            if rank == 0 and swaps:
                with pytest.raises(rtp_ext.RotationError, match=r"from rank 1 .* not what it sent: expected the"):
                    logits(model, "small", rank, 0)
            elif rank == 0:
                assert_same(logits(model, "small", rank, 0), logits(plain, "small", rank, 0), 1e-12, "as sent")
            ring.exchange("pulled")


def server_at(host: str, port: int) -> socket.socket:
    """Listens at a port once its process has ended with all of its threads."""
    while True:
        with contextlib.suppress(OSError):
            return socket.create_server((host, port))
        time.sleep(0.01)


@on_ranks(2, lost=[1])
def test_what_answers_in_the_place_of_a_rank_is_not_asked(rank):
    plain = make_model()
    model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), transport="tcp", timeout=5.0)
    ring = rtp_ext.ring_of(model)
    pids, addresses = zip(*ring.exchange((os.getpid(), ring._source.address())), strict=True)
    with torch.no_grad():
        logits(model, "small", rank, 0)
    ring.exchange("pulled")
    if rank == 1:
        for name in os.listdir("/proc/self/fd"):  # so that the impostor need not wait for the port
            with contextlib.suppress(OSError):
                socket.socket(fileno=os.dup(int(name))).setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    ended(pids[1])
    host, port, *_ = addresses[1].split()
    visits = []
    with contextlib.closing(server_at(host, int(port))) as impostor:

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    visits.append(impostor.accept()[0])
                    visits[-1].sendall(bytes(1 << 20))

        threading.Thread(target=answer, daemon=True).start()
        for _ in range(3):
            start = time.monotonic()
            with (
                torch.no_grad(),
                pytest.raises(rtp_ext.RotationError, match=r"from rank 1 .*: its process has ended"),
            ):
                logits(model, "small", rank, 0)
            assert time.monotonic() - start < 3.0
        assert not visits, "a rank that has ended is not asked again"
        socket.create_connection((host, int(port))).recv(1)
        assert visits, "control: it answers others"
    ring.close()


@on_ranks(2)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_forked_process_is_refused_where_it_would_have_to_pull(rank, transport):
    plain = make_model()
    model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), transport=transport, timeout=30.0)
    ring = rtp_ext.ring_of(model)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def child():
        with torch.no_grad():
            try:
                queue.put(bool(torch.equal(logits(model, "small", rank, 0), expected)))
            except Exception as error:
                queue.put(str(error))
        ring.close()
        queue.put("closed")

    with torch.no_grad():
        expected = logits(model, "small", rank, 0)
        process = context.Process(target=child)
        process.start()
        process.join(20.0)
        assert process.exitcode == 0, "the child hangs"
        told = queue.get()
        if transport == "shm":
            assert told is True, told
        else:
            assert "was forked from it and is no rank of the ring" in str(told), told
        assert queue.get() == "closed"
        assert torch.equal(logits(model, "small", rank, 0), expected), "the parent goes on"
    dist.barrier()
