"""Ring(checksum=True): a bit that flips on the way is an error that names the hop; without it, numbers are wrong."""

import functools
import re

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks, run_ranks
from reference import random

import rtp_ext
from rtp_ext import _native
from rtp_ext.nn import RotatedLinear

PATIENT = 30.0
TRANSPORTS = ("shm", "tcp", "c10d")


def test_the_checksum_is_the_one_of_the_standard():
    """RFC 3720, B.4; and the instruction computes what the table does."""
    for text, expected in (
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"", 0),
    ):
        assert _native.crc32c(text) == expected == _native.crc32c(text, by_table=True)
    numbers = torch.randint(256, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    for size in range(0, 300, 7):
        text = bytes(numbers[:size])
        assert _native.crc32c(text) == _native.crc32c(text, by_table=True)
        if size:
            assert _native.crc32c(text) != _native.crc32c(bytes([numbers[0] ^ 1, *numbers[1:size]]))


class Rings:
    """Rings whose native transports can flip bits. `verify`: with checksums."""

    def __init__(self, transport: str, **options) -> None:
        self.options = {"transport": transport, "timeout": PATIENT, **options}

    def make(self, verify: bool) -> tuple[rtp_ext.Ring, object]:
        made, original = [], _native.CheckedTransport

        def disturbed(native, ranks):
            made.append(original(native, ranks, verify))
            return made[-1]

        _native.CheckedTransport = disturbed
        try:
            ring = rtp_ext.Ring(checksum=True, **self.options)
        finally:
            _native.CheckedTransport = original
        return ring, made[0]


def results(ring, rank) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer = RotatedLinear(7, 11, ring=ring)
    x = random(3 + rank, 7, dtype=torch.float32, seed=rank).requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.to_local() for p in layer.parameters())]


def same(ours, theirs) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def told_of_a_flip(rings, channel, ranks, act, hop) -> None:
    """Flips a bit of the last hop to the last rank, whose error has to match `hop`; all ranks get an error."""
    ring, native = rings.make(verify=True)
    flips_here = ring.rank == ranks - 1
    if flips_here:
        native.flip(channel, ranks - 2)
    with pytest.raises(rtp_ext.RotationError) as caught:
        for _ in range(100):  # who is done before it hears of it goes on
            act(ring)
    text = str(caught.value)
    if flips_here:
        assert re.search(hop, text), text
    assert not ring.alive
    dist.barrier()
    ring.close()


def unnoticed(rings, channel, ranks, act):
    """The same without checksums: what `act` gives then, and the ring, which is left open."""
    ring, native = rings.make(verify=False)
    if ring.rank == ranks - 1:
        native.flip(channel, ranks - 2)
    return act(ring), ring


@on_ranks([2, 3])
def test_a_flipped_bit_is_found(rank, ranks, cases):
    for transport in TRANSPORTS:
        with rtp_ext.Ring(transport=transport, timeout=PATIENT) as plain:
            expected = results(plain, rank)
        rings = Rings(transport)
        with (
            cases.case(f"{transport}, undisturbed"),
            rtp_ext.Ring(transport=transport, timeout=PATIENT, checksum=True) as ring,
        ):
            assert ring.transport == transport and same(results(ring, rank), expected)
        act = functools.partial(results, rank=rank)
        for channel in ("weight", "gradient"):
            with cases.case(f"{transport}, {channel}, found"):
                hop = rf"RotatedLinear (forward|backward), {channel} hop {ranks - 1} of {ranks - 1}"
                hop += r": what arrived from rank \d of the ring is not what it sent"
                told_of_a_flip(rings, channel, ranks, act, hop)
            with cases.case(f"{transport}, {channel}, control"):
                found, ring = unnoticed(rings, channel, ranks, act)
                wrong = not same(found, expected)
                assert any(ring.exchange(wrong)), "the flipped bit has to change a number"
                ring.close()


def test_ranks_that_differ_and_gpus_are_refused(monkeypatch):
    run_ranks(_disagree, 2)


def _disagree(rank, ranks):
    with pytest.raises(ValueError, match=r"checksum True.*checksum False"):
        rtp_ext.Ring(checksum=rank == 0, timeout=PATIENT)
