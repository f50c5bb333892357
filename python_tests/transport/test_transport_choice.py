"""The transport, route and mode that a ring of GPUs selects if support is missing on this rank, on another, or between
them. No GPU is needed: the calls of the extension that need one are replaced."""

import logging
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

import rtp_ext
from rtp_ext import RotationError, _native
from rtp_ext.observe import doctor
from rtp_ext.ring.links.options import TransportOptions
from rtp_ext.ring.links.transports import connect
from rtp_ext.ring.routes import route_planner
from rtp_ext.ring.routes.weight_routes import choose_ce_modes, choose_route


class TwoRanks:
    """Rank 0 of a ring of two on GPUs. `other`: what the other rank says where it says something else."""

    rank, size, timeout, device = 0, 2, timedelta(seconds=1), torch.device("cuda", 0)

    def __init__(self, other=None, **options):
        self.other = other or {}
        self.transport_options = TransportOptions.of(options)

    def exchange(self, value):
        known = isinstance(value, (str, type(None)))
        return [value, self.other.get(value, value) if known else value]

    def new_group(self, backend):
        return f"group of {backend}"


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs with all that the transports need; returns what replaces more."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    device = SimpleNamespace(name="A GPU", total_memory=2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(_native, "host_id", lambda: "this host")
    monkeypatch.setattr(_native, "nccl_versions", lambda: (23007, 23007))
    monkeypatch.setattr(_native, "nccl_unique_id", lambda: b"id")
    monkeypatch.setattr(_native, "ring_end", lambda *arguments: arguments)
    monkeypatch.setattr(_native, "ce_refusal", lambda: None)
    monkeypatch.setattr(_native, "ce_transport", lambda *arguments: "native ce")
    monkeypatch.setattr(_native, "nccl_transport", lambda *arguments: "native nccl")
    monkeypatch.setattr(_native, "c10d_transport", lambda *arguments: "native c10d")
    return monkeypatch


def refuse(reason):
    def fail(*_):
        raise RotationError(reason)

    return fail


def chosen(ring, wish="auto"):
    connection = connect(ring, wish, ring.transport_options)
    assert connection.native == f"native {connection.name}"
    return connection.name, connection.reason


def test_copy_engines_come_first(gpus):
    assert chosen(TwoRanks()) == ("ce", "copy engines between GPUs of one host")
    assert chosen(TwoRanks(), "ce") == ("ce", "as asked; copy engines between GPUs of one host")
    assert chosen(TwoRanks(), "nccl")[0] == "nccl"


REFUSALS = {
    "an NCCL too old": (
        lambda gpus: gpus.setattr(_native, "ce_refusal", lambda: "it needs ncclGetPeerDevicePointer"),
        {},
        "it needs ncclGetPeerDevicePointer",
    ),
    "one connection": (
        lambda gpus: gpus.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        {},
        "CUDA_DEVICE_MAX_CONNECTIONS is 1",
    ),
    "the other rank": (lambda gpus: None, {None: "the other rank cannot"}, "the other rank cannot"),
    "two hosts": (lambda gpus: None, {"this host": "that host"}, "its ranks are on 2 hosts"),
    "no window": (
        lambda gpus: gpus.setattr(_native, "ce_transport", refuse("NCCL gave no window")),
        {},
        "NCCL gave no window",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_missing_is_said_and_the_next_one_taken(gpus, caplog, case):
    prepare, other, reason = REFUSALS[case]
    prepare(gpus)
    if case == "the other rank":  # of ce alone: every candidate is asked the same way
        ring = TwoRanks()
        answers = iter([[None, "the other rank cannot"]])
        ring.exchange = lambda value: next(answers, [value, value])
    else:
        ring = TwoRanks(other)
    with caplog.at_level(logging.INFO, logger="rtp_ext"):
        name, why = chosen(ring)
    assert name == "nccl" and "direct NCCL" in why
    said = f"ce cannot be used (copy engines between GPUs of one host): {reason}"
    assert said in why and said in caplog.text


@pytest.mark.parametrize("case", sorted(set(REFUSALS) - {"the other rank"}))
def test_what_was_asked_for_and_is_missing_is_an_error(gpus, case):
    prepare, other, reason = REFUSALS[case]
    prepare(gpus)
    with pytest.raises(RotationError, match=f"ce cannot be used .*{reason}"):
        chosen(TwoRanks(other), "ce")


def test_without_nccl_there_is_c10d(gpus):
    gpus.setattr(_native, "nccl_versions", lambda: (23007, 22809))
    name, why = chosen(TwoRanks())
    assert name == "c10d" and "ce cannot be used" in why and "nccl cannot be used" in why


def test_copy_engines_are_for_gpus(gpus):
    ring = TwoRanks()
    ring.device = torch.device("cpu")
    with pytest.raises(ValueError, match="transport ce does not work on device type cpu"):
        chosen(ring, "ce")


def test_routes(gpus):
    ring = TwoRanks()
    for transport in ("ce", "nccl"):
        assert choose_route(ring, transport, "auto") == "direct"
        assert choose_route(ring, transport, "ring") == "ring"
    gpus.setattr(torch.cuda, "device_count", lambda: 1)  # each rank sees its own GPU, but not the links
    assert choose_route(ring, "nccl", "auto") == "ring"
    gpus.setattr(torch.cuda, "device_count", lambda: 2)
    gpus.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    assert choose_route(ring, "nccl", "auto") == "ring"
    # `ce` has the address of every rank's slots, or would have been refused
    assert choose_route(ring, "ce", "auto") == "direct"


@pytest.mark.parametrize("other", [(9, 132), (9, 78), (8, 132)])
def test_ranks_tell_each_other_the_kinds_of_their_gpus(gpus, other):
    gpus.setattr(route_planner, "kind_of", lambda device: (9, 132))
    planner = route_planner.RoutePlanner(2, TwoRanks.device, "direct", "ring", None)
    assert not planner.compare_devices(lambda value: [value, other])
    assert planner.alike == (other == (9, 132))


@pytest.mark.parametrize(
    ("wish", "route", "weight", "gradient"),
    [
        ("auto", "ring", "push", "push"),
        ("auto", "direct", "pull", "push"),
        ("pull", "ring", "pull", "pull"),
        ("push", "direct", "push", "push"),
    ],
)
def test_modes_follow_the_route(gpus, wish, route, weight, gradient):
    told = {}
    gpus.setattr(_native, "set_ce_mode", lambda native, channel, mode: told.update({channel: mode}))
    choose_ce_modes("native ce", route, wish)
    assert told == {"weight": weight, "gradient": gradient}


def test_an_unknown_mode_is_an_error():
    with pytest.raises(ValueError, match="ce_mode to be one of auto, push, pull, got 'both'"):
        TransportOptions.of({"ce_mode": "both"})


@pytest.mark.skipif(not _native.with_cuda, reason="needs a build with CUDA")
def test_only_ce_has_modes():
    transport = _native.emulated_transport(torch.device("cpu"))
    with pytest.raises(ValueError, match="expected the transport ce, got emulated"):
        _native.set_ce_mode(transport, "weight", "push")


def test_an_emulated_ring_on_a_cpu_has_no_link():
    with rtp_ext.Ring.emulated(2) as ring:
        assert ring.link is None
    with pytest.raises(ValueError, match="expected no link on a CPU, which has only one, got ce-local"):
        rtp_ext.Ring.emulated(2, link="ce-local")


def test_doctor_says_what_would_be_taken(gpus):
    works = {name: (True, "") for name in ("shm", "tcp", "ce", "nccl", "c10d")}
    assert doctor.automatic(works) == {"GPUs": "ce", "CPUs": "shm"}
    without = {**works, "ce": (False, ""), "shm": (False, "")}
    assert doctor.automatic(without) == {"GPUs": "nccl", "CPUs": "tcp"}
    assert doctor.automatic({**without, "tcp": (False, "")}) == {"GPUs": "nccl", "CPUs": "c10d"}
    assert doctor.transports()["ce"] == (True, "GPUs of one host, without SMs")
    assert "  auto takes ce on GPUs of this host\n  auto takes shm on CPUs of this host" in doctor.report()
    gpus.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one < other)
    assert doctor.transports()["ce"] == (False, "GPU 1 has no direct access to GPU 0")
    assert "  ce         does not work: GPU 1 has no direct access to GPU 0" in doctor.report()
