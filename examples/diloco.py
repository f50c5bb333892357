"""DiLoCo: each ring trains on its own batches, and the replicas combine their weights in an outer step now and then.

    torchrun --nproc-per-node 4 examples/diloco.py --ring 2 --period 10

Runs on GPUs where there are some, else on CPUs. Between outer steps rings exchange no data, so that they may be far
apart. At the end all replicas get their mean, so that a checkpoint of any of them is a plain one.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import rtp_ext
from rtp_ext.outer import DiLoCo


def main(arguments: list[str] | None = None) -> tuple[list[float], int]:
    """Returns the mean loss of all ranks, by step, and the bytes that outer steps have sent to other replicas."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ring", type=int, default=2, help="ranks of a ring; it divides the number of ranks")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--period", type=int, default=10, help="steps from one outer step to the next")
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
    dims = rtp_ext.RotationDims(ring="ring", replicate="replicas")
    policy = DiLoCo(options.period)
    rtp_ext.fully_rotate(model, mesh=mesh, dims=dims, outer=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    policy.attach(optimizer)  # the policy acts after optimizer steps

    torch.manual_seed(1 + rank)  # each rank draws its own batches
    losses = []
    for _ in range(options.steps):
        x = torch.randn(32, 16, device=device)
        loss = nn.functional.mse_loss(model(x), x.unflatten(1, (4, 4)).sum(2))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # clips by the norm of the gradients of this replica
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
    sent = policy.bytes_sent()
    policy.average()
    if rank == 0:
        print(f"{ranks // options.ring} rings of {options.ring}: loss {losses[0]:.3f}, then {losses[-1]:.3f}")
        print(f"bytes to other replicas: {sent}, in {options.steps // options.period} outer steps")
    return losses, sent


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
