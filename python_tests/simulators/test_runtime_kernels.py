"""The CUDA sources that GPU tests compile when they run: NVRTC compiles them here, for every architecture."""

import ast
from pathlib import Path

import pytest
import torch

ARCHITECTURES = (80, 90, 100)  # those of setup.py
GPU_TESTS = Path(__file__).resolve().parents[1] / "gpu"


def sources() -> dict[str, str]:
    """The sources of kernels among the texts of the GPU tests, by file and the line where they begin."""
    found = {}
    for file in sorted(GPU_TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "__global__" in node.value:
                found[f"{file.name}:{node.lineno}"] = node.value
    return found


def compiled(source: str, architecture: int) -> str:
    from torch.cuda._utils import _nvrtc_compile

    name = source.split("(int")[0].split()[-1]
    return _nvrtc_compile(source, name, compute_capability=str(architecture))[0]


def test_nvrtc_compiles_the_kernels_of_gpu_tests():
    try:
        compiled('extern "C" __global__ void nothing(int* anything) {}', 90)
    except (ImportError, OSError) as error:
        pytest.skip(f"no NVRTC beside this torch {torch.__version__}: {error}")
    found = sources()
    assert len(found) >= 2
    for place, source in found.items():
        for architecture in ARCHITECTURES:
            assert compiled(source, architecture), f"{place} for sm_{architecture}"
    with pytest.raises(RuntimeError, match="undefined"):
        compiled('extern "C" __global__ void wrong(int* anything) { undefined(anything); }', 90)
