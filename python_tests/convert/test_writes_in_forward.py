"""Forwards that write to parameters that are gathered while in use: kept, or refused by name."""

import copy

import pytest
import torch
from grids import few
from harness import on_ranks
from reference import assert_same, differs, wholes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import rtp_ext

D = torch.float64


class Writing(nn.Module):
    """Computes x @ w + b after `write(module, x)`."""

    def __init__(self, write, width: int = 4) -> None:
        super().__init__()
        self.write = write
        self.w = nn.Parameter(torch.linspace(-1, 1, width * width, dtype=D).view(width, width) / width)
        self.b, self.frozen = nn.Parameter(torch.ones(width, dtype=D)), nn.Parameter(torch.ones(1, dtype=D), False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            kept = self.write(self, x)
        w = self.w if kept is None else kept
        return (x @ w + self.b) * self.frozen


def clamp(module: Writing, _: torch.Tensor) -> None:
    module.w.clamp_(min=0)


def average(module: Writing, _: torch.Tensor) -> None:
    module.frozen.mul_(0.9).add_(module.b.mean(), alpha=0.5)


def first_batch(module: Writing, x: torch.Tensor) -> None:
    if not hasattr(module, "began"):
        module.began = True
        module.b.copy_(-x.mean(0))


def at_the_end(module: Writing, x: torch.Tensor) -> None:
    """The next forward is the first to read it again."""
    average(module, x)
    module.b.clamp_(max=0.9)


def by_rows(module: Writing, _: torch.Tensor) -> None:
    module.w[-1].mul_(0.5)  # in the shard of one rank


def no_write(module: Writing, _: torch.Tensor) -> None:
    module.w.mul_(1.0)


KEPT = {write.__name__: write for write in (clamp, average, first_batch, at_the_end, by_rows, no_write)}


def of_the_batch(module: Writing, x: torch.Tensor) -> None:
    module.b.copy_(x.mean(0))


REFUSED = {
    "by the batch": (of_the_batch, "b of a Writing: .* with different values on ranks"),
}


def make(write, width: int = 4) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(width, width, dtype=D), Writing(write, width), nn.LayerNorm(width, dtype=D))


def batch(seed: int, width: int = 4) -> torch.Tensor:
    return torch.randn(6, width, generator=torch.Generator().manual_seed(seed), dtype=D)


def train(model: nn.Module, width: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        (model(batch(step, width)) - 1).pow(2).mean().backward()
        optimizer.step()
    with torch.no_grad():
        model(batch(7, width))


@on_ranks(few([3], [2, 3]))
def test_writes_are_kept_or_refused(rank, cases):
    for name, write in KEPT.items():
        for width in (4, 400) if write is clamp else (4,):  # small modules are gathered together
            with cases.case(f"{name}, {width}"):
                plain = make(write, width)
                model, without = copy.deepcopy(plain), make(lambda module, x: None, width)
                rtp_ext.fully_rotate(model, timeout=30.0)
                for each in (plain, model, without):
                    train(each, width)
                found = wholes(model.parameters())
                for (key, p), whole in zip(plain.named_parameters(), found, strict=True):
                    assert_same(whole, p, 1e-9, key)
                if write is not no_write:
                    changed = [differs(without.get_parameter(key), p, 1e-4) for key, p in plain.named_parameters()]
                    assert any(changed), "control: the writes matter"
                rtp_ext.ring_of(model).close()
    for name, (write, words) in REFUSED.items():
        with cases.case(name):
            model = rtp_ext.fully_rotate(make(write), timeout=30.0)
            with pytest.raises(ValueError, match=words):
                model(batch(rank))
            model[1].write = lambda module, x: None
            model(batch(rank)).sum().backward()  # the refused forward has ended
            rtp_ext.ring_of(model).close()
    with cases.case("a copy in 16 bits"):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = rtp_ext.fully_rotate(make(clamp), mp_policy=policy, timeout=30.0)
        with pytest.raises(ValueError, match=r"w of a Writing: .* as a copy in torch.bfloat16"):
            model(batch(0))
        rtp_ext.ring_of(model).close()


@on_ranks(4)
def test_writes_with_replicas_are_refused():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "ring"))
    dims = rtp_ext.RotationDims(ring="ring", replicate="replica")
    model = rtp_ext.fully_rotate(make(clamp), mesh=mesh, dims=dims, timeout=30.0)
    with pytest.raises(ValueError, match=r"w of a Writing: .* with replicas"):
        model(batch(0))
