"""docs/gpu.md names every function of CUDA, NCCL and cuBLAS that is called, and has the tables of its script."""

import re
from pathlib import Path

import gpu_on_paper

ROOT = Path(__file__).resolve().parents[2]
CALLED = re.compile(r"\b((?:cuda|nccl|cublas)[A-Z]\w+)\(|\"((?:cu|nccl)[A-Z]\w+)\"")
CALLS = re.compile(r"^\s*//.*$", re.MULTILINE)


def called():
    names = set()
    for source in (ROOT / "csrc").rglob("*"):
        if source.suffix in (".cpp", ".h", ".cu", ".cuh"):
            names |= {first or second for first, second in CALLED.findall(CALLS.sub("", source.read_text()))}
    return names


def test_every_function_that_is_called_is_named():
    names = called()
    assert {"cudaStreamWaitEvent", "ncclSend", "cuStreamBatchMemOp", "ncclPutSignal", "cublasLtMatmul"} <= names
    page = gpu_on_paper.PAGE.read_text()
    assert sorted(name for name in names if f"`{name}`" not in page) == []


def test_the_predictions_are_those_of_the_script():
    assert gpu_on_paper.written() == gpu_on_paper.tables()
    for row in gpu_on_paper.rows():
        assert row.prediction and row.compute <= row.gpu <= row.after <= row.before
        assert row.graphs <= row.after <= row.nccl and row.blocking <= row.nccl
