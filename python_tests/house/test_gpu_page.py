"""docs/gpu.md names every function of CUDA, NCCL and cuBLAS that is called, and has the tables of its script."""

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from gpu import gpu_on_paper
from shared.card import last_command

from rtp_ext import _native
from rtp_ext.planner.constants import host_constant

ROOT = Path(__file__).resolve().parents[2]
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
    table = gpu_on_paper.PAGE.read_text().split("| function | enforced | not enforced |")[1].split("\n\n")[0]
    rows = [row.strip("|").split("|") for row in table.splitlines()[2:]]
    assert all(len(row) == 3 and row[1].strip() for row in rows), "each row says what is enforced"
    return {name for row in rows for name in re.findall(r"`((?:cu|cuda|nccl|cublas)[A-Z]\w+)`", row[0])}


def test_every_function_that_is_called_is_named():
    names = called()
    assert {"cudaStreamWaitEvent", "ncclSend", "cuStreamBatchMemOp", "ncclPutSignal", "cublasLtMatmul"} <= names
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
    assert gpu_on_paper.written() == gpu_on_paper.tables()
    for row in gpu_on_paper.rows():
        assert row.prediction and row.compute <= row.gpu <= row.after <= row.before
        assert row.graphs <= row.after <= row.nccl and row.blocking <= row.nccl


def test_the_planner_counts_the_calls_of_the_last_results():
    rows = last_command([json.loads(line) for line in gpu_on_paper.CALLS.read_text().splitlines()])
    for transport in ("ce", "nccl"):
        found = [row for row in rows if row["transport"] == transport and row.get("calls_per_hop")]
        assert max(row["calls_per_hop"] for row in found) == host_constant(f"{transport}_hop_calls"), transport
        assert max(row["calls_per_compute"] for row in found) == host_constant("compute_calls"), transport
