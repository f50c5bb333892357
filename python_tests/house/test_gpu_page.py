"""docs/gpu_calls.md names every function of CUDA, NCCL and cuBLAS that is called; with docs/gpu.md it has the tables of
their script."""

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from gpu import expected, gpu_on_paper
from shared.table import last_command

from rtp_ext import _native
from rtp_ext.planner.constants import host_constant

ROOT = Path(__file__).resolve().parents[2]
PAGES = [page.read_text() for page in gpu_on_paper.PAGES]
CALLED = re.compile(r"\b((?:cuda|nccl|cublas)[A-Z]\w+)\(|\"((?:cu|nccl)[A-Z]\w+)\"")
CALLS = re.compile(r"^\s*//.*$", re.MULTILINE)


def called():
    names = set()
    for source in (ROOT / "csrc").rglob("*"):
        if source.suffix in (".cpp", ".h", ".cu", ".cuh"):
            names |= {first or second for first, second in CALLED.findall(CALLS.sub("", source.read_text()))}
    return names


def listed():
    """The functions in the first column of the page's table."""
    table = PAGES[1].split("| function | enforced | not enforced |")[1].split("\n\n")[0]
    rows = [row.strip("|").split("|") for row in table.splitlines()[2:]]
    assert all(len(row) == 3 and row[1].strip() for row in rows), "each row says what is enforced"
    return {name for row in rows for name in re.findall(r"`((?:cu|cuda|nccl|cublas)[A-Z]\w+)`", row[0])}


def test_every_function_that_is_called_is_named():
    names = called()
    assert {
        "cudaStreamWaitEvent",
        "ncclSend",
        "cuStreamBatchMemOp",
        "ncclCommWindowRegister",
        "cublasLtMatmul",
    } <= names
    assert sorted(names - listed()) == []
    csrc = "".join(source.read_text() for source in (ROOT / "csrc").rglob("*") if source.is_file())
    stale = {name for name in listed() if not re.search(rf"\b{name}\b", csrc)}
    assert stale <= {"cudaDeviceSynchronize", "cudaSetDevice", "cudaStreamIsCapturing"}, (
        f"named, and not called but by torch: {stale}"
    )


def test_every_function_that_is_linked_is_named():
    """Calls of torch's headers count too."""
    nm = shutil.which("nm")
    if _native.nccl_versions() is None:
        pytest.skip("built without CUDA: nothing of it is linked")
    assert nm is not None, "nm comes with the compiler that built the extension"
    linked = subprocess.run([nm, "-D", "--undefined-only", _native._C.__file__], capture_output=True, check=True).stdout
    names = set(re.findall(r"\bU ((?:cu|cuda|nccl|cublas)[A-Z]\w+)", linked.decode()))
    assert {"cudaStreamWaitEvent", "ncclSend", "cublasLtMatrixLayoutDestroy"} <= names
    assert sorted(names - listed()) == []


def test_each_contract_says_what_is_expected_and_what_a_failure_means():
    tests = ast.parse((ROOT / "python_tests" / "gpu" / "transport" / "test_contracts_gpu.py").read_text()).body
    found = [each for each in tests if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")]
    assert len(found) == 10
    for each in found:
        said = each.body[0].value
        assert isinstance(said, ast.Call) and said.func.id == "check" and len(said.args) == 2, each.name


def test_the_predictions_are_those_of_the_script():
    gpu_on_paper.main(["--check"])
    for before, after in (("| 2048 | 0.33 | 2.68 |", "| 2048 | 0.33 | 2.69 |"), ("| 7.6 - 23.2 |", "| 7.6 |")):
        wrong = [text.replace(before, after) for text in PAGES]
        assert "".join(PAGES).count(before) == 1 and gpu_on_paper.rewrite(wrong) == PAGES, "control"
    with pytest.raises(ValueError, match="blocks first day, one GPU, host, each once, got one GPU, first day"):
        gpu_on_paper.rewrite([text.replace("<!-- gpu_on_paper: host -->", "") for text in PAGES])
    for row in gpu_on_paper.rows():
        assert row.compute <= row.gpu
        for name in gpu_on_paper.NAMES:
            assert row.gpu <= getattr(row, name).least <= getattr(row, name).most <= row.threads.most
        assert row.ce.most == row.gpu, "as the page says: the host does not limit it"
    blocking, threads = (
        [row for row in gpu_on_paper.rows() if getattr(row, way).most > row.gpu] for way in ("blocking", "threads")
    )
    assert 0 < len(blocking) < len(threads) and max(row.tokens for row in blocking) < 4096, "as the page says"
    step = gpu_on_paper.hosts()["ce"].step(21, 24)
    assert f"take {step.least:.0f} to {step.most:.0f} us" in " ".join(PAGES[1].split())


def test_the_expectations_of_the_first_day_are_those_of_its_assumptions():
    rows = {(row.machine, row.tokens): row for row in gpu_on_paper.first_day()}
    assert len(rows) == 10 and all(max(row.shares) < 1.01 for row in rows.values())
    two, flat = (rows[f"2 x 8 x H100, {way}", 2048] for way in ("two levels", "flat"))
    assert two.transport == "`ce+nccl`" and all(a < b / 3 for a, b in zip(two.rotation, flat.rotation, strict=True))
    best = [
        1e3 * 2 * tokens * 14336 * 4096 / gpu_on_paper.H100.bf16_achievable_flops_per_s / row.rotation[0]
        for (machine, tokens), row in rows.items()
        if machine.endswith("flat")
    ]
    text = " ".join(PAGES[0].split())
    share, larger = (f"{100 * each:.0f} %" for each in best)
    assert f"the products take {share} of its forward at 2048 tokens and {larger} at 8192" in text


def test_the_planner_counts_the_calls_of_the_last_results():
    rows = last_command([json.loads(line) for line in expected.CALLS.read_text().splitlines()])
    for transport in ("ce", "nccl"):
        found = [row for row in rows if row["transport"] == transport and row.get("calls_per_hop")]
        assert max(row["calls_per_hop"] for row in found) == host_constant(f"{transport}_hop_calls"), transport
        assert max(row["calls_per_compute"] for row in found) == host_constant("compute_calls"), transport
