"""Rings that follow each other in one process, between other groups and other worlds."""

from datetime import timedelta

import torch
import torch.distributed as dist
from harness import on_ranks
from models import batch_loss, make_model
from torch.distributed.device_mesh import init_device_mesh

import rtp_ext

TIMEOUT = 20.0


def _check_ring(group=None):
    """A ring that rotates its ranks' values, and closes."""
    ring = rtp_ext.Ring(group, transport="c10d", timeout=TIMEOUT)
    places = [int(value.item()) for _, value in ring.rotate(torch.tensor([float(ring.rank)]))]
    ring.close()
    assert sorted(places) == list(range(ring.size)), places


def _check_replicas(rank, ranks, mesh):
    """A step's gradients of a model on two rings of two ranks: those of one process."""
    model = make_model()
    sum(batch_loss(model, other, 0) for other in range(ranks)).div(ranks).backward()
    expected = model.head.weight.grad
    model = rtp_ext.fully_rotate(
        make_model(), mesh=mesh, dims=rtp_ext.RotationDims(replicate="replicas"), timeout=TIMEOUT
    )
    batch_loss(model, rank, 0).backward()
    gradient = model.head.weight.grad.full_tensor()
    rtp_ext.ring_of(model).close()
    torch.testing.assert_close(gradient, expected)
    assert gradient.abs().max() > 1e-3, "control: zeros would not do"


@on_ranks(4)
def test_rings_in_turn(rank, ranks, cases):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [store.port if store is not None else 0]
    dist.broadcast_object_list(port)
    store = store or dist.TCPStore("127.0.0.1", port[0])
    for world in range(3):
        if world > 0:
            dist.destroy_process_group()
            keys = dist.PrefixStore(f"world {world}", store)  # torch itself fails where a world finds old addresses
            dist.init_process_group("gloo", store=keys, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT))
        for turn in range(2):
            with cases.case(f"world {world}, ring {turn}"):
                _check_ring()
        # torch's own groups of all ranks come before those of some
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicas", "ring"))
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        if rank < 2:
            other = dist.new_group([0, 1], use_local_synchronization=True)
            with cases.case(f"world {world}, a ring of two"):
                _check_ring(pairs[0])
            dist.destroy_process_group(other)
        if rank == 3:
            dist.new_group([3], use_local_synchronization=True)
        for turn in range(2):
            with cases.case(f"world {world}, ring {turn} after groups that other ranks have not"):
                _check_ring()
        for turn in range(2):
            with cases.case(f"world {world}, replicas {turn}"):
                _check_replicas(rank, ranks, mesh)
    dist.barrier()
