"""benchmarks/gpu_suite.sh, as far as a machine without a GPU goes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from shared.options import overlap_options

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def suite(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(BENCHMARKS / "gpu_suite.sh"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("part", ["host", "contracts", "tests", "overlap", "memory", "kernels", "train"])
def test_the_suite_says_what_it_would_run(part, tmp_path, monkeypatch):
    done = suite("--dry-run", part, str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "out").exists()
    commands = [line.replace("\\", "").split() for line in done.stdout.splitlines()]
    assert commands and all(command[0] == "timeout" and int(command[1]) < 540 for command in commands)
    assert [c for c in commands if "build_ext" in c], "it builds first"
    scripts = [word for command in commands for word in command if word.startswith(("benchmarks/", "python_tests/"))]
    here = {name for name in scripts if (ROOT / name).exists()}
    assert set(scripts) - here <= {"benchmarks/gpu/kernels.py"}, scripts
    if part == "host":
        timed = [place for place, command in enumerate(commands) if "host_time" in command]
        assert timed == [len(commands) - 2] and "benchmarks/gpu/hops.py" in commands[-1]
    if part == "overlap":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        wished = [command[4:] for command in commands if "benchmarks/overlap.py" in command]
        budgets = 0.0
        for options in wished:
            options[options.index("--output") + 1] = str(tmp_path / "o.jsonl")
            args = overlap_options.parse_arguments(options)
            assert args.links and args.cases
            budgets += args.budget
        assert wished and budgets + 150 <= 540, "leaves time to build and to start"


def test_hops_are_timed(tmp_path):
    """On CPUs, where nothing is predicted: the script, its lines and its columns."""
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


def test_the_suite_refuses(tmp_path):
    assert suite("everything").returncode == 2
    missing = suite("--dry-run", "tests", str(tmp_path), NCCL_LIBRARY="/nowhere/libnccl.so.2")
    assert missing.returncode == 2 and "cannot be read" in missing.stderr


def test_the_suite_says_that_there_is_no_gpu(tmp_path):
    done = suite("contracts", str(tmp_path), PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "there is no GPU" in done.stderr, done.stderr
    assert "build_ext" not in done.stdout, "nothing is compiled for nothing"


def test_the_suite_can_write_its_card(tmp_path):
    """Runs the suite without the import paths that pytest adds: otherwise a run would end there."""
    (line,) = [line for line in suite("--dry-run", "kernels", str(tmp_path)).stdout.splitlines() if "card" in line]
    command = [sys.executable, *line.split()[3:]]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "kernels.card.json").read_text())["torch"] == torch.__version__
