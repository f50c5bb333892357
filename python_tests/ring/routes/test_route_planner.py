"""The decisions of the RoutePlanner: the sizes from which a layer is gathered, the same on all ranks."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from harness import Cases, run_ranks
from reference import assert_same, chunk, random

import rtp_ext
from rtp_ext.cost import GEMM_RAMP
from rtp_ext.functional import rotated_linear, rotated_mlp
from rtp_ext.ring.routes import route_planner
from rtp_ext.ring.routes.route_planner import Device, LayerSize, Link, decide, gemm_seconds, predict

LINK = Link(bytes_per_second=400e9, seconds_per_hop=6e-6, source="assumed")
DEVICE = Device(flops=650e12, multiprocessors=132, seconds_per_launch=4e-6, source="assumed")
RANKS = 8


def _plan(tokens, layer, link=LINK, device=DEVICE, ranks=RANKS, **ways):
    return decide(ranks, tokens, layer, hop_route="direct", link=link, device=device, **ways)


def _way(plan):
    return plan.route, plan.group


def test_a_gemm_counts_its_last_wave_whole():
    device = dataclasses.replace(DEVICE, seconds_per_launch=0.0)
    one_wave = gemm_seconds(device, 128, 256 * 132, 4096)
    assert one_wave == pytest.approx(2 * 128 * 256 * 132 * (4096 + GEMM_RAMP) / 650e12)
    assert gemm_seconds(device, 128, 256 * 133, 4096) == pytest.approx(1.5 * one_wave), "three of half as large tiles"
    assert gemm_seconds(DEVICE, 128, 256 * 132, 4096) == pytest.approx(one_wave + DEVICE.seconds_per_launch)
    assert gemm_seconds(DEVICE, 0, 256, 256) == 0.0


def test_tiny_layers_are_gathered_and_large_ones_rotate():
    tiny, large = LayerSize(512, 512, 2, 4), LayerSize(14336, 4096, 2, 4)
    few, many = _plan(128, tiny, groups=False), _plan(16384, large, groups=False)
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
        return _plan(16, layer, fast, groups=False, buffers=buffers).route

    routes = {buffers: route(buffers) for buffers in ("auto", whole, whole - 1, 0, "lean")}
    assert routes == {"auto": "gather", whole: "gather", whole - 1: "direct", 0: "direct", "lean": "direct"}
    for wrong, said in (("much", "got 'much'"), (-1, "a number of bytes, got -1"), (True, "got True")):
        with pytest.raises(ValueError, match=said):
            rtp_ext.Ring(buffers=wrong)


def test_groups_where_they_take_the_least_time():
    """Few tokens: fewer products, whose hops have one latency on route direct. Many: one shard a product; all shards at
    once hide nothing."""
    layer = LayerSize(4096, 4096, 2, 4)
    few, many = _plan(128, layer), _plan(4096, layer)
    assert list(few.seconds) == ["rotate", "groups of 2", "groups of 4", "groups of 8", "gather"]
    assert _way(few) == ("direct", 4) and few.predicted == few.seconds["groups of 4"] == min(few.seconds.values())
    assert few.predicted < route_planner.MARGIN * few.seconds["rotate"] and not few.halves
    assert _way(many) == ("direct", 1) and many.predicted == many.seconds["rotate"]
    near = _plan(1024, LayerSize(14336, 4096, 2, 4), Link(420e9, 6e-6, "assumed"))
    assert near.group == 1 and near.predicted * route_planner.MARGIN < min(near.seconds.values()), "within the margin"
    # a product of all shards writes no sum: a closed form of what groups save where nothing travels
    free, whole = Link(1e18, 0.0, "none"), LayerSize(1024, 1024, 2, 4)
    device = Device(650e12, 0, 0.0, "assumed", memory_bytes_per_second=1e12)
    seconds = predict(8, 8192, whole, free, device)
    sums = (2 * 4 * 8 - 2) * 8192 * 1024 / 1e12  # of dgrad in float32, but for the last result
    inputs = 2 * 2 * 7 * 8192 * 1024 / 1e12  # x, for forward and wgrad
    assert 0.8 * (sums + inputs) < seconds["rotate"] - seconds["groups of 8"] < 1.2 * (sums + inputs)


def test_groups_stay_within_the_budget_and_what_a_ring_can(monkeypatch):
    layer = LayerSize(4096, 4096, 2, 4)
    sizes = {group: route_planner.slots_bytes(RANKS, layer, group) for group in (1, 2, 4, 8)}
    assert sizes[1] < sizes[2] < sizes[4] and sizes[4] == 2 * 4 * 4096 * 512 * 2 + (2 * 4 + 2) * 4096 * 512 * 4
    assert _way(_plan(128, layer, buffers=sizes[4])) == ("direct", 4)
    assert _way(_plan(128, layer, buffers=sizes[4] - 1)) == ("direct", 2)
    assert all(_way(_plan(128, layer, buffers=each)) == ("direct", 1) for each in ("lean", sizes[2] - 1))
    asked = {"route": "auto", "gradient_halves": None}
    for ways, expected in (
        ({}, ("direct", 4)),
        ({"group": 3}, ("direct", 3)),
        ({"group": 99}, ("direct", 8)),
        ({"group": 1}, ("direct", 1)),
        ({"in_place": True}, ("gather", 1)),
        ({"gathers": False}, ("direct", 1)),
    ):
        in_place = ways.pop("in_place", False)
        planner = route_planner.RoutePlanner(RANKS, torch.device("cpu"), "direct", **asked, **ways)
        planner.link, planner.model = LINK, DEVICE
        with monkeypatch.context() as patched:
            patched.setattr(route_planner, "device_of", lambda device, dtype: DEVICE)
            plan = planner.plan("layer", 128, layer, torch.bfloat16, in_place=in_place)
        assert _way(plan) == expected, expected
    on_cpu = route_planner.RoutePlanner(RANKS, torch.device("cpu"), "direct", "auto", None, group=3)
    assert _way(on_cpu.plan("layer", 128, layer, torch.bfloat16)) == ("direct", 3), "as asked, without a model"
    assert route_planner.group_choices(2) == (2,) and route_planner.group_choices(3) == (3,)
    assert route_planner.group_choices(16) == (4, 8, 16)


def test_an_mlp_is_planned_by_the_products_of_both_layers():
    """By hand where nothing travels and memory is free: forward 2, backward 4 products of gate|up, and of down. Sums of
    groups: y and dx in float32, and the contributions to the gradients."""
    gated, plain = LayerSize(2 * 1024, 512, 2, 4, down=256, gates=2), LayerSize(1024, 512, 2, 4, down=256)
    assert (gated.hidden, gated.values, plain.values) == (1024, 1280, 768)
    device, free = Device(650e12, 0, 0.0, "assumed"), Link(1e18, 0.0, "none")
    for layer in (gated, plain, dataclasses.replace(gated, again=True)):
        values = 3 * 1024 * layer.values + layer.again * layer.outputs * layer.inputs
        for way, seconds in predict(8, 8192, layer, free, device).items():  # "gather" posts its hops
            assert way == "gather" or seconds == pytest.approx(2 * 8192 * values / 650e12, rel=0.01), (layer, way)
    slow = Device(650e15, 0, 0.0, "assumed", memory_bytes_per_second=1e12)
    seconds = predict(8, 8192, gated, free, slow)
    sums = (2 * 4 * 8 - 2) * 8192 * (256 + 512) / 1e12  # y and dx, but for the last result
    inputs = 7 * 2 * 8192 * (512 * 2 + 256 * 2) / 1e12  # x and dy, for forward, dh and both wgrads
    assert 0.8 * (sums + inputs) < seconds["rotate"] - seconds["groups of 8"] < 1.2 * (sums + inputs)
    few, llama = _plan(128, dataclasses.replace(gated, down=512)), LayerSize(2 * 14336, 4096, 2, 4, down=4096, gates=2)
    assert few.group > 1 or few.route == "gather"
    assert few.predicted == min(few.seconds.values()) and _way(_plan(4096, llama)) == ("direct", 1)
    assert route_planner.slots_bytes(8, gated, 8) > route_planner.slots_bytes(8, gated, 1) > 0
    hop = LINK.seconds_per_hop + 1792 * llama.values * 4 / LINK.bytes_per_second
    for tokens in (1024, 65536):
        back = gemm_seconds(DEVICE, tokens, 1792, 4096) + gemm_seconds(DEVICE, tokens, 4096, 2 * 1792, 8)
        plan = decide(8, tokens, llama, hop_route="ring", link=LINK, device=DEVICE, gathers=False, groups=False)
        assert plan.halves == (hop > back) == (tokens == 1024), tokens


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
    assert deciding.plan("alike", 1, layer, torch.float64).seconds, "control"
    deciding.alike = False
    plan = deciding.plan("different", 1, layer, torch.float64)
    assert (plan.route, plan.halves, plan.seconds) == ("direct", False, {})


def _decides(rank, ranks):
    """The ranks have different numbers of tokens, on both sides of the border: the largest number decides for all."""
    slow = Device(flops=1e9, multiprocessors=0, seconds_per_launch=20e-6, source="assumed")
    route_planner.device_of = lambda device, dtype: slow
    cases, weight = Cases(), random(24, 16, dtype=torch.float64, seed=1)
    down = random(16, 24, dtype=torch.float64, seed=9)
    layer = LayerSize(24, 16, 8, 8)
    border = next(2**k for k in range(24) if _way(_plan(2**k, layer, device=slow, ranks=ranks)) == ("direct", 1))
    routes = []
    for name, tokens in {"few": border // 4, "many on one rank": 2 * border if rank == 0 else border // 4}.items():
        ring = rtp_ext.Ring(transport="shm", timeout=60.0)
        ring.gate.link = LINK
        local = chunk(weight, ranks, rank).clone()
        x = random(tokens, 16, dtype=torch.float64, seed=2 + rank)
        y = rotated_linear(x, local, ring=ring, name=name)
        with cases.case(name):
            assert_same(y, F.linear(x, weight), 1e-10, "output")
        shards = chunk(weight, ranks, rank).clone(), chunk(down, ranks, rank, dim=1).clone()
        z = rotated_mlp(x, *shards, activation="relu", ring=ring, name="mlp")
        with cases.case(f"MLP, {name}"):
            assert_same(z, F.linear(F.linear(x, weight).relu(), down), 1e-10, "output")
            assert ring.gate.plans["mlp"].seconds
        routes += [_way(ring.gate.plans[each]) for each in (name, "mlp")]
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
    assert results[0] == [("direct", 3)] * 2 + [("direct", 1)] * 2, "control: the border lies between the two"
    assert all(routes == results[0] for routes in results)
