"""Policies that act after steps: against n workers in one process."""

import itertools
import os
import time

import pytest
import torch
from freezing_cases import freezing_cases
from grids import few
from harness import on_ranks
from local_training_cases import (
    checkpoint_cases,
    counting_cases,
    frozen_cases,
    gather_all,
    local_training_refusals,
    property_cases,
    training_cases,
)
from programs.workers import diloco, gossip, gossip_beside, local_sgd, nothing
from reference import assert_same, differs
from workers import EXACT, STEPS, Replica, Workers, adamw, momentum

import rtp_ext
from rtp_ext.outer import DiLoCo, Gossip, LocalSGD
from rtp_ext.outer.local_training.diloco import nesterov


def outer_adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.03, betas=(0.5, 0.9))


def halves():
    """Where a model is cut in two by the middle of each parameter, in elements."""
    sizes = [parameter.numel() for parameter in Workers((1, 1), nothing).models[0].parameters()]
    first, before = 0, 0
    for size in sizes:
        if before + size / 2 < sum(sizes) / 2:
            first = before + size
        before += size
    return first


def policies():
    cut = halves()
    streamed = [(2, slice(0, cut)), (4, slice(cut, None))]
    return {
        "local SGD": (lambda: LocalSGD(2, warmup=1), local_sgd(2, 1), momentum),
        "DiLoCo": (lambda: DiLoCo(2), diloco(2, nesterov), adamw),
        "DiLoCo, AdamW outside": (lambda: DiLoCo(3, outer_adam), diloco(3, outer_adam), adamw),
        "streaming": (
            lambda: DiLoCo(4, fragments=2, delay=1, keep=0.25),
            diloco(4, nesterov, streamed, 1, 0.25),
            adamw,
        ),
        "delayed": (lambda: DiLoCo(3, delay=2), diloco(3, nesterov, None, 2), momentum),
        "one-peer": (Gossip, gossip("one-peer"), adamw),
        "ring": (lambda: Gossip("ring", 2), gossip("ring", 2), momentum),
        "grid": (lambda: Gossip("grid"), gossip("grid"), adamw),
        "exponential": (lambda: Gossip("exponential"), gossip("exponential"), adamw),
        "complete": (lambda: Gossip("complete", 3), gossip("complete", 3), adamw),
        "PGA": (lambda: Gossip("one-peer", 1, global_period=4), gossip("one-peer", 1, 4), adamw),
        "beside": (lambda: Gossip("one-peer", overlap=True), gossip_beside("one-peer"), adamw),
        "PGA beside": (
            lambda: Gossip("ring", 2, global_period=4, overlap=True),
            gossip_beside("ring", 2, 4),
            momentum,
        ),
    }


ON_RINGS = ("local SGD", "DiLoCo, AdamW outside", "streaming", "delayed", "one-peer", "PGA beside")


@on_ranks(4, timeout=240.0)
def test_against_workers_in_one_process(rank, ranks, cases):
    apart = {}
    every = list(itertools.product(((4, 1), (2, 2)), policies()))
    # every kind of mixing once for two replicas: their topologies are the same
    enough = [(shape, name) for shape, name in every if shape == (4, 1) or name in ON_RINGS]
    for number, (shape, name) in enumerate(few(enough, every)):
        policy, act, make = policies()[name]
        with cases.case(f"{name} on {shape}"):
            replica = Replica(rank, shape, policy(), make)
            replica.train(STEPS)
            rows = gather_all(replica.weights)
            if rank != number % ranks:  # one of them computes what all have to have
                continue
            workers = Workers(shape, act, make)
            workers.train(STEPS)
            expected = workers.weights.repeat_interleave(shape[1], 0)
            for row, theirs in zip(rows, expected, strict=True):
                assert_same(row, theirs, EXACT, "weights")
            if (shape, make) not in apart:
                apart[shape, make] = Workers(shape, nothing, make)
                apart[shape, make].train(STEPS)
            alone = apart[shape, make].weights
            assert all(differs(rows[i * shape[1]], alone[i], 1e-6) for i in range(shape[0])), (
                "control: it did something"
            )


@on_ranks(4, timeout=300.0)
def test_two_by_two(rank, ranks, cases, tmp_path):
    folder = str(tmp_path)
    for part in (property_cases, counting_cases, training_cases, local_training_refusals, frozen_cases, freezing_cases):
        part(rank, ranks, cases)
    checkpoint_cases(rank, ranks, cases, folder)


def ring_of_four():
    return Gossip("ring")


def average_each():
    return LocalSGD(1)


@on_ranks(4, lost={3})
@pytest.mark.parametrize(
    ("shape", "policy"),
    [((4, 1), ring_of_four), ((2, 2), average_each)],
)
def test_a_replica_that_dies_is_named(rank, ranks, shape, policy):
    """The last rank does, before a step. The others get an error that names it, and no hang."""
    replica = Replica(rank, shape, policy())
    replica.train(1)
    if rank == ranks - 1:
        os._exit(1)
    start = time.monotonic()
    with pytest.raises(rtp_ext.RotationError, match=r"; who failed: global rank 3 \(its process has ended\)"):
        replica.train(3)
    assert time.monotonic() - start < 25.0, "not by a timeout"
