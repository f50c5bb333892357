"""Strategies of other packages, how costs grow, and the paper's claims: what is recorded of them, with made-up runs."""

import argparse
import json
import math
import time

import compare
import plot
import pytest
import report
import torch
from growth import growth
from shared import compare_options, contestant, memory, reports
from shared.agreement import TOLERANCES
from shared.table import read_lines
from torch.multiprocessing import ProcessRaisedException

CARD = {"date": "2026-01-01T00", "commit": "abc", "device": "made up", "cores": 2, "torch": "2", "dtype": "float32"}
CARD |= {"command": "python x", "ranks": 2, "tokens": 256, "threads": 1, "direction": "step", "link": None}
CARD |= {"shape": "s", "transport": "shm", "reduce_dtype": "float32", "travel": None, "gradient_travel": None}
TIMED = {"step_ms": 100.0, "p20_ms": 90.0, "p80_ms": 130.0, "tokens_per_s": 10.0, "cores_shared": False}
TIMED |= {"forward_backward_ms": 80.0, "reference_forward_backward_ms": 64.0, "exposed_ms": 16.0, "processor_ms": 55.4}
TIMED |= {"loss_spread": 1e-7, "gradient_spread": 2e-7, "optimizer": "adamw", "rtp_ratio": 1.0}
TIMED |= {"peak_bytes": 8 << 20, "kept_bytes": 6 << 20, "pss_bytes": 9 << 20, "transient_bytes": 2 << 20}
TIMED |= {"kept_efficiency": 1.0, "peak_efficiency": 0.8}


def row(strategy: str, **more) -> dict:
    return CARD | TIMED | {"strategy": strategy, "case": f"mlp/{strategy}"} | more


FAILED = CARD | {"strategy": "deepspeed", "case": "mlp/deepspeed", "error": "ImportError: no deepspeed"}


def test_a_package_is_tried_before_it_is_timed():
    packages = ["deepspeed", "upstream", "simplefsdp"]
    args = argparse.Namespace(strategies=["rtp", *packages], tokens=[256], network=1, model="gpt")
    asked, wrong = [], {}

    def start(race, alone, ranks):
        assert (race, ranks, alone.network, alone.tokens) == ("race", 3, None, [128]), "one sequence"
        asked.append(alone.strategies)
        if "deepspeed" in alone.strategies and "deepspeed" in wrong:
            raise ProcessRaisedException("\n-- Process 1 --\nTraceback\n  File\nImportError: no deepspeed\n", 1, 7)
        return [row(name, gradient_spread=wrong.get(name, 0.0)) for name in alone.strategies]

    assert contestant.failures("race", args, 3, start) == {} and asked == [[*packages, "single"]]
    for error, told in ((2 * TOLERANCES["float32"][1], "2e-04"), (math.nan, "nan")):
        wrong |= {"deepspeed": None, "upstream": error}
        asked.clear()
        found = contestant.failures("race", args, 3, start)
        assert asked == [[*packages, "single"], *([name, "single"] for name in packages)]
        differ = f"losses differ from those of one process by 1e-07, gradients by {told}"
        assert found == {"deepspeed": "ImportError: no deepspeed", "upstream": f"it computes something else: {differ}"}
    args.strategies = ["rtp", "ddp"]
    assert contestant.failures("race", args, 3, None) == {}


def test_options_of_other_packages(tmp_path, capsys):
    base = ["--device", "cpu", "--model", "mlp-tiny", "--output", str(tmp_path / "x.jsonl")]
    for options, message in (
        (["--strategies", "deepspeed"], "expected one in which ranks train together, of torch or rtp"),
        (["--strategies", "rtp,upstream"], "expected both or neither"),
        (["--strategies", "rtp", "--upstream", str(tmp_path)], "expected both or neither"),
        (["--strategies", "rtp,upstream", "--upstream", str(tmp_path)], "expected a folder with rtp/"),
        (["--strategies", "rtp,simplefsdp", "--dtype", "bfloat16"], "simplefsdp: expected float32"),
        (["--strategies", "rtp,deepspeed", "--optimizer", "muon"], "not compared with Muon"),
    ):
        with pytest.raises(SystemExit):
            compare_options.parse_arguments([*base, *options])
        assert message in capsys.readouterr().err
    some = compare_options.parse_arguments(base).strategies
    assert "rtp" in some and not {"deepspeed", "simplefsdp", "upstream"} & set(some), "only where they are named"
    told = compare_options.parse_arguments([*base[:4], "--strategies", "rtp,deepspeed", "--machine", "made-up"])
    told.output.parent.rmdir() if not told.output.unlink() else None
    assert told.output.name == "peers.jsonl"


def test_a_strategy_that_was_not_timed_has_a_row(tmp_path, capsys):
    rows = [row("rtp"), row("ddp", step_ms=50.0), dict(FAILED)]
    args = argparse.Namespace(model="mlp", optimizer="adamw", dtype="float32", steps=2, warmup=1)
    args.output = tmp_path / "peers.jsonl"
    for each in rows:
        each |= {"backend": "gloo", "balanced_over": 4}
    compare.report(rows, args)
    told = capsys.readouterr().out
    assert "deepspeed           not timed: ImportError: no deepspeed" in told
    cases = json.loads(told.splitlines()[-1])["cases"]
    assert cases["deepspeed@R2T256"] == {"error": "ImportError: no deepspeed"} and cases["rtp@R2T256"]["step_ms"] == 100
    assert len(read_lines(args.output)) == 3
    (tmp_path / "m").mkdir()
    args.output.rename(tmp_path / "m" / "peers.jsonl")
    text = report.block("m peers mlp one-host", tmp_path)
    assert "| 256 | DeepSpeed ZeRO-3 | not timed: ImportError: no deepspeed |" in text
    assert "| 256 | DDP | 50 (90-130) |" in text and "80 (1.25) | 55 |" in text and "| 9 |" in text, "of 64 ms"
    assert report.block("m peers mlp 2gbit", tmp_path) == report.block("m peers gpt", tmp_path) == "\n"


def test_claims_stand_beside_what_was_measured(tmp_path):
    one = row("single", peak_bytes=12 << 20)
    runs = [row("rtp", peak_bytes=8 << 20), row("ddp", peak_bytes=32 << 20, tokens_per_s=20.0), one, dict(FAILED)]
    runs += [row("rtp", tokens=512, peak_efficiency=0.9), row("rtp", ranks=4, peak_efficiency=0.7)]
    used = reports.runs_of([*runs, row("ddp", hosts=2, rate="2gbit")], "mlp")
    assert len(used) == 5, "neither the failed one nor the one between hosts"
    results = {line["claim"]: line["result"] for line in reports.claims(list(used.values()))}
    assert next(result for claim, result in results.items() if "remarkably close" in claim) == (
        "R = 2: 0.80 to 0.90; R = 4: 0.70"
    )
    assert results['"85% memory save compared with DP" (8 ranks)'] == "R = 2: 75 %"
    assert results['"comparable performance to Distributed Data Parallel"'] == "R = 2: 0.50"
    assert list(results.values()).count("not measured") == 7, "nothing of fully_shard, tensor parallelism, ..., MNIST"
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "peers.jsonl").write_text("\n".join(map(json.dumps, runs)))
    assert "R = 2: 75 % |" in report.block("m paper mlp", tmp_path) and report.block("m paper gpt", tmp_path) == "\n"
    plot.main(["paper", str(tmp_path / "m" / "peers.jsonl"), "--uncommitted", "--output", str(tmp_path / "paper")])
    assert (tmp_path / "paper.png").stat().st_size > 10_000


def lines_of_growth(power: float, strategy: str = "rtp") -> list[dict]:
    costs = {f"{cost}_{kind}": None for cost in ("first_step", "step", "save", "load") for kind in ("s", "processor_s")}
    return [
        CARD
        | {"case": f"layers/{strategy}", "strategy": strategy, "sweep": "layers", "layers": layers, "parameters": 1}
        | {"shape": "9 x (Linear)", "peak_bytes": None, **costs}
        | {"convert_s": 1.0, "convert_processor_s": 0.01 * layers**power}
        for layers in (10, 100)
    ]


def test_what_grows_faster_than_the_model_is_found(tmp_path, capsys):
    assert growth.verdict(lines_of_growth(1.0)) == ({"layers/rtp convert to 100 layers, 2 ranks": 1.0}, [])
    (wrong,) = growth.verdict(lines_of_growth(1.5))[1]
    assert wrong == "layers/rtp convert to 100 layers, 2 ranks: exponent 1.50, at most 1.2 is expected"
    assert growth.verdict(lines_of_growth(1.5, "fsdp2"))[1] == [], "not ours"
    file = tmp_path / "m" / "growth.jsonl"
    file.parent.mkdir()
    file.write_text("\n".join(map(json.dumps, [*lines_of_growth(3.0), *lines_of_growth(1.5)])))
    with pytest.raises(SystemExit, match=r"exponent 1\.50"):
        growth.main(["--check", "--output", str(file)])
    assert "1.000 (10.000, 1.50) |" in report.block("m growth layers", tmp_path), "the last run"
    assert report.block("m growth ranks", tmp_path) == "\n"
    capsys.readouterr()


def test_the_proportional_set_size_is_read_while_a_step_runs():
    meter = memory.MemoryProbe(torch.device("cpu"))._meter
    meter.start()
    sizes = {}
    for name, count in (("large", 64 << 20), ("small", 1)):
        with meter.watching():
            block = torch.ones(count, dtype=torch.uint8)
            time.sleep(0.5)
            del block
        sizes[name] = meter.pss()
    meter.stop()
    assert sizes["large"] - sizes["small"] > 56 << 20, sizes
