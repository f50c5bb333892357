"""Links of the emulated ring on one GPU, and the slots of the copy-engine transport in torch's memory statistics."""

import pytest
import torch
from support import run_gpu_ranks, several_ranks_problem, share_gpu
from torch.distributed.device_mesh import init_device_mesh

import rtp_ext

LINKS = [None, "sm-local", "ce-local", "ce-local:2", "ce-local:4", "nccl-self", "nccl-self:2", "pcie"]


@pytest.mark.parametrize("link", LINKS)
def test_every_link_carries_the_shards(link):
    ring = rtp_ext.Ring.emulated(4, device="cuda", link=link)
    assert ring.link == (link or "sm-local")
    shard = torch.randn(1000, 3001, device="cuda")  # 12 MB: several chunks of pinned memory, no multiple of any cut
    for reverse in (False, True):
        for _, passing in ring.rotate(shard, reverse=reverse):
            assert torch.equal(passing, shard)
    ring.close()


def test_unknown_links_are_value_errors():
    with pytest.raises(ValueError, match="got wire"):
        rtp_ext.Ring.emulated(2, device="cuda", link="wire")


def _counts_slots(rank, ranks, log):
    share_gpu(rank, ranks, log)
    ring = rtp_ext.Ring(init_device_mesh("cuda", (ranks,)), transport="ce", timeout=60.0)
    shard = torch.full((16 << 20,), rank, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated()
    for owner, passing in ring.rotate(shard):
        assert (passing == owner).all()
    slots = ring.slot_count("weight")
    assert slots.bytes >= (ranks - 1) * shard.numel()
    assert torch.cuda.memory_allocated() - before >= slots.bytes
    reserved = torch.cuda.memory_reserved()
    ring.clear_slots()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.memory_reserved() <= reserved - slots.bytes  # and so it is the GPU's again
    ring.close()


@pytest.mark.real_gpu("torch counts its memory")
def test_slots_are_counted_and_given_back(tmp_path):
    if (problem := several_ranks_problem(2)) is not None:
        pytest.skip(problem)
    run_gpu_ranks(_counts_slots, 2, str(tmp_path / "nccl"), timeout=120.0)
