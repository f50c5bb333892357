"""How kernels are compiled: one by one, ahead of the extension as with it; and in `make build` without a warning, and
such that no thread spills registers."""

import json
import os
import re
import shlex
import shutil
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


def compiled_with(build):
    """The command for each kernel, by its name, of a folder that CMake has configured."""
    found = json.loads((build / "compile_commands.json").read_text())
    return {Path(each["file"]).name: shlex.split(each["command"]) for each in found if each["file"].endswith(".cu")}


def architectures(command):
    """Returns the value of RTP_CUDA_ARCHITECTURES for it."""
    codes = [set(code.split(",")) for code in re.findall(r"code=\[([\w,]+)\]", " ".join(command))]
    assert codes, command
    names = []
    for code in codes:
        (number,) = {re.sub("sm_|compute_", "", each) for each in code}
        names.append(number if len(code) == 2 else f"{number}-{'real' if f'sm_{number}' in code else 'virtual'}")
    return " ".join(names)


@pytest.fixture(scope="module")
def commands():
    build = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
    cache = build / "CMakeCache.txt"
    if not cache.exists():
        pytest.skip("the extension was not compiled in this folder")
    told = re.search(r"^RTP_WERROR:BOOL=(.*)$", cache.read_text(), re.MULTILINE)
    assert told is not None
    if told[1] in ("", "0", "OFF"):
        pytest.skip("the extension was not compiled with RTP_WERROR=1, as `make build` does")
    kernels = compiled_with(build)
    if not kernels:
        pytest.skip("the extension was compiled without CUDA")
    return kernels


def test_no_kernel_is_compiled_otherwise(commands):
    assert set(commands) == {file.name for file in (ROOT / "csrc" / "kernels").rglob("*.cu")}
    chosen = architectures(commands["delay.cu"])
    needed = {"-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror"}
    if set(re.findall(r"\d+", chosen)) <= {"80", "90", "100"}:
        needed.add("-Xptxas=-warn-spills")
    for name, command in commands.items():
        assert needed <= set(command), name
        assert architectures(command) == chosen, name


def test_what_is_quantized_is_rounded_as_on_a_cpu(commands, tmp_path):
    """Code for GPUs never computes a product and a sum of floats with one rounding: neither does nvcc contract them
    (`fma`), nor can ptxas, which contracts products and sums without an explicit rounding mode."""
    compiler, *flags = commands["quantize.cu"]
    kept = [flag for flag in flags if flag.startswith(("-O", "-D", "-I", "-std", "-fmad"))]
    source = next(flag for flag in flags if flag.endswith("quantize.cu"))

    def arithmetic(*given):
        file = tmp_path / "quantize.ptx"
        command = [compiler, *given, "-arch=compute_90", "--ptx", source, "-o", str(file)]
        subprocess.run(command, capture_output=True, check=True, timeout=120)
        return set(re.findall(r"\b(?:fma|mul|add|sub)\S*\.f32\b", file.read_text()))

    assert arithmetic(*kept) == {"mul.rn.f32", "add.rn.f32"}
    assert "fma.rn.f32" in arithmetic(*(flag for flag in kept if flag != "-fmad=false")), "control"


def test_kernels_are_compiled_ahead_as_with_the_extension(commands, tmp_path):
    """In a folder that is configured anew, too, by the CMake beside Python, which may be another."""
    if "-isystem" in commands["delay.cu"]:
        pytest.skip("pip brings the toolkit's headers: nothing is compiled ahead")
    told = {**os.environ, "RTP_CUDA_ARCHITECTURES": architectures(commands["delay.cu"])}
    cmake, ninja = (
        shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") for name in ("cmake", "ninja")
    )
    settings = [
        f"-DPython_EXECUTABLE={sys.executable}",
        "-DRTP_WERROR=1",
        "-DRTP_KERNELS_ONLY=ON",
        "-DCMAKE_UNITY_BUILD=ON",
    ]
    for _ in range(2):
        configure = [cmake, "-G", "Ninja", "-S", str(ROOT), "-B", str(tmp_path), f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        subprocess.run([*configure, *settings], check=True, capture_output=True, timeout=120, env=told)
        ahead = compiled_with(tmp_path)
        assert {name: sorted(command) for name, command in ahead.items()} == {
            name: sorted(command) for name, command in commands.items()
        }


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
    if said.startswith("Registers") and "-Xptxas=-warn-spills" not in kept:
        pytest.skip("compiled for other architectures than those that are known not to spill")
    command = [compiler, *kept, "-arch=sm_90", "-x", "cu", "-c", str(file), "-o", str(tmp_path / "kernel.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode == 0) is (said == ""), done.stderr
    assert said in done.stderr
