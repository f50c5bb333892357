"""Two small problems between replicas with known solutions: averaging of noise, and convergence of replicas on
different data."""

import argparse
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import rtp_ext
from rtp_ext import outer
from shared.launch import Place, gather

RATE, NOISE, DIMS, STEPS = 0.1, 1.0, 64, 1200
WIDTH, ROUNDS = 8, 240


def noise_floor(workers: int, topology: str | None, period: int = 1) -> float:
    """Mean squared distance from the minimum of |x|^2 / 2 per dimension, of the mean of workers, in the long run.

    SGD with rate r and gradients with noise of variance s^2 ends at r s^2 / (2 - r) / n: linear speed-up over workers,
    however they mix, since the mean of the workers takes the mean of their gradients. Simulated. `topology`: None:
    local SGD with `period`.
    """
    generator = torch.Generator().manual_seed(workers)
    x, total, counted = torch.zeros(workers, DIMS, dtype=torch.float64), 0.0, 0
    for step in range(STEPS):
        x = x - RATE * (x + NOISE * torch.randn(x.shape, generator=generator, dtype=torch.float64))
        if topology is not None:
            x = outer.mixing_matrix(topology, workers, step) @ x
        elif (step + 1) % period == 0:
            x = x.mean(0).expand_as(x)
        if step >= STEPS // 6:
            total, counted = total + x.mean(0).square().mean().item(), counted + 1
    return total / counted


def expected_floor(workers: int) -> float:
    return RATE * NOISE**2 / (2 - RATE) / workers


def _least_squares(place: Place) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs and targets of this rank, which are unlike those of others; and the minimum over all data."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = [], []
    for _ in range(place.ranks):
        scale = torch.rand(WIDTH, generator=generator, dtype=torch.float64) + 0.2
        x = torch.randn(4 * WIDTH, WIDTH, generator=generator, dtype=torch.float64) * scale
        own = torch.randn(WIDTH, 1, generator=generator, dtype=torch.float64)
        inputs.append(x)
        targets.append(x @ own)
    best = torch.linalg.lstsq(torch.cat(inputs), torch.cat(targets)).solution
    return inputs[place.rank], targets[place.rank], best


def drift(policy: outer.OuterPolicy, place: Place, mesh: Any) -> dict[str, float]:
    """Replicas on data that differ in kind: how far from the common minimum the mean of their weights ends, and how far
    they are apart, both relative to the minimum's norm. Full batches: nothing of this is noise."""
    x, y, best = (each.to(place.device) for each in _least_squares(place))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 1, bias=False, dtype=torch.float64)).to(place.device)
    dims = rtp_ext.RotationDims(ring="ring", replicate="replicas")
    rtp_ext.fully_rotate(model, mesh=mesh, dims=dims, outer=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    if isinstance(policy, outer.LocalSGD | outer.DiLoCo | outer.Gossip):
        policy.attach(optimizer)
    for _ in range(ROUNDS):
        optimizer.zero_grad()
        ((model(x) - y).square().mean() / 2).backward()
        optimizer.step()
    weights = gather(model[0].weight.full_tensor().flatten().tolist(), place)
    rtp_ext.ring_of(model).close()
    mean = weights.mean(0)
    size = best.cpu().norm().item()
    apart = (weights - mean).norm(dim=1).max().item()
    return {"from_minimum": (mean - best.cpu().flatten()).norm().item() / size, "apart": apart / size}


def print_problems(place: Place, args: argparse.Namespace) -> None:
    """Both, as tables and a line of JSON on rank 0. Collective; replicas are single ranks."""
    mesh = init_device_mesh(place.device.type, (place.ranks, 1), mesh_dim_names=("replicas", "ring"))
    policies = {
        "all-reduce": outer.AllReduce(),
        "local-sgd, H = 4": outer.LocalSGD(4),
        "local-sgd, H = 16": outer.LocalSGD(16),
        "local-sgd, H = 48": outer.LocalSGD(48),
        "diloco, H = 16": outer.DiLoCo(16),
        "gossip, ring": outer.Gossip("ring"),
        "top-k": outer.AllReduce(outer.TopK(0.125)),
        "top-k, no feedback": outer.AllReduce(outer.TopK(0.125, error_feedback=False)),
    }
    drifts = {name: drift(policy, place, mesh) for name, policy in policies.items()}
    dist.barrier()
    if place.rank:
        return
    floors: dict[str, dict[int, float]] = {}
    kinds: dict[str, tuple[str | None, int]] = {
        "all-reduce": ("complete", 1),
        "one-peer": ("one-peer", 1),
        "ring": ("ring", 1),
        "local SGD, H = 8": (None, 8),
    }
    for name, (topology, period) in kinds.items():
        floors[name] = {n: noise_floor(n, topology, period) for n in (1, 2, 4, 8, 16)}
    print("noisy quadratic: squared distance from the minimum times n, which linear speed-up keeps at")
    print(f"{expected_floor(1):.5f} (simulated)\n\n{'n':<20}" + "".join(f"{n:>10}" for n in (1, 2, 4, 8, 16)))
    for name, found in floors.items():
        print(f"{name:<20}" + "".join(f"{n * floor:>10.5f}" for n, floor in found.items()))
    print(f"\nleast squares, every replica with data of its own kind, after {ROUNDS} steps of SGD, relative\n")
    print(f"{'policy':<20}{'from the minimum':>18}{'replicas apart':>16}")
    for name, row in drifts.items():
        print(f"{name:<20}{row['from_minimum']:>18.2e}{row['apart']:>16.2e}")
    print(json.dumps({"floors": floors, "expected": expected_floor(1), "drift": drifts}), flush=True)
