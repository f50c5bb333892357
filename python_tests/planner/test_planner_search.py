"""The search for plans, its command, and when rotation wins."""

import csv
import dataclasses
import io
import itertools
import json
import re
import time

import pytest
from planner import planner_runs

from rtp_ext.__main__ import main
from rtp_ext.command_line import WIDTH
from rtp_ext.planner import (
    Cluster,
    ModelSpec,
    Strategy,
    estimate_memory,
    estimate_time,
    search,
    smallest_cluster,
)
from rtp_ext.planner.constants import constants
from rtp_ext.planner.memory import states
from rtp_ext.planner.plans import when
from rtp_ext.planner.plans.differences import differences, differences_line
from rtp_ext.planner.plans.search import allocated_bytes, limit_bytes
from rtp_ext.planner.plans.when import FAMILIES, LINKS, compare, contenders, when_table

TIE = 1 + constants()["search"]["tie_fraction"]["value"]
H100 = Cluster.preset("h100-80gb")
LLAMA = ModelSpec.preset("llama-3-8b", seq=4096)


def _command(capsys, *arguments):
    try:
        status = main(["plan", *arguments])
    except SystemExit as ended:
        status = ended.code
    told = capsys.readouterr()
    return status, told.out, told.err


def test_llama_405b_on_1024_gpus_within_five_seconds_of_one_core():
    model, cluster = ModelSpec.preset("llama-3-405b"), Cluster.preset("h100-80gb", gpus=1024)
    start = time.process_time()
    plans = search(model, cluster, global_batch=2048, seq=8192)
    assert time.process_time() - start < 5.0
    assert len(plans) == 10
    for plan in plans:
        assert plan.strategy.gpus == 1024 and plan.memory.verdict == "fits" and plan.memory.global_batch == 2048
        plan.strategy.check(model, cluster, 2048)
        assert plan.binding and plan.strategy.tp <= 8
    seconds = [plan.step_seconds for plan in plans]
    assert seconds == sorted(seconds)
    for index, plan in enumerate(plans):
        leader = plans[plan.rank - 1]
        assert leader.rank == plan.rank and plan.step_seconds <= leader.step_seconds * TIE
        assert plan.tied == (sum(other.rank == plan.rank for other in plans) > 1)
        if index and plan.rank != plans[index - 1].rank:
            assert plan.rank == index + 1 and plan.step_seconds > plans[plans[index - 1].rank - 1].step_seconds * TIE
    told = json.loads(json.dumps(plans[0].to_dict()))
    assert {"rank", "tied", "binding", "time", "peak_allocated_bytes"} <= set(told)


def test_search_misses_nothing_of_its_space():
    """Against all combinations of degrees, one by one."""
    cluster, batch, found = H100, 16, []
    for tp, pp, rtp, dp in itertools.product((1, 2, 4, 8), repeat=4):
        if tp * pp * rtp * dp != 8:
            continue
        for zero, micro_batch, recompute, bundle, chunks in itertools.product(
            (0, 1, 3), (1, 2, 4, 8, 16), ("none", "selective", "full"), (True, "recompute"), (1, 2, 4)
        ):
            if bundle == "recompute" and (rtp == 1 or recompute != "none"):
                continue
            more = {"schedule": "interleaved", "interleave": chunks} if chunks > 1 else {}
            try:
                plan = Strategy(
                    dp=dp,
                    tp=tp,
                    pp=pp,
                    rtp=rtp,
                    zero=zero,
                    micro_batch=micro_batch,
                    recompute=recompute,
                    bundle=bundle,
                    sequence_parallel=tp > 1,
                    fused_loss=True,
                    **more,
                )
                plan.check(LLAMA, cluster, batch)
            except ValueError:
                continue
            if allocated_bytes(LLAMA, plan, batch) <= limit_bytes(cluster):
                found.append((estimate_time(LLAMA, cluster, plan, batch).step_seconds, plan))
    best, _ = min(found, key=lambda pair: pair[0])
    plans = search(LLAMA, cluster, global_batch=batch, top=20)
    assert plans[0].step_seconds == pytest.approx(best)
    assert any(plan.strategy.rtp > 1 for plan in plans) and any(plan.strategy.zero == 3 for plan in plans)
    tight = [plan for plan in plans if plan.binding.startswith("memory")]
    for plan in tight:  # the plans that are reported as faster are faster, and do not fit
        change = dict([plan.binding.split()[1].split("=")])
        values = {"yes": True, "none": "none"}
        wanted = {key: values[v] if v in values else int(v) for key, v in change.items()}
        other = dataclasses.replace(plan.strategy, **wanted)
        assert estimate_time(LLAMA, cluster, other, batch).step_seconds < plan.step_seconds
        assert estimate_memory(LLAMA, cluster, other, batch).verdict != "fits"
    assert tight


def test_plans_are_compared_like_with_like(monkeypatch, capsys):
    """The same loss head for all plans of a search, and for the fewest GPUs. The output names other differences."""
    plans = search(LLAMA, H100, global_batch=16, top=30)
    strategies = [plan.strategy for plan in plans]
    assert {plan.rtp > 1 for plan in strategies} == {True, False}
    assert {plan.effective_loss for plan in strategies} == {"fused"}
    assert smallest_cluster(LLAMA, H100)[1].effective_loss == "fused"
    unlike = differences(strategies)
    assert set(unlike) == {"stack", "recompute"} and set(unlike["stack"]) == {"megatron", "torch"}
    arguments = ["--model", "llama-3-8b", "--seq", "4096", "--gpus", "8", "--global-batch", "16", "--top", "30"]
    _, out, _ = _command(capsys, *arguments)
    assert " ".join(out.split()).endswith(differences_line(strategies))
    _, out, _ = _command(capsys, *arguments, "--json")
    assert json.loads(out)["differences"] == unlike


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, {}),
        ({"micro_batch": 2}, {}),
        ({"fused_loss": True}, {"loss": ["eager", "fused"]}),
        ({"recompute": "full"}, {"recompute": ["none", "full"]}),
        ({"compiled": True}, {"compiled": ["False", "True"]}),
        ({"param_dtype": "fp16"}, {"param_dtype": ["bf16", "fp16"]}),
    ],
)
def test_differences_of_plans_are_told(capsys, change, told):
    ring, sharded = Strategy(rtp=8), Strategy(dp=8, zero=3, **change)
    assert differences([ring, sharded]) == told
    plan = ",".join(["zero=3", *(f"{key}={'yes' if value is True else value}" for key, value in change.items())])
    arguments = ["--model", "llama-3-8b", "--gpus", "8", "--global-batch", "16"]
    status, out, _ = _command(capsys, *arguments, "--plan", "rtp=8", "--plan", plan)
    assert status == 0
    assert ("these plans differ in" in out) is bool(told)
    for name, (one, other) in told.items():
        assert out.rstrip().endswith(f"these plans differ in: {name} ({one}, {other})")


def test_what_rotation_is_held_against_recomputes_as_it_does(monkeypatch):
    """The search tries every family of `--when` with every recomputation; all plans have the same loss and stack."""
    tried, plain = {}, when.estimate_time

    def noted(model, cluster, strategy, batch):
        tried.setdefault((strategy.rtp > 1, strategy.tp, strategy.pp), []).append(strategy)
        return plain(model, cluster, strategy, batch)

    monkeypatch.setattr(when, "estimate_time", noted)
    monkeypatch.setattr(when, "limit_bytes", lambda cluster: float("inf"))
    compare("llama-3-8b", 8, "NVLink", 1024)
    assert {(False, 1, 1), (True, 1, 1), (False, 8, 1), (False, 2, 4), (True, 2, 1)} <= set(tried)
    for way, plans in tried.items():
        assert {plan.recompute for plan in plans} == {"none", "selective", "full"}, way
    unlike = differences([plan for plans in tried.values() for plan in plans])
    assert set(unlike) == {"recompute"}, unlike
    rings, groups = {plan.rtp for plan in tried[True, 1, 1]}, {plan.dp // plan.replicate for plan in tried[False, 1, 1]}
    assert rings == groups == {4, 8}
    monkeypatch.undo()
    cell = compare("llama-3-8b", 8, "NVLink", 8192)
    assert cell.plans["fsdp"].strategy.recompute == "selective", "full would be slower, and none does not fit"


def test_memory_of_few_layers_and_of_the_end_stages_is_that_of_all(monkeypatch):
    for name, ranks, bundle in (("gpt-3-small", 3, True), ("llama-3-8b", 4, False), ("mixtral-8x7b", 2, True)):
        model = dataclasses.replace(ModelSpec.preset(name), layers=7)
        plan = Strategy(rtp=ranks, bundle=bundle, fused_loss=True)
        quick = states.rotation_bytes(model, plan, 0)
        with monkeypatch.context() as patched:
            patched.setattr(states, "_FEW_LAYERS", 99)
            states._rotation_bytes.cache_clear()
            assert states.rotation_bytes(model, plan, 0) == quick
            states._rotation_bytes.cache_clear()
    for plan in (
        Strategy(pp=4, dp=2, zero=1),
        Strategy(pp=8, schedule="interleaved", interleave=4),
        Strategy(pp=4, rtp=2),
    ):
        whole = estimate_memory(LLAMA, H100, plan, 32)
        assert allocated_bytes(LLAMA, plan, 32, H100) == whole.peak_allocated_bytes


def test_smallest_cluster():
    big = Cluster.preset("h100-80gb", gpus=1024)
    sized, plan = smallest_cluster(LLAMA, big)
    assert plan.gpus == sized.gpus <= 8 and estimate_memory(LLAMA, sized, plan).verdict == "fits"
    states_alone = 16 * LLAMA.parameters / 64e9
    assert sized.gpus >= states_alone
    sized, plan = smallest_cluster(ModelSpec.preset("llama-3-70b"), big)
    assert sized.gpus % 8 == 0 and estimate_memory(ModelSpec.preset("llama-3-70b"), sized, plan).verdict == "fits"
    with pytest.raises(ValueError, match="up to 4 GPUs"):
        smallest_cluster(ModelSpec.preset("llama-3-405b"), big, largest=4)


def test_search_ranks_runs_as_they_were_measured():
    """The plan predicted to be fastest is, on average over model sizes, within 8 % of the fastest measured (vTrain)."""
    sizes: dict = {}
    for run in planner_runs.vtrain():
        cluster = Cluster.preset("a100-80gb", gpus=run.cluster.gpus)  # as a user would, without the runs' own network
        plan = dataclasses.replace(run.strategy, reduce_dtype=Strategy().reduce_dtype)
        predicted = estimate_time(run.model, cluster, plan, run.global_batch).step_seconds
        sizes.setdefault((run.cluster.gpus, run.model.hidden), []).append((predicted, run.step_seconds))
    fastest = {size: min(measured for _, measured in runs) for size, runs in sizes.items()}
    regrets = [min(runs)[1] / fastest[size] - 1 for size, runs in sizes.items()]
    assert len(sizes) == 4 and sum(regrets) / len(regrets) < 0.08
    slowest = [max(measured for _, measured in runs) / fastest[size] - 1 for size, runs in sizes.items()]
    assert sum(slowest) / len(slowest) > 0.5  # control: a wrong choice costs much


def test_search_command(tmp_path, capsys):
    arguments = ["--model", "llama-3-8b", "--seq", "4096", "--gpus", "8", "--global-batch", "16", "--top", "3"]
    status, out, err = _command(capsys, *arguments)
    assert (status, err) == (0, "") and max(map(len, out.splitlines())) <= WIDTH
    assert len(re.findall(r"^ +\d+=? +[\d.]+ +\d+ ", out, re.MULTILINE)) == 3
    for column in ("rank", "step s", "TFLOP/s/GPU", "compute s", "exposed communication s", "bubble s", "memory GB"):
        assert column in out
    plans = search(LLAMA, H100, global_batch=16, top=3)
    assert f"{plans[0].step_seconds:.4g}" in out and plans[0].binding in " ".join(out.split())
    status, out, _ = _command(capsys, *arguments, "--json")
    told = json.loads(out)["plans"]
    assert [plan["rank"] for plan in told] == [plan.rank for plan in plans]
    status, out, _ = _command(capsys, *arguments, "--csv")
    assert len({row["plan"] for row in csv.DictReader(io.StringIO(out))}) == 3
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plans.png"
    status, out, _ = _command(capsys, *arguments, "--explain", "--plot", str(picture))
    assert status == 0 and "time of a step" in out and picture.stat().st_size > 5000


def test_questions_and_what_has_no_answer(tmp_path, capsys):
    status, out, _ = _command(capsys, "--model", "llama-3-8b", "--min-gpus")
    assert status == 0 and "x h100-80gb, with" in out and "fits: " in out
    status, out, err = _command(capsys, "--model", "llama-3-405b", "--gpus", "1")
    assert (status, out, err.count("\n")) == (1, "", 1) and "no plan" in err and "--min-gpus" in err
    assert "Training adapters" not in err
    table = tmp_path / "runs.csv"
    timed = [(run.strategy, 1e3 * run.step_seconds) for run in planner_runs.vtrain() if run.cluster.gpus == 64]
    plans = [(f"{plan.tp},{plan.dp},{plan.pp},{plan.micro_batch}", milliseconds) for plan, milliseconds in timed]
    lines = [f"gpt,30,3072,32,51200,2048,a100-80gb,64,{plan},512,full,no,{ms}" for plan, ms in plans]
    head = "family,layers,hidden,heads,vocab,seq,gpu,gpus,tp,dp,pp,micro_batch,global_batch,recompute,flash_attention"
    table.write_text("\n".join([f"{head},step_ms", *lines]) + "\n")
    status, out, err = _command(capsys, "--calibrate", str(table))
    told = json.loads(out)
    assert (status, err) == (0, "") and told["fitted"]["measurements"] == 7 and told["kept_back"]["measurements"] == 6
    assert told["fitted"]["mean_error"] <= told["before"]["mean_error"] * 1.5


def test_what_fits_only_with_the_memory_of_the_host_is_proposed(capsys):
    cluster = Cluster.preset("rtx-4090-24gb", gpus=4)
    plans = search(ModelSpec.preset("llama-3-8b"), cluster, global_batch=4)
    assert plans and all(plan.strategy.offload and plan.memory.verdict == "fits" for plan in plans)
    values = ModelSpec.preset("llama-3-8b").parameters
    assert plans[0].memory.host_bytes == pytest.approx(16 * values / 4, rel=1e-3)  # float32, AdamW
    out = _command(capsys, "--model", "llama-3-8b", "--gpu", "rtx-4090-24gb", "--gpus", "4")[1]
    assert "offload=yes" in out and f" + {plans[0].memory.host_bytes / 1e9:.2f} " in out
    on_gpus = search(LLAMA, H100, global_batch=16)
    assert not any(plan.strategy.offload or plan.memory.host_bytes for plan in on_gpus), "control: where others fit"
    with pytest.raises(ValueError, match="expected pp 1 with offload"):
        Strategy(dp=2, pp=2, zero=3, offload=True)
    unknown = dataclasses.replace(cluster, host_bytes_per_s=0.0)
    assert not search(ModelSpec.preset("llama-3-8b"), unknown, global_batch=4), "control: rates of the host unknown"


def test_adapters_are_proposed_where_nothing_else_fits_and_missing_rings_have_a_reason(tmp_path, capsys):
    small = tmp_path / "small.json"
    small.write_text(json.dumps({"base": "rtx-4090-24gb", "name": "no host", "host_bytes_per_s": 0.0}))
    status, _, err = _command(capsys, "--model", "llama-3-8b", "--cluster", str(small), "--gpus", "4")
    assert status == 1 and "on the GPUs alone" in err and "frozen=nf4" in err and "lora_rank=16" in err
    arguments = ("--model", "llama-3-8b", "--gpus", "64", "--top", "1")
    told = " ".join(_command(capsys, *arguments)[1].split())
    seconds = float(re.search(r"no ring among them: the fastest takes ([\d.]+) s", told)[1])
    rings = [
        p
        for p in search(ModelSpec.preset("llama-3-8b"), Cluster.preset("h100-80gb", gpus=64), global_batch=64, top=99)
        if p.strategy.rtp > 1
    ]
    assert seconds == pytest.approx(rings[0].step_seconds, rel=1e-3)


def test_hosts_without_gpus():
    """Their plans run on torch, and hold what the same plans hold on GPUs but for context and communicators."""
    model, cluster = ModelSpec.preset("llama-3-8b"), Cluster.preset("xeon-8452y-512gb", gpus=8)
    assert (cluster.cpus, cluster.gpus_per_node, cluster.offloads) == (True, 2, False)
    plans = search(model, cluster, global_batch=64, top=40)
    strategies = [plan.strategy for plan in plans]
    assert {strategy.effective_stack for strategy in strategies} == {"torch"}
    assert any(strategy.rtp == 8 for strategy in strategies) and any(strategy.zero == 1 for strategy in strategies)
    ring = Strategy(rtp=8, fused_loss=True, gradient_route="direct")  # asked for: no plan of whole blocks on GPUs
    on_gpus = estimate_memory(model, dataclasses.replace(cluster, cpus=False), ring).stages[0].components
    assert on_gpus["context_and_communicators"] == 2e9
    here = estimate_memory(model, cluster, ring).stages[0].components
    assert here == {**on_gpus, "context_and_communicators": 0.0}
    for refused in (
        lambda: Strategy(dp=8, zero=1).check(model, cluster),
        lambda: Cluster.preset("xeon-8452y-512gb", link="pcie"),
        lambda: when.links_of("xeon-8452y-512gb"),
    ):
        with pytest.raises(ValueError, match=r"xeon-8452y-512gb.* sockets of CPUs"):
            refused()


def test_when_rotation_wins():
    families = {}
    for family, plan in contenders(64):
        families.setdefault(family, []).append(plan)
        assert plan.gpus == 64 and plan.effective_stack == "torch" and family in FAMILIES
    assert set(families) == set(FAMILIES)
    fast, slow = (compare("llama-3-8b", 8, link, 8192) for link in LINKS[:2])
    for cell in (fast, slow):
        times = {name: plan.step_seconds for name, plan in cell.plans.items() if plan}
        assert cell.winner == "tie" or cell.winner == min(times, key=times.get)
        rotated = min(times[name] for name in times if name.startswith("rtp"))
        others = min(times[name] for name in times if not name.startswith("rtp"))
        assert cell.advantage == pytest.approx(others / rotated)
    assert slow.plans["rtp"].step_seconds > fast.plans["rtp"].step_seconds
    lines = when_table([fast, slow]).splitlines()
    assert "Predictions" in lines[5] and "8192" in lines[2] and max(map(len, lines[5:])) <= WIDTH
    assert len({line.count("|") for line in lines[:4]}) == 1
