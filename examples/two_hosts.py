"""One ring over two hosts. Run on each host, with the address of the first and the number of the host as NODE:

    torchrun --nnodes 2 --nproc-per-node 2 --node-rank NODE --master-addr 10.0.0.1 --master-port 29500 \\
        examples/two_hosts.py

Or run as root, with two simulated hosts on one machine:

    python benchmarks/hosts.py --hosts 2 --ranks-per-host 2 --rate 2gbit -- examples/two_hosts.py

Ranks of one host are neighbours; hops between hosts take the network, the others memory. Runs on GPUs where there are
some, else on CPUs, and on one host too.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn

import rtp_ext


def main(arguments: list[str] | None = None) -> tuple[list[float], rtp_ext.Ring]:
    """Returns the mean loss of all ranks, by step, and the closed ring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=256, help="of each rank in a step")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same weights on every rank
    with torch.device(device):
        blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)]
        model = nn.Sequential(nn.Embedding(32, 64), *blocks, nn.LayerNorm(64), nn.Linear(64, 32))
    rtp_ext.fully_rotate(model, timeout=120.0)  # a lost neighbour is an error on all others, never a hang
    ring = rtp_ext.ring_of(model)
    if rank == 0:
        print(f"{ring.hosts} hosts of {ring.per_host} ranks, transport {ring.transport}: {ring.transport_reason}")
        print(f"hops take the route {ring.hop_route}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    torch.manual_seed(1 + rank)  # each rank draws its own batches
    losses, began = [], time.perf_counter()
    for _ in range(options.steps):
        ids = torch.randint(32, (options.tokens,), device=device)
        loss = nn.functional.cross_entropy(model(ids), (3 * ids + 1) % 32)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
    if rank == 0:
        milliseconds = 1000 * (time.perf_counter() - began) / options.steps
        print(f"loss {losses[0]:.3f}, then {losses[-1]:.3f}; {milliseconds:.1f} ms a step")
    ring.close()
    return losses, ring


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
