"""Optimizers that multiply across shards, for plain tensors and DTensors; and policies for them."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import _muon
from workers import Workers

import rtp_ext.optim
from rtp_ext.outer import DiLoCo, Gossip, LocalSGD, mixing_matrix
from rtp_ext.outer.local_training.diloco import nesterov

# torch's iteration runs in bfloat16, where one process and shards round differently
_source = inspect.getsource(_muon._zeropower_via_newtonschulz)
assert _source.count("grad.bfloat16()") == 1
_exact: dict = dict(vars(_muon))
exec(_source.replace("grad.bfloat16()", "grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)"), _exact)


class Muon(torch.optim.Muon):
    """torch's, whose iteration runs in float32, or in float64 for gradients in float64."""

    def step(self, closure=None):
        stock = _muon._zeropower_via_newtonschulz
        _muon._zeropower_via_newtonschulz = _exact["_zeropower_via_newtonschulz"]
        try:
            return super().step(closure)
        finally:
            _muon._zeropower_via_newtonschulz = stock


def whole(tensor: Tensor) -> Tensor:
    """The same on all ranks of a mesh."""
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim) if sharded(tensor) else tensor


def sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def of_whole(function, tensor: Tensor) -> Tensor:
    """`function` of a tensor for which DTensor has no rule."""
    if not sharded(tensor):
        return function(tensor)
    tensor = whole(tensor)
    return DTensor.from_local(function(tensor.to_local()), tensor.device_mesh, tensor.placements, run_check=False)


def inverse_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix + 1e-3 * torch.eye(len(matrix), dtype=matrix.dtype))
    return vectors @ torch.diag(values**-0.25) @ vectors.T


def basis(matrix: Tensor) -> Tensor:
    """Returns eigenvectors of a matrix close to the given one, with distinct eigenvalues."""
    apart = torch.linspace(1, 2, len(matrix), dtype=matrix.dtype) * matrix.trace() / 10
    return torch.linalg.eigh(matrix + torch.diag(apart))[1]


def small(matrix: Tensor) -> Tensor:
    """Of full rank, although the first gradients have a lower rank."""
    return 0.01 * torch.eye(len(matrix), dtype=matrix.dtype)


class Matrices(torch.optim.Optimizer):
    """An optimizer of matrices; `state` contains lists."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(self.update(parameter.grad, self.state[parameter]), alpha=-group["lr"])


class Shampoo(Matrices):
    def update(self, gradient, state):
        products = [whole(gradient @ gradient.T), whole(gradient.T @ gradient)]
        if "factors" not in state:
            state["factors"] = [torch.zeros_like(product) for product in products]
        for factor, product in zip(state["factors"], products, strict=True):
            factor.add_(product)
        left, right = (of_whole(inverse_root, factor) for factor in state["factors"])
        return left @ gradient @ right


class Soap(Matrices):
    """Adam in the eigenbasis of Shampoo's factors, which a step of a power iteration follows."""

    def update(self, gradient, state):
        products = [whole(gradient @ gradient.T), whole(gradient.T @ gradient)]
        if not state:
            state["factors"] = [of_whole(small, product) for product in products]
            state["bases"] = [of_whole(basis, product) for product in products]
            state["squares"] = torch.zeros_like(gradient)
        for factor, product in zip(state["factors"], products, strict=True):
            factor.lerp_(product, 0.3)
        turned = [whole(factor @ base) for factor, base in zip(state["factors"], state["bases"], strict=True)]
        state["bases"] = [of_whole(lambda one: torch.linalg.qr(one)[0], each) for each in turned]
        left, right = state["bases"]
        inside = left.T @ gradient @ right
        state["squares"].lerp_(inside * inside, 0.3)
        return left @ (inside / (state["squares"].sqrt() + 1e-3)) @ right.T


def matrices(model):
    """A square matrix and a tall one: DTensor takes milliseconds for every new operator and shape."""
    return [model.mix.weight, model.mlp[0].weight]


def muon(model):
    return Muon(matrices(model), lr=0.02)


def ours(model):
    """rtp_ext.optim.Muon, where the parameters are sharded."""
    cls = rtp_ext.optim.Muon if sharded(model.mix.weight) else Muon
    return cls(matrices(model), lr=0.02)


def shampoo(model):
    return Shampoo(matrices(model), lr=0.02)


def soap(model):
    return Soap(matrices(model), lr=0.02)


# -- policies, and the same rules between workers in one process

CLOSE = 1e-9  # products of many factors


def mean(workers):
    if workers.step % 2 == 0:
        workers.mix(mixing_matrix("complete", 2))


def one_peer(workers):
    workers.mix(mixing_matrix("one-peer", 2, workers.step - 1))


def diloco(workers):
    if "anchor" not in workers.kept:
        workers.kept["anchor"] = torch.nn.Parameter(Workers.flat(type(workers.models[0])()))
        workers.kept["outer"] = nesterov([workers.kept["anchor"]])
    if workers.step % 2 == 0:
        anchor = workers.kept["anchor"]
        anchor.grad = anchor.detach() - workers.weights.mean(0)
        workers.kept["outer"].step()
        workers.put(anchor.detach().repeat(2, 1))


POLICIES = {
    "local SGD": (lambda: LocalSGD(2), mean),
    "DiLoCo": (lambda: DiLoCo(2), diloco),
    "gossip": (Gossip, one_peer),
}
