"""Gossip with replicas that freeze or thaw a parameter: together, which trains like n workers, and one later than
another, which is a prompt error on every rank, before anything is mixed."""

import time

import pytest
import torch
import torch.distributed as dist
from replica_models import Tiny
from workers import Replica, Workers, assert_trained_alike

from rtp_ext.outer import Gossip, LocalSGD, mixing_matrix

PROMPT = 15.0  # seconds; the rings' timeout is 30


def freeze(model, frozen):
    model.mix.requires_grad_(not frozen)
    if frozen:
        model.mix.zero_grad()


def thawing(frozen):
    """Returns a model with or without a layer that is frozen at first."""
    model = Tiny()
    freeze(model, frozen)
    return model


def together_cases(rank, ranks, cases):
    def mixes(workers):
        workers.mix(mixing_matrix("one-peer", 2, workers.step - 1))

    with cases.case("gossip, changed on all replicas"):
        replica, workers = Replica(rank, (2, 2), Gossip(), model=thawing(True)), Workers((2, 2), mixes)
        for frozen in (True, False, True):
            for model in (replica.model, *workers.models):
                freeze(model, frozen)
            for each in (replica, workers):
                each.train(1)
        assert_trained_alike(replica, workers, "gossip")


def local_training_cases(rank, ranks, cases):
    for shape, topology, overlap, frozen in (
        ((2, 2), "one-peer", False, False),
        ((2, 2), "ring", True, True),
        ((4, 1), "one-peer", False, True),
    ):
        what = f"gossip {topology} on {shape}, overlap {overlap}, frozen at first {frozen}"
        replica = Replica(rank, shape, Gossip(topology, overlap=overlap), model=thawing(frozen))
        replica.train(2)
        if replica.number == 1:
            freeze(replica.model, not frozen)
        start = time.monotonic()
        with cases.case(what), pytest.raises((ValueError, RuntimeError)) as caught:
            replica.train(4)
        text = str(caught.value)
        named = "replicas disagree: expected gossip with ticket" in text and "freeze the same parameters" in text
        told = [torch.zeros((), dtype=torch.int64) for _ in range(ranks)]
        dist.all_gather(told, torch.tensor(int(named)))
        with cases.case(f"{what}: named"):
            assert time.monotonic() - start < PROMPT, f"{time.monotonic() - start} s"
            # replicas that do not mix with the odd one fail because others have ended
            assert named or shape == (4, 1), text
            assert sum(map(int, told)) >= 2 and told[shape[1]], f"the odd one and who met it: {told}"
    for period in (1, 3):
        with cases.case(f"a step later on one replica, period {period}"):
            replica = Replica(rank, (2, 2), LocalSGD(period))
            replica.train(1)
            with pytest.raises(ValueError, match=r"replicas disagree.*(freeze the same parameters at|same with its)"):
                for step in range(4):
                    if step == replica.number:
                        freeze(replica.model, True)
                    replica.train(1)


def unseen_cases(rank, ranks, cases):
    """Freezes or thaws between forward and step, after the comparison of models: the replicas' mixed parameters differ,
    and no buffer is sent."""
    for policy in (Gossip(), LocalSGD(1)):
        with cases.case(f"thawed between forward and step, {policy!r}"):
            replica = Replica(rank, (2, 2), policy, model=thawing(True))
            replica.train(1)
            odd = replica.number == 1
            replica.optimizer.register_step_pre_hook(lambda *_, odd=odd, model=replica.model: freeze(model, not odd))
            replica.policy.attach(replica.optimizer)  # after that hook
            with pytest.raises(ValueError, match=r"replicas disagree.*freeze the same parameters at the same step"):
                replica.train(1)


def freezing_cases(rank, ranks, cases):
    together_cases(rank, ranks, cases)
    local_training_cases(rank, ranks, cases)
    unseen_cases(rank, ranks, cases)
