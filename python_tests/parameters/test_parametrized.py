"""Weights that are computed from other parameters: right if registered before conversion, otherwise an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils as old
from harness import on_ranks
from reference import assert_same, differs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import register_parametrization  # as user code imports it: before conversion

import rtp_ext

EXACT = 1e-9


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T


class Scaled(nn.Module):
    """With a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6, 1), 1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.convolution = nn.LayerNorm(6), nn.Conv1d(3, 3, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(self.norm(self.two(torch.tanh(self.one(x)))))


WAYS: dict[str, Callable[[Net], Any]] = {
    "weight_norm": lambda net: parametrizations.weight_norm(net.one),
    "weight_norm of a convolution": lambda net: parametrizations.weight_norm(net.convolution),
    "spectral_norm": lambda net: parametrizations.spectral_norm(net.one),
    "orthogonal": lambda net: parametrizations.orthogonal(net.one),
    "symmetric": lambda net: register_parametrization(net.one, "weight", Symmetric()),
    "scaled": lambda net: register_parametrization(net.one, "weight", Scaled()),
    "a bias": lambda net: register_parametrization(net.norm, "bias", nn.Tanh()),
    "old weight_norm": lambda net: old.weight_norm(net.one),
    "old spectral_norm": lambda net: old.spectral_norm(net.one),
    "l1_unstructured": lambda net: prune.l1_unstructured(net.one, "weight", amount=0.4),
    "random_unstructured of a norm": lambda net: prune.random_unstructured(net.norm, "weight", amount=0.4),
    "ln_structured": lambda net: prune.ln_structured(net.two, "weight", amount=0.3, n=2, dim=0),
    "global_unstructured": lambda net: prune.global_unstructured(
        [(net.one, "weight"), (net.two, "weight")], pruning_method=prune.L1Unstructured, amount=0.3
    ),
}


def placed(ranks: int, replicas: int) -> dict:
    if replicas == 1:
        return {"timeout": 30.0}
    mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("replicas", "ring"))
    return {"mesh": mesh, "dims": rtp_ext.RotationDims(ring="ring", replicate="replicas"), "timeout": 30.0}


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 3, 6, generator=generator, dtype=torch.float64)


def trained(net: nn.Module, ranks: list[int]) -> nn.Module:
    """On the mean over the batches of `ranks`, in one forward each, since spectral_norm counts them."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        output = net(torch.cat([batch(rank, step) for rank in ranks]))
        (output.pow(2).sum() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.eval()


def made(way: Callable[[Net], Any]) -> Net:
    torch.manual_seed(0)
    net = Net()
    way(net)
    return net


@on_ranks([2, 3])
def test_what_was_parametrized_before_trains_as_in_one_process(rank, ranks, cases):
    x = batch(9, 9)
    ring = rtp_ext.Ring(timeout=30.0)
    for what, way in WAYS.items():
        with cases.case(what):
            net = rtp_ext.fully_rotate(made(way), mesh=ring)
            assert all(isinstance(parameter, DTensor) for parameter in net.parameters())
            expected = trained(made(way), list(range(ranks)))(x)
            assert_same(trained(net, [rank])(x), expected, EXACT, what)
            assert differs(trained(made(way), [0])(x), expected, EXACT), "the control is the same"
            assert differs(trained(made(lambda _: None), list(range(ranks)))(x), expected, EXACT), "it does nothing"
    ring.close()


def by_hand(net: Net) -> None:
    """Computes the weight like weight_norm, under an unknown name."""
    weight = net.one._parameters.pop("weight")
    net.one.register_parameter("weight_v", weight)
    net.one.weight = weight * 2


def by_hand_of_a_norm(net: Net) -> None:
    """Computes the weight like a parametrization."""
    del net.norm._parameters["bias"]
    net.norm.parametrizations = nn.ModuleDict({"bias": nn.Identity()})
    net.norm.__class__ = type("Mine", (type(net.norm),), {"bias": property(lambda self: torch.ones(6))})


@on_ranks()
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 2)])
def test_what_is_parametrized_after_is_refused(rank, ranks, cases, replicas):
    x = batch(rank, 0)
    torch.manual_seed(0)
    net = Net()
    plain = copy.deepcopy(net)
    rtp_ext.fully_rotate(net, **placed(ranks, replicas))
    known = {name: id(parameter) for name, parameter in net.named_parameters()}
    for what, way in WAYS.items():
        with cases.case(what), pytest.raises(ValueError, match=r"add these to the plain model, before fully_rotate"):
            way(net)
        with cases.case(f"{what} has changed nothing"):
            assert {name: id(parameter) for name, parameter in net.named_parameters()} == known
            assert_same(net(x), plain(x), EXACT, what)
    for way, name in ((by_hand, "one.weight"), (by_hand_of_a_norm, "norm.bias")):
        with cases.case(name):
            other = copy.deepcopy(net)
            way(other)
            for _ in range(2):
                with pytest.raises(ValueError, match=rf"{name} of a .*add these to the plain model"):
                    other(x)
    with cases.case("modules of nobody"):
        for way in (parametrizations.spectral_norm, parametrizations.weight_norm, old.spectral_norm):
            layer = way(nn.Linear(3, 3))
            prune.l1_unstructured(layer, "bias", amount=0.5)
            assert layer(torch.ones(2, 3)).shape == (2, 3)
    with cases.case("the ring still works"):
        net(x).sum().backward()
    rtp_ext.ring_of(net).close()
