"""Rings and their replicas: one rank of every ring owns each shard, and gradients are averaged over all ranks.

    torchrun --nproc-per-node 4 examples/replicas.py --ring 2

Runs on GPUs where there are some, else on CPUs. Every rank has its own batches, several to a step: the gradients of
micro-batches add up within a ring, and only the last one of a step reduces them over replicas.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import rtp_ext


def main(arguments: list[str] | None = None) -> list[float]:
    """Returns the mean loss of all ranks, by step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ring", type=int, default=2, help="ranks of a ring; it divides the number of ranks")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro-batches", type=int, default=2)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    mesh = init_device_mesh(device, (ranks // options.ring, options.ring), mesh_dim_names=("replicas", "ring"))
    torch.manual_seed(0)  # the same weights on every rank; replicas that differ are refused
    with torch.device(device):
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 4))
    rtp_ext.fully_rotate(model, mesh=mesh, dims=rtp_ext.RotationDims(ring="ring", replicate="replicas"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    torch.manual_seed(1 + rank)  # each rank draws its own batches
    losses = []
    for _ in range(options.steps):
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for number in range(options.micro_batches):
            rtp_ext.set_requires_all_reduce(model, number == options.micro_batches - 1)
            x = torch.randn(32, 16, device=device)
            loss = nn.functional.mse_loss(model(x), x.unflatten(1, (4, 4)).sum(2)) / options.micro_batches
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
    if rank == 0:
        print(f"{ranks // options.ring} rings of {options.ring}: loss {losses[0]:.3f}, then {losses[-1]:.3f}")
        print(f"bytes to other replicas: {rtp_ext.outer_of(model).bytes_sent()}")
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
