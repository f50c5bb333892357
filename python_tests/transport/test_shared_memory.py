"""The contents of a peer's shared memory are not trusted: memory is private, its size sealed, and every offset in it is
checked before anything is copied there."""

import fcntl
import mmap
import os
import re
import resource
import struct
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks, run_ranks

import rtp_ext
from rtp_ext import RotationError, _native
from rtp_ext.ring.links import transports

CPU, TIMEOUT = torch.device("cpu"), timedelta(seconds=5)
BYTES = 70056  # of the shard that travels, to be found in the memory that describes it; no small message
SMALL = 1 << 16  # bytes of the largest message that waits in the receiver's mailbox
TOKEN = 176  # bytes of a HopToken
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def _descriptor(address):
    return int(address.split()[3])


def _plant(address, change):
    """Changes what this process says of where its next message is to land: (offset, bytes of the segment)."""
    with open(f"/proc/self/fd/{_descriptor(address)}", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        first = memory.find(struct.pack("=Q", BYTES))
        start = memory.rfind(struct.pack("=Q", 1), 0, first)  # the first segment; its bytes and the hop's token follow
        segment_bytes, offset = struct.unpack_from(f"=Q{TOKEN}xQ", memory, start + 8)
        assert offset + BYTES <= segment_bytes < 1 << 20, "not the memory that was looked for"
        offset, segment_bytes = change(offset, segment_bytes)
        struct.pack_into("=Q", memory, start + 8, segment_bytes)
        struct.pack_into("=Q", memory, start + 16 + TOKEN, offset)


LIES = {
    "far away": (
        lambda offset, size: (1 << 40, size),
        rf"expects {BYTES} bytes at offset {1 << 40} of a segment that holds",
    ),
    "just beyond": (lambda offset, size: (size - BYTES + 8, size), "at offset .* of a segment that holds"),
    "wraps around": (lambda offset, size: (2**64 - 8, size), rf"at offset {2**64 - 8} of a segment that holds"),
    "a larger segment": (lambda offset, size: (1 << 30, 1 << 31), rf"to hold {1 << 31} bytes, got "),
    "no segment": (lambda offset, size: (offset, 0), "to hold 0 bytes, got "),
}


@on_ranks(2)
@pytest.mark.parametrize("lie", LIES)
def test_a_place_that_is_not_there_is_refused(rank, ranks, lie):
    change, text = LIES[lie]
    transport = _native.ShmTransport(rank, ranks, TIMEOUT)
    told = [None] * ranks
    dist.all_gather_object(told, transport.address())
    transport.connect(told)
    executor = _native.Executor(transport, rank, ranks, CPU)
    shard = torch.full((BYTES,), float(rank)).to(torch.uint8)
    shapes = [[[BYTES]] * ranks]
    dist.barrier()
    if rank == 1:
        execution = _native.Execution.rotate(executor, [shard], shapes, "ring", False)
        execution.next()
        _plant(transport.address(), change)
    dist.barrier()
    if rank == 0:
        execution = _native.Execution.rotate(executor, [shard], shapes, "ring", False)
    with pytest.raises(RotationError) as raised:
        while execution.next() is not None:
            pass
        execution.finish()
    if rank == 0:
        assert re.search(rf"rotate, weight hop 1 of 1: rank 1 of the ring.* {text}", str(raised.value)), raised.value
    else:
        assert isinstance(raised.value, rtp_ext.RingTimeout) and "rank 0" in str(raised.value), raised.value
    assert not executor.alive
    dist.barrier()


def _rotated(executor, rank, ranks, sizes, value):
    """Returns the shards that arrive, of `sizes` bytes, if that of rank r is filled with value + r."""
    shard = torch.full((sizes[rank],), value + rank, dtype=torch.uint8)
    execution = _native.Execution.rotate(executor, [shard], [[[size] for size in sizes]], "ring", False)
    found = {}
    while (step := execution.next()) is not None:
        (view,) = execution.weight()
        found[step.owner] = view.clone()
    execution.finish()
    return found


@on_ranks(2)
def test_small_messages_arrive_as_large_ones_do_and_other_sizes_are_refused(rank, ranks):
    for case, sizes in enumerate(((SMALL, SMALL + 8), (104, 112))):
        transport = _native.ShmTransport(rank, ranks, TIMEOUT)
        told = [None] * ranks
        dist.all_gather_object(told, transport.address())
        transport.connect(told)
        executor = _native.Executor(transport, rank, ranks, CPU)
        for turn, size in enumerate([1, SMALL, SMALL + 1, 0, 8] * 5 if case == 0 else []):
            found = _rotated(executor, rank, ranks, [size] * ranks, turn)
            assert {owner: set(view.tolist()) for owner, view in found.items()} == {
                owner: {turn + owner} if size else set() for owner in range(ranks)
            }, (turn, size)
        dist.barrier()
        # A rank that expects another size than the other one sends gets an error, and no numbers.
        with pytest.raises(
            RotationError, match=r"out of step|of the ring (sent|expects)|its ring failed|process has ended"
        ):
            _rotated(executor, rank, ranks, [sizes[rank]] * ranks, 0)
        assert not executor.alive
        dist.barrier()


def test_memory_is_private_and_keeps_its_size():
    transport, news = _native.ShmTransport(0, 2, TIMEOUT), _native.PeerStatus(0, 2)
    for address in (transport.address(), news.address()):
        fd = _descriptor(address)
        assert os.fstat(fd).st_mode & 0o777 == 0o600
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
        size = os.fstat(fd).st_size
        for other in (0, size - 1, size + 4096):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, other)


def _altered(address, **fields):
    names = ("host", "processes", "pid", "fd", "nonce")
    return " ".join(str(fields.get(name, value)) for name, value in zip(names, address.split(), strict=True))


def test_addresses_that_are_none_and_places_out_of_reach(tmp_path):
    mine, other = _native.ShmTransport(0, 2, TIMEOUT), _native.ShmTransport(1, 2, TIMEOUT)
    address = other.address()
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 1 << 20)
    small = os.memfd_create("small", os.MFD_ALLOW_SEALING)
    os.ftruncate(small, 64)
    fcntl.fcntl(small, fcntl.F_ADD_SEALS, SEALS)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 1 << 20)
    refused = {
        "": "expected an address .*, got ''",
        "here": "expected an address .*, got 'here'",
        f"{address} more": "expected an address",
        _altered(address, pid=-1): "expected an address",
        _altered(address, pid="1x"): "expected an address",
        _altered(address, fd=-1): "expected an address",
        _altered(address, fd=2**40): "expected an address",
        _altered(address, host="elsewhere"): "rank 1 is on another host",
        _altered(address, processes="pid:[1]"): r"rank 1 is in another container of this host .*pid:\[1\]",
        _altered(address, nonce=1): "rank 1 is not process",
        _altered(address, fd=unsealed): "rank 1: .* to be memory of a sealed size, got another file",
        _altered(address, fd=file): "rank 1: .* to be memory of a sealed size, got another file",
        _altered(address, fd=small): "rank 1: .* to hold .* bytes, got 64",
        _altered(address, fd=9999): "rank 1: .*cannot open /proc/.*/fd/9999: No such file",
    }
    for text, reason in refused.items():
        with pytest.raises(RotationError, match=reason):
            _native.ShmTransport(0, 2, TIMEOUT).connect([mine.address(), text])
        news = _native.PeerStatus(0, 2)
        assert news.connect([news.address(), text]) == 0
    for fd in (unsealed, small, file):
        os.close(fd)


def _contained(rank, ranks):
    """Rank 1 reports another container: all ranks use tcp and name the reason."""
    make = _native.ShmTransport

    class Contained:
        def __init__(self, *arguments):
            self.native = make(*arguments)

        def address(self):
            return _altered(self.native.address(), processes="pid:[7]") if rank == 1 else self.native.address()

        def connect(self, addresses):
            self.native.connect(addresses)

    _native.ShmTransport = Contained
    with rtp_ext.Ring(timeout=30.0) as ring:
        assert ring.transport == "tcp"
        assert (
            "in another container of this host" in ring.transport_reason and "cannot open" not in ring.transport_reason
        )
        assert len(list(ring.rotate(torch.ones(2)))) == ranks


def test_a_ring_across_containers_says_so():
    assert transports._native is _native
    run_ranks(_contained, 2)


def test_too_many_open_files_are_not_taken_for_another_host():
    transport = _native.ShmTransport(0, 2, timedelta(seconds=1))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))  # no number is left for another file
    try:
        with pytest.raises(RotationError, match=r"cannot read .*boot_id: Too many open files"):
            transport.address()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert transport.address()
