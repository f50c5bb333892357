"""Optimizers that multiply across shards (Muon, Shampoo, SOAP) in local training of replicas: against n workers in one
process."""

import copy
import itertools
import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp
from grids import few
from harness import on_ranks
from local_training_cases import SHAPE, gather_all, other_values
from matrix_optimizers import CLOSE, POLICIES, muon, ours, shampoo, soap
from reference import assert_same, differs, full
from replica_models import DIMS, Tiny, mesh_of
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from workers import Replica, Workers, assert_trained_alike

import rtp_ext
from rtp_ext.outer import DiLoCo, Gossip, LocalSGD


def training_cases(rank, cases):
    every = list(itertools.product((muon, shampoo, soap), POLICIES))
    enough = [(muon, name) for name in POLICIES] + [(shampoo, "gossip"), (soap, "local SGD")]
    for make, name in few(enough, every):
        policy, act = POLICIES[name]
        with cases.case(f"{make.__name__}, {name}"):
            workers, alone = Workers(SHAPE, act, make), Workers(SHAPE, lambda workers: None, make)
            replica = Replica(rank, SHAPE, policy(), make)
            for each in (replica, workers, alone):
                each.train(3)
            assert_trained_alike(replica, workers, make.__name__, CLOSE)
            assert differs(workers.weights, alone.weights, 1e-4), "control: replicas met"
            rows = alone.weights
            assert differs(rows[0], rows[1], 1e-4), "control: they differ where they do not"


def penalty_cases(rank, cases):
    with cases.case("a product of weights in the loss"):
        replica, workers = Replica(rank, SHAPE, LocalSGD(5)), Workers(SHAPE, lambda workers: None)
        for each in (replica, workers):
            each.train(2)  # replicas differ

        def penalty(weight):
            return (weight @ weight.T).square().sum()

        replica.model.zero_grad()
        weight, expected = replica.model.mix.weight, workers.models[replica.number].mix.weight
        penalty(weight).backward()
        (gradient,) = torch.autograd.grad(penalty(expected), expected)
        assert_same(full(weight.grad), gradient, CLOSE, "gradient")
        other = workers.models[1 - replica.number].mix.weight
        (wrong,) = torch.autograd.grad(penalty(other), other)
        assert differs(wrong, gradient, 1e-3), "control"


def checkpoint_cases(rank, cases, folder):
    every = [(ours, lambda: DiLoCo(3)), (shampoo, lambda: Gossip("ring", 3))]
    every += [(muon, lambda: DiLoCo(3)), (soap, lambda: LocalSGD(3))]
    for make, policy in few(every[:2], every):
        name = make.__name__
        with cases.case(f"restart of {name}"):
            first = Replica(rank, SHAPE, policy(), make, clip=None)
            first.train(2)
            schedule, saved = first.schedule.state_dict(), gather_all(first.weights)
            dcp.save({"policy": first.policy}, checkpoint_id=f"{folder}/{name}")
            assert differs(saved[0], saved[2], 1e-4), "control: replicas differ when they are saved"
            first.train(2)
            again = Replica(rank, SHAPE, policy(), make, clip=None, model=other_values())
            dcp.load({"policy": again.policy}, checkpoint_id=f"{folder}/{name}")
            assert torch.equal(again.weights, saved[rank])
            again.schedule.load_state_dict(schedule)
            again.step = 2
            again.train(2)
            assert torch.equal(again.weights, first.weights), "bit for bit"
    with cases.case("the mean of state in lists"):
        replica = Replica(rank, SHAPE, LocalSGD(3), shampoo)
        replica.train(1)
        with pytest.raises(ValueError, match=r"state_dict of Shampoo.*average"):
            replica.optimizer.state_dict()
        (factor, _) = replica.optimizer.state[replica.model.mix.weight]["factors"]
        both = gather_all(full(factor))
        replica.policy.average()
        assert_same(full(factor), (both[0] + both[2]) / 2, CLOSE, "factor")
        assert differs(both[0], both[2], 1e-3), "control"
        replica.optimizer.state_dict()
    with cases.case("state of which ranks have terms of a sum"):
        replica = Replica(rank, SHAPE, LocalSGD(3), muon)
        replica.train(1)
        weight = replica.model.mix.weight
        replica.optimizer.state[weight]["sum"] = (weight.grad.T @ weight.grad.detach()).detach()
        with pytest.raises(ValueError, match=r"a DTensor of shape \(7, 7\) with placements \(Partial"):
            replica.policy.state_dict()


def layout_cases(rank, cases):
    """Parameters are on the mesh of their ring only."""
    with cases.case("parts first, and a copy"):
        warned: list = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = warned.append
        logging.getLogger("rtp_ext").addHandler(handler)
        model = Tiny()
        for part in (model.mlp, model):
            policy = LocalSGD(2) if part is model.mlp else None
            rtp_ext.fully_rotate(part, mesh=mesh_of(SHAPE, ("replicas", "ring")), dims=DIMS, outer=policy, timeout=30.0)
        for each in (model, copy.deepcopy(model)):
            for name, parameter in each.named_parameters():
                assert parameter.device_mesh == rtp_ext.ring_of(model).mesh and len(parameter.placements) == 1, name
        logging.getLogger("rtp_ext").removeHandler(handler)
        assert warned == [], "ranks of a ring compare what is not cut yet"
    with cases.case("a ring hears of what fails on its mesh"):
        ring, told = rtp_ext.ring_of(model), []
        stock = ring.communicator.collectively

        def collectively(operation, *arguments, **keywords):
            told.append(operation)
            return stock(operation, *arguments, **keywords)

        ring.communicator.collectively = collectively
        model.mix.weight.full_tensor().sum().backward()
        assert told == ["full_tensor backward"]
    with cases.case("whole state dicts"):
        plain = other_values()
        whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, plain.state_dict() if rank == 0 else {}, options=whole)
        for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(full(parameter.detach()), expected)
        found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        assert rank > 0 or all(torch.equal(found[name], value) for name, value in plain.state_dict().items())


@on_ranks(4, timeout=300.0)
def test_two_by_two(rank, cases, tmp_path):
    folder = str(tmp_path)
    training_cases(rank, cases)
    penalty_cases(rank, cases)
    layout_cases(rank, cases)
    checkpoint_cases(rank, cases, folder)
