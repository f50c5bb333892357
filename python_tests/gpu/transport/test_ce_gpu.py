"""Links of the emulated ring on one GPU, the slots of the copy-engine transport in torch's memory statistics, and a
kernel that follows its hops."""

import pytest
import torch
from harness import run_ranks
from support import several_ranks_problem, share_gpu
from torch.distributed.device_mesh import init_device_mesh

import rtp_ext
from rtp_ext.functional import rotated_linear

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


def test_slots_are_counted_and_given_back(tmp_path):
    if (problem := several_ranks_problem(2)) is not None:
        pytest.skip(problem)
    run_ranks(_counts_slots, 2, str(tmp_path / "nccl"), timeout=120.0)


def _follows(rank, ranks, log):
    share_gpu(rank, ranks, log)
    mesh = init_device_mesh("cuda", (ranks,))
    ring = rtp_ext.Ring(mesh, transport="ce", route="ring", persistent_gemm=True, timeout=60.0)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-1, 2, (ranks * 392, 520), generator=generator).bfloat16()  # tiles that are not whole
    home = weight.chunk(ranks)[rank].cuda()
    for tokens in (1, 300, 1111):
        x = torch.randint(-1, 2, (tokens, 520), generator=generator).bfloat16()
        dy = torch.randint(-1, 2, (tokens, ranks * 392), generator=generator).bfloat16()
        mine = x.cuda().requires_grad_()
        y = rotated_linear(mine, home, ring=ring, name="layer")
        y.backward(dy.cuda())
        assert torch.equal(y.cpu(), (x.float() @ weight.float().t()).bfloat16()), tokens  # exact sums, rounded once
        assert torch.equal(mine.grad.cpu(), (dy.float() @ weight.float()).bfloat16()), tokens
    assert ring.persistent_gemms() == {"layer forward": "", "layer backward": ""}
    ring.close()


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_kernel_follows_the_hops(tmp_path, ranks):
    if (problem := several_ranks_problem(ranks)) is not None:
        pytest.skip(problem)
    run_ranks(_follows, ranks, str(tmp_path / "nccl"), timeout=120.0)
