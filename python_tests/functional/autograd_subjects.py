"""Modules by themselves, plain and rotated, with inputs: subjects of test_autograd.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from reference import random
from test_experts_module import PlainExperts
from torch import Tensor, nn
from torch.nn import functional as F

import rtp_ext
from rtp_ext.nn import Flyweight, RotatedExperts, RotatedLinear, RotatedLinearCrossEntropy


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class Loss(nn.Linear):
    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(x), targets)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 5))


def converted(plain: nn.Module, ring: rtp_ext.Ring, in_place: bool, **options: Any) -> nn.Module:
    ring.in_place = in_place
    return rtp_ext.fully_rotate(plain, mesh=ring, **options)


def cut_along_inputs(plain: nn.Module, ring: rtp_ext.Ring, in_place: bool) -> nn.Module:
    ring.in_place = in_place
    return RotatedLinear.from_module(plain, ring, shard_dim=1)


def of_experts(plain: nn.Module, ring: rtp_ext.Ring, in_place: bool) -> nn.Module:
    ring.in_place = in_place
    return RotatedExperts.from_module(plain, ring)


def features(*shape: int) -> Callable[[int], list[Tensor]]:
    return lambda rank: [random(*shape, dtype=torch.float64, seed=rank)]


def numbers(*shape: int, seed: int) -> Tensor:
    return random(*shape, dtype=torch.float64, seed=seed).mul(3).long() % 5


@dataclass(frozen=True)
class Subject:
    """`rotate(plain, ring, in_place)`; `stricter`: parameters that our backward reads and the plain one need not."""

    plain: Callable[[], nn.Module]
    inputs: Callable[[int], list[Tensor]]
    rotate: Callable[..., nn.Module] = converted
    stricter: frozenset[str] = field(default_factory=frozenset)

    def make(self) -> nn.Module:
        """The same on every rank."""
        model = self.plain().double()
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=200 + number))
        return model

    def batches(self, ranks: int, needs: bool) -> list[list[Tensor]]:
        batches = [self.inputs(rank) for rank in range(ranks)]
        for batch in batches:
            for tensor in batch:
                tensor.requires_grad_(needs and tensor.is_floating_point())
        return batches


def fly(plain: nn.Module, ring: rtp_ext.Ring, in_place: bool) -> nn.Module:
    cuts = {"0.weight": 0, "0.bias": 0, "2.weight": 1, "2.bias": 0}
    ring.in_place = in_place
    return Flyweight(plain, ring, shard_dims=cuts, combine="sum", added_once=("2.bias",))


def fused(plain: nn.Module, ring: rtp_ext.Ring, in_place: bool) -> nn.Module:
    plain.__class__ = nn.Linear
    ring.in_place = in_place
    return RotatedLinearCrossEntropy.from_module(plain, ring)


def routed(rank: int) -> list[Tensor]:
    weights = random(3, 2, dtype=torch.float64, seed=50 + rank).abs()
    return [random(3, 6, dtype=torch.float64, seed=rank), numbers(3, 2, seed=60 + rank), weights]


SUBJECTS = {
    "linear": Subject(lambda: nn.Linear(6, 7), features(3, 6)),
    "linear cut along its inputs": Subject(
        lambda: nn.Linear(6, 7),
        features(3, 6),
        cut_along_inputs,
    ),
    "embedding": Subject(lambda: nn.Embedding(5, 7), lambda rank: [numbers(3, 4, seed=rank)]),
    "convolution": Subject(lambda: nn.Conv1d(4, 7, 3), features(2, 4, 5)),
    "attention": Subject(Attending, features(2, 3, 6)),
    "norm": Subject(lambda: nn.LayerNorm(6), features(3, 6)),
    "mlp": Subject(mlp, features(3, 6)),
    "mlp, recomputed": Subject(
        mlp,
        features(3, 6),
        lambda plain, ring, in_place: converted(plain, ring, in_place, bundle="recompute"),
        frozenset({"0.weight", "0.bias"}),
    ),
    "experts": Subject(
        lambda: PlainExperts(nn.SiLU()),
        routed,
        of_experts,
        frozenset({"down_proj"}),  # the gradient of the router's weights is had from it
    ),
    "head and loss": Subject(
        lambda: Loss(6, 5),
        lambda rank: [random(3, 6, dtype=torch.float64, seed=rank), numbers(3, seed=70 + rank)],
        fused,
        frozenset({"weight", "bias"}),  # logits are computed again
    ),
    "flyweight": Subject(mlp, features(3, 6), fly, frozenset({"0.weight", "0.bias", "2.weight", "2.bias"})),
}
