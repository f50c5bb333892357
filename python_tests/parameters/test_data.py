"""Assignments to parameter.data, and writes through it, of converted models."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from harness import on_ranks
from reference import assert_same, differs, whole_parameters
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import rtp_ext

EXACT = 1e-10


class Net(nn.Module):
    """Parameters cut along either dimension, gathered ones, a tied one; sizes that ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.mlp = nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 5))
        self.other, self.norm = nn.Embedding(3, 5), nn.LayerNorm(5)
        self.double()
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.mlp(self.table(ids) + self.other(ids % 3))))


def placed(ranks: int, replicas: int) -> dict:
    if replicas == 1:
        return {"timeout": 30.0}
    mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("replicas", "ring"))
    return {"mesh": mesh, "dims": rtp_ext.RotationDims(ring="ring", replicate="replicas"), "timeout": 30.0}


def ways(model: nn.Module, plain: nn.Module) -> dict[str, Callable[[], object]]:
    """Ways in which user code copies the values of `plain` to `model`."""
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))

    def assign(made: Callable[[DTensor, Tensor], Tensor]) -> None:
        for parameter, whole in pairs:
            parameter.data = made(parameter, whole.detach())

    def placed_alike(parameter: DTensor, whole: Tensor) -> Tensor:
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements)

    def replicated(parameter: DTensor, whole: Tensor) -> Tensor:
        everywhere = [Replicate()] * parameter.device_mesh.ndim
        return distribute_tensor(whole, parameter.device_mesh, everywhere)

    def averages(decay: float) -> None:
        for parameter, whole in pairs:
            parameter.data.mul_(decay)
            target = distribute_tensor(whole.detach(), parameter.device_mesh, parameter.placements)
            parameter.data.add_(target, alpha=1 - decay)

    return {
        "a whole tensor": lambda: assign(lambda _, whole: whole),
        "a parameter": lambda: assign(lambda _, whole: nn.Parameter(whole)),
        "a DTensor": lambda: assign(placed_alike),
        "a DTensor that is whole": lambda: assign(replicated),
        "a vector": lambda: vector_to_parameters(parameters_to_vector(plain.parameters()), model.parameters()),
        "copy_": lambda: [p.data.copy_(placed_alike(p, whole)) for p, whole in pairs],
        "averages": lambda: averages(0.0),
    }


@on_ranks()
@pytest.mark.parametrize(
    ("ranks", "replicas", "outer"), [(2, 1, None), (3, 1, None), (4, 2, None), (4, 2, "ZeroOuter")]
)
def test_what_is_assigned_to_data_counts(rank, ranks, cases, replicas, outer):
    ids = torch.randint(0, 7, (2, 4), generator=torch.Generator().manual_seed(rank))
    torch.manual_seed(0)
    model = Net()
    plain, before = copy.deepcopy(model), copy.deepcopy(model)
    for parameter in plain.parameters():
        parameter.data.mul_(-1.25).add_(0.1)
    policy = {} if outer is None else {"outer": getattr(rtp_ext.outer, outer)()}
    rtp_ext.fully_rotate(model, **placed(ranks, replicas), **policy)
    known = {name: id(parameter) for name, parameter in model.named_parameters()}
    local = (
        "a DTensor",
        "copy_",
        "averages",
    )  # which distribute_tensor makes: of pieces that replicas cut it makes none
    for what in [name for name in ways(model, plain) if outer is None or name not in local]:
        with cases.case(what):
            ways(model, plain)[what]()
            assert_same(model(ids), plain(ids), EXACT, what)
            model(ids).sum().backward()
            ways(model, before)["a whole tensor"]()
            assert_same(model(ids), before(ids), EXACT, f"back from {what}")
            assert differs(before(ids), plain(ids), EXACT), "the control is the same"
            assert {name: id(parameter) for name, parameter in model.named_parameters()} == known
    rtp_ext.ring_of(model).close()


@on_ranks(2)
def test_data_that_does_not_fit_is_refused(cases):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
    plain = copy.deepcopy(model)
    adapter = nn.Parameter(torch.ones(3))
    rtp_ext.fully_rotate(model, timeout=30.0)
    weight, x = model[0].weight, torch.randn(3, 4)
    for values, kind, words in (
        (torch.zeros(3, 4), ValueError, r"\(6, 4\), got \(3, 4\)"),
        (torch.zeros(6, 4).double(), TypeError, r"torch.float32.*\(6, 4\).*got torch.float64"),
        (torch.zeros(6, 4, device="meta"), ValueError, "meta device"),
        ([1.0], TypeError, "got a list"),
    ):
        with cases.case(words), pytest.raises(kind, match=words):
            weight.data = values
    with cases.case("nothing has changed"):
        assert_same(model(x), plain(x), 1e-5, "after what was refused")
    with cases.case("parameters_to_vector"):  # torch makes none of shards of several sizes
        vector_to_parameters(2 * parameters_to_vector(model.parameters()), model.parameters())
        for name, whole in whole_parameters(model).items():
            assert_same(whole, 2 * plain.get_parameter(name).detach(), EXACT, f"twice {name}")
        vector_to_parameters(parameters_to_vector(plain.parameters()), model.parameters())
    with cases.case("a vector of another length"), pytest.raises((ValueError, RuntimeError)):
        vector_to_parameters(torch.zeros(20), model.parameters())
    with cases.case("on the meta device"):
        with torch.device("meta"):
            empty = nn.Sequential(nn.Linear(4, 6))
        rtp_ext.fully_rotate(empty, mesh=rtp_ext.ring_of(model))
        with pytest.raises(ValueError, match="meta device"):
            empty[0].weight.data = torch.zeros(6, 4)
        empty.to_empty(device="cpu")
        vector_to_parameters(parameters_to_vector(plain[:1].parameters()), empty.parameters())
        assert_same(empty(x), plain[:1](x), 1e-5, "after to_empty")
    with cases.case("between forward and backward"):
        loss = model(x.requires_grad_()).sum()
        weight.data = torch.zeros(6, 4)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with cases.case("moves"):
        model.double()
        assert weight.dtype == torch.float64
        weight.data = torch.ones(6, 4).double()
        assert bool((model[0].weight.to_local() == 1).all())
    with cases.case("what no ring has cut"):
        adapter.data = torch.zeros(5)
        assert adapter.shape == (5,)
    rtp_ext.ring_of(model).close()
