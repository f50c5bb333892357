"""Policies that act after steps: against n workers in one process."""

import itertools
import os
import time

import pytest
import torch
from apart_cases import (
    apart_refusals,
    checkpoint_cases,
    counting_cases,
    everyone,
    frozen_cases,
    property_cases,
    training_cases,
)
from freezing_cases import freezing_cases
from grids import few
from harness import Cases, run_ranks
from reference import assert_same, differs
from workers import EXACT, STEPS, Replica, Workers, adamw, momentum

import rtp_ext
from rtp_ext.outer import DiLoCo, Gossip, LocalSGD, mixing_matrix
from rtp_ext.outer.apart.diloco import nesterov

# -- what the algorithms are, on whole models --------------------------------------------------------------------------


def mean(workers):
    workers.mix(mixing_matrix("complete", workers.replicas))


def local_sgd(period, warmup=0):
    def act(workers):
        if workers.step <= warmup or (workers.step - warmup) % period == 0:
            mean(workers)

    return act


def gossip(topology, period=1, global_period=None):
    def act(workers):
        if global_period and workers.step % global_period == 0:
            mean(workers)
        elif workers.step % period == 0:
            workers.mix(mixing_matrix(topology, workers.replicas, workers.step // period - 1))

    return act


def gossip_beside(topology, period=1, global_period=None):
    """D-PSGD: what mixing changes comes a step later."""

    def act(workers):
        late = workers.kept.pop("late", None)
        if late is not None:
            workers.put(workers.weights + late)
        if global_period and workers.step % global_period == 0:
            mean(workers)
        elif workers.step % period == 0:
            matrix = mixing_matrix(topology, workers.replicas, workers.step // period - 1)
            workers.kept["late"] = matrix @ workers.weights - workers.weights

    return act


def diloco(period, outer, fragments=None, delay=0, keep=0.0):
    """`fragments`: for each, the step of a period after which it is sent, and its elements, a slice."""

    def act(workers):
        kept, parts = workers.kept, fragments or [(0, slice(None))]
        if not kept:
            start = Workers.flat(type(workers.models[0])())
            kept["anchors"] = [torch.nn.Parameter(start[part].clone()) for _, part in parts]
            kept["outer"] = [outer([anchor]) for anchor in kept["anchors"]]
            kept["sent"] = {}
        for number, (due, part) in enumerate(parts):
            anchor = kept["anchors"][number]
            if workers.step % period == due % period:
                kept["sent"][number] = workers.step, anchor.detach() - workers.weights[:, part].mean(0)
            when, moved = kept["sent"].get(number, (None, None))
            if when is not None and workers.step == when + delay:
                anchor.grad = moved
                kept["outer"][number].step()
                weights = workers.weights
                weights[:, part] = keep * weights[:, part] + (1 - keep) * anchor.detach()
                workers.put(weights)

    return act


def outer_adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.03, betas=(0.5, 0.9))


def halves():
    """Where a model is cut in two by the middle of each parameter, in elements."""
    sizes = [parameter.numel() for parameter in Workers((1, 1), mean).models[0].parameters()]
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


def _four(rank, ranks):
    cases = Cases()
    apart = {}
    every = list(itertools.product(((4, 1), (2, 2)), policies()))
    # of two replicas every kind of mixing once: their topologies are alike
    enough = [(shape, name) for shape, name in every if shape == (4, 1) or name in ON_RINGS]
    for number, (shape, name) in enumerate(few(enough, every)):
        policy, act, make = policies()[name]
        with cases.case(f"{name} on {shape}"):
            replica = Replica(rank, shape, policy(), make)
            replica.train(STEPS)
            rows = everyone(replica.weights)
            if rank != number % ranks:  # one of them computes what all have to have
                continue
            workers = Workers(shape, act, make)
            workers.train(STEPS)
            expected = workers.weights.repeat_interleave(shape[1], 0)
            for row, theirs in zip(rows, expected, strict=True):
                assert_same(row, theirs, EXACT, "weights")
            if (shape, make) not in apart:
                apart[shape, make] = Workers(shape, lambda workers: None, make)
                apart[shape, make].train(STEPS)
            alone = apart[shape, make].weights
            assert all(differs(rows[i * shape[1]], alone[i], 1e-6) for i in range(shape[0])), (
                "control: it did something"
            )
    cases.finish()


def test_against_workers_in_one_process():
    run_ranks(_four, 4, timeout=240.0)


def _two_by_two(rank, ranks, folder):
    cases = Cases()
    for part in (property_cases, counting_cases, training_cases, apart_refusals, frozen_cases, freezing_cases):
        part(rank, ranks, cases)
    checkpoint_cases(rank, ranks, cases, folder)
    cases.finish()


def test_two_by_two(tmp_path):
    run_ranks(_two_by_two, 4, str(tmp_path), timeout=300.0)


def _dies(rank, ranks, shape, policy):
    """The last rank does, before a step. The others get an error that names it, and no hang."""
    replica = Replica(rank, shape, policy())
    replica.train(1)
    if rank == ranks - 1:
        os._exit(1)
    start = time.monotonic()
    with pytest.raises(rtp_ext.RotationError, match=r"; who failed: global rank 3 \(its process has ended\)"):
        replica.train(3)
    assert time.monotonic() - start < 25.0, "not by a timeout"


def ring_of_four():
    return Gossip("ring")


def average_each():
    return LocalSGD(1)


@pytest.mark.parametrize(
    ("shape", "policy"),
    [((4, 1), ring_of_four), ((2, 2), average_each)],
)
def test_a_replica_that_dies_is_named(shape, policy):
    run_ranks(_dies, 4, shape, policy, lost={3})
