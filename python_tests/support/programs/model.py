"""The models of random programs: a token embedding, blocks of one kind of layer each, and a vocabulary head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from programs.drawn import Program


class Block(nn.Module):
    """A residual around one kind of layer. `at(place, value)` is called on the way, and may raise: see faults.py."""

    at: Callable[[str, Tensor], Tensor] | None = None

    def __init__(self, kind: str, width: int, hidden: int, checkpointed: bool | None) -> None:
        super().__init__()
        self.kind, self.checkpointed = kind, checkpointed
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.ones(width))
        if kind == "mlp":
            self.inner: nn.Module = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        elif kind == "attention":
            self.inner = nn.MultiheadAttention(width, 2, batch_first=True)
        elif kind == "convolution":
            self.inner = nn.Conv1d(width, width, 3, padding=1)
        elif kind == "experts":
            self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        else:
            self.inner = nn.Linear(width, width, bias=hidden % 2 == 0)

    def compute(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.at is not None:
            y = self.at("inside", y)
        if self.kind == "attention":
            return x + self.scale * self.inner(y, y, y, need_weights=False)[0]
        if self.kind == "convolution":
            return x + self.scale * self.inner(y.transpose(1, 2)).transpose(1, 2)
        if self.kind == "norm":
            return x + self.scale * y
        if self.kind == "experts":  # all of them, each weighed by its token
            first, second = self.inner
            return x + self.scale * (torch.sigmoid(y) * first(y) + torch.tanh(y) * second(y))
        return x + self.scale * self.inner(y)

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed is None or not torch.is_grad_enabled():
            return self.compute(x)
        return checkpoint(self.compute, x, use_reentrant=self.checkpointed)


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.embed = nn.Embedding(program.vocabulary, program.width)
        self.blocks = nn.ModuleList(Block(kind, program.width, *rest) for kind, *rest in program.blocks)
        self.head = nn.Linear(program.width, program.vocabulary, bias=False)
        if program.tied:
            self.head.weight = self.embed.weight
        self.to(program.dtype)
        fill(self, program.seed)
        for number, parameter in enumerate(self.parameters()):
            parameter.requires_grad_(number not in program.frozen)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fill(module: nn.Module, seed: int) -> None:
    """Values that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * noise + (parameter.dim() < 2))


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / 4
