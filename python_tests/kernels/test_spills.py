"""A kernel whose threads spill registers, or that is compiled with a warning, does not compile in `make build`."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNEL = """
extern "C" __global__ void BOUNDS sum_of_products(float* values, int count) {
  float sums[64];
  for (int i = 0; i < 64; ++i) sums[i] = values[i * count + threadIdx.x];
  for (int k = 0; k < count; ++k)
    for (int i = 0; i < 64; ++i) sums[i] = sums[i] * sums[(i + 7) % 64] + values[k];
  for (int i = 0; i < 64; ++i) values[i * count + threadIdx.x] = sums[i];
}
"""


@pytest.fixture(scope="module")
def commands():
    """What each kernel was compiled with, by its name."""
    made = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}" / "compile_commands.json"
    found = json.loads(made.read_text()) if made.exists() else []
    kernels = {Path(each["file"]).name: shlex.split(each["command"]) for each in found if each["file"].endswith(".cu")}
    if not kernels:
        pytest.skip("the extension was not compiled with CUDA in this folder")
    return kernels


def test_no_kernel_is_compiled_otherwise(commands):
    assert set(commands) == {file.name for file in (ROOT / "csrc" / "kernels").glob("*.cu")}
    first = next(iter(commands.values()))
    needed = {"-Xptxas=-warn-spills", "-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror"}
    for name, command in commands.items():
        assert needed <= set(command), f"{name} was not compiled as `make build` does, with RTP_WERROR=1: {command}"
        assert [flag for flag in command if "arch=" in flag] == [flag for flag in first if "arch=" in flag], name


@pytest.mark.parametrize(
    "bounds, body, said",
    [
        ("", KERNEL, ""),
        ("__launch_bounds__(1024, 2)", KERNEL, "Registers are spilled to local memory in function 'sum_of_products'"),
        ("", KERNEL + "static __global__ void unused() {}", "was declared but never referenced"),
    ],
    ids=["neither", "spills", "warning"],
)
def test_what_spills_or_warns_does_not_compile(commands, tmp_path, bounds, body, said):
    file = tmp_path / "kernel.cu"
    file.write_text(body.replace("BOUNDS", bounds))
    compiler, *flags = commands["delay.cu"]
    kept = [flag for flag in flags if flag.startswith(("-O", "-D", "-I", "-W", "-X", "-std"))]
    command = [compiler, *kept, "-arch=sm_90", "-x", "cu", "-c", str(file), "-o", str(tmp_path / "kernel.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode == 0) is (said == ""), done.stderr
    assert said in done.stderr
