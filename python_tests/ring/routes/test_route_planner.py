"""The decisions of the RoutePlanner: the sizes from which a layer is gathered, the same on all ranks."""

import pytest
import torch
import torch.nn.functional as F
from harness import Cases, run_ranks
from reference import assert_same, chunk, random

import rtp_ext
from rtp_ext.functional import rotated_linear
from rtp_ext.ring.routes import route_planner
from rtp_ext.ring.routes.route_planner import Device, LayerSize, Link, decide, gemm_seconds, predict

LINK = Link(bytes_per_second=400e9, seconds_per_hop=6e-6, source="assumed")
DEVICE = Device(flops=650e12, multiprocessors=132, seconds_per_launch=4e-6, source="assumed")
RANKS = 8


def _plan(tokens, layer, link=LINK, device=DEVICE, ranks=RANKS):
    return decide(ranks, tokens, layer, hop_route="direct", link=link, device=device)


def test_a_gemm_counts_its_last_wave_whole():
    one_wave = gemm_seconds(DEVICE, 128, 256 * 132, 4096)
    assert one_wave == pytest.approx(2 * 128 * 256 * 132 * 4096 / 650e12)
    assert gemm_seconds(DEVICE, 128, 256 * 133, 4096) == pytest.approx(1.5 * one_wave), "three of half as large tiles"
    assert gemm_seconds(DEVICE, 1, 1, 1) == DEVICE.seconds_per_launch
    assert gemm_seconds(DEVICE, 0, 256, 256) == 0.0


def test_tiny_layers_are_gathered_and_large_ones_rotate():
    tiny, large = LayerSize(512, 512, 2, 4), LayerSize(14336, 4096, 2, 4)
    few, many = _plan(128, tiny), _plan(16384, large)
    assert few.route == "gather" and few.seconds["gather"] < few.seconds["rotate"]
    assert many.route == "direct" and many.seconds["rotate"] < many.seconds["gather"]
    assert "us for 128 tokens over a assumed link" in few.reason.replace("an assumed", "a assumed")


def test_a_layer_is_gathered_within_the_budget_alone():
    """Whole weights in 16 bits, and their gradients in 32; `lean` rings hold slots of one shard."""
    layer = LayerSize(14336, 4096, 2, 4)
    fast, whole = Link(4e12, 6e-6, "assumed"), 14336 * 4096 * (2 + 4)
    seconds = predict(RANKS, 16, layer, fast, DEVICE)
    assert seconds["gather"] < route_planner.MARGIN * seconds["rotate"], "control: by time alone it is"

    def route(buffers):
        return decide(RANKS, 16, layer, hop_route="direct", link=fast, device=DEVICE, buffers=buffers).route

    routes = {buffers: route(buffers) for buffers in ("auto", whole, whole - 1, 0, "lean")}
    assert routes == {"auto": "gather", whole: "gather", whole - 1: "direct", 0: "direct", "lean": "direct"}
    for wrong, said in (("much", "got 'much'"), (-1, "a number of bytes, got -1"), (True, "got True")):
        with pytest.raises(ValueError, match=said):
            rtp_ext.Ring(buffers=wrong)


def test_halves_where_a_gradient_hop_outlasts_a_dgrad():
    layer = LayerSize(14336, 4096, 2, 4)
    hop = LINK.seconds_per_hop + 14336 / 8 * 4096 * 4 / LINK.bytes_per_second
    assert _plan(1024, layer).halves == (hop > gemm_seconds(DEVICE, 1024, 4096, 14336 // 8)) is True
    assert _plan(16384, layer).halves == (hop > gemm_seconds(DEVICE, 16384, 4096, 14336 // 8)) is False


@pytest.mark.parametrize("change", [{"ranks": 1}, {"link": None}, {"device": None}])
def test_nothing_to_decide(change):
    plan = _plan(128, LayerSize(512, 512, 2, 4), **change)
    assert (plan.route, plan.halves, plan.seconds) == ("direct", False, {})


def test_a_cpu_and_an_emulated_ring_decide_nothing():
    ring = rtp_ext.Ring.emulated(4)
    assert ring.gate.link is None and route_planner.device_of(torch.device("cpu"), torch.float32) is None
    with pytest.raises(ValueError, match="at least 2 ranks, got 1"):
        rtp_ext.Ring.emulated(1).measure_link()


def test_devices_of_different_kinds_decide_nothing(monkeypatch):
    slow = Device(flops=1e9, multiprocessors=0, seconds_per_launch=20e-6, source="assumed")
    monkeypatch.setattr(route_planner, "device_of", lambda device, dtype: slow)
    deciding = route_planner.RoutePlanner(4, torch.device("cpu"), "direct", "auto", None)
    deciding.link = LINK
    layer = LayerSize(24, 16, 8, 8)
    assert deciding.plan("alike", 1, layer, torch.float64).route == "gather", "control"
    deciding.alike = False
    plan = deciding.plan("different", 1, layer, torch.float64)
    assert (plan.route, plan.halves, plan.seconds) == ("direct", False, {})


def _decides(rank, ranks):
    """The ranks have different numbers of tokens, on both sides of the border: the largest number decides for all."""
    slow = Device(flops=1e9, multiprocessors=0, seconds_per_launch=20e-6, source="assumed")
    route_planner.device_of = lambda device, dtype: slow
    cases, weight = Cases(), random(24, 16, dtype=torch.float64, seed=1)
    layer = LayerSize(24, 16, 8, 8)
    border = next(2**k for k in range(24) if _plan(2**k, layer, device=slow, ranks=ranks).route != "gather")
    routes = []
    for name, tokens in {"few": border // 4, "many on one rank": 2 * border if rank == 0 else border // 4}.items():
        ring = rtp_ext.Ring(transport="shm", timeout=60.0)
        ring.gate.link = LINK
        local = chunk(weight, ranks, rank).clone()
        x = random(tokens, 16, dtype=torch.float64, seed=2 + rank)
        y = rotated_linear(x, local, ring=ring, name=name)
        with cases.case(name):
            assert_same(y, F.linear(x, weight), 1e-10, "output")
        routes.append(ring.gate.plans[name].route)
        ring.close()
    ring = rtp_ext.Ring(transport="shm", timeout=60.0)
    link = ring.measure_link(1 << 20)
    with cases.case("measured"):
        assert link.source == "measured" and link.bytes_per_second > 1e6 and 0 < link.seconds_per_hop < 1
        assert ring.gate.link is link
    ring.close()
    cases.finish()
    return routes


def test_all_ranks_decide_alike():
    results = run_ranks(_decides, 3)
    assert results[0] == ["gather", "direct"], "control: the border lies between the two"
    assert all(routes == results[0] for routes in results)
