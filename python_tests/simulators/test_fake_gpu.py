"""python_tests/gpu on the fake GPU: a part of it runs, and the fake finds what is wrong in a test. `make rehearse` runs
all of it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
FAKE = Path(__file__).parent / "fake_gpu"
# One or two tests of a file; a rotated layer, MLP, head, experts; links; what is skipped.
PART = {
    "test_linear_gpu.py": "layer_of_repeated_shards and 3-0-False or wrong_devices",
    "test_bundles_gpu.py": "mlp and 2-torch.float32-False or experts and 2-torch.float64",
    "test_routes_gpu.py": "repeated_shards and ce-local-halves-torch.float64 or second_size",
    "test_capture_gpu.py": "goes_on_after_a_capture and sm-local",
    "test_kernels_gpu.py": "match_float64 and add_rows",
    "test_errors_gpu.py": "unknown or closed or broken",
    "transport/test_ce_gpu.py": "every_link and sm-local or unknown",
}
PASSED, SKIPPED = 10, 3

MISTAKES = """
import pytest
import torch
from reference import assert_same, random

import rtp_ext
from rtp_ext.functional import rotated_linear


@pytest.mark.parametrize("ranks", [3, 2])
def test_three_shards(ranks):
    ring = rtp_ext.Ring.emulated(ranks, device="cuda", link="ce-local")
    weight, x = (random(8, 6, dtype=torch.float64, seed=seed).cuda() for seed in (1, 2))
    assert_same(rotated_linear(x, weight, ring=ring), (x @ weight.t()).repeat(1, 3), 1e-10, "output")


def test_a_second_gpu():
    torch.zeros(1, device="cuda:1")


def test_an_error_that_stays(monkeypatch):
    torch.cuda.synchronize = lambda *_: torch._check(False, lambda: "an illegal address")


def test_is_not_reached():
    pass
"""


def on_fake(*arguments: str) -> subprocess.CompletedProcess:
    """Runs pytest in a process that finds the fake GPU."""
    told = {**os.environ, "FAKE_GPU": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(FAKE)])}
    for name in [name for name in told if name.startswith(("PYTEST_", "RTP_TEST_"))]:
        del told[name]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=told, timeout=300)


def counts(done: subprocess.CompletedProcess) -> dict[str, int]:
    """Returns the numbers of the last line, such as {"passed": 3}."""
    return {name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}


def test_a_part_runs_on_the_fake() -> None:
    files = [str(TESTS / "gpu" / file) for file in PART]
    done = on_fake(*files, "-k", " or ".join(f"({each})" for each in PART.values()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert counts(done) == {"passed": PASSED, "skipped": SKIPPED}, done.stdout
    assert done.stdout.count("needs a real GPU: ") == SKIPPED, done.stdout


def test_mistakes_are_found(tmp_path: Path) -> None:
    """Controls: a wrong expectation, a GPU that is not there, and an error after which no call works."""
    for file in ("conftest.py", "support.py"):
        shutil.copy(TESTS / "gpu" / file, tmp_path)
    (tmp_path / "test_mistakes.py").write_text(MISTAKES)
    done = on_fake(str(tmp_path), "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "--tb=line")
    assert done.returncode == 2, done.stdout + done.stderr
    assert counts(done) == {"passed": 2, "failed": 2}, done.stdout
    for said in ("output: ", "invalid device ordinal", "no later test can pass in this process: an illegal address"):
        assert said in done.stdout, done.stdout
