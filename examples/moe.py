"""A mixture of experts whose experts are divided: tokens travel over one dimension of the mesh, shards over the other.

    torchrun --nproc-per-node 4 examples/moe.py --expert 2

Trains a small Mixtral. Runs on GPUs where there are some, else on CPUs. `--expert 1` rotates all experts, `--expert 4`
on four ranks none: the losses are the same, the bytes differ.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import MixtralConfig, MixtralForCausalLM

import rtp_ext

VOCABULARY, EXPERTS = 32, 8


def make_model() -> MixtralForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, num_hidden_layers=2, **sizes, **experts))


def main(arguments: list[str] | None = None) -> tuple[list[float], int, int]:
    """Returns the mean loss of all ranks by step, and the bytes of tokens and of shards that this rank sends in the
    last step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--expert", type=int, default=2, help="ranks that experts are divided over")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    sizes = (ranks // options.expert, options.expert)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("ring", "expert"))  # tokens stay within a host
    torch.manual_seed(0)  # the same weights on every rank
    with torch.device(device):
        model = make_model()
    rtp_ext.fully_rotate(model, mesh=mesh, dims=rtp_ext.RotationDims(ring="ring", expert="expert"))
    ring = rtp_ext.ring_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

    def sent() -> tuple[int, int]:
        shards = sum(each.bytes_sent(what) for each in ring.rings for what in ("weight", "gradient"))
        return (0 if ring.experts is None else ring.experts.bytes_sent), shards

    torch.manual_seed(1 + rank)
    losses = []
    for _ in range(options.steps):
        before = sent()
        ids = [torch.randint(VOCABULARY, (4, 1), device=device)]
        for _ in range(15):
            ids.append((3 * ids[-1] + 1) % VOCABULARY)
        batch = torch.cat(ids, 1)
        loss = model(batch, labels=batch).loss  # with the balance loss of the routers
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
    tokens, shards = (after - first for after, first in zip(sent(), before, strict=True))
    if rank == 0:
        print(f"{sizes[0]} x {sizes[1]} ranks: loss {losses[0]:.3f}, then {losses[-1]:.3f}")
        print(f"rank 0 sends {tokens / 1e3:.0f} KB of tokens and {shards / 1e3:.0f} KB of shards a step")
    ring.close()
    return losses, tokens, shards


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
