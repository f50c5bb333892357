"""Predicted step times: parts against formulas worked by hand, rotations against the simulator, plans against
published runs. Times printed in the tests' names and comments are seconds."""

import dataclasses
import json
import math
import statistics

import gpu.expected as first_day
import pytest
from planner import planner_runs, published
from planner.planner_runs import regrets

from rtp_ext import schedule, timeline
from rtp_ext.planner import (
    Cluster,
    ModelSpec,
    RotatedOperation,
    Strategy,
    TimeConstants,
    Weight,
    calibrate,
    errors_of,
    estimate_time,
    read_measurements,
    rotations_of,
)
from rtp_ext.planner.rotation.seconds import rotation_seconds
from rtp_ext.planner.time.estimate import step_flops
from rtp_ext.planner.time.links import Group, all_reduce_s, gather_s, ring_bytes_per_s
from rtp_ext.planner.time.report import TIME_COMPONENTS
from rtp_ext.planner.time.stage import StageClock
from rtp_ext.planner.time.work import Product, layer_seconds, product_s

CONSTANTS = TimeConstants.default()
H100 = Cluster.preset("h100-80gb")
LLAMA = ModelSpec.preset("llama-3-8b", seq=4096)

# -- parts ------------------------------------------------------------------------------------------------------------


def test_products_run_in_waves_or_at_the_speed_of_memory():
    rate = 794.5e12 * CONSTANTS.gemm_fraction
    depth = 4096 + CONSTANTS.gemm_ramp_depth
    one_wave = Product("", 128 * 11, 256 * 12, 4096)  # 132 tiles on 132 multiprocessors
    expected = 132 * 2 * 128 * 256 * depth / rate + CONSTANTS.kernel_s
    assert product_s(one_wave, H100, CONSTANTS) == pytest.approx(expected, rel=1e-12)
    one_more = dataclasses.replace(one_wave, rows=128 * 11 + 1)  # two waves, or three of half as large tiles
    assert product_s(one_more, H100, CONSTANTS) - CONSTANTS.kernel_s == pytest.approx(
        1.5 * (expected - CONSTANTS.kernel_s)
    )
    thin = Product("", 1, 8192, 8192)
    moved = 2 * (8192 + 8192 * 8192 + 8192)
    seconds = moved / (3.35e12 * CONSTANTS.hbm_fraction) + CONSTANTS.kernel_s
    assert product_s(thin, H100, CONSTANTS) == pytest.approx(seconds)
    dgrad, wgrad = Product("p", 3, 5, 7).backward()
    assert (dgrad.rows, dgrad.columns, dgrad.depth) == (3, 7, 5) and (wgrad.rows, wgrad.columns, wgrad.depth) == (
        5,
        7,
        3,
    )


def test_products_take_what_an_h100_took(monkeypatch):
    """Whole products, those of all shards, and float32 sums, as benchmarks/gpu measured them on one H100."""

    def errors():
        return [abs(predicted / measured - 1) for _, measured, predicted in first_day.timed_products()]

    assert len(errors()) >= 33 and statistics.mean(errors()) < 0.05 and max(errors()) < 0.11
    monkeypatch.setattr(first_day, "TIME", dataclasses.replace(CONSTANTS, hbm_fraction=1e3))
    assert max(errors()) > 0.25, "control: without the traffic of sums"


def test_megatron_adds_weight_gradients_in_float32():
    own = {"model": LLAMA, "cluster": H100, "constants": CONSTANTS, "tokens": 4096}
    plain, megatron = (layer_seconds(strategy=Strategy(zero=zero), **own).gemm for zero in (3, 1))
    matrices = LLAMA.layer_parameters - LLAMA.norm_parameters
    added = 6 * matrices / (3.35e12 * CONSTANTS.hbm_fraction)  # 8 bytes a value in place of 2
    assert megatron[0] == plain[0] and megatron[1] - plain[1] == pytest.approx(added)


def test_collectives_over_nodes_share_ports_and_bandwidth_grows_with_size():
    cluster = Cluster.preset("h100-80gb", gpus=64)
    inside, across, strided = Group(cluster, 8), Group(cluster, 16), Group(cluster, 8, 8)
    port = 50e9 * CONSTANTS.network_fraction
    assert (inside.nodes, across.nodes, strided.nodes, strided.local) == (1, 2, 8, 1)
    rates = [ring_bytes_per_s(group, CONSTANTS) for group in (inside, across, strided)]
    assert rates == [370.8e9, min(370.8e9, 8 * port), port]
    assert all_reduce_s(inside, 8e9, CONSTANTS) == pytest.approx(
        CONSTANTS.nccl_base_s + 14 * CONSTANTS.nccl_intra_step_s + 2 * 7 / 8 * 8e9 / 370.8e9
    )
    assert gather_s(Group(cluster, 1), 8e9, CONSTANTS) == 0
    a100 = Group(Cluster.preset("a100-80gb"), 8)
    ratios = [
        2 * 7 / 8 * size / all_reduce_s(a100, size, CONSTANTS) / 1e9 / bus for size, bus in published.A100_BUS.items()
    ]
    assert all(0.85 < ratio < 1.5 for ratio in ratios) and abs(ratios[-1] - 1) < 0.06
    flat = [240 / bus for bus in published.A100_BUS.values()]  # control: a bandwidth independent of the size
    assert max(flat) > 10


def test_pipelines_wait_as_their_formula_says():
    model = ModelSpec.gpt(layers=32, hidden=4096, heads=32, vocab=128, seq=2048)
    cluster = Cluster.preset("a100-80gb", gpus=64)
    for schedule_, chunks in (("1f1b", 1), ("interleaved", 2)):
        plan = Strategy(tp=8, pp=8, schedule=schedule_, interleave=chunks)
        report = estimate_time(model, cluster, plan, 32)
        busy = report.step_seconds - report.components["bubble"] - report.components["optimizer"]
        # embedding and head are negligible here: (p - 1) / (m chunks) of the busy time
        assert report.components["bubble"] / busy == pytest.approx(7 / 32 / chunks, rel=0.03)
    assert report.components["bubble"] / busy != pytest.approx(7 / 32, rel=0.03)  # control


def test_fully_shard_shows_what_computing_does_not_hide():
    shown = []
    for seq in (256, 1024, 4096, 16384):
        model = ModelSpec.preset("llama-3-8b", seq=seq)
        shown.append(estimate_time(model, H100, Strategy(dp=8, zero=3), 8).components["unsharding"])
    assert shown[0] > 1.8 * shown[1] > 1.8 * shown[2] == pytest.approx(1.8 * shown[3])  # the root's stays
    slow = dataclasses.replace(H100, nccl_ring_bytes_per_s=25e9)
    layer, rate = LLAMA.layer_parameters, 3.35e12 * CONSTANTS.hbm_fraction
    hidden = StageClock(LLAMA, slow, Strategy(dp=8, zero=3), CONSTANTS)
    group = Group(slow, 8)
    gather, scatter = gather_s(group, 2 * layer, CONSTANTS), gather_s(group, 4 * layer, CONSTANTS)
    # out of the buffer 2 + 2 bytes a value, twice; into that of the reduce-scatter 2 + 4
    out, back = 4 * layer / rate, 10 * layer / rate
    assert hidden.per_layer["copies"] == pytest.approx(out + back)
    forward, backward = hidden.layer.forward + out, hidden.layer.backward + back
    expected = max(0, gather - forward) + max(0, gather + scatter - backward)
    assert hidden.per_layer["unsharding"] == pytest.approx(expected, rel=1e-9) and expected > 0
    assert hidden.per_layer["interference"] == 0, "multiprocessors that NCCL takes while products wait for it"
    megatron = StageClock(LLAMA, slow, Strategy(dp=8, zero=3, stack="megatron"), CONSTANTS)
    assert megatron.per_layer["copies"] == 0, "views of its buffers"


def test_fully_shard_in_the_units_of_torchtitan():
    """Embedding, layers, and norm with head: by hand, where a layer hides all of its own gathers and scatters."""
    model = ModelSpec.preset("llama-3-8b", seq=8192)
    clock, group = StageClock(model, H100, Strategy(dp=8, zero=3), CONSTANTS), Group(H100, 8)
    layer, table, norm = model.layer_parameters, 128256 * 4096, 4096
    sent = [gather_s(group, size * values, CONSTANTS) for values in (table, layer) for size in (2, 4)]
    assert clock.root["unsharding"] == pytest.approx(sum(sent)), "the head's are behind and before a layer"
    assert clock.root["copies"] == pytest.approx(
        (14 * table + 10 * (table + norm)) / (3.35e12 * CONSTANTS.hbm_fraction)
    )
    taken, beside = 0.15 / 0.85, StageClock(model, H100, Strategy(dp=8, zero=3, symm_mem=True), CONSTANTS)
    ahead, back = gather_s(group, 2 * layer, CONSTANTS), gather_s(group, 4 * layer, CONSTANTS)
    assert clock.per_layer["interference"] == pytest.approx(taken * (2 * ahead + back))
    assert beside.per_layer == {**clock.per_layer, "interference": 0.0} and beside.root["interference"] == 0
    tied = StageClock(dataclasses.replace(model, tied=True), H100, Strategy(dp=8, zero=3), CONSTANTS)
    assert tied.root["copies"] == pytest.approx(10 * table / (3.35e12 * CONSTANTS.hbm_fraction)), "gathered once"
    two = Cluster.preset("h100-80gb", gpus=16)
    ports = dataclasses.replace(two, gpus_per_node=1)
    for cluster, share in ((two, 0.15), (ports, 0.02)):  # NVLink's on two nodes of 8, too
        many = StageClock(dataclasses.replace(model, seq=65536), cluster, Strategy(dp=16, zero=3), CONSTANTS)
        wire = 2 * gather_s(Group(cluster, 16), 2 * layer, CONSTANTS) + gather_s(
            Group(cluster, 16), 4 * layer, CONSTANTS
        )
        assert many.per_layer["interference"] == pytest.approx(share / (1 - share) * wire)


def test_input_gradients_of_layers_with_one_input_are_added():
    """q, k, v and gate, up: three additions of 6 bytes a value, none where a bundle or Megatron-LM joins the layers."""
    own = {"cluster": H100, "constants": CONSTANTS, "tokens": 4096}
    added = 3 * 6 * 4096 * 4096 / (3.35e12 * CONSTANTS.hbm_fraction)
    gpt = ModelSpec.gpt(layers=2, hidden=4096, heads=32, seq=4096)
    for model, plan, expected in (
        (LLAMA, Strategy(zero=3), added),
        (LLAMA, Strategy(zero=3, compiled=True), added / 3),
        (LLAMA, Strategy(rtp=8, bundle=False), added),
        (LLAMA, Strategy(rtp=8), 0.0),
        (LLAMA, Strategy(zero=1), 0.0),
        (gpt, Strategy(zero=3), 0.0),
    ):
        forward, backward = layer_seconds(model, plan, **own).elementwise
        kernels = 8 * CONSTANTS.kernel_s
        assert backward - kernels - 2 * (forward - kernels) == pytest.approx(expected, abs=1e-12), plan


def test_a_ring_counts_its_casts_and_the_products_that_it_repeats():
    """Casts by hand; the head computes logits twice, and bundles that recompute their first half beyond a whole one."""
    rate, tokens, group = 3.35e12 * CONSTANTS.hbm_fraction, 4096, Group(H100, 8)
    rows, others = 6 * tokens * 4096, rotations_of(LLAMA, layers=1, fused_loss=True)[0]
    for rotation, values, sums in zip(
        others,
        (128256 * 4096, 6144 * 4096, 4096 * 4096, 3 * 14336 * 4096, 128256 * 4096),
        ((0, 0), (0, 1), (0, 1), (1, 1), (0, 1)),  # float32 sums over shards: outputs, input gradients
        strict=True,
    ):
        time = rotation_seconds(rotation, tokens, group, CONSTANTS)
        local = 6 * values / 8
        sent = (local, local * (rotation.kind != "embedding"))
        expected = [(shard + count * rows) / rate for shard, count in zip(sent, sums, strict=True)]
        assert time.casts_s == pytest.approx(expected), rotation
        wide = rotation_seconds(rotation, tokens, group, CONSTANTS, compute_bytes=4)
        assert wide.casts_s == (0, 0)
    *_, mlp, head = others
    again = rotation_seconds(mlp, tokens, group, CONSTANTS, recompute=True)
    kept = rotation_seconds(mlp, tokens, group, CONSTANTS)
    logits = product_s(Product("", tokens, 128256, 4096), H100, CONSTANTS)
    assert again.unsplit_s == kept.unsplit_s and again.computes_s[1] > 1.25 * kept.computes_s[1]
    seen = rotation_seconds(head, tokens, group, CONSTANTS)
    assert seen.computes_s[1] - seen.unsplit_s[1] > 0.9 * logits


def test_reports_add_up_and_carry_units():
    plan = Strategy(dp=2, tp=2, pp=2, zero=1, sequence_parallel=True)
    report = estimate_time(LLAMA, H100, plan, global_batch=16)
    assert tuple(report.components) == TIME_COMPONENTS
    assert report.step_seconds == pytest.approx(math.fsum(report.components.values()))
    assert math.fsum(report.groups.values()) == pytest.approx(report.step_seconds)
    assert report.tokens == 16 * 4096 and report.gpus == 8
    assert report.tflops_per_gpu == pytest.approx(report.flops / report.step_seconds / 8e12)
    told = json.loads(json.dumps(report.to_dict()))
    assert {"step_seconds", "components_seconds", "groups_seconds", "tflops_per_gpu"} <= set(told)
    matrices = LLAMA.parameters - LLAMA.embedding_parameters - LLAMA.final_norm_parameters - 32 * LLAMA.norm_parameters
    attention = 12 * 32 * 4096 * 4096 / 2  # half of it is masked
    flops = step_flops(LLAMA, Strategy(zero=3), 1)
    assert flops == pytest.approx(4096 * (6 * matrices + attention))
    gpt = ModelSpec.gpt(layers=24, hidden=2304, heads=24, vocab=51200, seq=2048)
    own = Strategy(recompute="full", flash_attention=False)
    executed = step_flops(gpt, own, 8) + step_flops(gpt, own, 8, recomputed=True)
    ratio = 1 + 2048 / (6 * 2304) + 51200 / (16 * 24 * 2304)
    assert executed == pytest.approx(96 * 8 * 2048 * 24 * 2304**2 * ratio)  # arXiv 2104.04473, section 5.1


# -- rotations --------------------------------------------------------------------------------------------------------


def _seconds(ranks, op, form, durations):
    """The makespan of all ranks together by rtp_ext.timeline."""
    made = schedule.schedules(ranks, op=op, **form)

    def time(rank, step):
        kind = step.compute if step.action == "compute" else step.channel if step.action == "hop" else step.action
        return durations[kind] * (0.5 if step.half else step.owners)

    events = timeline.timeline(made, compute_time=time, hop_time=time, copy_time=time)
    return max((event.end for event in events), default=0.0)


def test_what_fewer_bytes_make_of_a_backward():
    """Predictions of a layer of 4096 x 14336 with 2048 tokens on 8 GPUs, by the simulator: a win where the wire holds
    the backward up, and a loss where kernels that round and widen cost more than the wire saves."""
    layer, ways = RotatedOperation("linear", (Weight((14336, 4096)),)), {"gradient_route": "direct", "reduce_bytes": 2}
    found = {}
    for rate in (370.8e9, 25e9):
        group = Group(dataclasses.replace(H100, nccl_ring_bytes_per_s=rate), 8)

        def predict(group=group, **ways):
            return rotation_seconds(layer, 2048, group, CONSTANTS, **ways)

        eight = {"gradient_route": "direct", "gradient_travel": "int8", "travel": "int8"}
        times = predict(), predict(**ways), predict(**ways, travel="int8"), predict(**eight)
        found[rate] = [time.makespan_s[1] for time in times]
        sent = [time.durations["weight"] + time.durations["gradient"] for time in times]
        assert sent == sorted(sent, reverse=True) and sent[3] < 0.5 * sent[0], sent
        for time, narrow in ((times[1], True), (predict(gradient_route="direct"), False)):
            form = {"two_lanes": time.two_lanes[1], "pass_": "backward", "gradient_route": "direct", "narrow": narrow}
            assert not time.halves
            assert time.timeline_s[1] == pytest.approx(_seconds(8, "linear", form, time.durations), rel=1e-9)
    fast, slow = found.values()
    assert fast[0] < fast[1] < fast[2], fast
    assert slow[3] < slow[2] < 0.6 * slow[0] and slow[2] < slow[1], slow


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_rotations_take_what_the_simulator_says_of_the_executors_schedule(ranks):
    model = ModelSpec.preset("llama-3-8b")
    checked = set()
    for tokens, rate in ((8192, 370.8e9), (512, 370.8e9), (2048, 20e9)):
        cluster = dataclasses.replace(H100, nccl_ring_bytes_per_s=rate)
        for in_place in (False, True):
            parts, _ = rotations_of(model, layers=1, fused_loss=True)
            for rotation in parts:
                time = rotation_seconds(rotation, tokens, Group(cluster, ranks), CONSTANTS, in_place=in_place)
                form = {"in_place": time.in_place, "two_lanes": time.two_lanes[1], "pass_": "backward"}
                form |= {"halves": time.halves, "dgrad": time.dgrad}
                one = _seconds(ranks, time.operation, form, time.durations)
                assert time.timeline_s[1] == pytest.approx(time.chunks * one, rel=1e-9)
                assert time.makespan_s[1] >= time.timeline_s[1]
                checked.add((time.operation, time.halves, time.two_lanes[1], time.in_place))
                spoiled = {**time.durations, "wgrad": 8 * time.durations["wgrad"]}
                assert _seconds(ranks, time.operation, form, spoiled) > one  # control
    assert {operation for operation, *_ in checked} == {"linear", "embedding", "mlp", "cross_entropy"}
    if ranks > 2:
        assert any(halves for _, halves, *_ in checked) and any(two for _, _, two, _ in checked)


def test_lockstep_equals_the_simulator_and_for_large_rings_the_closed_forms():
    uneven = {"forward": 1.0, "dgrad": 1.1, "wgrad": 0.7, "weight": 0.5, "gradient": 1.9, "copy": 0.1, "add": 0.2}
    for ranks in (1, 2, 3, 6):
        for op in ("linear", "mlp"):
            for form in (
                {"pass_": "forward"},
                {"pass_": "forward", "in_place": True},
                {"pass_": "backward"},
                {"pass_": "backward", "halves": True, "route": "direct"},
                {"pass_": "forward", "route": "gather"},
                {"pass_": "backward", "route": "gather"},
            ):
                one = timeline.Lockstep(schedule.schedules(ranks, op=op, **form)[0])
                assert one.makespan(uneven) == pytest.approx(_seconds(ranks, op, form, uneven)), (ranks, op, form)
    for ranks in (16, 64):
        first = {name: schedule.schedules(ranks, op=name)[0] for name in ("linear", "mlp")}
        in_place = schedule.schedules(ranks, in_place=True)[0]
        back = {name: schedule.schedules(ranks, op=name, pass_="backward")[0] for name in ("linear", "mlp")}
        for hop in (0.0, 0.4, 1.0, 2.5):
            equal = dict.fromkeys(("forward", "dgrad", "wgrad"), 1.0) | {"weight": hop, "gradient": hop}
            equal |= {"copy": 0.25, "add": 0.25}
            slower = max(1.0, hop)
            found = {name: timeline.Lockstep(made).makespan(equal) for name, made in back.items()}
            assert timeline.Lockstep(first["linear"]).makespan(equal) == pytest.approx(1 + (ranks - 1) * slower)
            assert timeline.Lockstep(in_place).makespan(equal) == pytest.approx(ranks * slower)
            assert found["linear"] == pytest.approx(ranks + 1 + (ranks - 1) * slower)
            assert found["mlp"] == pytest.approx(ranks + ranks * slower + 0.25)
            for halves, hidden in ((False, 1.0), (True, 2.0)):
                uneven = equal | {"gradient": 2 * hop}
                made = schedule.schedules(ranks, pass_="backward", halves=halves)[0]
                shown = max(0.0, 2 * hop - hidden, hop - 2.0)
                assert timeline.Lockstep(made).makespan(uneven) == pytest.approx(2 * ranks + (ranks - 1) * shown)


def test_rotation_of_a_model_hides_its_hops_where_there_are_tokens_enough():
    def parts(tokens, **change):
        cluster = dataclasses.replace(H100, **change)
        model = ModelSpec.preset("llama-3-8b", seq=tokens)
        return estimate_time(model, cluster, Strategy(rtp=8, fused_loss=True), 8)

    many, few = parts(8192), parts(512)
    assert many.components["rotation"] < 0.02 * many.step_seconds
    assert few.components["rotation"] > 0.25 * few.step_seconds
    slow = parts(8192, nccl_ring_bytes_per_s=20e9)
    assert slow.components["rotation"] > 20 * many.components["rotation"]
    whole = estimate_time(ModelSpec.preset("llama-3-8b", seq=8192), H100, Strategy(dp=8, zero=3, fused_loss=True), 8)
    assert many.components["gemm"] == pytest.approx(whole.components["gemm"])
    two = Cluster.preset("h100-80gb", gpus=16)
    inside = estimate_time(LLAMA, two, Strategy(rtp=8, dp=2, fused_loss=True), 16)
    flat, across = (
        estimate_time(LLAMA, two, Strategy(rtp=16, route=way, fused_loss=True), 16) for way in ("ring", "auto")
    )
    assert flat.components["rotation"] > 20 * inside.components["rotation"], "every hop waits for the one between nodes"
    assert across.components["rotation"] < 0.2 * flat.components["rotation"], "on two levels one hop in eight does"
    assert across.components["rotation"] > 2 * inside.components["rotation"]
    staged = estimate_time(LLAMA, H100, Strategy(rtp=4, pp=2, fused_loss=True), 32)
    assert staged.components["bubble"] > 0 < staged.components["rotation"]


# -- published runs ---------------------------------------------------------------------------------------------------


RUNS = planner_runs.vtrain()
HALVES = planner_runs.halves(RUNS)


def test_a100_runs_and_the_half_kept_back():
    assert len(RUNS) == 55
    fitted, kept = HALVES["every second run"]  # the constants that ship are fitted to the first
    for runs in (RUNS, fitted, kept):
        found = errors_of(runs)
        assert found.mean_error < 0.10 and found.median_error < 0.05
        assert statistics.mean(regrets(runs)) < 0.08 and max(regrets(runs)) < 0.10
    wrong = dataclasses.replace(CONSTANTS, gemm_fraction=CONSTANTS.gemm_fraction / 2)  # control
    assert errors_of(RUNS, wrong).mean_error > 0.2


@pytest.mark.parametrize("half", HALVES)
def test_calibration_predicts_the_half_it_has_not_seen(half):
    start = dataclasses.replace(CONSTANTS, gemm_fraction=0.7, hbm_fraction=0.5, kernel_s=1e-5)
    seen, kept = HALVES[half]
    found = calibrate(seen, start=start)
    assert errors_of(seen, start).mean_error > 0.10
    assert found.mean_error < 0.075 and errors_of(kept, found.constants).mean_error < 0.09
    assert statistics.mean(regrets(kept, found.constants)) < 0.08
    assert found.to_dict()["measurements"] == len(seen)


def _named(run):
    return run.name


@pytest.mark.parametrize("run", planner_runs.sc21(), ids=_named)
def test_megatron_sc21(run):
    assert run.predicted == pytest.approx(run.measured, rel=0.15)


@pytest.mark.parametrize("run", planner_runs.llama3(), ids=_named)
def test_llama_3_405b(run):
    assert run.predicted == pytest.approx(run.measured, rel=0.15)


def test_llama_3_405b_without_chunks():
    """Control: the bubble is too large."""
    errors = [run.error for run in planner_runs.llama3(chunks=1) if run.cluster.gpus == 16384]
    assert len(errors) == 2 and max(errors) < -0.15


@pytest.mark.parametrize("run", planner_runs.korthikanti(), ids=_named)
def test_korthikanti_table_5(run):
    assert run.predicted == pytest.approx(run.measured, rel=0.10)


@pytest.mark.parametrize("run", planner_runs.nemo(), ids=_named)
def test_nemo(run):
    assert run.predicted == pytest.approx(run.measured, rel=0.15)


# -- files and errors -------------------------------------------------------------------------------------------------


def test_measurements_from_files(tmp_path):
    table = tmp_path / "runs.csv"
    table.write_text(
        "family,layers,hidden,heads,vocab,seq,gpu,gpus,tp,dp,global_batch,recompute,flash_attention,step_seconds,source\n"
        "gpt,24,1024,16,51200,1024,a100-80gb,4,2,2,16,full,no,0.5,mine\n"
    )
    (run,) = read_measurements(table)
    assert (run.strategy.tp, run.strategy.flash_attention, run.cluster.gpus, run.step_seconds) == (2, False, 4, 0.5)
    lines = tmp_path / "runs.jsonl"
    timed = {"model": "llama-3-8b", "gpu": "h100-80gb", "gpus": 8, "rtp": 8, "global_batch": 8, "step_ms": 900.0}
    lines.write_text(json.dumps({"benchmark": "overlap", "step_ms": None}) + "\n" + json.dumps(timed) + "\n")
    (run,) = read_measurements(lines)
    assert (run.strategy.rtp, run.step_seconds) == (8, 0.9)
    table.write_text("gpus,step_seconds\n4,0.5\n")
    with pytest.raises(ValueError, match="row 1"):
        read_measurements(table)
    with pytest.raises(ValueError, match="none"):
        read_measurements(tmp_path / "none.csv")


def test_mistakes():
    with pytest.raises(ValueError, match="at least one measurement"):
        calibrate([])
    with pytest.raises(ValueError, match="unknown constants speed"):
        calibrate(RUNS[:1], names=["speed"])
    with pytest.raises(ValueError, match="fp8"):
        estimate_time(LLAMA, Cluster.preset("a100-80gb"), Strategy(dp=8, fp8=True), 8)
    with pytest.raises(ValueError, match="heads divisible by tp"):
        estimate_time(LLAMA, H100, Strategy(tp=3), 8)
