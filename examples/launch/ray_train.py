"""A ring of the workers of Ray Train.

    python examples/launch/ray_train.py --workers 2

Ray starts the workers and makes their process group, `fully_rotate` converts the model: it takes the place of
`prepare_model`. Runs on the GPUs of the cluster with --gpus, else on CPUs.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer, get_device
from torch import nn

import rtp_ext


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Runs on each worker. Returns the last loss, the number of parameters of this rank, and that of hosts."""
    torch.manual_seed(0)  # the same initial model on every rank
    with torch.device(get_device()):
        model = nn.Sequential(nn.Embedding(256, 64), nn.LayerNorm(64), nn.Linear(64, 256))
    rtp_ext.fully_rotate(model, timeout=120.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + ray.train.get_context().get_world_rank())  # each rank draws its own batches
    for _ in range(settings["steps"]):
        tokens = (torch.randint(0, 256, (8, 1)) + torch.arange(33)).to(get_device()) % 256
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = sum(parameter.to_local().numel() for parameter in model.parameters())
    with rtp_ext.ring_of(model) as ring:  # closes it
        return {"loss": loss.item(), "kept": kept, "hosts": ring.hosts}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Returns the result of `train` on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="ranks of the ring")
    parser.add_argument("--gpus", action="store_true", help="one GPU for each worker")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    # PACK: as few hosts as possible, so that neighbours in the ring share memory
    workers = ray.train.ScalingConfig(num_workers=options.workers, use_gpu=options.gpus, placement_strategy="PACK")
    return TorchTrainer(train, train_loop_config={"steps": options.steps}, scaling_config=workers).fit().return_value


if __name__ == "__main__":
    print(main())
