"""Replicas of rings, whose gradients are all-reduced: against one process on the batches of all ranks."""

import torch
import torch.distributed as dist
from harness import Cases, run_ranks
from reference import assert_same, differs, full, random
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import rtp_ext
from rtp_ext import RotationDims

EXACT = 1e-9
VOCABULARY, WIDTH, HIDDEN = 11, 7, 9


class Tiny(nn.Module):
    """Embedding, norm, MLP block, linear, a scalar, a head tied to the embedding."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(random(*parameter.shape, dtype=dtype, seed=number) * 0.4 + (parameter.dim() < 2))

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.mix(x)
        return self.head(self.norm(x + self.mlp(x))) * self.temperature


def batch_loss(model, rank, step, tokens=5, reduction="mean"):
    ids = torch.randint(VOCABULARY, (2, tokens + 1), generator=torch.Generator().manual_seed(1000 * rank + step))
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02, foreach=True)


def replicated(shape, names=("replicas", "ring"), **options):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    options.setdefault("dims", RotationDims(ring="ring", replicate="replicas"))
    return rtp_ext.fully_rotate(Tiny(), mesh=mesh, timeout=30.0, **options)


def step_on(model, optimizer, losses):
    """One clipped step on the losses given, each a micro-batch. Returns the gradients and their norm."""
    optimizer.zero_grad()
    for loss in losses:
        loss().backward()
    gradients = {name: full(p.grad).clone() for name, p in model.named_parameters()}
    norm = full(nn.utils.clip_grad_norm_(model.parameters(), 0.1)).clone()
    optimizer.step()
    return gradients, norm


def _trains_as_one(rank, ranks, shape, names, dims):
    model, plain = replicated(shape, names, dims=dims), Tiny()
    optimizer, reference = adamw(model), adamw(plain)
    for step in range(10):
        gradients, norm = step_on(model, optimizer, [lambda: batch_loss(model, rank, step)])
        expected, expected_norm = step_on(
            plain, reference, [lambda: sum(batch_loss(plain, other, step) for other in range(ranks)) / ranks]
        )
        assert_same(norm, expected_norm, EXACT, f"norm of step {step}")
        for name, gradient in gradients.items():
            assert_same(gradient, expected[name], EXACT, f"{name} gradient, step {step}")
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(full(parameter), other, EXACT, name)
    return [tuple(p.placements) for p in model.parameters()]


def test_2x2():
    print(run_ranks(_trains_as_one, 4, (2, 2), ("replicas", "ring"), RotationDims(replicate="replicas")))
