"""Optimizers that multiply across shards (Muon, Shampoo, SOAP) where replicas train apart: against n workers in one
process."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from apart_cases import SHAPE, everyone, other_values
from harness import Cases, run_ranks
from matrix_optimizers import muon, shampoo, soap
from reference import assert_same, differs, full, local
from workers import Replica, Workers, assert_trained_alike

from rtp_ext.outer import DiLoCo, Gossip, LocalSGD, mixing_matrix
from rtp_ext.outer.apart.diloco import nesterov

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


def training_cases(rank, cases):
    for make in (muon, shampoo, soap):
        alone = Workers(SHAPE, lambda workers: None, make)
        alone.train(3)
        for name, (policy, act) in POLICIES.items():
            with cases.case(f"{make.__name__}, {name}"):
                replica, workers = Replica(rank, SHAPE, policy(), make), Workers(SHAPE, act, make)
                for each in (replica, workers):
                    each.train(3)
                assert_trained_alike(replica, workers, make.__name__, CLOSE)
                assert differs(workers.weights, alone.weights, 1e-4), "control: replicas met"
                rows = workers.weights
                assert differs(rows[0], rows[1], 1e-4) or policy is Gossip, "control: and trained apart"


def penalty_cases(rank, cases):
    with cases.case("a product of weights in the loss"):
        replica, workers = Replica(rank, SHAPE, LocalSGD(5)), Workers(SHAPE, lambda workers: None)
        for each in (replica, workers):
            each.train(2)  # replicas differ

        def penalty(weight):
            return (weight.T @ weight).square().sum()

        replica.model.zero_grad()
        weight, expected = replica.model.mix.weight, workers.models[replica.number].mix.weight
        penalty(weight).backward()
        (gradient,) = torch.autograd.grad(penalty(expected), expected)
        assert_same(full(weight.grad), gradient, CLOSE, "gradient")
        other = workers.models[1 - replica.number].mix.weight
        (wrong,) = torch.autograd.grad(penalty(other), other)
        assert differs(wrong, gradient, 1e-3), "control"


def checkpoint_cases(rank, cases, folder):
    for make, policy in ((muon, lambda: DiLoCo(3)), (shampoo, lambda: Gossip("ring", 3)), (soap, lambda: LocalSGD(3))):
        name = make.__name__
        with cases.case(f"restart of {name}"):
            first = Replica(rank, SHAPE, policy(), make, clip=None)
            first.train(2)
            schedule, saved = first.schedule.state_dict(), everyone(first.weights)
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
        both = everyone(full(factor))
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
    with cases.case("a copy lies as the model"):
        twin = copy.deepcopy(replica.model)
        assert twin.mix.weight.device_mesh == weight.device_mesh and weight.device_mesh.shape == (2,)
        assert torch.equal(local(twin.mix.weight), local(weight))


def _two_by_two(rank, ranks, folder):
    cases = Cases()
    training_cases(rank, cases)
    penalty_cases(rank, cases)
    checkpoint_cases(rank, cases, folder)
    cases.finish()


def test_two_by_two(tmp_path):
    run_ranks(_two_by_two, 4, str(tmp_path), timeout=300.0)
