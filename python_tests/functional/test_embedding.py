"""RotatedEmbedding: its hops, refusals and constructor. test_operations.py tests its results."""

import pytest
import torch
from harness import on_ranks, run_ranks
from operations.layers import make_embedding, make_ids
from reference import assert_same, chunk, full, local
from torch import nn

import rtp_ext
from rtp_ext.nn import RotatedEmbedding

TIMEOUT = 30.0


@on_ranks(3)
def test_what_travels_and_what_is_refused(rank, ranks, ring):
    """Backward sends no weights; a frozen table sends nothing back; ids out of range move nothing."""
    ids = make_ids("2d", 16, rank, 10)
    module = make_embedding((16, 17)).module(ring)
    y = module(ids)
    assert (ring.hops("weight"), ring.hops("gradient")) == (ranks - 1, 0)
    y.sum().backward()
    assert (ring.hops("weight"), ring.hops("gradient")) == (ranks - 1, ranks - 1)
    module.weight.requires_grad_(False)
    assert not module(ids).requires_grad
    for bad in (torch.tensor([0, 16]), torch.tensor([-1, 3])):
        with pytest.raises(IndexError, match=r"16.*(-1|16)"):
            module(bad)
    for bad in (torch.tensor([0.5]), torch.tensor([True])):
        with pytest.raises(TypeError, match="int64"):
            module(bad)
    y = module(ids)
    assert_same(y, nn.functional.embedding(ids, full(module.weight)), 0.0, "after errors")


def _construct(rank, ranks):
    with rtp_ext.Ring(timeout=TIMEOUT) as ring:
        for shard_dim in (0, 1):
            module = RotatedEmbedding(10, 7, padding_idx=2, ring=ring, shard_dim=shard_dim)
            assert isinstance(module, nn.Embedding)
            assert (module.num_embeddings, module.embedding_dim, module.padding_idx) == (10, 7, 2)
            assert list(module.state_dict()) == ["weight"] and module.weight.shape == (10, 7)
            assert local(module.weight).shape == chunk(torch.empty(10, 7), ranks, rank, shard_dim).shape
            whole = full(module.weight)
            assert not whole[2].any() and whole.unique().numel() == 9 * 7 + 1
        assert RotatedEmbedding(10, 7, ring=ring, device="meta").weight.is_meta
        return whole.tolist()


def test_constructor_is_that_of_nn_embedding():
    values = run_ranks(_construct, 3)
    assert values[0] == values[1] == values[2]
