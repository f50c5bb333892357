"""Shards above the slot cap travel in chunks: the same results, and slots no larger than the cap."""

import torch
import torch.nn.functional as F
from harness import Cases, run_ranks
from reference import assert_same, chunk, random

import rtp_ext
from rtp_ext.functional import rotated_embedding, rotated_linear, rotated_linear_cross_entropy

VOCABULARY, FEATURES, TOKENS = 17, 5, 600  # more tokens than the vocabulary head looks at together
ROW = 8 * (FEATURES + 1)  # bytes of a row and its bias in float64
TOLERANCE = 1e-10


def _home(whole, ring, dim=0):
    return chunk(whole, ring.size, ring.rank, dim).clone(memory_format=torch.contiguous_format).requires_grad_()


def _compare(ring, operation, plain, inputs, parameters, dims):
    """`operation(x, *homes)` on the ring against `plain(x, *wholes)` on all batches: outputs and all gradients."""
    wholes = [parameter.clone().requires_grad_() for parameter in parameters]
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    outputs = [plain(x, rank, *wholes) for rank, x in enumerate(leaves)]
    (sum(y.square().sum() for y in outputs) / ring.size).backward()
    local_shards = [_home(parameter, ring, dim) for parameter, dim in zip(parameters, dims, strict=True)]
    x = inputs[ring.rank].clone().requires_grad_(inputs[0].is_floating_point())
    y = operation(x, *local_shards)
    y.square().sum().backward()
    assert_same(y, outputs[ring.rank], TOLERANCE, "output")
    if x.grad is not None:
        assert_same(x.grad, leaves[ring.rank].grad * ring.size, TOLERANCE, "input gradient")
    for local, whole, dim in zip(local_shards, wholes, dims, strict=True):
        expected = chunk(whole.grad, ring.size, ring.rank, dim)
        scale = whole.grad.abs().max() / max(expected.abs().max(), 1e-30) if expected.numel() else 1.0
        assert_same(local.grad, expected, TOLERANCE * float(scale), "gradient")


def _run(rank, ranks):
    weight = random(VOCABULARY, FEATURES, dtype=torch.float64, seed=1)
    bias = random(VOCABULARY, dtype=torch.float64, seed=2)
    xs = [random(TOKENS + r, FEATURES, dtype=torch.float64, seed=10 + r) for r in range(ranks)]
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(VOCABULARY, (TOKENS + r,), generator=generator) for r in range(ranks)]
    cases, hops = Cases(), {}
    for transport, in_place in (("shm", False), ("c10d", True)):
        for cap in (0, ROW, 4 * ROW + 1):
            ring = rtp_ext.Ring(transport=transport, slot_cap=cap, in_place=in_place, timeout=30.0)
            options = {"ring": ring}
            with cases.case(f"linear {transport} {cap}"):
                _compare(
                    ring,
                    lambda x, w, b, o=options: rotated_linear(x, w, b, **o),
                    lambda x, _, w, b: F.linear(x, w, b),
                    xs,
                    [weight, bias],
                    [0, 0],
                )
            for dim in (0, 1):
                with cases.case(f"embedding {dim} {transport} {cap}"):
                    _compare(
                        ring,
                        lambda i, w, d=dim, o=options: rotated_embedding(i, w, shard_dim=d, **o),
                        lambda i, _, w: F.embedding(i, w),
                        ids,
                        [weight],
                        [dim],
                    )
            with cases.case(f"cross-entropy {transport} {cap}"):
                _compare(
                    ring,
                    lambda x, w, b, o=options: rotated_linear_cross_entropy(
                        x, w, ids[rank], b, label_smoothing=0.1, **o
                    ),
                    lambda x, r, w, b: F.cross_entropy(F.linear(x, w, b), ids[r], label_smoothing=0.1),
                    xs,
                    [weight, bias],
                    [0, 0],
                )
            with cases.case(f"slots {transport} {cap}"):
                count = ring.slot_count("weight")
                # a part of a slot is aligned to 64 bytes
                assert cap == 0 or count.peak_bytes <= count.peak_slots * (cap + 2 * 64), count.peak_bytes
            hops[transport, cap] = ring.hops("weight")
            ring.close()
    cases.finish()
    return hops


def test_pieces():
    for ranks in (1, 2, 3, 4):
        hops = run_ranks(_run, ranks)[0]
        for transport in ("shm", "c10d"):
            if ranks > 1:  # control: the cap does cut
                assert hops[transport, ROW] > hops[transport, 4 * ROW + 1] > hops[transport, 0]


def test_a_schedule_is_made_once():
    """Passes with the same hops share it, for all sizes, chunks and values."""
    ring = rtp_ext.Ring.emulated(3)
    made = []
    for rows, cap, frozen in ((2, 0, False), (2, 0, False), (5, 0, False), (5, 1, False), (5, 0, True), (2, 0, True)):
        ring.slot_cap = cap
        weight = random(rows, 6, dtype=torch.float64, seed=rows).requires_grad_(not frozen)
        x = random(4, 6, dtype=torch.float64, seed=1).requires_grad_()
        rotated_linear(x, weight, ring=ring).sum().backward()
        made.append(ring.communicator.executor.schedules())
    assert made == [2, 2, 2, 2, 3, 3]
