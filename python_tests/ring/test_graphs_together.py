"""Passes as graphs together with split backwards and checkpoints. Replays are made as replayed.py says."""

import contextlib

import pytest
import torch
from autograd_subjects import SUBJECTS
from grids import few
from harness import Cases, run_ranks
from replayed import replayed
from test_split_backward import _adapted, _checkpointed, _subject

import rtp_ext
from rtp_ext.nn import RotatedLinear
from rtp_ext.ring import graphs


@contextlib.contextmanager
def replaying():
    """Rings made in it have graphs, and at least one of them replays."""
    with replayed() as rings:
        yield
        assert sum(each.replayed for each in rings) > 0, rings


# -- split backwards ---------------------------------------------------------------------------------------------------


def _parts(rank, ranks):
    cases = Cases()
    with replaying(), rtp_ext.Ring(timeout=30.0) as ring:
        for _ in range(5):  # until their passes are graphs
            for label in ("linear", "mlp"):
                _subject(label, SUBJECTS[label], ring, False, cases)
            _checkpointed(ring, cases)
        _adapted(ring, cases)
    cases.finish()


@pytest.mark.parametrize("ranks", few([2], [2, 3]))
def test_split_backwards_and_checkpoints(ranks):
    run_ranks(_parts, ranks, timeout=600.0)


# -- the control -------------------------------------------------------------------------------------------------------


def _without_addresses(argument, tensors, _look=graphs._look):
    return _look(argument, [])


def _mixed_up(rank, ranks):
    """Graphs that do not tell addresses apart give an earlier call's numbers, which the tests above would see."""
    for mistaken in (False, True):
        with replayed(), rtp_ext.Ring(timeout=30.0) as ring, pytest.MonkeyPatch.context() as patch:
            if mistaken:
                patch.setattr(graphs, "_look", _without_addresses)
            layer = RotatedLinear(6, 7, bias=False, ring=ring)
            xs = [torch.full((3, 6), float(number)) for number in range(1, 3)]
            with torch.no_grad():
                once = [layer(x).clone() for x in [xs[0]] * 6 + [xs[1]]]
            assert torch.equal(once[-1], once[0] * 2) != mistaken and once[0].abs().sum() > 0


def test_a_graph_of_other_addresses_shows():
    run_ranks(_mixed_up, 2)
