"""Arguments of a new ring that one rank alone refuses: every rank gets an error that names it, and none waits."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch.distributed as dist
from harness import on_ranks
from models import batch_loss, make_model
from torch import nn

import rtp_ext
from rtp_ext.convert import model as converting

TIMEOUT = 30.0  # seconds; a rank that waits for it takes longer than PROMPT
PROMPT = 10.0


def _inference_ranks(rank, odd, group):
    """Returns the calls of `rotate_for_inference`, in which `odd` makes this rank refuse."""

    def call(model=None, **options):
        return lambda: rtp_ext.rotate_for_inference(model or nn.Linear(4, 4), timeout=TIMEOUT, **options)

    return {
        "expected transport auto": call(transport="pigeon" if odd else "shm"),
        "expected weights None": call(weights="int3" if odd else None, mesh=group),
        "expected a torch.nn.Module, got int": call(3 if odd else None),
        "expected offload=False on CPUs": call(offload=odd),
        "expected a layer that can be cut": call(nn.LayerNorm(4) if odd else None),
    }


def _calls(rank, odd, group):
    def rotate(module=None, **options):
        return lambda: rtp_ext.fully_rotate(module or make_model(), **{"timeout": TIMEOUT, **options})

    one = make_model().norm.weight
    return {
        "expected buffers 'auto', 'lean' or a number of bytes": rotate(buffers=-1 if odd else 1),
        "expected prefetch True or False, got 9": lambda: rtp_ext.Ring(prefetch=9 if odd else 1, timeout=TIMEOUT),
        "expected a positive timeout": rotate(timeout=-1.0 if odd else TIMEOUT),
        "expected a timeout below 1e14": rotate(timeout=1e300 if odd else TIMEOUT),
        "expected mp_policy to be": rotate(mp_policy="bfloat16" if odd else None),
        "expected bundle to be": rotate(bundle="yes" if odd else True),
        "expected ignored_params to be several": rotate(mesh=group, ignored_params=one if odd else ()),
        "expected transport to be one of": rotate(transport="pigeon" if odd else "shm", mesh=group),
        "or a list of them, got int": rotate(3 if odd else None),
        **_inference_ranks(rank, odd, group),
    }


def _refused(cases, what, call, odd, ranks):
    with cases.case(what):
        began = time.monotonic()
        whose = what if odd else f"the call failed on rank {ranks - 1} of {ranks}: .*{what}"
        with pytest.raises((ValueError, TypeError), match=whose):
            call()
        assert time.monotonic() - began < PROMPT, "no rank waits for the timeout"


@on_ranks(3)
def test_a_refusal_of_one_rank_reaches_the_others_of_a_new_ring(rank, ranks, cases):
    odd = rank == ranks - 1
    group = dist.new_group()
    for what, call in _calls(rank, odd, group).items():
        _refused(cases, what, call, odd, ranks)
    with cases.case("all ranks refuse"), pytest.raises(ValueError, match=r"^fully_rotate: expected bundle to be"):
        rtp_ext.fully_rotate(make_model(), bundle="no", timeout=TIMEOUT)
    with cases.case("afterwards"):
        batch_loss(rtp_ext.fully_rotate(make_model(), timeout=TIMEOUT), rank, 0).backward()
    with cases.case("control: a refusal that is not sent leaves the others waiting"):
        converting.refused_together = lambda *_: contextlib.nullcontext()
        began = time.monotonic()
        with pytest.raises((ValueError, RuntimeError)) as caught:
            rtp_ext.fully_rotate(make_model(), bundle="no" if odd else True, timeout=1.0)
        assert odd or (time.monotonic() - began > 0.9 and "bundle" not in str(caught.value))


@on_ranks(2, transport="shm")
def test_options_beside_a_ring_are_those_of_the_ring(ring, cases):
    """Options of a ring beside a ring that exists already."""
    for name, other, same in (
        ("transport", "tcp", "shm"),
        ("route", "gather", "auto"),
        ("timeout", TIMEOUT + 1, TIMEOUT),
        ("travel", "int8", None),
        ("gradient_route", "direct", "auto"),
        ("gradient_travel", "int8", None),
    ):
        with cases.case(name):
            if name != "gradient_travel":
                rtp_ext.fully_rotate(nn.Linear(4, 4), mesh=ring, **{name: same})  # control: an equal value passes
            with pytest.raises(ValueError, match=f"expected {name} .*that of the ring, or none, got"):
                rtp_ext.fully_rotate(nn.Linear(4, 4), mesh=ring, **{name: other})
    with cases.case("emulated"), pytest.raises(ValueError, match="expected route 'ring', that of the ring"):
        rtp_ext.fully_rotate(nn.Linear(4, 4), mesh=rtp_ext.Ring.emulated(2), route="direct")
    with cases.case("forwards alone"), pytest.raises(TypeError, match="a DeviceMesh or a process group, got Ring"):
        rtp_ext.rotate_for_inference(nn.Linear(4, 4), mesh=ring, timeout=TIMEOUT)
    assert ring.alive
