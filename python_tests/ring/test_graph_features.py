"""Passes as graphs together with split backwards and checkpoints, and with policies between replicas. replayed.py makes
the replays."""

import contextlib

import pytest
import torch
from autograd_subjects import SUBJECTS
from grids import few, needs_split_backwards
from harness import on_ranks
from local_training_cases import gather_all
from reference import assert_same, differs
from replayed import replayed
from replica_models import EXACT as SUMMED
from test_local_training import diloco, gossip, local_sgd
from test_split_backward import _adapted, _checkpointed, _subject
from workers import EXACT, Replica, Workers, adamw, momentum

import rtp_ext
from rtp_ext.nn import RotatedLinear
from rtp_ext.outer import AllReduce, DiLoCo, Gossip, LocalSGD, ZeroOuter
from rtp_ext.outer.local_training.diloco import nesterov
from rtp_ext.ring import graphs


@contextlib.contextmanager
def replaying():
    """Rings that are made within the context have graphs, and at least one of them replays."""
    with replayed() as rings:
        yield
        assert sum(each.replayed for each in rings) > 0, rings


# -- split backwards ---------------------------------------------------------------------------------------------------


@needs_split_backwards
@on_ranks(few([2], [2, 3]), timeout=600.0)
def test_split_backwards_and_checkpoints(cases):
    with replaying(), rtp_ext.Ring(timeout=30.0) as ring:
        for _ in range(5):  # until their passes are graphs
            for label in ("linear", "mlp"):
                _subject(label, SUBJECTS[label], ring, False, cases)
            _checkpointed(ring, cases)
        _adapted(ring, cases)


# -- between replicas --------------------------------------------------------------------------------------------------


STEPS, MOST_STEPS = 6, 30  # tensors get earlier addresses again, sooner or later
POLICIES = {  # what acts, the same on whole models, the optimizer
    "local SGD": (lambda: LocalSGD(2), local_sgd(2), momentum),
    "DiLoCo": (lambda: DiLoCo(2), diloco(2, nesterov), adamw),
    "gossip": (Gossip, gossip("one-peer"), adamw),
    "all-reduce": (AllReduce, None, adamw),
    "zero": (ZeroOuter, None, adamw),
}


@on_ranks(few([4], [4, 6]), timeout=300.0)
def test_policies_between_replicas(rank, ranks, cases):
    """Policies write to parameters and read gradients whose addresses are in graphs."""
    for number, (name, (policy, act, make)) in enumerate(POLICIES.items()):
        with cases.case(name), replayed() as rings:
            replica = Replica(rank, (2, ranks // 2), policy(), make, attach=act is not None)
            replayed_by = [0]
            while replica.step < MOST_STEPS and not min(replayed_by):
                replica.train(STEPS)
                replayed_by = gather_all(torch.tensor(sum(each.replayed for each in rings))).tolist()
            assert max(replayed_by) > 0, rings
            rows = gather_all(replica.weights)
            rtp_ext.ring_of(replica.model).close()
            if rank != number % ranks:  # one of them computes what all have to have
                continue
            shape = (2, ranks // 2) if act is not None else (1, ranks)
            workers, alone = Workers(shape, act or (lambda workers: None), make), Workers((1, 1), lambda _: None, make)
            workers.train(replica.step), alone.train(replica.step)
            expected = workers.weights.repeat_interleave(shape[1], 0)
            for row, theirs in zip(rows, expected, strict=True):
                assert_same(row, theirs, EXACT if act is not None else SUMMED, name)
                assert differs(row, alone.weights[0], 1e-6), "control: not what a rank would come to alone"


# -- the control -------------------------------------------------------------------------------------------------------


def _without_addresses(argument, tensors, _look=graphs._look):
    return _look(argument, [])


@on_ranks(2)
def test_a_graph_of_other_addresses_shows():
    """Graphs that do not distinguish addresses give the numbers of an earlier call, which the tests above detect."""
    for mistaken in (False, True):
        with replayed(), rtp_ext.Ring(timeout=30.0) as ring, pytest.MonkeyPatch.context() as patch:
            if mistaken:
                patch.setattr(graphs, "_look", _without_addresses)
            layer = RotatedLinear(6, 7, bias=False, ring=ring)
            xs = [torch.full((3, 6), float(number)) for number in range(1, 3)]
            with torch.no_grad():
                once = [layer(x).clone() for x in [xs[0]] * 6 + [xs[1]]]
            assert torch.equal(once[-1], once[0] * 2) != mistaken and once[0].abs().sum() > 0
