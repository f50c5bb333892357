"""The program of the README: a model on a ring, and a plain training loop.

    torchrun --nproc-per-node 2 examples/quickstart.py

Runs on GPUs where there are some, else on CPUs.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

import rtp_ext


def main(steps: int = 20) -> tuple[float, int]:
    """Returns the last loss, and how many parameters this rank kept."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group()
    torch.manual_seed(0)  # the same initial model on every rank
    with torch.device(device):
        model = nn.Sequential(
            nn.Embedding(256, 64), nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256)
        )
    rtp_ext.fully_rotate(model)  # in place; every rank keeps 1/R of every parameter
    torch.manual_seed(1 + dist.get_rank())  # from here on every rank draws its own batches
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        tokens = (torch.randint(0, 256, (8, 1)) + torch.arange(33)).to(device) % 256  # tokens that count up
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = sum(parameter.to_local().numel() for parameter in model.parameters())
    print(f"loss {loss.item():.3f}, {kept} parameters on this rank")
    rtp_ext.ring_of(model).close()
    return loss.item(), kept


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
