"""benchmarks/gpu/first_day.sh, as far as a machine without a GPU goes: its steps, its summary, its kit."""

import argparse
import json
import os
import re
import runpy
import shlex
import shutil
import struct
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch
from gpu import card, emulated_step, expected, host_times, summary, sums
from gpu.expected import Expected
from gpu.kit import prune_fatbin
from shared import card as shared_card

from rtp_ext import _native

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {"main": 530, "more": 270, "ranks": 515}
SUMMARY = 6  # seconds, at the end
H100 = expected.cluster_of("NVIDIA H100 80GB HBM3")


def first_day(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "benchmarks/gpu/first_day.sh", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "GPUS": "8", "KIT": "/nowhere", **environment},
    )


def steps(mode: str, out: Path) -> tuple[list[int], dict[str, list[str]]]:
    """The seconds of a mode's steps, and their commands."""
    done = first_day("--dry-run", mode, str(out))
    assert done.returncode == 0, done.stderr
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    return [int(line[1]) for line in lines if line[0] == "share"], {
        line[1]: line[2:] for line in lines if line[0] == "step"
    }


class Parsed(Exception):
    pass


def test_every_command_exists_and_the_seconds_add_up(tmp_path, monkeypatch):
    real = argparse.ArgumentParser.parse_args

    def parse(self, args=None, namespace=None):
        real(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    scripts, tests = set(), set()
    for mode, limit in LIMITS.items():
        seconds, commands = steps(mode, tmp_path / "out")
        assert sum(seconds) + SUMMARY == limit and min(seconds) > 0, mode
        assert not (tmp_path / "out").exists()
        names = list(commands)
        assert names[:3] == ["warm", "import", "card"]
        for command in commands.values():
            tests |= {word for word in command if word.startswith("python_tests/gpu")}
            number = next(
                (n for n, word in enumerate(command) if re.match(r"(benchmarks|python_tests)/.*py$", word)), 0
            )
            if number and command[number - 1] == "python3" and not command[number].endswith("gpu/card.py"):
                options = [str(tmp_path / Path(word).name) if word.endswith(".jsonl") else word for word in command]
                monkeypatch.setattr(sys, "argv", options[number:])
                with pytest.raises(Parsed):
                    runpy.run_path(str(ROOT / command[number]), run_name="__main__")
                scripts.add(command[number])
        if mode == "main":
            order = [
                "ranks",
                "sums",
                "groups",
                "tests",
                "host",
                "overlap",
                "emulated_step",
                "graphs",
                "kernels",
                "train_single",
            ]
            assert [name for name in names if name in order] == order
    assert {"benchmarks/overlap.py", "benchmarks/gpu/hops.py", "python_tests/kernels/kernel_sweep.py"} <= scripts
    assert len(scripts) >= 10
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *sorted(tests)]
    done = subprocess.run(collect, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0 and len(tests) > 20, done.stdout[-2000:] + done.stderr[-2000:]


def test_what_is_not_known_is_refused(tmp_path):
    for arguments in ((), ("everything",), ("--dry-run", "host")):
        done = first_day(*arguments)
        assert done.returncode == 2 and "main|more|ranks" in done.stdout
    wrong = first_day("main", str(tmp_path), SCALE="1.5")
    assert wrong.returncode == 2 and "whole number as SCALE, got 1.5" in wrong.stderr
    one = first_day("ranks", str(tmp_path), PYTHON=str(stub(tmp_path, "")), GPUS="1")
    assert one.returncode == 2 and "needs at least 2 GPUs, this machine has 1" in one.stderr


def stub(folder: Path, failing: str) -> Path:
    """A Python that runs the summary alone. Steps whose arguments match `failing` write a line of results, and fail."""
    file = folder / "python"
    file.write_text(
        f"""#!/usr/bin/env bash
case "$*" in
*gpu/summary.py*) exec {sys.executable} "$@" ;;
*time.sleep*) exec sleep 1 ;;
{failing or "nothing"})
  echo '{{"benchmark": "sums", "case": "a line of a step that fails"' >>"{folder}/out/results.jsonl"
  echo "this step fails"
  exit 7 ;;
esac
"""
    )
    file.chmod(0o755)
    return file


def test_a_failing_step_stops_nothing_and_what_is_known_is_kept(tmp_path):
    done = first_day("main", str(tmp_path / "out"), PYTHON=str(stub(tmp_path, "*sums.py*|*overlap.py*")))
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    rows = [line.split("\t") for line in (out / "steps.tsv").read_text().splitlines()]
    status = {name: code for name, code, *_ in rows}
    assert status.pop("sums") == status.pop("overlap") == "7"
    sanitized = {name: status.pop(name) for name in ("memcheck", "racecheck", "memcheck_layer")}
    assert set(sanitized.values()) == {"0" if shutil.which("compute-sanitizer") else "missing"}
    assert set(status.values()) == {"0"} and {"import", "tests", "memory", "ranks", "train_single"} <= set(status)
    assert all(int(most) <= LIMITS["main"] for *_, most in rows)
    assert "sums: status 7" in done.stdout and "this step fails" in done.stdout
    assert re.search(r"^train_single +0 ", (out / "summary.txt").read_text(), re.MULTILINE)
    with tarfile.open(out / "logs.tar.gz") as logs:
        assert {"logs/sums.log", "logs/train_single.log"} <= set(logs.getnames())
    again = first_day("main", str(out), PYTHON=str(stub(tmp_path, "")), ONLY="^(sums|host)$")
    assert again.returncode == 0, again.stderr
    names = [line.split("\t")[0] for line in (out / "steps.tsv").read_text().splitlines()]
    assert names == ["warm", "import", "card", "sums", "host"]


def test_a_run_that_is_ended_ends_its_step_and_keeps_what_is_known(tmp_path):
    slow = stub(tmp_path, "nothing")
    slow.write_text(
        slow.read_text().replace("nothing)", f"*sums.py*) echo $$ >{tmp_path}/pid; exec sleep 600 ;;\nnothing)")
    )
    command = ["bash", "benchmarks/gpu/first_day.sh", "main", str(tmp_path / "out")]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "KIT": "/nowhere", "PYTHON": str(slow)}, stdout=subprocess.DEVNULL
    ) as run:
        until = time.monotonic() + 60
        while not (tmp_path / "pid").exists() and time.monotonic() < until:
            time.sleep(0.05)
        run.terminate()
        assert run.wait(60) == 143
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists(), "the step still runs"
    assert re.search(r"^card +0 ", (tmp_path / "out" / "summary.txt").read_text(), re.MULTILINE)


def test_steps_end_with_their_seconds(tmp_path):
    """With no seconds no step starts, and a missing extension ends the run, with its results kept."""
    done = first_day("more", str(tmp_path / "out"), PYTHON=str(stub(tmp_path, "")), SCALE="0")
    assert done.returncode == 1
    rows = [line.split("\t")[:2] for line in (tmp_path / "out" / "steps.tsv").read_text().splitlines()]
    assert rows == [[name, "no time"] for name in ("warm", "import", "import_again", "build")]
    assert "no time" in (tmp_path / "out" / "summary.txt").read_text()
    assert Path(_native._C.__file__).exists(), "an extension that stands here is not removed"


# -- the summary -------------------------------------------------------------------------------------------------------


def test_verdicts():
    time = Expected(10.0, 20.0)
    assert [time.verdict(value) for value in (9.5, 21.0, 5.0, 30.0)] == [
        "as predicted", "as predicted", "better", "worse by 50 %",
    ]  # fmt: skip
    share = Expected.ratio(0.8, less_is_better=False)
    assert [share.verdict(value) for value in (0.79, 0.9, 0.4)] == ["as predicted", "better", "worse by 50 %"]


def lines_at(factor: float) -> list[dict]:
    """A line of each benchmark; each figure is `factor` times as bad as predicted."""
    told = {"device": "NVIDIA H100 80GB HBM3", "ranks": 8, "spread": 1.1}
    layer = expected.overlap(H100, 14336, 4096, 8192, 8, "step")
    split, roofline = layer["split"].least * factor, layer["roofline"].least / factor
    rate = expected.kernel_gb_per_s(H100).least / factor
    step = expected.step_ratio(H100, "rtp", 4, 32768, 2048, group=1).least * factor
    lines = [
        {"benchmark": "host_times", "link": "ce-local", "host_us_per_hop": expected.hop_us("ce").most * factor},
        {"benchmark": "sums", "case": "k 1792", "shape": "8192x4096", "k": 1792,
         "ratio": expected.sum_ratio(H100, 1792).least * factor},
        {"benchmark": "overlap", "case": "llama3-8b/T8192/R8/step", "direction": "step", "link": "ce-local", "n": 14336,
         "k": 4096, "tokens": 8192, "shape": "llama3-8b", "t_g1_us": 1000.0, "t_gr_us": 1000 * split, "t_c_us": 400.0,
         "e_hide": 1 / factor, "roofline": roofline, "model_roofline": roofline, "e_ect": 0.9, "tflops": 700.0,
         "graph": False, "two_lanes": False},
        {"benchmark": "emulated_step", "case": "rtp", "strategy": "rtp", "group": 1, "link": None, "layers": 4,
         "vocabulary": 32768, "shape": "block4: ", "tokens": 2048, "ratio": step, "forward_backward_ms": 9.0,
         "host_ms": 1.0, "forward_backward_p20_ms": 8.9, "forward_backward_p80_ms": 9.1},
        {"benchmark": "memory_per_rank", "case": "llama3-8b/rtp/R8/L32", "strategy": "rtp", "layers": 32,
         "tokens": 2048, "full_layers": 32, "parameter_dtype": "float32", "checkpoint": False, "reserved_bytes": None,
         "transient_bytes": 1, "slot_bytes": 1, "peak_bytes": expected.peak_bytes(H100, "rtp", 2048).most * factor},
        {"benchmark": "kernels", "case": "nf4", "kernel": "dequantize_blocks", "dtype": "bfloat16", "gb_per_s": rate,
         "copy_gb_per_s": 2900.0, "t_us": 10.0, "fraction": 0.8},
        *({"benchmark": "compare", "strategy": name, "tokens": 1, "step_ms": ms, "p20_ms": ms, "p80_ms": ms,
           "forward_backward_ms": ms, "optimizer_ms": 1.0} for name, ms in (("single", 10.0), ("rtp", 10.0 * factor))),
    ]  # fmt: skip
    return [{**told, **line, **({"ranks": 1} if line["benchmark"] == "compare" else {})} for line in lines]


def written(out: Path, lines: list[dict], **files: str) -> str:
    (out / "logs").mkdir(exist_ok=True)
    (out / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, text in files.items():
        (out / "logs" / name.replace("_", ".")).write_text(text)
    return summary.page(out, out / "logs")


def test_each_figure_stands_beside_its_prediction(tmp_path):
    page = written(tmp_path, lines_at(1.0))
    assert page.count("as predicted)") == 10 and "worse" not in page and "cannot be read" not in page
    page = written(tmp_path, lines_at(1.5))
    assert page.count("(7.6 - 23.2, worse by 50 %)") == 1 and "1.50 (1.00, worse by 50 %)" in page
    changes = page.split("what to change:\n")[1].splitlines()
    assert sorted(line.split(",")[0].strip() for line in changes) == sorted(expected.CHANGES)
    other = [{**line, "device": "NVIDIA L4"} for line in lines_at(1.5)]
    page = written(tmp_path, other)
    assert "no rates of NVIDIA L4 are known" in page and page.count("worse by") == 2, "calls, and the same work twice"


def test_what_was_interrupted_is_summarised(tmp_path):
    (tmp_path / "steps.tsv").write_text("host\t137\t40\t40\n")
    lines = lines_at(1.0)
    del lines[1]["ratio"]
    log = "[gw0] [ 50%] PASSED a.py::test_a \n[gw1] [100%] FAILED a.py::test_b[2] \nc.py::test_c SKIPPED (no GPU)\n"
    page = written(tmp_path, lines, tests_log=log, memcheck_log="========= ERROR SUMMARY: 0 errors\n")
    assert "the rest of this part cannot be read: KeyError 'ratio'" in page and page.count("as predicted)") == 9
    assert "1 passed, 1 failed, 1 skipped (stopped)" in page and "memcheck: ERROR SUMMARY: 0 errors" in page
    assert [each["test"] for each in summary.json_lines(tmp_path / "tests.jsonl")] == [
        "a.py::test_b[2]",
        "c.py::test_c",
    ]
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"benchmark": "kernels", "case": "cut o')
    assert summary.page(tmp_path, tmp_path / "logs") == page
    report = '<testcase classname="x.a" name="test_b"><failure message="no">where</failure></testcase>'
    report = f"<testsuite>{report}</testsuite>"
    page = written(tmp_path, lines, tests_log=log, tests_xml=report)
    assert "FAILED tests a::test_b: no" in page and "stopped" not in page


# -- what it runs ------------------------------------------------------------------------------------------------------


def test_the_measurements_run(tmp_path):
    """On CPUs, where nothing is predicted: the scripts, their lines and their columns."""
    file = tmp_path / "results.jsonl"
    common = ["--device", "cpu", "--output", str(file)]
    host_times.main([*common, "--ranks", "2", "--mib", "1", "--links", "ce-local"])
    sums.main([*common, "--shape", "64,48", "--depths", "16", "--seconds", "0", "--iterations", "1"])
    for cases in emulated_step.CASES:
        shape = ["--size", "tiny", "--tokens", "32", "--steps", "1", "--ranks", "2"]
        emulated_step.main([*common, "--cases", cases, *shape])
    host, added, *stepped = summary.json_lines(file)
    assert host["host_us_per_hop"] > 0 and host["expected_us"][0] < host["expected_us"][1]
    assert added["ratio"] == pytest.approx(added["t_beta1_us"] / added["t_beta0_us"]) and added["t_elsewhere_us"] > 0
    assert [row["case"] for row in stepped] == [case.name for cases in emulated_step.CASES.values() for case in cases]
    ran = [row for row in stepped if "refused" not in row]
    assert len(ran) == 11 and ran[0]["ratio"] == 1.0, [row.get("refused") for row in stepped]
    assert "cannot be read" not in summary.page(tmp_path, tmp_path)


def test_a_wrong_sum_is_found():
    a, b, before = torch.randn(4, 3), torch.randn(3, 2), torch.zeros(4, 2)
    out = torch.empty(4, 2)
    right = {"beta0": lambda: out.copy_(a @ b), "beta1": lambda: out.add_(a @ b)}
    right["elsewhere"] = right["beta0"]
    sums.check(right, out, before, a, b)
    with pytest.raises(RuntimeError, match="a product with beta1 is wrong"):
        sums.check({**right, "beta1": right["beta0"]}, out, before, a, b)


def test_hops_are_timed(tmp_path):
    file = tmp_path / "hops.jsonl"
    command = [sys.executable, "benchmarks/gpu/hops.py", "--device", "cpu", "--mib", "1", "--output", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["transport"], row["route"], row["ranks"]) for row in rows] == [
        ("shm", "ring", 2),
        ("shm", "direct", 2),
    ]
    for row, line in zip(rows, map(json.loads, file.read_text().splitlines()), strict=True):
        assert row.items() <= line.items() and line["benchmark"] == "hops" and row["expected_us"] is None
        assert min(row["host_us_per_hop"], row["host_us_per_pass"], row["pass_ms"]) > 0
        assert row["gigabytes_per_s"] == pytest.approx(2**20 / row["pass_ms"] / 1e6, rel=0.05, abs=0.006)


# -- the card and the kit ----------------------------------------------------------------------------------------------


def test_the_card_names_the_loaded_nccl_and_the_commit_of_a_copy_without_git(tmp_path, monkeypatch):
    monkeypatch.setattr(_native, "nccl_versions", lambda: (22809, 23007))
    assert shared_card.loaded_nccl() == "2.30.7"
    monkeypatch.setattr(sys, "argv", ["card.py", str(tmp_path / "card.json")])
    card.main()
    assert json.loads((tmp_path / "card.json").read_text())["nccl_compiled"] == "2.28.9"
    monkeypatch.setenv("RTP_COMMIT", "0123456789ab")
    assert shared_card._commit() == "0123456789ab", "of the extension that is loaded"
    monkeypatch.delenv("RTP_COMMIT")
    assert shared_card._commit() != "0123456789ab", "control"
    monkeypatch.setattr(shared_card, "output_of", lambda *command: None)
    assert shared_card._commit() is None


def library(codes: list[tuple[int, int, bytes]]) -> bytes:
    """An ELF file whose .nv_fatbin has a fat binary with these codes: kind, architecture, payload."""
    inner = b"".join(
        struct.pack("<HHIQ", kind, 0, 64, len(code)) + bytes(12) + struct.pack("<I", architecture) + bytes(32) + code
        for kind, architecture, code in codes
    )
    fat = struct.pack("<IHHQ", prune_fatbin.MAGIC, 1, 16, len(inner)) + inner
    names = b"\0.nv_fatbin\0.names\0"
    table = 64 + len(fat) + len(names)
    head = bytearray(64)
    struct.pack_into("<Q", head, 0x28, table)
    struct.pack_into("<HHH", head, 0x3A, 64, 3, 2)
    places = [(0, 0, 0), (1, 64, len(fat)), (12, 64 + len(fat), len(names))]
    headers = b"".join(struct.pack("<IIQQQQ", name, 0, 0, 0, at, size) + bytes(24) for name, at, size in places)
    return bytes(head) + fat + names + headers


def test_code_of_other_gpus_is_zeroed(tmp_path):
    codes = [(2, 80, b"A" * 24), (2, 90, b"B" * 16), (1, 90, b"C" * 8)]
    (tmp_path / "all.so").write_bytes(library(codes))
    found = prune_fatbin.prune(tmp_path / "all.so", tmp_path / "one.so", 90)
    assert found == {("elf", 80): 24, ("elf", 90): 16, ("ptx", 90): 8}
    kept = [(kind, each, code if (kind, each) == (2, 90) else bytes(len(code))) for kind, each, code in codes]
    assert (tmp_path / "one.so").read_bytes() == library(kept)
    with pytest.raises(ValueError, match=r"expected code for 100, got \[80, 90\]"):
        prune_fatbin.prune(tmp_path / "all.so", tmp_path / "none.so", 100)
    assert not (tmp_path / "none.so").exists()
