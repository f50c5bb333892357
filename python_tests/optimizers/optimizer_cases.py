"""A small model with shards of every kind, and the optimizers of torch that train it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from harness import Cases
from reference import assert_same, random, wholes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import rtp_ext
from rtp_ext.outer import OuterPolicy

STEPS = 5
EXACT = 1e-12
WIDTH, HIDDEN = 5, 7  # no ring of 2 or 3 divides them


class Mixed(nn.Module):
    """Layers that rotate, one with fewer rows than ranks; a norm, a stack of matrices and a scalar, which do not."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate = nn.Linear(HIDDEN, 1)
        self.stack = nn.Parameter(torch.empty(3, HIDDEN, HIDDEN))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.empty(()))
        self.to(dtype)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(random(*parameter.shape, dtype=dtype, seed=number) * 0.4 + (parameter.dim() < 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.up(x))
        for matrix in self.stack:
            x = torch.tanh(x @ matrix)
        return self.down(x * self.gate(x)) * self.scale


def batch_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """The loss of the batch of one rank, whose gradients differ in sign between steps."""
    parameter = next(model.parameters())
    x, target = random(2, 4, WIDTH, dtype=torch.float64, seed=100 * rank + step).to(parameter.dtype)
    return nn.functional.mse_loss(model(x), target)


@functools.cache
def mesh_of(shape: tuple[int, ...]) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "ring")[-len(shape) :])


def convert(model: nn.Module, shape: tuple[int, ...], outer: OuterPolicy | None = None) -> nn.Module:
    dims = rtp_ext.RotationDims(ring="ring", replicate="replicas") if len(shape) == 2 else None
    return rtp_ext.fully_rotate(model, mesh=mesh_of(shape), dims=dims, outer=outer, timeout=30.0)


def train(model: nn.Module, optimizers: list[Any], ranks: Sequence[int], steps: int = STEPS, first: int = 0) -> None:
    """Steps on the mean loss of `ranks`: of all of them for the plain model, of this one for a converted one."""
    for step in range(first, first + steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (sum(batch_loss(model, rank, step) for rank in ranks) / len(ranks)).backward()
        for optimizer in optimizers:
            optimizer.step()


def assert_alike(model: nn.Module, plain: nn.Module, tolerance: float = EXACT) -> None:
    for (name, expected), found in zip(plain.named_parameters(), wholes(model.parameters()), strict=True):
        assert_same(found, expected.detach(), tolerance, name, scale=max(expected.abs().max().item(), 0.1))


def assert_trains(cases: Cases, name: str, make: Any, rank: int, shape: tuple[int, ...], outer: Any = None) -> None:
    """Five steps of the optimizers that `make` makes for a model, on shards and in one process; and that one step more
    of the plain model would be seen."""
    ranks = torch.Size(shape).numel()
    plain = Mixed()
    optimizers = make(plain)
    train(plain, optimizers, range(ranks))
    model = convert(Mixed(), shape, outer() if outer else None)
    with cases.case(f"{name}, {shape} {outer.__name__ if outer else ''}"):
        train(model, make(model), [rank])
        assert_alike(model, plain)
        train(plain, optimizers, range(ranks), steps=1, first=STEPS)
        try:
            assert_alike(model, plain, 1e-6)
        except AssertionError:
            return
        raise AssertionError("the comparison sees no step")


ADAM = {"lr": 0.02, "weight_decay": 0.1, "amsgrad": True}
LOOPS = ({"foreach": False}, {"foreach": True})
FUSED = (*LOOPS, {"fused": True})

# The arguments and implementations of each class of torch.optim that trains all parameters of a model.
STOCK: dict[str, tuple[dict[str, Any], tuple[dict[str, Any], ...]]] = {
    "Adadelta": ({"lr": 0.5, "weight_decay": 0.1}, LOOPS),
    "Adafactor": ({"lr": 0.05, "weight_decay": 0.1}, LOOPS),
    "Adagrad": ({"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.1}, FUSED),
    "Adam": (ADAM, FUSED),
    "AdamW": (ADAM, FUSED),
    "Adamax": ({"lr": 0.02, "weight_decay": 0.1}, LOOPS),
    "ASGD": ({"lr": 0.02, "weight_decay": 0.1, "t0": 1}, LOOPS),
    "NAdam": ({"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True}, LOOPS),
    "RAdam": ({"lr": 0.02, "weight_decay": 0.1}, LOOPS),
    "RMSprop": ({"lr": 0.01, "momentum": 0.9, "centered": True, "weight_decay": 0.1}, LOOPS),
    "Rprop": ({"lr": 0.01}, LOOPS),
    "SGD": ({"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, FUSED),
}
# More arguments of those whose steps on shards are ours.
OURS: list[tuple[str, dict[str, Any]]] = [
    ("Adafactor", {"lr": 0.05, "maximize": True}),
    ("Adafactor", {"lr": 0.05, "eps": (1e-2, 1e-1), "d": 1.5}),
    ("Adafactor", {"lr": torch.tensor(0.05, dtype=torch.float64)}),
    ("Adagrad", {"lr": 0.05, "maximize": True, "fused": True}),
    ("Rprop", {"lr": 0.01, "maximize": True, "etas": (0.4, 1.3), "step_sizes": (1e-3, 0.02)}),
    ("SGD", {"lr": 0.05, "fused": True}),
    ("SGD", {"lr": 1e-3, "momentum": 0.9, "dampening": 0.1, "maximize": True, "fused": True}),
]


def maker(name: str, options: dict[str, Any]) -> Any:
    return lambda model: [getattr(torch.optim, name)(model.parameters(), **options)]
