"""The steps that count in local training, for all parameters of the optimizer; and the parts that a policy covers."""

import copy

import pytest
import torch
from grids import few
from harness import on_ranks
from optimizer_cases import Mixed, convert, mesh_of, train
from reference import differs, random, wholes
from torch import nn

import rtp_ext
from rtp_ext.outer import DiLoCo, LocalSGD

GRID = (2, 2)
# Their steps see plain shards; AdamW's sees DTensors.
OPTIMIZERS = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
}


def _made(make, policy):
    model = convert(Mixed(), GRID, policy)
    optimizer = make(model.parameters())
    policy.attach(optimizer)
    return model, optimizer


@on_ranks(4)
def test_state_that_is_made_for_a_checkpoint_is_no_step(rank, cases):
    for number, (name, make) in enumerate(OPTIMIZERS.items()):
        for policy in few([(LocalSGD, DiLoCo)[number % 2]], (LocalSGD, DiLoCo)):
            with cases.case(f"{name}, {policy.__name__}"):
                model, optimizer = _made(make, first := policy(2))
                first.state_dict()
                assert first.state_dict()["steps"] == 0, "a step that makes state for a checkpoint counts as one"
                train(model, [optimizer], [rank], steps=3)  # one after the replicas met, one before they do
                state = copy.deepcopy(first.state_dict())
                twin, other = _made(make, second := policy(2))
                second.load_state_dict(state)
                train(model, [optimizer], [rank], steps=2, first=3)
                before = wholes(twin.parameters())
                train(twin, [other], [rank], steps=2, first=3)
                expected, found = wholes(model.parameters()), wholes(twin.parameters())
                assert all(map(torch.equal, found, expected)), "it goes on as if it had not been interrupted"
                assert differs(before[0], found[0], 1e-4), "control: it goes on"


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7)), nn.Linear(7, 5)
        self.double()
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(random(*parameter.shape, dtype=torch.float64, seed=number))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def _trained(policy, members, rank):
    model = Two()
    options = {"dims": rtp_ext.RotationDims(ring="ring", replicate="replicas"), "outer": policy, "timeout": 30.0}
    rtp_ext.fully_rotate(members(model), mesh=mesh_of(GRID), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy.attach(optimizer)
    for step in range(2):
        optimizer.zero_grad()
        model(random(3, 5, dtype=torch.float64, seed=10 * rank + step)).square().mean().backward()
        optimizer.step()
    return wholes(model.parameters())


@on_ranks(4)
def test_parts_without_a_model_around_them_are_averaged_or_refused(rank, cases):
    with cases.case("LocalSGD"):
        alone = _trained(LocalSGD(1), lambda model: [model.first, model.second], rank)
        together = _trained(LocalSGD(1), lambda model: model, rank)
        apart = _trained(LocalSGD(5), lambda model: model, rank)
        assert all(map(torch.equal, alone, together)) and differs(apart[-1], together[-1], 1e-4)
    with cases.case("DiLoCo"), pytest.raises(ValueError, match=r"got weight, which is outside of the Sequential.*aro"):
        _trained(DiLoCo(1), lambda model: [model.first, model.second], rank)
