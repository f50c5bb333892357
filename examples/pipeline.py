"""A pipeline whose stages rotate: each pair of ranks holds two of four stages, and spreads their weights between them.

    torchrun --nproc-per-node 4 examples/pipeline.py

Trains a small model to predict the next token, with an interleaved zero-bubble schedule, which computes the gradients
of activations first and those of weights where the pipeline would wait.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
from torch.nn import functional as F

import rtp_ext

VOCABULARY, WIDTH, TOKENS, STAGES, MICRO_BATCHES = 32, 64, 16, 4, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def make_stage(index: int) -> nn.Module:
    torch.manual_seed(index)  # the ranks of a ring start with equal weights
    before = [nn.Embedding(VOCABULARY, WIDTH)] if index == 0 else []
    after = [nn.Linear(WIDTH, VOCABULARY)] if index == STAGES - 1 else []
    return nn.Sequential(*before, Block(), *after)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(steps: int) -> list[float]:
    """Returns the losses of this rank's batches, where it has the last stage."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device.type, (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "ring"))
    place = mesh.get_local_rank("ring")
    stages, indices = [], range(mesh.get_local_rank("pp"), STAGES, 2)
    for index in indices:
        module = rtp_ext.fully_rotate(make_stage(index).to(device), mesh=mesh["ring"])
        stages.append(PipelineStage(module, index, STAGES, device, group=mesh.get_group("pp")))
    schedule = ScheduleInterleavedZeroBubble(stages, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW((p for stage in stages for p in stage.submod.parameters()), lr=1e-2)

    history = []
    generator = torch.Generator().manual_seed(1000 + place)  # every place in a ring has its own batches
    for step in range(steps):
        ids = torch.randint(VOCABULARY, (4 * MICRO_BATCHES, TOKENS), generator=generator).to(device)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(
            *([ids] if 0 in indices else []),
            **({"target": (ids + 1) % VOCABULARY, "losses": losses} if STAGES - 1 in indices else {}),
        )
        optimizer.step()
        if losses:
            history.append(torch.stack(losses).mean().item())
            if place == 0 and step % 10 == 0:
                print(f"step {step}: loss {history[-1]:.4f}", flush=True)
    return history


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(steps=51)
    dist.destroy_process_group()
