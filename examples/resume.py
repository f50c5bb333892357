"""Saves a training run, and resumes it on another number of ranks.

    torchrun --nproc-per-node 2 examples/resume.py --folder checkpoint --steps 20
    torchrun --nproc-per-node 3 examples/resume.py --folder checkpoint --steps 20

Every rank writes and reads its own shards, by torch.distributed.checkpoint. Runs on GPUs where there are some, else on
CPUs.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import rtp_ext

BATCH = 24  # samples of all ranks together


def main(arguments: list[str] | None = None) -> tuple[int, list[float]]:
    """Returns the first step of this run, and the mean losses of all ranks, by step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/example-resume"))
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same weights on every rank
    with torch.device(device):
        model = nn.Sequential(nn.Embedding(32, 48), nn.LayerNorm(48), nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 32))
    rtp_ext.fully_rotate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    found = [(options.folder / ".metadata").is_file()]
    dist.broadcast_object_list(found)  # the answer of the first rank, for all ranks
    start = 0
    if found[0]:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, checkpoint_id=str(options.folder))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        start = state["step"]

    losses = []
    for step in range(start, start + options.steps):
        # this rank's part of the batch, which does not depend on the number of ranks
        ids = torch.randint(32, (BATCH, 8), generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank].to(device)
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), (3 * ids + 1).flatten() % 32)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)

    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": start + options.steps}
    dcp.save(state, checkpoint_id=str(options.folder))
    if rank == 0:
        print(f"{ranks} ranks, steps {start} to {start + options.steps}: loss {losses[0]:.3f}, then {losses[-1]:.3f}")
    rtp_ext.ring_of(model).close()
    return start, losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
