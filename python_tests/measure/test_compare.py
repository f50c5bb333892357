"""The comparison of strategies with tiny models, and `python -m rtp_ext bench`."""

import contextlib
import dataclasses
import io
import json
import math
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import Cases, run_ranks
from shared import reports
from shared.agreement import TOLERANCES
from shared.card import KEYS, refusal_to_write
from shared.table import read_lines
from torch.distributed.device_mesh import init_device_mesh

from rtp_ext import RotationError, bench, functional, trace
from rtp_ext.__main__ import main
from rtp_ext.measure.overlap_metrics import Times

ROOT = Path(__file__).resolve().parents[2]

# -- compare.py --------------------------------------------------------------------------------------------------------


def _arguments(compare, file, *options):
    base = ["--device", "cpu", "--model", "mlp-tiny", "--tokens", "16", "--steps", "2", "--warmup", "1"]
    return compare.parse_arguments([*base, "--output", file, *options])


def _compares(rank, ranks, file):
    import compare
    from shared import models
    from shared.launch import Place
    from shared.models import GPT, WORKLOADS, Llama, Workload, random_tokens

    sizes = {"layers": 1, "hidden": 32, "heads": 4, "kv_heads": 2, "inner": 48, "vocabulary": 64}
    sample = partial(random_tokens, seq=8, vocabulary=64)
    WORKLOADS["llama-mini"] = Workload(Llama, sizes, "a Llama", sample, 8, ("kv_heads", "inner", "vocabulary"))
    place = Place(rank, ranks, torch.device("cpu"), init_device_mesh("cpu", (ranks,)))
    compare.launch = lambda worker, args, ranks: worker(place, args)
    compare.is_first = lambda: rank == 0
    cases = Cases()

    def run(*options, told=None):
        """Rank 0's output of the whole command."""
        told = told or io.StringIO()
        sys.argv = ["compare.py", *options]
        compare.parse_arguments = lambda: _arguments(SimpleNamespace(parse_arguments=parse), file, *options)
        with contextlib.redirect_stdout(told):
            compare.main()
        return told.getvalue()

    parse = compare.parse_arguments
    with cases.case("mlp"):
        new = "rtp,rtp-2rings,fsdp2,fsdp2-noreshard,hsdp,ddp,tp,single,none"
        told = run("--strategies", new)
        if rank == 0:
            lines = read_lines(Path(file))
            assert [line["strategy"] for line in lines] == new.split(",")
            _check_lines(lines, ranks)
            assert json.loads(told.splitlines()[-1])["loss_agrees"] and "exposed" in told and "options: model=" in told
    with cases.case("llama"):
        run("--model", "llama-mini", "--strategies", "rtp-fused,tp,single", "--no-memory")
        if rank == 0:
            assert len(read_lines(Path(file))) == 12
    lora = ("--model", "llama-mini", "--lora", "2", "--strategies", "fsdp2,rtp,rtp-int8,rtp-nf4")
    with cases.case("adapters around frozen weights"):
        run(*lora)
        if rank == 0:
            rows = {line["strategy"]: line for line in read_lines(Path(file))[-4:]}
            assert rows["rtp-nf4"]["frozen"] == "nf4" and rows["rtp-nf4"]["loss_spread"] < 1e-6
            assert rows["rtp-int8"]["travel"] == "int8" and rows["rtp-int8"]["loss_spread"] > 1e-5, "control"
            sent, kept = ({name: row[key] for name, row in rows.items()} for key in ("ring_bytes", "kept_bytes"))
            norms = 4 * 3 * 32 / ranks  # gathered, not sent along the ring
            assert sent["rtp"] == rows["rtp"]["closed_form_bytes"] - norms and rows["fsdp2"]["closed_form_bytes"] > 0
            assert sent["rtp-nf4"] < sent["rtp"] and kept["rtp-nf4"] < kept["rtp"] == kept["fsdp2"]
    with cases.case("control: other frozen weights"):
        right, models.FrozenWeight = models.FrozenWeight, lambda _, *rest: right("mxfp4", *rest)
        differ = pytest.raises(SystemExit, match=r"the strategies differ: losses by .*, in fsdp2@R2T16")
        with differ if rank == 0 else contextlib.nullcontext():
            run(*lora, "--no-memory")
        models.FrozenWeight = right
    with cases.case("bfloat16"):
        told = run("--dtype", "bfloat16", "--strategies", "rtp,rtp-lean,tp,fsdp2", "--no-memory")
        assert rank or ("autocast" in told and "rtp by a mixed-precision policy" in told)
    with cases.case("fewer bits on the wire"):
        fewer = ("--travel", "int8", "--reduce-dtype", "bfloat16")
        run("--strategies", "rtp,rtp-unbundled,fsdp2", *fewer, "--where", "2")
        if rank == 0:
            _check_where(read_lines(Path(file).with_name("where.jsonl")))
            lines = read_lines(Path(file))
            wide, narrow = lines[0], lines[-3]
            assert (narrow["case"], narrow["travel"], narrow["reduce_dtype"]) == ("mlp-tiny/rtp", "int8", "bfloat16")
            assert wide["travel"] is None and narrow["ring_bytes"] == lines[-2]["ring_bytes"]
            assert 0.3 < narrow["ring_bytes"] / wide["ring_bytes"] < 0.4 and lines[-1]["ring_bytes"] is None
            assert 1e-6 < narrow["loss_spread"] < 2.0**-6, "control: weights were rounded"
    with cases.case("formats of their own"):
        run("--strategies", "rtp,rtp-bf16,rtp-int8,rtp-rowwise", "--no-memory", "--steps", "1")
        if rank == 0:
            rows = {line["strategy"]: line for line in read_lines(Path(file))[-4:]}
            for name, row in rows.items():  # norms are gathered
                assert row["ring_bytes"] == pytest.approx(row["closed_form_bytes"], rel=0.02), name
            rows.pop("rtp")
            assert all(row["ring_bytes"] < 0.7 * wide["ring_bytes"] for row in rows.values()), "control"
            assert all(row["loss_spread"] > 1e-6 for row in rows.values()), "control: weights were rounded"
            assert rows["rtp-rowwise"]["recipe"] == "float8_rowwise"
    _check_agreement(cases, compare, run, rank)
    if rank == 0:
        _check_compare(cases, compare, parse, file)
        with cases.case("gpt2-small"), torch.device("meta"):
            sizes = sum(p.numel() for p in WORKLOADS["gpt2-small"].build().parameters())
            assert sizes == 124_439_808 and WORKLOADS["gpt2-small"].make is GPT
            block = WORKLOADS["llama-8b-block"].build().blocks[0]
            assert sum(p.numel() for p in block.parameters()) == 218_112_000
    cases.finish()


def _check_agreement(cases, compare, run, rank):
    make = compare.make_trainer

    def refused(change, *options):
        """Returns rank 0's differences of losses and gradients after `change` modified the first strategy's trainer."""
        told, first = io.StringIO(), options[options.index("--strategies") + 1].split(",")[0]

        def make_one(strategy, *others):
            trainer = make(strategy, *others)
            if strategy == first:
                change(trainer)
            return trainer

        compare.make_trainer = make_one
        differ = pytest.raises(SystemExit, match="the strategies differ: losses by ")
        with differ if rank == 0 else contextlib.nullcontext() as raised:
            run(*options, told=told)
        compare.make_trainer = make
        if rank > 0:
            return None
        assert json.loads(told.getvalue().splitlines()[-1], parse_constant=pytest.fail)["loss_agrees"] is False
        return tuple(float(value) for value in re.findall(r" by (\S+) \(", str(raised.value)))

    def losses(factor):
        def change(trainer):
            step = trainer.step
            trainer.step = lambda *arguments, **more: step(*arguments, **more) * factor

        return change

    def gradients(function, dimensions):
        def change(trainer):
            for parameter in trainer.model.parameters():
                if parameter.dim() in dimensions:
                    parameter.register_hook(function)

        return change

    def lost_on_one_rank(trainer):
        step = trainer.step

        def change(*arguments, **more):
            loss = step(*arguments, **more)
            for parameter in trainer.model.parameters() if rank == 1 else ():
                parameter.grad.zero_()
            return loss

        trainer.step = change

    for what, change, options, least in (
        ("losses", losses(1.0001), ("ddp,tp",), (9e-5, 0)),
        ("losses in bfloat16", losses(1.1), ("rtp,fsdp2", "--dtype", "bfloat16"), (0.05, None)),
        ("a loss that no other strategy has", losses(1.0001), ("rtp",), (9e-5, 0)),
        ("no number", losses(math.nan), ("rtp",), (math.nan, 0)),
        ("a sum, which AdamW does not tell from a mean", gradients(lambda g: 2 * g, (1, 2)), ("ddp,tp",), (0, 0.5)),
        ("a little off", gradients(lambda g: 1.001 * g, (1,)), ("ddp,tp",), (0, 9e-4)),
        ("not trained", gradients(lambda g: 0 * g, (1,)), ("ddp,tp",), (None, 0.99)),
        ("signs", gradients(lambda g: -g, (1,)), ("ddp,tp",), (None, 0.1)),
        ("places", gradients(lambda g: g.roll(1), (1,)), ("ddp,tp",), (None, 0.1)),
        ("on another rank", lost_on_one_rank, ("ddp,single",), (0, 0.99)),
    ):
        with cases.case(f"they differ: {what}"):
            found = refused(change, "--no-memory", "--strategies", *options)
            for value, bound, most in zip(found or (), least, TOLERANCES["float32"], strict=rank == 0):
                if bound == 0:  # they do not differ in that
                    assert value <= most, found
                elif bound is not None:
                    assert value >= bound or (math.isnan(value) and math.isnan(bound)), found


def _check_lines(lines, ranks):
    known = {line["strategy"]: line for line in lines}
    for line in lines:
        assert set(KEYS) <= set(line) and line["ranks"] == ranks and line["loss_spread"] < 1e-5
        kept = sum(line[f"{name}_bytes"] for name in ("parameter", "gradient", "optimizer"))
        assert line["kept_bytes"] == kept and line["forward_backward_ms"] <= line["step_ms"]
        gap = line["forward_backward_ms"] - line["reference_forward_backward_ms"]
        assert 0 < line["forward_backward_processor_ms"] <= line["processor_ms"]
        assert line["pss_bytes"] is not None
        assert line["exposed_ms"] == (None if line["strategy"] == "single" else gap)
        assert "roof_ms" not in line and "hosts" not in line, "of made hosts alone"
    forms = {line["strategy"]: line["closed_form_bytes"] for line in lines}
    assert forms["rtp"] == 1.5 * forms["ddp"] == 0.75 * forms["fsdp2"] > 0 and forms["tp"] is None
    assert known["none"]["exposed_ms"] == 0.0 and known["none"]["rtp_ratio"] > 0
    for strategy, least, most in (("rtp", 0.9, 1.0), ("tp", 0.9, 1.0), ("fsdp2", 0.9, 1.0), ("ddp", 0.4, 0.51)):
        assert least <= known[strategy]["kept_efficiency"] <= most, known[strategy]
    assert known["single"]["kept_efficiency"] == known["single"]["peak_efficiency"] == 1 / ranks
    assert known["tp"]["buffer_bytes"] is None


def _check_where(lines):
    """The parts of a recorded step add up; only strategies with a ring have parts."""
    assert [line["strategy"] for line in lines] == ["rtp", "rtp-unbundled", "fsdp2"]
    for line in lines:
        parts = [line.get(f"{name}_ms") for name in (*trace.CAUSES, "outside")]
        main, gloo = (line["threads_ms"][kind] for kind in ("main", "gloo"))
        assert line["recorded"] == 2 and main[0] > gloo[0] > 0 and main[1] >= 0 and line["interrupts_ms"] >= 0
        assert "losses" not in line and line["benchmark"] == "where" and line["step_ms"] > 0
        if line["strategy"] == "fsdp2":
            assert parts == [None] * len(parts)
            continue
        assert sum(parts) == pytest.approx(line["forward_backward_ms"]) and min(parts) >= 0, parts
        assert line["products_ms"] > 0 and line["conversions_ms"] > 0 and line["collectives_ms"] > 0
    earlier = [{**line, "date": "2026-11-01"} for line in lines]
    travel = lines[0]["asked_travel"]
    assert reports.last_where([*earlier, *lines], ["mlp-tiny", travel]) == lines
    assert reports.last_where(lines, ["mlp-tiny", "exact"]) == [], "control"


def _check_compare(cases, compare, parse, file):
    with cases.case("scaling"):
        rows = [{"strategy": "rtp", "tokens": 8, "ranks": r, "tokens_per_s": 10.0 * r**0.5} for r in (1, 4)]
        rows.append({"strategy": "tp", "tokens": 8, "ranks": 4, "tokens_per_s": 1.0})
        compare.add_scaling(rows)
        assert [row["scaling_efficiency"] for row in rows] == [1.0, 0.5, None]
    for options, message in (
        (["--steps", "0"], "at least 1"),
        (["--steps", "1", "--warmup", "0"], "at least 2 steps together"),
        (["--where", "-1"], "--where at least 0"),
        (["--lr", "nan"], "positive and finite"),
        (["--lr", "inf"], "positive and finite"),
        (["--seed", "-1"], "--seed must be"),
        (["--tokens", "0"], "at least 1"),
        (["--ranks", "0"], "at least 1"),
        (["--strategies", "rtp,zero3"], "unknown strategy 'zero3'"),
        (["--strategies", "rtp,rtp"], "expected each once"),
        (["--strategies", "rtp-fused"], "no vocabulary head"),
        (["--model", "gpt", "--tokens", "128", "--strategies", "tp"], "GPT has no parallelize"),
        (["--model", "llama-tiny", "--tokens", "100"], "not a multiple"),
        (["--model", "llama-tiny", "--tokens", "128", "--ranks", "3"], "cannot cut kv_heads 8 for 3 ranks"),
        (["--strategies", "hsdp", "--ranks", "3"], "hsdp cannot be run on 3 ranks"),
        (["--device", "cuda"], "no GPU is available"),
        (["--output", "/proc/compare.jsonl"], "cannot be written"),
        (["--model", "gpt3"], "invalid choice"),
        (["--strategies", "rtp-nf4"], "it needs --lora"),
        (["--strategies", "rtp-rowwise", "--lora", "4"], "adapters are not compared in 8 bits"),
        (["--lora", "4"], "expected a model of the transformers package, got mlp-tiny"),
        (["--model", "llama-tiny", "--lora", "4", "--tokens", "128", "--strategies", "tp"], "no plan for adapters"),
        (["--travel", "int4"], "invalid choice"),
        (["--travel", "int8", "--strategies", "ddp"], "expected an rtp strategy, got ddp"),
        (["--travel", "int8", "--strategies", "rtp,rtp-inplace"], "send copies of weights, got rtp-inplace"),
    ):
        told = io.StringIO()
        with cases.case(str(options)), contextlib.redirect_stderr(told):
            with pytest.raises(SystemExit) as ended:
                _arguments(SimpleNamespace(parse_arguments=parse), file, *options)
            assert ended.value.code == 2 and message in told.getvalue(), told.getvalue()
    with cases.case("more ranks than GPUs"), contextlib.redirect_stderr(io.StringIO()) as told:
        available, count = torch.cuda.is_available, torch.cuda.device_count
        torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 2
        with pytest.raises(SystemExit):
            _arguments(SimpleNamespace(parse_arguments=parse), file, "--device", "cuda", "--ranks", "2,4")
        assert "4 ranks need as many GPUs, this machine has 2" in told.getvalue()
        torch.cuda.is_available, torch.cuda.device_count = available, count


def test_what_a_strategy_is_given_of_what_travels():
    import compare

    asked = SimpleNamespace(travel="int8", gradient_route="direct", gradient_travel=None, reduce_dtype="bfloat16")
    exact = {"travel": None, "gradient_route": None, "gradient_travel": None, "reduce_dtype": "float32"}
    assert compare._ways("rtp", asked) == vars(asked)
    assert compare._ways("rtp-nf4", asked) == {**exact, "frozen": "nf4"}
    assert compare._ways("rtp-exact", asked) == compare._ways("ddp", asked) == exact
    assert compare._ways("fsdp2", asked) == {**exact, "reduce_dtype": "bfloat16"}


def test_strategies_agree_and_absurd_wishes_are_refused(tmp_path):
    pytest.importorskip("transformers")
    run_ranks(_compares, 2, str(tmp_path / "made" / "compare.jsonl"), timeout=300.0)


def test_a_results_file_is_tried_before_the_run(tmp_path):
    assert refusal_to_write(tmp_path / "new" / "r.jsonl") is None
    (tmp_path / "file").touch()
    assert "cannot be written" in refusal_to_write(tmp_path / "file" / "r.jsonl")


LAUNCHED_TWICE = """
import argparse, sys
sys.path.insert(0, {benchmarks!r})
from shared.launch import gather, launch

def worker(place, args):
    return gather(float(place.rank + args.add), place).tolist()

for add in (0, 10):
    assert launch(worker, argparse.Namespace(device="cpu", threads=1, add=add), 2) == [add, add + 1]
print("twice")
"""


def test_torchrun_serves_several_launches(tmp_path):
    script = tmp_path / "twice.py"
    script.write_text(LAUNCHED_TWICE.format(benchmarks=str(ROOT / "benchmarks")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0 and told.stdout.count("twice") == 2, told.stderr


# -- python -m rtp_ext bench -------------------------------------------------------------------------------------------


TINY = dataclasses.replace(
    bench.choose(device="cpu", tokens=[8, 4], seconds=0), rows=48, columns=16, width=16, inner=32, batch=8
)


NARROW = dataclasses.replace(TINY, travel="int8", gradient_route="direct", reduce_dtype=torch.bfloat16)


def _benches(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    return bench.measure(TINY, mesh), bench.measure(NARROW, mesh)


def test_bench_on_two_ranks():
    found, narrow = zip(*run_ranks(_benches, 2), strict=True)
    assert set(narrow[0]["training"]) == set(found[0]["training"])
    said = "weights travel in int8; gradients in bfloat16, route direct"
    assert said in bench.table(NARROW, narrow[0]) and "travel" not in bench.table(TINY, found[0])
    assert [list(each["layers"]) for each in found] == [[4, 8]] * 2 and found[0]["transport"] == "shm"
    assert found[0]["layers"] == found[1]["layers"], "the slowest rank's"
    training = found[0]["training"]
    assert training["rtp"]["kept_bytes"] == training["fully_shard"]["kept_bytes"] < training["DDP"]["kept_bytes"]
    said = bench.verdict(TINY, found[0])
    assert said.startswith("verdict: at 8 tokens") and "of fully_shard's" in said
    lines = bench.table(TINY, found[0]).splitlines()
    assert len(lines) == 12 and f"torch {torch.__version__}" in lines[0]


def test_bench_of_an_emulated_ring(monkeypatch):
    plan = dataclasses.replace(TINY, emulated=True, ranks=4)
    found = bench.run(plan)
    assert found["training"] is None and found["transport"] == "emulated"
    assert "One cpu stood for the ring" in bench.verdict(plan, found) and "one process stands" in plan.describe()
    right = functional.rotated_linear
    monkeypatch.setattr(functional, "rotated_linear", lambda x, *rest, **more: right(x * (1 + 1e-3), *rest, **more))
    with pytest.raises(RotationError, match="nothing is timed"):
        bench.run(plan)
    monkeypatch.setattr(bench, "choose", lambda **_: plan)
    assert main(["bench"]) == 1
    monkeypatch.setattr(functional, "rotated_linear", right)
    assert main(["bench"]) == 0


def test_verdicts():
    def found(costs, noise=0.5):
        layers = {tokens: Times(100.0, 100.0, 50.0, 100.0 * cost, 150.0, 100.0) for tokens, cost in costs.items()}
        return {"layers": layers, "noise": dict.fromkeys(layers, noise), "training": None, "transport": "shm"}

    free = found({8: 1.3, 64: 1.04, 512: 1.01})
    assert bench.free_from(free["layers"], free["noise"]) == 64
    assert "within 5% of one whole GEMM) from 64 tokens" in bench.verdict(TINY, free)
    assert bench.free_from(free["layers"], {8: 1.0, 64: 60.0, 512: 1.0}) == 512, "what cannot be told is not free"
    never = found({8: 1.0, 512: 1.2})
    assert bench.free_from(never["layers"], never["noise"]) is None
    assert "not free here up to 512" in bench.verdict(TINY, never)
    harmful = bench.verdict(TINY, found({8: 1.7}))
    assert "no communication is hidden" in harmful
    assert "100% of what can be hidden" in bench.verdict(TINY, found({8: 0.99}))
    more_than_there_is = {8: Times(100.0, 100.0, 50.0, 20.0, 150.0, 100.0)}  # e_hide 2.6
    for layers, noise in ((more_than_there_is, 0.5), (found({8: 1.7})["layers"], 40.0)):
        each = {**found({8: 1.0}), "layers": layers, "noise": {8: noise}, "backend": "gloo"}
        assert "cannot be told" in bench.verdict(TINY, each) and "cannot tell" in bench.table(TINY, each)
        assert "%" not in bench.table(TINY, each)
    for noise, free in ((60.0, False), (20.0, False), (4.0, True)):
        said = bench.verdict(TINY, found({8: 1.0}, noise=noise))
        assert ("cannot be told" in said) == (not free) and ("Rotation is free" in said) == free, said
    assert "Rotation is not free" in bench.verdict(TINY, found({8: 3.0}, noise=20.0)), (
        "noise is less than what it costs"
    )
    bench.check_losses({"a": [1.0, 2.0], "b": [1.00005, 2.0]})
    for wrong in ([1.0, 2.001], [1.0, float("nan")]):
        with pytest.raises(RotationError, match="equal losses at step 1"):
            bench.check_losses({"a": [1.0, 2.0], "b": wrong})


def test_bench_chooses_and_refuses(capsys, monkeypatch):
    monkeypatch.setattr(bench.os, "sched_getaffinity", lambda pid: {0, 1})
    assert (bench.choose(gpus=4).ranks, bench.choose(gpus=4).emulated) == (4, False)
    assert (bench.choose(gpus=1).ranks, bench.choose(gpus=1).emulated) == (4, True)
    assert bench.choose(gpus=6).ranks == 4, "what divides the rows"
    assert bench.choose(gpus=1, gradient_travel="int8").ways == {"gradient_route": "direct", "gradient_travel": "int8"}
    assert bench.choose(gpus=0).device == "cpu" and "TAKE TURNS" in bench.choose(gpus=0, ranks=4).describe()
    for requested, message in (
        ({"ranks": 8, "gpus": 2}, "8 ranks need as many GPUs, this machine has 2"),
        ({"ranks": 1, "gpus": 0}, "at least 2 ranks"),
        ({"ranks": 5, "gpus": 0}, "which divide"),
        ({"ranks": 4096, "gpus": 0}, "at most 16 ranks for each of 2 cores"),
        ({"device": "cuda", "gpus": 0}, "found none"),
        ({"seconds": 11.0, "gpus": 0}, "0 to 10 seconds"),
        ({"travel": "int4", "gpus": 0}, "travel to be None"),
        ({"gradient_route": "chain", "gradient_travel": "int8", "gpus": 0}, "gradient_route direct where"),
    ):
        with pytest.raises(ValueError, match=message):
            bench.choose(**requested)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--device", "cpu", "--ranks", "1"])
    assert ended.value.code == 2 and "at least 2 ranks" in capsys.readouterr().err
