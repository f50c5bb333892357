"""Trains a GPT on bytes with Muon for its hidden matrices and AdamW for the rest, beside AdamW alone.

    torchrun --nproc-per-node 2 examples/muon.py --text README.md --steps 60

Muon orthogonalises each whole matrix, which is whole on no rank: see docs/optimizers.md. Runs on GPUs where there are
some, else on CPUs.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import rtp_ext
from rtp_ext.optim import Muon, matrices

WIDTH, LENGTH, BATCH = 64, 64, 8  # BATCH: sequences of each rank
RATE = 0.01  # of 0.001, 0.002, 0.005, 0.01 and 0.02 the best one for AdamW alone, in 60 steps on README.md


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), up, nn.GELU(), down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.table(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))))


def train(text: torch.Tensor, steps: int, with_muon: bool) -> tuple[float, int]:
    """Returns the mean loss of all ranks over the last fifth of the steps, and the bytes that Muon sent."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights on every rank
    with torch.device(text.device):
        model = GPT()
    rtp_ext.fully_rotate(model)
    hidden, rest = matrices(model)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest if with_muon else model.parameters(), lr=RATE)]
    if with_muon:  # "match_rms_adamw": updates as large as AdamW's, so that its learning rate fits
        optimizers.append(Muon(hidden, lr=RATE, adjust_lr_fn="match_rms_adamw"))
    torch.manual_seed(1 + rank)  # each rank draws its own batches
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), device=text.device)
        ids = text[starts + torch.arange(LENGTH + 1, device=text.device)].long()
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.detach())
    last = torch.stack(losses[-max(steps // 5, 1) :]).mean()
    dist.all_reduce(last)
    sent = sum(each.bytes_sent() for each in optimizers if isinstance(each, Muon))
    rtp_ext.ring_of(model).close()
    return last.item() / ranks, sent


def main(arguments: list[str] | None = None) -> tuple[float, float, int]:
    """Returns the losses with Muon and with AdamW alone, and the bytes that Muon sent from this rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(__file__))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8).to(device)
    (muon, sent), (adamw, _) = (train(text, options.steps, with_muon) for with_muon in (True, False))
    if dist.get_rank() == 0:
        print(f"loss {muon:.3f} with Muon, {adamw:.3f} with AdamW alone; Muon sent {sent} bytes from rank 0")
    return muon, adamw, sent


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
