"""Ring(checksum=True) with fewer bytes: a flipped bit in a quantized value, in a scale, or in a contribution on the
direct route is an error that names the hop and the sender; without checksums numbers are wrong."""

import functools

import pytest
import torch
from grids import few
from harness import on_ranks
from reference import chunk, random
from test_checksum import PATIENT, Rings, same, told_of_a_flip, unnoticed

import rtp_ext
from rtp_ext import _native
from rtp_ext.functional import rotated_linear

# The rows of every rank's shard: the flipped bit is in the middle of the data of a hop. With a single number for each
# rank that is its scale: one byte, three of padding, and four of the scale.
NUMBERS, SCALE = (6, 7), (1, 1)
HALF = torch.bfloat16
DIRECT = {"gradient_route": "direct"}
WAYS = [
    ("weight", NUMBERS, None, {"travel": "bfloat16"}),
    ("weight", NUMBERS, None, {"travel": "int8"}),
    ("weight", SCALE, None, {"travel": "int8"}),
    ("gradient", NUMBERS, None, DIRECT),
    ("gradient", NUMBERS, HALF, DIRECT | {"travel": "int8"}),
    ("gradient", NUMBERS, None, DIRECT | {"gradient_travel": "int8"}),
    ("gradient", SCALE, None, DIRECT | {"gradient_travel": "int8"}),
]


def results(ring, shape, reduce_dtype):
    """Output and gradients of a layer whose shards are of `shape`, in an order that has no prefetch."""
    rows, features = shape
    weight = random(rows * ring.size, features, dtype=torch.float32, seed=1)
    shard = chunk(weight, ring.size, ring.rank).clone().requires_grad_()
    x = random(3 + ring.rank, features, dtype=torch.float32, seed=2 + ring.rank).requires_grad_()
    y = rotated_linear(x, shard, ring=ring, reduce_dtype=reduce_dtype, name="layer")
    y.square().sum().backward()
    return [y.detach(), x.grad, shard.grad]


@on_ranks()
@pytest.mark.parametrize(
    ("ranks", "transports"), few([(2, ["shm"]), (3, ["c10d"])], [(2, ["shm"]), (3, ["c10d"]), (3, ["tcp"])])
)
def test_a_flipped_bit_of_few_is_found(rank, ranks, cases, transports):
    odd = ranks - 1  # the rank that a disturbed hop reaches
    for transport in transports:
        for channel, shape, reduce_dtype, options in WAYS:
            what = f"{transport}, {channel} of {shape} {reduce_dtype} {options}"
            with rtp_ext.Ring(transport=transport, timeout=PATIENT, **options) as plain:
                expected = results(plain, shape, reduce_dtype)
                hop_by_hop = plain.hop_route == "ring" and (channel == "weight" or plain.gradient_route == "chain")
            rings = Rings(transport, **options)
            with cases.case(f"{what}, undisturbed"), rtp_ext.Ring(checksum=True, **rings.options) as ring:
                assert same(results(ring, shape, reduce_dtype), expected)
            act = functools.partial(results, shape=shape, reduce_dtype=reduce_dtype)
            with cases.case(f"{what}, found"):
                hop = rf"layer (forward|backward), {channel} hop {ranks - 1} of {ranks - 1}"
                hop += rf": what arrived from rank {odd - 1 if hop_by_hop else 0} of the ring is not what"
                told_of_a_flip(rings, channel, ranks, act, hop)
            with cases.case(f"{what}, control"):
                found, ring = unnoticed(rings, channel, ranks, act)
                wrong = not same(found, expected)
                told = ring.exchange(wrong)
                assert told[odd], "the flipped bit has to change a number"
                assert rank != odd or all(torch.isfinite(each).all() for each in found), "and nobody notices"
                ring.close()


def test_where_the_middle_of_a_single_number_is():
    assert _native.kernels.quantized_bytes(1) == 8, "the byte that is flipped, (8 / 2) | 6, is one of its scale"
