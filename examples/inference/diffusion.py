"""Samples a diffusion transformer whose weights lie on all ranks, with steps and resolutions of each rank's own.

    torchrun --nproc-per-node 2 examples/inference/diffusion.py
    torchrun --nproc-per-node 2 examples/inference/diffusion.py --weights nf4

Runs on CPUs, with a small DiT of the diffusers package (pip install diffusers) and random weights. Every rank keeps
1/R of the weights. No rank waits for another one: rank r takes 4 + 2r steps on latents of 16 + 8r points a side.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from diffusers import DDIMScheduler, DiTTransformer2DModel

import rtp_ext

CLASSES, CHANNELS = 10, 4


def make_model() -> DiTTransformer2DModel:
    torch.manual_seed(0)  # the same weights on every rank
    return DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=CHANNELS,
        num_layers=2,
        sample_size=16,
        patch_size=2,
        num_embeds_ada_norm=CLASSES,
    ).eval()


@torch.inference_mode()
def sample(model: DiTTransformer2DModel, *, steps: int, side: int, seed: int) -> torch.Tensor:
    """Returns latents [2, channels, side, side] of two random classes."""
    scheduler = DDIMScheduler(num_train_timesteps=1000)
    scheduler.set_timesteps(steps)
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(2, CHANNELS, side, side, generator=generator)
    labels = torch.randint(CLASSES, (2,), generator=generator)
    for moment in scheduler.timesteps:
        noise = model(latents, timestep=moment.expand(2), class_labels=labels).sample
        latents = scheduler.step(noise, moment, latents).prev_sample
    return latents


def main(arguments: list[str] | None = None) -> tuple[torch.Tensor, int]:
    """Returns this rank's latents, and the bytes of weights that it keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=("auto", "shm", "shm+tcp", "tcp"), default="auto")
    parser.add_argument("--weights", choices=("int8", "nf4", "mxfp4"), help="store linear layers in fewer bits")
    options = parser.parse_args(arguments)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = rtp_ext.rotate_for_inference(make_model(), transport=options.transport, weights=options.weights)
    ring = rtp_ext.ring_of(model)
    start = time.perf_counter()
    latents = sample(model, steps=4 + 2 * rank, side=16 + 8 * rank, seed=rank)
    seconds = time.perf_counter() - start
    print(f"rank {rank}: {4 + 2 * rank} steps, latents {tuple(latents.shape)}, {seconds:.2f} s; {ring}")
    dist.barrier()  # over tcp the others may still pull from this rank
    ring.close()
    return latents, ring.shard_bytes + ring.whole_bytes


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
