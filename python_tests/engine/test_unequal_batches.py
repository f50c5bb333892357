"""Ranks with batches of different sizes post the same hops: the computes of a rank do not affect the others."""

from datetime import timedelta

import pytest
import recording_transport
import torch
from reference import TOLERANCE, assert_same, chunk, random
from simulated_cuda import one_of_ranks, run_threads, values
from torch import nn

import rtp_ext
from rtp_ext import _native
from rtp_ext import nn as rotated

CPU, DTYPE = torch.device("cpu"), torch.float64
MULTIPROCESSORS = 2  # 200 tokens fill them, 100 tokens or none do not
# of each rank, by step
TOKENS = [[200, 200, 200, 200, 200], [200, 200, 100, 100, 200], [100, 200, 0, 200, 100]]
WIDTH, LAYERS = 12, 3  # three ranks divide it: an emulated ring has equal shards only


class Everything(nn.Module):
    """Every operation that rotates."""

    def __init__(self, ring):
        super().__init__()
        self.embed = rotated.RotatedEmbedding(12, WIDTH, ring=ring)
        self.linear = rotated.RotatedLinear(WIDTH, WIDTH, ring=ring)
        self.partial = rotated.RotatedLinear(WIDTH, WIDTH, ring=ring, shard_dim=1)
        self.convolution = rotated.RotatedConv1d(WIDTH, WIDTH, 1, ring=ring)
        self.attention = rotated.RotatedMultiheadAttention(WIDTH, 2, ring=ring)
        self.mlp = rotated.RotatedMLP(WIDTH, 2 * WIDTH, ring=ring)
        self.experts = rotated.RotatedExperts(3, WIDTH, 6, ring=ring)
        self.last = rotated.RotatedLinear(WIDTH, WIDTH, ring=ring)
        self.loss = rotated.RotatedLinearCrossEntropy(WIDTH, 12, ring=ring)

    def forward(self, ids):
        x = self.partial(self.linear(self.embed(ids)))
        x = self.convolution(x.t().unsqueeze(0)).squeeze(0).t()
        x = self.attention(x, x, x, need_weights=False)[0]
        x = self.mlp(x)
        index = torch.zeros(*ids.shape, 1, dtype=torch.int64)  # of this rank, all tokens take one expert
        return self.loss(self.last(self.experts(x, index, torch.ones(index.shape))), ids)


class Linears(nn.Module):
    def __init__(self, ring):
        super().__init__()
        self.embed = rotated.RotatedEmbedding(12, WIDTH, ring=ring)
        self.layers = nn.Sequential(*(rotated.RotatedLinear(WIDTH, WIDTH, ring=ring) for _ in range(LAYERS)))

    def forward(self, ids):
        return self.layers(self.embed(ids)).sum()


def _hops(kind, rank, tokens):
    """Returns the posts of one rank of three, hop by hop; the number of hops that it sent ahead; whether it ever
    computed on two streams."""
    ring = rtp_ext.Ring.emulated(3, rank=rank)
    module = recording_transport.load()
    ring.communicator.executor = _native.Executor(module.transport(multiprocessors=MULTIPROCESSORS), rank, 3, CPU)
    ring.communicator.executor.prefetch(True)
    torch.manual_seed(0)
    model = kind(ring)
    module.start()
    try:
        for count in tokens:
            ring.begin_forward()
            loss = model(torch.zeros(count, dtype=torch.int64))
            ring.end_forward()
            loss.backward()
        records = module.records()
    finally:
        module.stop()
    beside = any(record.kind == "memory" and record.lane == 1 for record in records)
    return [record.text for record in records if record.kind == "hop"], ring.prefetched(), beside


@pytest.mark.parametrize("kind", [Everything, Linears])
def test_every_rank_posts_the_same_hops(kind):
    tokens = [[count or 100 for count in of_rank] if kind is Everything else of_rank for of_rank in TOKENS]
    (hops, ahead, _), *others = (_hops(kind, rank, of_rank) for rank, of_rank in enumerate(tokens))
    assert ahead[1] > 0, "control: hops are sent ahead, and used"
    for rank, (theirs, their_ahead, beside) in enumerate(others, start=1):
        assert theirs == hops and their_ahead == ahead, f"rank {rank}"
        assert beside, "control: some rank computes on two lanes at times"


def _train(rank, sim, ids, ranks, registered):
    """Runs steps of linear layers, one after the other, and checks every product. Returns the posts."""
    timeout = timedelta(seconds=20)
    transport = sim.nccl(ids, rank, ranks, timeout, None, registered=registered)
    executor = _native.Executor(transport, rank, ranks, CPU)
    executor.prefetch(True)
    whole = [random(WIDTH, WIDTH, dtype=DTYPE, seed=layer) for layer in range(LAYERS)]
    local_shards = [chunk(weight, ranks, rank).clone() for weight in whole]
    shape = _native.LinearBundle([_native.LinearShape(WIDTH, WIDTH, by_outputs=True, transposed=False)], [False])
    projections = [_native.Projection(0, 0, 0, WIDTH)]
    dtypes = {"compute_dtype": DTYPE, "reduce_dtype": DTYPE}
    with one_of_ranks(sim, rank, executor):
        for step in range(len(TOKENS[0])):
            xs = [random(TOKENS[r][step], WIDTH, dtype=DTYPE, seed=100 * step + r) for r in range(ranks)]
            options = [
                _native.RotationOptions(
                    route="ring", in_place=False, slot_cap=0, halves=False, name=f"layer {layer}", **dtypes
                )
                for layer in range(LAYERS)
            ]
            for layer, local in enumerate(local_shards):
                executor.enter(2 * step + 1, False, layer + 1, [local])
                (y,) = _native.linear_forward(executor, [xs[rank]], [local], shape, projections, options[layer])
                assert_same(y, xs[rank] @ whole[layer].t(), TOLERANCE[DTYPE], f"step {step}, layer {layer}: y")
            for layer, local in reversed(list(enumerate(local_shards))):
                executor.enter(2 * step + 2, True, layer + 1, [local])
                dx, dw = _native.linear_backward(
                    executor, [xs[rank]], [xs[rank]], [local], shape, projections, [True], [True], options[layer]
                )
                expected = chunk(sum(x.t() @ x for x in xs) / ranks, ranks, rank)
                assert_same(dx, xs[rank] @ whole[layer], TOLERANCE[DTYPE], f"step {step}, layer {layer}: dx")
                assert_same(dw, expected, TOLERANCE[DTYPE], f"step {step}, layer {layer}: dw")
        posted = executor.hops("weight"), executor.hops("gradient"), executor.prefetched()
        executor.close()
        return posted


@pytest.mark.parametrize("ranks", [2, 3])
def test_results_on_devices_of_two_multiprocessors(sim, ranks):
    for registered in (False, True):
        sim.controls.multiprocessors = MULTIPROCESSORS
        ids = [sim.unique_id(), sim.unique_id()]
        first, *others = values(run_threads(_train, ranks, sim, ids, ranks, registered))
        assert all(posted == first for posted in others), [first, *others]
        assert first[2][1] > 0, "control: hops are sent ahead, and used"
