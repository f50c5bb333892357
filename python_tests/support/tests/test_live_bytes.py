"""The meter of live bytes counts correctly."""

import pytest
import torch
from harness import run_ranks
from live_bytes import LiveBytes
from models import batch_loss, make_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import rtp_ext


def test_counts_every_storage_once_while_it_lives():
    old = torch.ones(500)
    with LiveBytes() as live:
        assert live.current == live.peak == 0
        x = torch.ones(1000)
        assert live.current == 4000
        views = [x[1:], x.view(10, 100), x.detach(), old[2:].view(-1)]
        assert live.current == 4000, "a view, or a storage that was there before"
        y = torch.tensor([[1.0, 2.0]], dtype=torch.float64) * 1.0
        assert live.current == 4016, "torch.tensor's own storage is gone"
        x.untyped_storage().resize_(8000)
        x.add_(1)
        assert live.current == 8016
        del x, views
        assert live.current == 16 and live.peak == 8016
        torch.ones(7, device="meta").add(1)
        live.reset_peak()
        assert live.current == live.peak == y.nbytes
    late = torch.ones(100)
    assert live.peak == 16 and late.numel() == 100


def test_counts_what_autograd_keeps():
    x = torch.ones(100, requires_grad=True)
    with LiveBytes() as live:
        loss = x.exp().sum()
        assert live.current == 404, "the result of exp is saved for backward"
        loss.backward()
        assert live.current == 404, "the gradient in place of what was saved"
        assert x.grad.nbytes == 400


def test_a_mapped_file_does_not_count(tmp_path):
    file = str(tmp_path / "values")
    (tmp_path / "values").write_bytes(bytes(4000))
    with LiveBytes() as live:
        mapped = torch.from_file(file, size=1000)
        other = torch.asarray(torch.UntypedStorage.from_file(file, shared=False, nbytes=4000), dtype=torch.uint8)
        total = mapped[:10].sum().item() + other[:10].sum().item()
        assert live.current == 0 and total == 0
        mapped = mapped.clone()
        assert live.current == 4000, "control: a copy"


def _sharded(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    with LiveBytes() as live:
        sharded = DTensor.from_local(torch.ones(10, 4), mesh, [Shard(0)], run_check=False)
        assert sharded.numel() == ranks * 40
        assert 160 <= live.current < 160 + 64, "the local part, and some numbers of the mesh"
        before = live.current
        double = sharded * 2
        assert live.current == before + 160 and double.shape == sharded.shape
        whole = sharded.full_tensor()
        assert live.current >= before + 160 + ranks * 160 and whole.shape == sharded.shape


@pytest.mark.parametrize("ranks", [2])
def test_counts_the_local_part_of_sharded_tensors(ranks):
    run_ranks(_sharded, ranks)


def _slots(rank, ranks):
    for transport in ("shm", "c10d"):
        model = rtp_ext.fully_rotate(make_model(), transport=transport)
        ring = rtp_ext.ring_of(model)
        with LiveBytes(ring) as live, LiveBytes() as blind:
            batch_loss(model, rank, 0).backward()
            slots = sum(ring.slot_count(channel).bytes for channel in ("weight", "gradient"))
            assert live.current - blind.current == (slots if transport == "shm" else 0)
            before = live.current
            ring.clear_slots()
            assert slots > 0 and live.current == before - slots, transport
        ring.close()


def test_counts_the_slots_of_a_ring():
    run_ranks(_slots, 3)
