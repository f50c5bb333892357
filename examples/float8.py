"""Trains with products in 8 bits: each recipe beside bfloat16, the same model and batches.

    torchrun --nproc-per-node 2 examples/float8.py
    torchrun --nproc-per-node 8 examples/float8.py --recipes float8_rowwise --steps 200

Runs on GPUs of compute capability 8.9 or newer, and on CPUs, where products in 8 bits are slow. Prints the loss of
every recipe and the bytes of weights that a rank sends in a step.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import rtp_ext

WIDTH, VOCABULARY = 256, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def train(recipe: str | None, steps: int, device: str) -> tuple[float, float]:
    """Returns the last loss, averaged over the ranks, and the bytes of weights that this rank sent in a step."""
    torch.manual_seed(0)  # the same initial model on every rank
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), nn.Linear(WIDTH, VOCABULARY)).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    rtp_ext.fully_rotate(model, recipe=recipe, mp_policy=policy)
    torch.manual_seed(1 + dist.get_rank())  # from here on every rank draws its own batches
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ring = rtp_ext.ring_of(model)
    for _ in range(steps):
        tokens = (torch.randint(VOCABULARY, (8, 1)) + 5 * torch.arange(33)).to(device) % VOCABULARY
        logits = model(tokens[:, :-1]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()  # the owner quantizes its shards again before they travel
        optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    sent = ring.bytes_sent("weight") / steps
    ring.close()
    return mean.item() / dist.get_world_size(), sent


def main(arguments: list[str] | None = None) -> dict[str, tuple[float, float]]:
    """Returns the loss and the bytes of each recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default="float8_tensorwise,float8_rowwise,float8_rowwise_with_gw_hp")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group()
    found = {}
    for name in ("bfloat16", *options.recipes.split(",")):
        found[name] = train(None if name == "bfloat16" else name, options.steps, device)
        if dist.get_rank() == 0:
            print(f"{name:<28}loss {found[name][0]:.4f}   {found[name][1] / 1e6:6.2f} MB of weights a step")
    return found


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
