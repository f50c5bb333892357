"""Tensor parallelism and a ring: parallelize_module cuts the layers, and each part rotates over a ring of its own.

    torchrun --nproc-per-node 4 examples/tensor.py --tensor 2

Runs on GPUs where there are some, else on CPUs. Ranks of one tensor-parallel group have the same batch; every position
on the ring has its own batches.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import rtp_ext

PLAN = {  # activations between layers are cut along the sequence
    "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
    "1": SequenceParallel(),
    "2": ColwiseParallel(input_layouts=Shard(1)),
    "4": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "5": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def main(arguments: list[str] | None = None) -> list[float]:
    """Returns the mean loss of all positions on the ring, by step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=int, default=2, help="ranks that share a layer; divides the number of ranks")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    ranks = dist.get_world_size()

    mesh = init_device_mesh(device, (ranks // options.tensor, options.tensor), mesh_dim_names=("ring", "tp"))
    torch.manual_seed(0)  # the same weights on every rank
    with torch.device(device):
        model = nn.Sequential(
            nn.Embedding(32, 64), nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 32)
        )
    parallelize_module(model, mesh["tp"], PLAN)
    rtp_ext.fully_rotate(model, mesh=mesh, dims=rtp_ext.RotationDims(ring="ring"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    torch.manual_seed(1 + mesh.get_local_rank("ring"))
    losses = []
    for _ in range(options.steps):
        ids = torch.randint(32, (8, 16), device=device)
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), (3 * ids + 1).flatten() % 32)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
    if dist.get_rank() == 0:
        print(f"{options.tensor} ranks a layer: loss {losses[0]:.3f}, then {losses[-1]:.3f}")
        print(f"2.weight: {tuple(model[2].weight.placements)} over {model[2].weight.device_mesh.mesh_dim_names}")
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
