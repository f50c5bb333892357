"""The options of a strategy besides degrees: routes, formats, policies between rings, replicas, offload, kernels."""

import dataclasses
import itertools

import pytest

from rtp_ext.planner import (
    Cluster,
    ModelSpec,
    RotatedOperation,
    Strategy,
    TimeConstants,
    Weight,
    estimate_memory,
    estimate_time,
    outer_cost,
    rotations_of,
    rtp_bytes,
    search,
)
from rtp_ext.planner.native import travel_bytes
from rtp_ext.planner.rotation.seconds import rotation_seconds
from rtp_ext.planner.time.links import Group, all_reduce_s, gather_s, hop_s
from rtp_ext.planner.time.stage import StageClock

CONSTANTS = TimeConstants.default()
H100 = Cluster.preset("h100-80gb")
TWO = Cluster.preset("h100-80gb", gpus=16)
LLAMA = ModelSpec.preset("llama-3-8b", seq=4096)


def _seconds(cluster=H100, model=LLAMA, batch=None, **fields):
    plan = Strategy(**fields)
    return estimate_time(model, cluster, plan, batch or plan.replicas)


def _bytes(cluster=H100, **fields):
    plan = Strategy(**fields)
    return estimate_memory(LLAMA, cluster, plan, plan.replicas)


def test_two_levels_are_the_engine_s_schedule_and_slots():
    """Hops inside take the links of a node, hops between nodes one port; both closed forms of timeline follow."""
    assert Strategy(rtp=16).hosts(TWO) == 2 and Strategy(rtp=8).hosts(TWO) == 1
    assert Strategy(rtp=16, route="ring").hosts(TWO) == 1 and Strategy(rtp=16, in_place=True).hosts(TWO) == 1
    slow = dataclasses.replace(TWO, nccl_ring_bytes_per_s=25e9)
    assert Strategy(rtp=16).hosts(slow) == 1 and Strategy(rtp=16, route="two-level").hosts(slow) == 2
    rotation = RotatedOperation("linear", (Weight((28672, 8192)),))
    for tokens in (1024, 8192):
        time = rotation_seconds(rotation, tokens, Group(TWO, 16), CONSTANTS, hosts=2)
        size = 2 * 28672 * 8192 / 16
        inside, outside = hop_s(Group(TWO, 8), size, CONSTANTS), hop_s(Group(TWO, 16), size, CONSTANTS)
        assert time.durations["weight"] == pytest.approx(inside)
        phase = time.durations["forward"] + 7 * max(time.durations["forward"], inside)
        assert time.timeline_s[0] == pytest.approx(phase + max(phase, outside), rel=1e-6), tokens
    flat, two = (_seconds(TWO, rtp=16, route=route, fused_loss=True) for route in ("ring", "two-level"))
    assert two.components["rotation"] < 0.5 * flat.components["rotation"]
    rotations, others = rotations_of(LLAMA, layers=3, fused_loss=True)
    flat_bytes, two_bytes = (
        rtp_bytes(rotations, 16, others=others, compute_bytes=2, hosts=n, look_ahead=0) for n in (1, 2)
    )
    assert two_bytes.gradient_slots_bytes > flat_bytes.gradient_slots_bytes
    report = estimate_memory(LLAMA, TWO, Strategy(rtp=16, fused_loss=True, buffers="lean"))
    assert report.components["rotation_slots"] == two_bytes.weight_slots_bytes + two_bytes.gradient_slots_bytes


def test_rings_over_hosts_follow_the_closed_forms():
    """Flat and on two levels: docs/design.md, 'Two levels'. A layer of 4096 x 14336 on 16 H100 of two hosts, one port
    of 47.5 GB/s: at the best rate of a GEMM, the products take 11 % of a flat ring's forward at 2k tokens and 44 % at
    8k."""
    rotation, shares = RotatedOperation("linear", (Weight((14336, 4096)),)), {}
    for hosts, tokens in itertools.product((2, 4), (2048, 8192)):
        ranks = 8 * hosts
        cluster = Cluster.preset("h100-80gb", gpus=ranks)
        flat, two = (rotation_seconds(rotation, tokens, Group(cluster, ranks), CONSTANTS, hosts=n) for n in (1, hosts))
        t, h_i, h_o = (two.durations[kind] for kind in ("forward", "weight", "outer weight"))
        assert flat.durations["weight"] == h_o and flat.durations["forward"] == t, "one port carries all shards"
        port = 2 * 14336 * 4096 / ranks / 47.5e9
        assert h_o == pytest.approx(CONSTANTS.nccl_base_s + CONSTANTS.nccl_inter_step_s + port)
        assert flat.timeline_s[0] == pytest.approx(t + (ranks - 1) * max(t, h_i, h_o))
        phase = t + 7 * max(t, h_i)
        assert two.timeline_s[0] == pytest.approx(phase + (hosts - 1) * max(phase, h_o))
        assert all(ours < 0.9 * theirs for ours, theirs in zip(two.makespan_s, flat.makespan_s, strict=True))
        if hosts == 2:
            shares[tokens] = 2 * tokens * 14336 * 4096 / 794.5e12 / flat.timeline_s[0]
    assert shares == {2048: pytest.approx(0.11, abs=0.005), 8192: pytest.approx(0.44, abs=0.005)}


def test_hops_take_ce_inside_a_host_and_nccl_between_hosts():
    """Driver calls of the host, and the time in which NCCL takes multiprocessors."""
    rotation, calls = RotatedOperation("linear", (Weight((14336, 4096)),)), {"ce": 11.44, "nccl": 4.44}
    for link, inner in (("nvlink", "ce"), ("pcie", "ce"), ("host memory", "nccl")):
        cluster = Cluster.preset("h100-80gb", gpus=16, link=link)
        for ranks, hosts in ((8, 1), (16, 2), (16, 1)):
            time = rotation_seconds(rotation, 4096, Group(cluster, ranks), CONSTANTS, hosts=hosts)
            over = inner if ranks == 8 or hosts == 2 else "nccl"
            hops, outer = ranks - hosts, hosts - 1
            assert time.host_calls[0] == pytest.approx(hops * calls[over] + outer * 4.44 + 3.75 * (ranks - 1))
            # NCCL takes 15 % of the multiprocessors where ranks share a node, 2 % between ports, while products run
            seen = 0.15 / 0.85 * min(hops * time.durations["weight"], time.computes_s[0]) * (over == "nccl")
            seen += 0.02 / 0.98 * min(outer * time.durations.get("outer weight", 0.0), time.computes_s[0])
            assert time.taken_s[0] == pytest.approx(seen), (link, ranks, hosts)
            of_nccl = (outer + hops * (over == "nccl")) * CONSTANTS.nccl_call_s
            assert time.host_s[0] == pytest.approx(
                time.host_calls[0] * CONSTANTS.driver_call_s + of_nccl + (ranks - 1) * CONSTANTS.engine_product_s
            )
            plan = Strategy(rtp=ranks, route="two-level" if hosts > 1 else "ring")
            lost = StageClock(LLAMA, cluster, plan, CONSTANTS).per_layer["interference"]
            assert over == "nccl" or hosts > 1 or lost == 0, "ce takes no multiprocessors"


def test_products_with_shards_read_and_write_their_sums():
    """By hand, on a GPU whose memory is the limit: float32 sums of input gradients (of outputs where inputs are cut),
    and of weight gradients in the dtype in which they travel. The first product of a sum does not read it."""
    slow = dataclasses.replace(H100, hbm_bytes_per_s=3.35e10)
    rate, tokens = slow.hbm_bytes_per_s * CONSTANTS.hbm_fraction, 1024
    x, y, w = 4096 * tokens, 14336 // 8 * tokens, 14336 // 8 * 4096
    for weight, forward, dgrad in (
        (Weight((14336, 4096)), 2 * (x + w) + 2 * y, 2 * (y + w) + (8 - 4 / 8) * x),
        (Weight((4096, 14336), 1), 2 * (y + w) + (8 - 4 / 8) * x, 2 * (x + w) + 2 * y),
    ):
        layer = RotatedOperation("bundle", (weight,))
        for reduce_bytes, direct in ((4, False), (2, False), (4, True)):
            ways = {"reduce_bytes": reduce_bytes, "gradient_route": "direct" if direct else "chain"}
            found = rotation_seconds(layer, tokens, Group(slow, 8), CONSTANTS, **ways).durations
            wgrad = 2 * (x + y) + (1 if direct else 2 - 1 / 8) * reduce_bytes * w
            moved = {"forward": forward, "dgrad": dgrad, "wgrad": wgrad}
            expected = {kind: size / rate + CONSTANTS.engine_launch_s for kind, size in moved.items()}
            assert {kind: found[kind] for kind in moved} == pytest.approx(expected), (weight.dim, ways)


def test_what_travels_in_fewer_bits():
    assert travel_bytes("int8", 2) == travel_bytes("int8", 4) == 1 + 4 / 128, "a float32 scale for 128 values"
    assert (
        travel_bytes("bfloat16", 4)
        == travel_bytes("bfloat16", 2)
        == travel_bytes(None, 2)
        == 2
        != travel_bytes(None, 4)
    )
    rotations = [RotatedOperation("linear", (Weight((512, 256)), Weight((512,))))]
    held, int8, bfloat16, direct, narrow_direct, lean = (
        rtp_bytes(rotations, 4, compute_bytes=4, look_ahead=0, **ways)
        for ways in (
            {},
            {"travel": "int8"},
            {"travel": "bfloat16"},
            {"gradient_route": "direct"},
            {"gradient_route": "direct", "gradient_travel": "int8"},
            {"gradient_route": "direct", "gradients_apart": False},
        )
    )
    shard, bias = 128 * 256, 128
    one = shard + 4 * shard // 128 + 4 * bias  # a bias stays as it is
    assert held.weight_slot_sizes == 2 * (4 * (shard + bias),) == held.gradient_slot_sizes and held.scratch_bytes == 0
    assert int8.weight_slot_sizes == 3 * (one,) and bfloat16.weight_slot_sizes == 3 * (2 * shard + 4 * bias,)
    assert int8.scratch_bytes == bfloat16.scratch_bytes == 4 * shard, "the place where weights are widened"
    assert int8.gradient_slot_sizes == bfloat16.gradient_slot_sizes == held.gradient_slot_sizes
    whole = 4 * (shard + bias)
    assert direct.gradient_slot_sizes == (whole, whole, 3 * whole), "two that leave, and a place for each arrival"
    assert lean.gradient_slot_sizes == 3 * (4 * (shard + bias),)
    assert direct.weight_slot_sizes == held.weight_slot_sizes == lean.weight_slot_sizes
    rounded = shard + 4 * shard // 128 + 192  # so is no gradient's bias: 128 values and a scale, up to 64 bytes
    places = 3 * (shard + 4 * shard // 128) + 448  # three of 132 bytes of a bias take 396
    assert sorted(narrow_direct.gradient_slot_sizes) == sorted([rounded, rounded, places, whole]), (
        "the last is where they are summed"
    )
    few = {"rtp": 8, "fused_loss": True}
    slots = [
        _bytes(**few, **more).components["rotation_slots"]
        for more in ({"buffers": "lean"}, {"travel": "int8"}, {"gradient_route": "direct", "gradient_travel": "int8"})
    ]
    assert slots[2] > slots[0], "each of 7 contributions has a slot of its own"
    assert slots[0] != slots[1]
    narrow = ModelSpec.preset("llama-3-8b", seq=1024)  # where hops are in the open
    times = {
        name: _seconds(model=narrow, **few, **more).components["rotation"]
        for name, more in {
            "plain": {"buffers": "lean"},
            "int8": {"travel": "int8", "buffers": "lean"},
            "direct": {"gradient_route": "direct"},
            "both": {"gradient_route": "direct", "gradient_travel": "int8", "travel": "int8"},
        }.items()
    }
    assert times["both"] < 0.6 * times["plain"] and times["int8"] < times["plain"]
    assert times["both"] < times["int8"]
    # operation by operation, without a look-ahead, the direct route is the slower one where it sends as many bytes
    assert times["plain"] < times["direct"]


def test_policies_between_rings():
    """The bytes of the shards of a ring of 8 with a replica on the other node."""
    ring = {"rtp": 8, "dp": 2, "fused_loss": True}
    plans = {
        "allreduce": {},
        "zero": {"outer": "zero"},
        "local_sgd": {"outer": "local_sgd", "period": 10},
        "diloco": {"outer": "diloco", "period": 10},
        "gossip": {"outer": "gossip", "period": 1},
    }
    held = {name: _bytes(TWO, **ring, **plan) for name, plan in plans.items()}
    own = held["allreduce"].components["parameters"] / 4
    assert held["local_sgd"].components == held["allreduce"].components == held["gossip"].components
    assert held["diloco"].components["optimizer"] == held["allreduce"].components["optimizer"] + 8 * own
    assert held["zero"].components["optimizer"] * 2 == held["allreduce"].components["optimizer"]
    assert held["zero"].components["parameters"] == 4 * own * 1.5
    times = {name: _seconds(TWO, **ring, **plan).components for name, plan in plans.items()}
    group = Group(TWO, 2, 8)
    cost = outer_cost("local-sgd", 4 * own, group, CONSTANTS, period=10)
    assert times["local_sgd"]["gradients"] == pytest.approx(cost.seconds, rel=1e-3)
    assert times["diloco"]["optimizer"] > times["local_sgd"]["optimizer"] > times["zero"]["optimizer"]
    assert times["gossip"]["gradients"] == pytest.approx(
        outer_cost("gossip", 4 * own, group, CONSTANTS).seconds, rel=1e-3
    )
    assert times["allreduce"]["gradients"] < all_reduce_s(group, 4 * own, CONSTANTS), "it hides under the backward"
    kinds = {
        plan.strategy.outer
        for plan in search(LLAMA, TWO, global_batch=16, top=60, outer=("allreduce", "diloco"), period=50)
        if plan.strategy.rtp > 1 and plan.strategy.dp > 1
    }
    assert "diloco" in kinds
    plain = search(LLAMA, TWO, global_batch=16, top=60)
    assert {plan.strategy.outer for plan in plain} == {"allreduce"}
    with pytest.raises(ValueError, match="outer policy"):
        search(LLAMA, TWO, global_batch=16, outer=("average",))


def test_replicas_of_shards_and_offload():
    whole, parted = (_bytes(TWO, dp=16, zero=3, replicate=count) for count in (1, 2))
    for name in ("parameters", "gradients", "optimizer"):
        assert parted.components[name] == 2 * whole.components[name]
    few = ModelSpec.preset("llama-3-8b", seq=512)
    far, near = (_seconds(TWO, few, dp=16, zero=3, replicate=count).components for count in (1, 2))
    assert near["unsharding"] < far["unsharding"], "gathers stay inside a node"
    assert far["gradients"] == 0 < near["gradients"]
    for more in ({"dp": 8, "zero": 3}, {"rtp": 8}):
        here, there = _bytes(**more), _bytes(**more, offload=True)
        assert [there.components[name] for name in ("parameters", "gradients", "optimizer")] == [0, 0, 0]
        assert there.peak_allocated_bytes < here.peak_allocated_bytes
        slower = _seconds(**more, offload=True).components["optimizer"]
        assert slower > 10 * _seconds(**more).components["optimizer"]
    with pytest.raises(ValueError, match="host_bytes_per_s for offload"):
        _seconds(dataclasses.replace(H100, host_bytes_per_s=0.0), dp=8, zero=3, offload=True)


def test_kernels():
    fsdp = {"dp": 8, "zero": 3}
    plain, norm, compiled = (
        _seconds(**fsdp, **more).components["elementwise"] for more in ({}, {"fused_norm": True}, {"compiled": True})
    )
    assert plain > norm > compiled > 0.2 * plain
    tensorwise, rowwise = (
        _seconds(**fsdp, fp8=True, compiled=True, fp8_scaling=way).components["elementwise"]
        for way in ("tensorwise", "rowwise")
    )
    assert rowwise > 1.3 * tensorwise
    long = ModelSpec.preset("llama-3-8b", seq=32768)
    even, uneven = (
        _seconds(model=long, batch=2, dp=2, cp=4, zero=3, cp_balanced=way).components["attention"]
        for way in (True, False)
    )
    assert uneven == pytest.approx((2 - 1 / 4) * even, rel=0.01)


def test_cut_sequences_are_copied_on_torch_and_gathered_in_eight_bits_where_one_scale_does():
    """Six gathers and six scatters of a layer with full recomputation; by hand."""
    group, model, tokens = Group(H100, 4), LLAMA, 2 * LLAMA.seq
    hidden = 2 * tokens * model.hidden

    def parallel(**fields):
        plan = Strategy(tp=4, sequence_parallel=True, **{"stack": "torch", "recompute": "full", **fields})
        return StageClock(model, H100, plan, CONSTANTS).per_layer["tensor_parallel"]

    def gathers(size):
        return gather_s(group, size, CONSTANTS)

    def copies(size):
        return 2 * size / (H100.hbm_bytes_per_s * CONSTANTS.hbm_fraction)

    plain = 12 * gathers(hidden)
    assert parallel(micro_batch=2, stack="megatron") == pytest.approx(plain)
    assert parallel(micro_batch=2) == pytest.approx(plain + 12 * copies(hidden))
    assert parallel(micro_batch=1) == pytest.approx(12 * gathers(hidden / 2) + 6 * copies(hidden / 2)), (
        "gathered: a view"
    )
    eight = 6 * (gathers(hidden / 2) + gathers(hidden)) + 6 * (copies(hidden / 2) + copies(hidden))
    assert parallel(micro_batch=2, fp8=True) == pytest.approx(eight)
    assert parallel(micro_batch=2, fp8=True, fp8_scaling="rowwise") == pytest.approx(parallel(micro_batch=2))
    again = [parallel(micro_batch=2, recompute=how) for how in ("none", "selective")]
    assert again[0] == pytest.approx(8 * (gathers(hidden) + copies(hidden)))
    assert again[1] - again[0] == pytest.approx(2 * (gathers(hidden) + copies(hidden))), "scattered: kept"


def test_the_host_bounds_small_layers():
    """A layer takes no less than the host takes to issue its kernels, and no more for that where it is large."""
    cluster = Cluster.preset("a100-80gb")
    small = ModelSpec.gpt(layers=24, hidden=1024, heads=16, vocab=51200, seq=1024)
    plan = Strategy(recompute="full", flash_attention=False)
    clock = StageClock(small, cluster, plan, CONSTANTS)
    kernels = sum(clock.layer.kernels) + clock.layer.kernels[0]
    assert sum(clock.per_layer.values()) == pytest.approx(kernels * CONSTANTS.host_s)
    assert sum(clock.per_layer.values()) == pytest.approx(3.3e-3, rel=0.15), "as measured: vTrain, one node"
    large = StageClock(dataclasses.replace(small, hidden=8192, head_dim=512, ffn=32768), cluster, plan, CONSTANTS)
    assert large.per_layer["launches"] == 0


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_host_issues_what_travels(nodes):
    """A ring's hops, and the products that its shards make more: where the host bounds a layer, they are seen."""
    cluster = Cluster.preset("h100-80gb", gpus=8, gpus_per_node=8 // nodes)
    small = ModelSpec.gpt(layers=4, hidden=256, heads=4, vocab=5120, seq=128)
    plan = Strategy(rtp=8, route="ring", gradient_route="direct")  # planned operation by operation
    free = dataclasses.replace(CONSTANTS, driver_call_s=0.0, nccl_call_s=0.0, engine_product_s=0.0)
    clock, without = (StageClock(small, cluster, plan, constants) for constants in (CONSTANTS, free))
    assert without.per_layer["launches"] > 0, "bounded by the host"
    hop = (11.44 if nodes == 1 else 4.44) * CONSTANTS.driver_call_s + (nodes > 1) * CONSTANTS.nccl_call_s
    expected, calls = 0.0, 3.75 * CONSTANTS.driver_call_s
    for time, (matrices, operation) in zip(clock.rotated, ((1, "linear"), (1, "linear"), (2, "mlp")), strict=True):
        assert time.operation == operation and time.chunks == 1
        compute = calls + matrices * CONSTANTS.engine_product_s
        gradients = 2 if time.halves else 1
        expected += 7 * ((2 + gradients) * hop + 3 * compute)
    more = clock.per_layer["launches"] - without.per_layer["launches"]
    assert more == pytest.approx(expected)
    many = StageClock(
        dataclasses.replace(small, hidden=8192, head_dim=2048, ffn=32768, seq=8192), cluster, plan, CONSTANTS
    )
    assert many.per_layer["launches"] == 0 < sum(sum(time.host_s) for time in many.rotated)


def test_the_host_issues_what_fully_shard_gathers():
    small = ModelSpec.gpt(layers=4, hidden=256, heads=4, vocab=5120, seq=128)
    cluster = Cluster.preset("h100-80gb")
    kernels = sum(StageClock(small, cluster, Strategy(dp=8), CONSTANTS).layer.kernels)
    sharded = StageClock(small, cluster, Strategy(dp=8, zero=3), CONSTANTS)
    assert sum(sharded.per_layer.values()) == pytest.approx((kernels + 8) * CONSTANTS.host_s)


def test_all_reduces_inside_a_node_as_measured():
    a100 = Cluster.preset("a100-80gb")
    for ranks, mib, rate in ((2, 16, 127.16), (4, 64, 185.11), (8, 1024, 229.35)):
        size = mib * 2**20
        expected = 2 * (ranks - 1) / ranks * size / (rate * 1e9)
        assert all_reduce_s(Group(a100, ranks), size, CONSTANTS) == pytest.approx(expected)
        assert gather_s(Group(a100, ranks), size, CONSTANTS) == pytest.approx(expected / 2)
    sizes = [all_reduce_s(Group(a100, 4), mib * 2**20, CONSTANTS) for mib in (0.25, 1, 3, 100, 4096)]
    assert sizes == sorted(sizes) and sizes[0] > 0
    assert all_reduce_s(Group(a100, 2), 2**24, CONSTANTS) > 1.3 * all_reduce_s(
        Group(dataclasses.replace(a100, all_reduce=""), 2), 2**24, CONSTANTS
    ), "control: the model of latency and bandwidth is too fast for two"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"route": "ring"}, "route needs rtp"),
        ({"outer": "diloco"}, "outer needs rtp"),
        ({"rtp": 4, "travel": "fp4"}, "expected travel of"),
        ({"rtp": 4, "travel": "int8", "in_place": True}, "expected in_place=False on a ring of travel"),
        ({"rtp": 4, "travel": "float32"}, r"expected travel of \(None, 'bfloat16', 'int8'\), got 'float32'"),
        ({"rtp": 4, "gradient_travel": "int8"}, "expected gradient_route direct where gradients"),
        ({"rtp": 4, "gradient_route": "direct", "route": "two-level"}, "expected gradient_route auto or chain"),
        ({"rtp": 4, "outer": "zero", "period": 2}, "acts in every step"),
        ({"rtp": 4, "outer": "zero", "offload": True}, "no offload"),
        ({"dp": 4, "replicate": 2}, "replicate is of zero=3"),
        ({"dp": 4, "zero": 3, "replicate": 3}, "divides dp"),
        ({"dp": 4, "offload": True}, "offload needs"),
        ({"compiled": True}, "torch stack"),
        ({"fp8_scaling": "blockwise"}, "fp8_scaling"),
    ],
)
def test_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Strategy(**fields)
    with pytest.raises(ValueError, match="equally many ranks on each, got 8 ranks, 8 to a node"):
        Strategy(rtp=8, route="two-level").hosts(H100)
