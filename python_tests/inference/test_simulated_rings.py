"""Whole models over `ce`, and with shards that stay on the host, against the simulated CUDA runtime: outputs are those
of the plain model while owners compute nothing, and planted mistakes of the copies are noticed."""

import copy

import pytest
import simulated_cuda
import torch
from hf_models import make
from models import make_model
from reference import assert_same, differs, random
from simulated_cuda import skip_without_headers
from simulated_cuda.late import late
from simulated_cuda.mutants import COPIED_MUTANTS
from simulated_ranks import TIMEOUT, inference_ranks
from torch import nn

import rtp_ext
from rtp_ext.functional._call import Call

skip_without_headers()

EXACT = 1e-12


def converted(plain, offload, **options):
    """A converted copy, its ring, and the bytes of all shards that a forward copies."""
    options |= {"transport": "shm" if offload else "ce", "offload": offload, "timeout": TIMEOUT}
    model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), **options)
    ring = rtp_ext.ring_of(model)
    assert ring.transport == options["transport"]
    return model, ring, sum(ring.exchange(ring.shard_bytes)) - (0 if offload else ring.shard_bytes)


def mixture():
    torch.manual_seed(0)
    block = next(p for p in make("mixtral", num_hidden_layers=1).modules() if type(p).__name__ == "MixtralExperts")
    with torch.no_grad():
        for parameter in block.double().parameters():
            parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=1) / 8)
    return block


@torch.no_grad()
def computes(rank, ranks, offload, block, language_model):
    plain = make_model()  # embeddings, linear layers, norms
    ids = torch.arange(6 + rank).unsqueeze(0)
    model, ring, copied = converted(plain, offload)
    for number in range(rank):  # rank 0 computes nothing, and serves
        assert_same(model(ids), plain(ids), EXACT, f"forward {number}")
        assert ring.pulled_bytes == (1 + number) * copied
    assert rtp_ext.explain(model).totals["forward_bytes"] == copied
    assert rank == 0 or differs(model(ids), plain(ids + 1), 1e-6), "control"
    ring.exchange("no rank is in a forward")
    for parameter in plain.parameters():
        parameter.mul_(0.9)
    assert rtp_ext.update_weights(model, plain.named_parameters()) == len(list(plain.parameters()))
    for _ in range(2):
        assert_same(model(ids), plain(ids), EXACT, "new weights")
    slots, most = ring.slot_count("weight"), rtp_ext.explain(model).totals["slot_bytes"]
    assert (slots.slots, slots.bytes) == (2, most), "all that the device holds of the shards"
    ring.close()

    model, ring, copied = converted(block, offload)
    x, weights = random(6, block.hidden_dim, dtype=torch.float64, seed=rank), torch.full((6, 2), 0.5).double()
    chosen = torch.stack([torch.arange(6) % block.num_experts, (torch.arange(6) + 1) % block.num_experts], 1)
    assert_same(model(x, chosen, weights), block(x, chosen, weights), EXACT, "all experts")
    assert ring.pulled_bytes == copied
    own = torch.full((6, 2), rank * (block.num_experts - 1))
    assert_same(model(x, own, weights), block(x, own, weights), EXACT, "own experts")
    assert ring.pulled_bytes == copied + (ring.shard_bytes if offload else 0), "those of other ranks are not copied"
    assert differs(model(x, own, weights), block(x, chosen, weights), 1e-3), "control"
    ring.close()

    plain = language_model  # attention and an MLP, as bundles
    ids = torch.arange(4 + rank).unsqueeze(0)
    for format in (None, "nf4"):
        model, ring, _ = converted(plain, offload, weights=format)
        twin = copy.deepcopy(plain)
        found = rtp_ext.frozen_weights(model)
        assert bool(found) == bool(format)
        twin.load_state_dict(found, strict=False)
        assert_same(model(ids).logits, twin(ids).logits, 1e-5, f"weights {format}")
        assert differs(model(ids).logits, plain(ids + 1).logits, 1e-3), "control"
        assert not format or differs(twin(ids).logits, plain(ids).logits, 1e-4), "control: values are rounded"
        ring.close()


@pytest.mark.parametrize("offload", [False, True])
def test_models(sim, offload):
    sim.controls.delay_us = 20
    # not made by the ranks: transformers' imports do not expect threads
    inference_ranks(sim, 2, computes, 2, offload, mixture(), make("llama", num_hidden_layers=1).eval())
    assert sim.pinned_regions() == 0


@torch.no_grad()
def races(rank, sim, offload):
    """Layers whose products run late, on a stream: as on a GPU, the host is far ahead of them."""
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 6, bias=False), nn.Linear(6, 4)).double()
    for number, parameter in enumerate(plain.parameters()):
        parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=number))
    model, ring, _ = converted(plain, offload)
    x = random(3 + rank, 5, dtype=torch.float64, seed=rank)
    sim.set_compute(True)
    with late(sim) as operators:
        found = [model(x) for _ in range(3)]
    assert operators.enqueued > 0, "control: nothing was late"
    sim.synchronize()
    sim.device_synchronize()  # copies for which a mutant does not wait end before their slots are freed
    same = all(torch.equal(y, found[0]) and not differs(y, plain(x), EXACT) for y in found)
    begun, used = ring.prefetched()
    assert begun == used == 4, "in two forwards, the first shards of two layers came ahead"
    ring.close()
    return same


@pytest.fixture
def no_operators(monkeypatch):
    """Operations do not become operators of selective checkpointing, which `late` would run twice."""
    monkeypatch.setattr(Call, "once", lambda call, name, inputs, shards, compute: compute())


@pytest.mark.parametrize("offload", [False, True])
def test_products_wait_for_their_shards(sim, no_operators, offload):
    sim.controls.delay_us = 200
    assert all(inference_ranks(sim, 2, races, sim, offload))


@pytest.mark.parametrize("mutant", range(len(COPIED_MUTANTS)), ids=list(COPIED_MUTANTS))
def test_a_mistake_of_offloaded_shards_is_noticed(sim, no_operators, mutant):
    for seed in range(10):
        sim.reset(seed)
        sim.controls.delay_us = 500
        if not all(inference_ranks(sim, 2, races, sim, True, mutant=mutant)):
            return
        assert simulated_cuda.settled(sim)
    raise AssertionError("not noticed")
