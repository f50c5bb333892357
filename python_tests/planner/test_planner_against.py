"""Plans of whole blocks: their timeline against the simulator of the executor's schedules and closed forms, what may be
planned before the engine has it, and the list of cells against `fully_shard`."""

import dataclasses
import re

import pytest
from planner import planner_page

from rtp_ext import schedule, timeline
from rtp_ext.cost import Operation, Rates, block_ends, block_seconds, group_sizes, product_seconds
from rtp_ext.embedding_rows import rows_traffic
from rtp_ext.gpu_rates import HOP_SECONDS, POST_SECONDS
from rtp_ext.planner import Cluster, ModelSpec, Strategy, TimeConstants, estimate_memory, estimate_time, rotations_of
from rtp_ext.planner.display.text import time_line
from rtp_ext.planner.memory.states import buffer_bytes
from rtp_ext.planner.native import engine
from rtp_ext.planner.plan_text import name_of
from rtp_ext.planner.plans.against import TO_COME
from rtp_ext.planner.plans.when import contenders
from rtp_ext.planner.rotation import family
from rtp_ext.planner.rotation.seconds import rotation_seconds
from rtp_ext.planner.time import links
from rtp_ext.planner.time.explain import explain_time
from rtp_ext.planner.time.links import Group
from rtp_ext.planner.time.stage import StageClock

H100 = Cluster.preset("h100-80gb")
CONSTANTS = TimeConstants.default()


def _operation(ranks, group, hop, *, gradient=0.0, route="", wgrad=0.0, hosts=1, outer=0.0, product=1.0, add=0.0):
    groups = group_sizes(ranks, group)
    wgrads = tuple(wgrad * count for count in groups) if route == "direct" else (wgrad,) * ranks
    return Operation(
        *(0.0, groups, tuple(product * count for count in groups), hop, 1.0, outer),
        *(route, wgrads if route else (), gradient, outer * (gradient > 0), add),
    )


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_one_shard_per_product_takes_what_the_simulator_says(ranks):
    """Forward, and backward with one chain and with two, alone and where hops take longer than products."""
    for hop in (0.0, 0.4, 1.0, 2.5):
        times = dict.fromkeys(("forward", "dgrad", "wgrad"), 1.0) | {"weight": hop, "gradient": 2 * hop}
        times |= {"copy": 0.0, "add": 0.0}
        ways = {"chain": {}, "halves": {"halves": True}}
        made = schedule.schedules(ranks)[0]
        found = block_ends([_operation(ranks, 1, hop)], 0)[0]
        assert found == pytest.approx(timeline.Lockstep(made).makespan(times)), (ranks, hop)
        for route, way in ways.items():
            made = schedule.schedules(ranks, pass_="backward", **way)[0]
            one = _operation(ranks, 1, hop, gradient=2 * hop, route=route, wgrad=1.0)
            expected = timeline.Lockstep(made).makespan(times)
            # two half chains send a half while the other is computed, the schedule's both after their product
            assert block_ends([one], 0)[0] <= expected * (1 + 1e-9), (ranks, hop, route)
            assert block_ends([one], 0)[0] >= expected * (1 if route == "chain" else 0.8) * (1 - 1e-9)


def test_groups_follow_their_closed_forms():
    for ranks in (2, 4, 8):
        for hop in (0.3, 1.0, 3.0):
            whole = _operation(ranks, ranks, hop)
            assert block_ends([whole], 0)[0] == pytest.approx((ranks - 1) * hop + ranks), "all shards, then one product"
            assert len(whole.products) == 1
            ahead = block_seconds([_operation(ranks, ranks, hop)], 1e9)
            assert ahead == pytest.approx(max(ranks, (ranks - 1) * hop)), "hidden behind the block before"
            begun = block_seconds([_operation(ranks, ranks, hop)], 0)  # all but the first hop begin with the operation
            assert begun == pytest.approx(max(ranks + max(0, ranks - 2) * hop, (ranks - 1) * hop), abs=hop)
            assert begun == ahead or begun > ahead, (ranks, hop)
            assert ranks == 2 or begun > ahead, "control"
            # gradients of a whole product: one chain waits for every hop, two for what a wgrad does not hide
            for route, shown in (("chain", hop), ("halves", max(0.0, hop - 1.0))):
                back = _operation(ranks, ranks, 0.0, gradient=hop, route=route, wgrad=1.0)
                busy = 2.0 * ranks
                assert block_ends([back], 0)[0] == pytest.approx(busy + (ranks - 1) * shown, rel=0.1), (route, hop)
            direct = [_operation(ranks, ranks, 0.0, gradient=hop, route="direct", wgrad=1.0, add=0.5)]
            assert block_ends(direct, 0)[0] == pytest.approx(2 * ranks + 0.5), "nothing waits in this block"
            assert block_seconds(direct, 0) == pytest.approx(max(2 * ranks + 0.5, (ranks - 1) * hop))
    _hops_that_are_posted_at_once_share_a_latency()
    two = _operation(8, 8, 0.1, hosts=2, outer=4.0)
    assert block_ends([two], 0, hosts=2)[0] == pytest.approx(4.0 + 3 * 0.1 + 8), "a shard over the port, then its phase"
    assert group_sizes(8, 3) == (3, 3, 2) and group_sizes(4, 4) == (4,)


def _hops_that_are_posted_at_once_share_a_latency():
    """Of a group, and of a group's gradients."""
    for ranks, group in ((8, 8), (8, 4), (8, 1), (6, 4)):
        one = dataclasses.replace(_operation(ranks, group, 1.0, product=0.0), call=5.0)
        calls = len(group_sizes(ranks, group)) - (group == 1)
        assert one.calls == calls and block_ends([one], 0)[0] == pytest.approx(ranks - 1 + 5.0 * calls)
        assert block_seconds([one], 1e9) == pytest.approx(ranks - 1 + 5.0 * calls), "bound by the wire"
    back = _operation(8, 8, 0.0, product=1.0, gradient=3.0, route="direct", wgrad=1.0)
    assert block_seconds([dataclasses.replace(back, gradient_call=9.0)], 0) == pytest.approx(7 * 3.0 + 9.0)


def test_one_call_an_operation():
    """It begins when the product before the last has ended: two operations have slots. Scatters of as many operations
    as are late may be under way."""

    def whole(hop, product, **more):
        operation = _operation(8, 8, hop, product=product / 8, gradient=more.pop("gradient", 0.0))
        return dataclasses.replace(operation, together=True, **more)

    slow, quick = ([whole(hop, 8.0, call=4.0), whole(hop, 8.0, call=4.0)] for hop in (3.0, 0.5))
    assert block_ends(slow, 0)[0] == pytest.approx(2 * (7 * 3.0 + 4.0) + 8), "the second product follows the wire"
    assert block_seconds(slow, 0) == pytest.approx(2 * (7 * 3.0 + 4.0)), "bound by the wire"
    assert block_ends(quick, 0)[0] == pytest.approx(7 * 0.5 + 4.0 + 2 * 8), "hidden behind the product before"
    assert block_seconds(quick, 0) == pytest.approx(2 * 8)
    # the third gather waits for the slot of the first, also where it is smaller
    uneven = [whole(1.0, 100.0), whole(1.0, 1.0), dataclasses.replace(whole(1.0, 1.0), shard_bytes=0.1)]
    assert block_ends(uneven, 0)[0] == pytest.approx(7.0 + 100 + 7 + 1), "it begins with the second product"
    # direct contributions too
    for late, end in ((None, 3 * 9.0), (0, 3 * (9 + 14.0)), (1, 9 + 14.0 + 14.0)):
        back = [whole(0.0, 8.0, gradients="direct", wgrads=(1.0,), gradient=2.0, late=late)] * 3
        assert block_ends(back, 0)[0] == pytest.approx(end), late
    # of three operations of 8 + 1, whose scatters take 14 each: the first ends at 23, the second at 37
    for late, end in ((0, 3 * (9 + 14.0)), (1, 9 + 14.0 + 14.0), (2, 27.0)):
        back = [whole(0.0, 8.0, gradients="scatter", wgrads=(1.0,), gradient=2.0, late=late)] * 3
        assert block_ends(back, 0)[0] == pytest.approx(end), late


def test_a_collective_costs_what_one_of_fully_shard_costs():
    """The same latency and bytes. Hops to the neighbour pay their latency one by one, over copy engines less than
    NCCL."""
    size, port = 2.0**26, dataclasses.replace(H100, gpus=32, gpus_per_node=1)
    for cluster, ranks in ((H100, 8), (dataclasses.replace(H100, gpus=32), 32), (port, 4), (port, 32)):
        group = Group(cluster, ranks)
        whole = family.BlockPlan((ranks,), "scatter", 0, collective=True)
        call, each = family._weights_s(group, size / ranks, CONSTANTS, whole, 1)
        assert call == 0.0 and (ranks - 1) * each == pytest.approx(links.gather_s(group, size, CONSTANTS))
        one_by_one = (ranks - 1) * links.hop_s(group, size / ranks, CONSTANTS)
        latency = HOP_SECONDS if ranks == 8 else CONSTANTS.nccl_base_s + CONSTANTS.nccl_inter_step_s
        assert one_by_one == pytest.approx(
            (ranks - 1) * (latency + size / ranks / links.hop_bytes_per_s(group, CONSTANTS))
        )
    nvlink, pcie = Group(H100, 8), Group(Cluster.preset("h100-80gb", link="pcie"), 8)
    assert nvlink.reaches_all and not pcie.reaches_all and pcie.over_ce and Group(port, 4).reaches_all
    over = dataclasses.replace(nvlink, nccl=True)
    assert over.reaches_all and not over.over_ce and nvlink.over_ce
    assert links.posted_s(nvlink, 0.0, CONSTANTS) == (HOP_SECONDS - POST_SECONDS, POST_SECONDS)
    assert links.posted_s(over, size, CONSTANTS) == (0.0, links.hop_s(over, size, CONSTANTS)), "a call for each hop"
    assert not Group(dataclasses.replace(H100, gpus=16), 16).reaches_all


def test_direct_gradients_hold_what_the_engine_does():
    """Late by one operation less than a block has, so that the slot of an MLP is free for the next one."""
    for model, ranks in (("llama-3-8b", 8), ("gpt-3-xl", 4)):
        operations = tuple(rotations_of(ModelSpec.preset(model, seq=4096), layers=1, embedding=False, head=False)[0])
        plans = family.block_plans(operations, ranks, family.BUILT, False)
        (plan,) = (each for each in plans if each.gradients == "direct" and each.ahead and set(each.groups) == {ranks})
        group, gaps = Group(H100, ranks), ((0.0,) * 3,) * 2
        time = family.block_time(operations, gaps, 4096, group, CONSTANTS, family.Sizes(), plan, simulated=False)
        held = engine().footprint(
            [each.facts for each in operations * 3],
            **{"ranks": ranks, "group": ranks, "in_place": False, "slot_cap": engine().SLOT_CAP, "cast": True},
            **{"sends_anywhere": True, "receives_anywhere": True, "compute_bytes": 2, "reduce_bytes": 4},
            **{"gradient_route": "direct", "gradients_apart": True, "sum_bytes": 4, "late": plan.late},
            look_ahead=None,
        )
        assert time.buffers_bytes == held.weight.peak_bytes + held.gradient.peak_bytes, model


def test_plans_with_collectives_hold_what_the_engine_does():
    """One operation ahead, and gradients of the one that computes and of those that are late; a head that goes in
    chunks."""
    model = ModelSpec.preset("llama-3-8b", seq=4096)
    operations = tuple(rotations_of(model, layers=1, embedding=False, head=False)[0])
    head = tuple(rotations_of(model, layers=0, embedding=False, fused_loss=True)[0])
    group, sizes, gaps = Group(H100, 8, nccl=True), family.Sizes(), ((0.0,) * 3,) * 2
    qkv, o, mlp = (sum(weight.shard_elements(1) for weight in each.weights) for each in operations)
    found = {}
    for late in (1, 2, 3):
        plan = family.BlockPlan((8, 8, 8), "scatter", 0, False, True, late)
        found[late] = family.block_time(operations, gaps, 4096, group, CONSTANTS, sizes, plan)
        bytes_ = found[late].buffers_bytes
        slots = {1: [mlp, mlp], 2: [mlp, qkv, o], 3: [mlp, mlp, qkv, qkv]}[late]
        assert bytes_ == 2 * 2 * mlp + 4 * sum(slots), "two of weights"
        more = family.block_time(operations, gaps, 4096, group, CONSTANTS, sizes, plan, last=head).buffers_bytes
        assert bytes_ <= more <= bytes_ + (64 << 20) * 6, "a head above the slot cap goes shard by shard"
        kept = family.block_time(
            operations, gaps, 4096, group, CONSTANTS, sizes, dataclasses.replace(plan, kept=True), 2
        )
        assert kept.buffers_bytes == pytest.approx(
            bytes_ + 7 / 8 * 2 * sum(weight.shard_elements(1) for each in operations for weight in each.weights)
        )
    assert found[3].exposed_s <= found[2].exposed_s <= found[1].exposed_s
    built = family.block_plans(operations, 8, family.BUILT, False, collective=True)
    assert {plan.late for plan in built} == {1, 2, 3} and not any(plan.kept for plan in built)
    assert not any(plan.collective for plan in family.block_plans(operations, 8, family.BUILT, False))
    large = tuple(dataclasses.replace(each, weights=each.weights[:1]) for each in operations[1:2])
    assert family.has_collectives(operations, 8, sizes, family.BUILT)
    assert not family.has_collectives(operations, 8, sizes, family.BUILT - {"collective"})
    assert not family.has_collectives(large, 1, dataclasses.replace(sizes, reduce_bytes=8), family.BUILT), "in chunks"
    assert family._head_cap(operations, head, 8, sizes) == engine().SLOT_CAP, "it goes in chunks anyway"
    small = family._head_cap(operations, head, 64, sizes)
    assert small == 128256 * 4096 // 64 * 4 // 2 and "slot_cap" in family.BlockPlan(
        (64,) * 3, "scatter", 0, False, True, 2, small
    ).ring_options(Group(dataclasses.replace(H100, gpus=64), 64))


def test_what_the_ring_of_a_plan_needs():
    """As the engine accepts it: `Ring` refuses groups on two levels."""
    one, nodes = Group(H100, 8), Group(dataclasses.replace(H100, gpus=64), 64)
    cards = Group(dataclasses.replace(Cluster.preset("h100-80gb", link="pcie"), gpus=64), 64)
    whole, direct = family.BlockPlan((8,), "scatter", 0, collective=True), family.BlockPlan((8,), "direct", 1, late=2)
    assert whole.ring_options(one) == {"group": 8, "collective": True}
    assert whole.ring_options(nodes, 8) == {"route": "gather", "collective": True}
    assert whole.ring_options(cards) == {"route": "ring", "group": 64, "collective": True}
    assert direct.ring_options(one) == {"late_gradients": 2}
    assert direct.ring_options(cards) == {"route": "ring", "gradient_route": "direct", "late_gradients": 2}
    assert family.BlockPlan((8,), "chain", 1).ring_options(one) == {}
    model = ModelSpec.preset("llama-3-8b", seq=4096)
    for asked, ring in (("yes", {"group": 8, "collective": True, "late_gradients": 2}), ("no", {"late_gradients": 2})):
        plan = Strategy(rtp=8, fused_loss=True, collective=asked)
        report = estimate_time(model, H100, plan, 8)
        assert report.ring == report.to_dict()["ring"] == ring
        assert explain_time(model, H100, plan, report).count("collective=True") == (asked == "yes")
        assert "its ring needs Ring(" in time_line(report)
    assert not estimate_time(model, H100, Strategy(dp=8, zero=3), 8).ring
    for wrong, said in (
        ({"in_place": True}, "expected collective auto or no, or a plain ring of GPUs"),
        ({"group": 4}, "where no plan can have it"),
        ({"buffers": "lean"}, "where no plan can have it"),
        ({"travel": "int8"}, "where no plan can have it"),
    ):
        with pytest.raises(ValueError, match=said):
            estimate_time(model, H100, Strategy(rtp=8, collective="yes", **wrong), 8)


def test_sums_show_but_beside_another_product():
    rates = Rates(1e12, 1e12, 0)
    shown, beside = (product_seconds(rates, 1000, 1000, 1000, result_bytes=8, beside=other) for other in (False, True))
    assert beside == pytest.approx(2e-3) and shown == pytest.approx(2e-3 + 6e6 / 1e12)
    assert product_seconds(rates, 1000, 1000, 1000) == pytest.approx(beside), "a result that is no sum"
    slow = dataclasses.replace(rates, memory=1e9)
    assert product_seconds(slow, 1000, 1000, 1000, result_bytes=8, beside=True) == pytest.approx((4 + 8) * 1e6 / 1e9)


def test_plans_use_what_is_built_unless_they_say_otherwise():
    model = ModelSpec.preset("llama-3-8b", seq=4096)
    assert all(not plan.to_come for _, plan in contenders(64))
    today = Strategy(rtp=8, fused_loss=True)
    assert frozenset({"joined", "rows", "groups", "halves", "ahead", "direct", "collective", "kept"}) == family.BUILT
    assert StageClock(model, H100, today, CONSTANTS).block.plan.groups == (8,) * 3
    for asked in ({"gradient_route": "direct"}, {"in_place": True}):
        plan = dataclasses.replace(today, **asked)
        assert StageClock(model, H100, plan, CONSTANTS).block is None, "operation by operation"
    hosts = dataclasses.replace(H100, cpus=True)
    assert StageClock(model, hosts, today, CONSTANTS).block is None, "on CPUs too"
    assert [
        dataclasses.replace(today, **more).late_passes for more in ({}, {"buffers": "lean"}, {"late_gradients": 2})
    ] == [1, 0, 2]
    for wrong, said in (
        ({"to_come": "grouped"}, "expected to_come 'all' or some of joined"),
        ({"to_come": "all", "in_place": True}, "expected in_place False with to_come"),
        ({"to_come": "all", "rtp": 1}, "to_come needs rtp of at least 2"),
        ({"buffers": "much"}, "buffers"),
        ({"group": 4, "in_place": True}, "expected group 0 or 1, or a plain ring of GPUs"),
        ({"group": 4, "travel": "int8"}, "expected travel None with group 4"),
        ({"group": 4, "buffers": "lean"}, "expected buffers 'auto' with group 4"),
        ({"group": 4, "rtp": 1}, "group needs rtp of at least 2"),
    ):
        with pytest.raises(ValueError, match=said):
            estimate_time(model, H100, Strategy(**{"rtp": 8, "dp": 8 // wrong.get("rtp", 8), **wrong}), 8)
    assert "NOT BUILT" in name_of(dataclasses.replace(today, to_come="head"))
    assert not any("BUILT" in name_of(dataclasses.replace(today, to_come=built)) for built in ("", "rows", "ahead"))
    for asked, size in ((1, 1), (2, 2), (99, 8)):
        plan = dataclasses.replace(today, group=asked)
        assert StageClock(model, H100, plan, CONSTANTS).block.plan.groups == (size,) * 3
    best, lean = (dataclasses.replace(today, to_come="all", buffers=buffers) for buffers in ("auto", "lean"))
    found = [StageClock(model, H100, plan, CONSTANTS).block.plan for plan in (best, lean)]
    assert max(found[0].groups) > 1 and found[1] == family.BlockPlan((1, 1, 1), "chain", 0)
    slots = [estimate_memory(model, H100, plan, 8).components["rotation_slots"] for plan in (best, lean, today)]
    assert slots[1] < min(slots[0], slots[2]) <= buffer_bytes(model, best), "at most those of fully_shard"
    seconds = [estimate_time(model, H100, plan, 8).step_seconds for plan in (best, lean, today)]
    assert seconds[0] <= seconds[2] < seconds[1]


def test_what_the_engine_has_on_some_rings_only():
    """Two levels have one shard a product and the chain, but for collectives; no groups in int8."""
    model, ring = ModelSpec.preset("llama-3-70b", seq=4096), Strategy(rtp=16, fused_loss=True)
    nodes, cards = Cluster.preset("h100-80gb", gpus=16), Cluster.preset("h100-80gb", gpus=8, link="pcie")
    for cluster, plan, missing in (
        (nodes, ring, {"groups", "halves", "direct"}),
        (nodes, dataclasses.replace(ring, route="two-level"), {"groups", "halves", "direct", "collective"}),
        (cards, dataclasses.replace(ring, rtp=8), set()),
        (H100, dataclasses.replace(ring, rtp=8, travel="int8"), {"groups", "collective"}),
        (H100, dataclasses.replace(ring, rtp=8, group=4), {"collective"}),
        (H100, dataclasses.replace(ring, rtp=8), set()),
        (nodes, dataclasses.replace(ring, to_come="levels"), set()),
    ):
        found = family.pieces_on(plan, Group(cluster, plan.rtp), plan.hosts(cluster))
        assert found == family.pieces_of(plan.to_come) - missing, (cluster.name, plan)
    block = StageClock(model, nodes, dataclasses.replace(ring, group=4), CONSTANTS).block
    best = StageClock(model, nodes, ring, CONSTANTS).block
    assert best.plan.collective and best.seconds < block.seconds
    assert (block.plan.groups, block.plan.gradients) == ((1, 1, 1), "chain"), "as the engine computes two levels"


def test_joined_operands_are_one_product():
    """q, k, v and gate, up of a shard: a float32 sum less is read and written for each that is joined."""
    operations = rotations_of(ModelSpec.preset("llama-3-8b"), layers=1, embedding=False, head=False)[0]
    rates = dataclasses.replace(H100, hbm_bytes_per_s=3.35e9)  # memory is the limit: bytes by hand
    tokens, h = 512, 4096
    for rotation, parts in ((operations[0], (4096, 1024, 1024)), (operations[2], (14336, 14336))):
        joined, apart = (
            family.products_s(
                *(rotation, tokens, Group(rates, 8), CONSTANTS, family.Sizes(joined=one)),
                *(1, (8.0, 8.0)),
            )
            for one in (True, False)
        )
        x = 2 * tokens * h  # read once, not for every layer
        saved = (len(parts) - 1) * x / (3.35e9 * CONSTANTS.hbm_fraction)
        launches = (len(parts) - 1) * CONSTANTS.engine_launch_s
        assert apart["forward"] - joined["forward"] == pytest.approx(saved + launches)
        assert apart["dgrad"] - joined["dgrad"] == pytest.approx(4 * saved + launches), "8 bytes a value of a sum"
        assert apart["wgrad"] - joined["wgrad"] == pytest.approx(saved + launches)


def test_rows_of_an_embedding_send_what_the_closed_form_says():
    """Ids once for each pass; the table where that is faster, and where rows cannot be sent."""
    model, tokens = ModelSpec.preset("llama-3-8b", seq=4096), 4096
    (rotation,) = rotations_of(model, layers=0, head=False)[0]
    group = Group(H100, 8)
    whole = rotation_seconds(rotation, tokens, group, CONSTANTS)
    rows = family.rows_seconds(whole, rotation, tokens, group, CONSTANTS, 2, 4)
    sent = rows_traffic((model.vocab, model.hidden), 1, 8, 0, tokens, 2, 2)
    assert sent.forward == 7 * (8 * tokens + 2 * tokens * model.hidden / 8), (
        "ids to all, this rank's features of theirs"
    )
    for index, moved in enumerate((sent.forward, sent.gradients)):
        exposed = rows.makespan_s[index] - rows.computes_s[index]
        latency = 3 * links.message_latency_s(group, CONSTANTS)
        assert exposed == pytest.approx(moved / links.hop_bytes_per_s(group, CONSTANTS) + latency)
    assert sum(rows.makespan_s) < 0.2 * sum(whole.makespan_s)
    plain, travels = (
        StageClock(model, H100, Strategy(rtp=8, fused_loss=True, **more), CONSTANTS).ends["embedding"]
        for more in ({}, {"travel": "int8"})
    )
    assert plain[0] == rows and sum(travels[0].makespan_s) > 2 * sum(rows.makespan_s), "control: rows are not rounded"


# -- the cells ---------------------------------------------------------------------------------------------------------


def test_the_committed_list_of_cells():
    """The table counts its rows, names what binds every loss, and no ring takes more memory than `fully_shard`."""
    text = (planner_page.DOCS / "predictions.md").read_text()
    block = re.search(r"<!-- planner: against -->(.*?)<!-- end -->", text, re.DOTALL).group(1)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if line.startswith("|")
    ]
    counts = {row[0]: row[1:] for row in rows if len(row) == 3}
    cells = [row for row in rows if len(row) == 9 and re.match(r"(gpt|llama)-", row[0])]
    assert len(cells) == 45
    today = sum(float(row[3]) <= 1 for row in cells)
    assert counts["the engine as it is"][0] == f"{today} of 45" and today >= 30
    built = sum(float(row[5]) <= 1 for row in cells)
    assert counts[f"+ {TO_COME[-1]}"][0] == f"{built} of 45" and built >= 32
    for row in cells:
        for ratio, binding in ((row[3], row[4]), (row[5], row[6])):
            assert (float(ratio) > 1) == (binding != "-"), row
        ours, theirs = map(int, row[8].split("/"))
        assert ours <= theirs


def test_all_that_is_to_come_is_never_slower_for_8b_on_8_h100():
    """At equal settings."""
    ratios = {}
    for tokens in (1024, 2048, 4096, 8192, 16384):
        model = ModelSpec.preset("llama-3-8b", seq=tokens)
        peer = Strategy(dp=8, zero=3, fused_loss=True)
        ours, theirs = (
            estimate_time(model, H100, plan, 8).step_seconds
            for plan in (Strategy(rtp=8, fused_loss=True, to_come="all"), peer)
        )
        ratios[tokens] = ours / theirs
    limits = {1024: 0.85, 2048: 0.93, 4096: 0.96, 8192: 0.98, 16384: 1.0}
    assert all(ratios[tokens] <= limit for tokens, limit in limits.items()), ratios
