"""A tiny model on replicas of rings, and the same in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from reference import full, random, whole_gradients
from shards import AdamW, clip_shards
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import rtp_ext
from rtp_ext import RotationDims

EXACT = 1e-9
VOCABULARY, WIDTH, HIDDEN = 11, 7, 9  # divisible by 3 at most
DIMS = RotationDims(ring="ring", replicate="replicas")


class Tiny(nn.Module):
    """Embedding, norm, MLP block, linear, a scalar, a head tied to the embedding."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.mixes = True
        self.to(dtype)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(random(*parameter.shape, dtype=dtype, seed=number) * 0.4 + (parameter.dim() < 2))

    def block(self, x: Tensor) -> Tensor:
        return self.norm(x + self.mlp(x))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.mixes:
            x = x + self.mix(x)
        return self.head(self.block(x)) * self.temperature


def batch_loss(model: nn.Module, rank: int, step: int, tokens: int = 5, reduction: str = "mean") -> Tensor:
    """The loss of the batch of one rank and (micro-)step."""
    return _loss_of(model, make_batch(rank, step, tokens), reduction)


def all_losses(model: nn.Module, ranks: int | Sequence[int], step: int, share: float = 1.0) -> Tensor:
    """The sum of the losses of all ranks, or of these, times `share`, for the plain model: all batches at once."""
    these = range(ranks) if isinstance(ranks, int) else ranks
    return _loss_of(model, torch.cat([make_batch(rank, step) for rank in these]), "mean") * (len(these) * share)


def make_batch(rank: int, step: int, tokens: int = 5) -> Tensor:
    """ids [2, tokens + 1]"""
    return torch.randint(VOCABULARY, (2, tokens + 1), generator=torch.Generator().manual_seed(1000 * rank + step))


def _loss_of(model: nn.Module, ids: Tensor, reduction: str) -> Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)


def adamw(model: nn.Module, **stock: bool) -> torch.optim.Optimizer:
    """Fused, on shards: see shards.py. `stock`: torch's own on DTensors, and which of its implementations."""
    return (torch.optim.AdamW if stock else AdamW)(model.parameters(), lr=0.02, **(stock or {"fused": True}))


def replicated(shape: tuple[int, ...], names: tuple[str, ...] = ("replicas", "ring"), model=None, **options) -> Tiny:
    options.setdefault("dims", DIMS)
    return rtp_ext.fully_rotate(Tiny() if model is None else model, mesh=mesh_of(shape, names), timeout=30.0, **options)


@functools.cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Returns one mesh for all models of a rank, since its process groups take 10 ms to make. Each ring has separate
    groups."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def step_on(
    model: nn.Module, optimizer: torch.optim.Optimizer, losses: Sequence[Callable[[], Tensor]], stock: bool = False
) -> tuple[dict[str, Tensor | None], Tensor]:
    """Runs one clipped step on losses, each of a micro-batch. Returns the gradients and their norm."""
    optimizer.zero_grad()
    for loss in losses:
        loss().backward()
    found = whole_gradients(model)
    clip = nn.utils.clip_grad_norm_ if stock else clip_shards
    norm = full(clip(model.parameters(), 0.1)).clone()
    optimizer.step()
    return found, norm
