"""The transport, route and mode that a ring of GPUs selects if support is missing on this rank, on another, or between
them. No GPU is needed: the calls of the extension that need one are replaced."""

import copy
import logging
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

import rtp_ext
from rtp_ext import RotationError, _native
from rtp_ext.observe import doctor
from rtp_ext.options import TransportOptions
from rtp_ext.ring.links.gpu_links import View, slowest, view_of
from rtp_ext.ring.links.hosts import Hosts
from rtp_ext.ring.links.transports import connect
from rtp_ext.ring.routes.gradient_routes import BY_DTYPE, choose_gradient_route
from rtp_ext.ring.routes.weight_routes import choose_ce_modes, choose_hops, choose_route


class TwoRanks:
    """Rank 0 of a ring of two on GPUs. `other`: what the other rank says where it says something else."""

    rank, size, timeout, device = 0, 2, timedelta(seconds=1), torch.device("cuda", 0)

    def __init__(self, other=None, **options):
        self.other = other or {}
        self.transport_options = TransportOptions.of(options)
        self.placed = Hosts.even(2, 1, "ring")

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


def view(rank, nvlinked=(), accessible=(0, 1), seen=(0, 1), host="this host", gpu=None, problem=None):
    name, sets = "GPU {}".format, [frozenset(f"GPU {each}" for each in some) for some in (seen, nvlinked, accessible)]
    return View(host, name(rank if gpu is None else gpu), *sets, problem)


WIRINGS = {
    "NVLink": ([view(0, [1]), view(1, [0])], "nvlink", "all pairs of its GPUs have NVLink"),
    "PCIe": ([view(0), view(1)], "pcie", "ranks 0 and 1 have no NVLink"),
    "NVLink one way": ([view(0, [1]), view(1)], "pcie", "ranks 1 and 0 have no NVLink"),
    "no direct access": ([view(0, accessible=[]), view(1, accessible=[])], "host memory", "no direct access"),
    "own GPUs only": ([view(0, seen=[0]), view(1, seen=[1])], "pcie", "rank 0 does not see the GPU of rank 1"),
    "no NVML": ([view(0, [1]), view(1, problem="no NVML")], "pcie", "rank 1 cannot find its links: no NVML"),
    "two hosts": ([view(0, [1]), view(1, [0], host="that host")], "network", "its GPUs are on 2 hosts"),
    "one GPU": ([view(0), view(1, gpu=0)], "one GPU", "its ranks share one GPU"),
}


@pytest.mark.parametrize("case", WIRINGS)
def test_direct_over_nvlink_only(case):
    views, kind, reason = WIRINGS[case]
    ring = TwoRanks()
    ring.placed, ring.wiring = Hosts.even(2, 1, "ring"), slowest(views)
    assert ring.wiring.kind == kind and reason in ring.wiring.reason
    assert ring.wiring.known == (case not in ("own GPUs only", "no NVML"))
    joined = case in ("NVLink", "one GPU")
    for transport in ("ce", "nccl"):
        assert choose_route(ring, transport, "auto") == ("direct" if joined else "ring")
        route, missed = choose_hops(ring, transport, "auto", None)
        assert (route, missed) == (("direct", "") if joined else ("ring", f"; route ring: {ring.wiring.reason}"))
        for asked in ("ring", "direct"):  # a requested route is taken over any link
            assert choose_hops(ring, transport, asked, None) == (asked, "")
    assert choose_route(ring, "c10d", "auto") == "ring"
    gradients = choose_gradient_route(ring, "ce", route, "auto", None)
    assert gradients.route == (BY_DTYPE if joined else "chain")
    wide = {dtype: gradients.direct(route, dtype) for dtype in (torch.float32, torch.bfloat16)}
    assert wide == dict.fromkeys(wide, joined)
    # not where contributions of all ranks have no room, in halves or with lean buffers, and on CPUs
    halves, host = choose_gradient_route(ring, "ce", route, "auto", None, False), copy.copy(ring)
    host.device = torch.device("cpu")
    for other, room in (
        (gradients, False),
        (halves, True),
        (choose_gradient_route(host, "shm", route, "auto", None), True),
    ):
        assert not other.direct(route, torch.float32, room)
        assert other.direct(route, torch.bfloat16, room) == (other.route == BY_DTYPE)


def test_links_are_those_that_torch_counts(gpus, monkeypatch):
    """Direct access over PCIe is not taken for NVLink. The GPU with index 1 is this rank's."""
    named = [SimpleNamespace(uuid=f"uuid {index}") for index in range(3)]
    gpus.setattr(torch.cuda, "device_count", lambda: 3)
    gpus.setattr(torch.cuda, "get_device_properties", lambda index: named[index])
    gpus.setattr(torch.cuda, "can_device_access_peer", lambda mine, other: other == 0)
    counted = SimpleNamespace(matrix=[[0, 4, 0], [4, 0, 0], [0, 0, 0]])
    gpus.setattr(torch._C._distributed_c10d, "_detect_dma_connectivity", lambda device, kind: counted)
    names = frozenset(["uuid 0", "uuid 1", "uuid 2"])
    found = view_of(torch.device("cuda", 1))
    assert found == View("this host", "uuid 1", names, frozenset(["uuid 0"]), frozenset(["uuid 0"]))
    counted.matrix = [[0, 0, 0]] * 3
    assert view_of(torch.device("cuda", 1)).nvlinked == frozenset(), "control: PCIe"
    gpus.setattr(torch._C._distributed_c10d, "_detect_dma_connectivity", refuse("no NVML\nmore"))
    assert view_of(torch.device("cuda", 1)) == View("this host", "GPU 1", problem="no NVML")


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


@pytest.mark.parametrize("link", ["ce-local", "wire:", "wire:0", "wire:1e9:", "wire:1e9:-1", "wire:1e9:1e-6:2", "1e9"])
def test_links_of_an_emulated_ring_on_a_cpu(link):
    with rtp_ext.Ring.emulated(2) as ring:
        assert ring.link is None
    with pytest.raises(ValueError, match=f"expected on a CPU no link or wire:.*got {link}"):
        rtp_ext.Ring.emulated(2, link=link)


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
