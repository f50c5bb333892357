"""The CUDA kernels' own source on emulated threads: against float64, under the address sanitizer, and with errors
planted that the emulation must find. ATen's side of the same steps goes through the same checks."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from compiled import compiler
from emulated_kernels import Emulated, KernelError, load
from kernel_arrays import ELEMENTS, Array, decode, encode
from kernel_checks import CHECKS, run_checks
from kernel_emulation import build, sanitizer_environment, sanitizer_runtimes, telling_pattern
from torch_kernels import Torch

FOLDER = Path(__file__).resolve().parent
THREADS = 64  # of the planted kernels

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler on PATH")


@pytest.fixture(scope="module")
def library() -> Path:
    return build()


@pytest.mark.parametrize("kernel", CHECKS)
def test_emulated_kernels_match_float64(library, kernel):
    run_checks(Emulated(library), 80, names=[kernel])


@pytest.mark.parametrize("kernel", CHECKS)
def test_aten_matches_float64(kernel):
    run_checks(Torch("cpu"), 40, names=[kernel])


# Planted kernels by number; those without a message are for the sanitizer.
PLANTED = {
    1: "read by thread 0 and written|read before any thread|written by thread",
    2: "with no barrier between",
    3: r"shared\[0\] is read before any thread of its block wrote it",
    4: r"shared\[64\] is written, but the array has 64 elements",
    5: "only 32 of 64 threads reach a barrier",
    6: "only some lanes of a warp reach a shuffle",
}


@pytest.mark.parametrize("backward", [0, 1])
def test_planted_mistakes_are_found(library, backward):
    kernels = load(library)
    kernels.set_backward(backward)
    values = np.arange(THREADS, dtype=np.float32)
    assert kernels.planted(0, values.ctypes.data, THREADS) == 0  # the one that is right
    assert np.array_equal(values, np.roll(np.arange(THREADS), -1))
    for which, message in PLANTED.items():
        with pytest.raises(KernelError, match=message):
            if kernels.planted(which, values.ctypes.data, THREADS) != 0:
                raise KernelError(kernels.message().decode())


def test_a_write_beyond_an_array_is_found_without_the_sanitizer(library):
    """The canaries around every array of the checks."""
    runner = Emulated(library)
    memory = runner.memory(Array(np.zeros((1, 100)), "float32", 100, 1, (1, 100)))
    memory.read()
    assert runner.library.planted(7, memory.address, 100) == 0
    with pytest.raises(AssertionError, match="bytes around an array"):
        memory.read()


SANITIZED = """
import sys
sys.path.append("../simulators")
import numpy as np
from emulated_kernels import Emulated
from kernel_arrays import Array
from kernel_emulation import build

runner = Emulated(build(sanitized=True), sanitized=True)
memory = runner.memory(Array(np.ones((1, 64)), "float32", 64, 0, (1, 64)))
status = runner.library.planted(int(sys.argv[1]), memory.address, 64)
values = memory.read()
print("status", status, "sum", values.sum())
"""


needs_sanitizer = pytest.mark.skipif(
    compiler() is not None and len(sanitizer_runtimes()) < 2,
    reason="the C++ compiler brings no libasan.so or libubsan.so",
)


def sanitized(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=FOLDER, env=sanitizer_environment(), timeout=120
    )


@needs_sanitizer
def test_kernels_stay_inside_their_arrays():
    """No access outside an array, no misaligned one, no undefined arithmetic, for random cases of every kernel."""
    build(sanitized=True)
    done = sanitized("kernel_sweep.py", "--runner", "sanitized", "--inside", "--cases", "25", "--seed", "7")
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"{25 * len(CHECKS)} cases passed" in done.stdout


@needs_sanitizer
def test_the_sanitizer_finds_planted_mistakes():
    build(sanitized=True)
    for which, message in ((0, None), (7, "heap-buffer-overflow"), (8, "misaligned address")):
        done = sanitized("-c", SANITIZED, str(which))
        if message is None:
            assert done.returncode == 0 and "status 0" in done.stdout, done.stderr[-4000:]
        else:
            assert done.returncode != 0 and message in done.stderr, (which, done.stdout, done.stderr[-4000:])


def test_unset_locals_show():
    """If the compiler can fill them (g++ 12, clang 8), a sum that was never set to zero has a large error."""
    if not telling_pattern(compiler()):
        pytest.skip("this compiler does not fill unset locals")
    values = np.ones(THREADS, np.float32)
    assert load(build()).planted(9, values.ctypes.data, THREADS) == 0
    assert not (np.abs(values - 1) < 1e-3).any()


def test_emulated_16_bit_types(library):
    """Every float16 and bfloat16, and roundings of random numbers, ties included, against NumPy's."""
    kernels = load(library)
    rng = np.random.default_rng(0)
    for element in ELEMENTS[1:]:
        bits = np.arange(0, 1 << 16, 7, dtype=np.uint16)
        bits = bits[~np.isnan(decode(bits, element))]
        values = decode(bits, element)
        mine = np.array([getattr(kernels, f"{element}_value")(int(b)) for b in bits])
        assert np.array_equal(mine, values)
        finite = values[np.isfinite(values)]
        middles = (finite[:-1] + finite[1:]) / 2  # ties
        numbers = np.concatenate([middles, finite, rng.standard_normal(3000) * 10.0 ** rng.integers(-9, 9, 3000)])
        numbers = numbers[np.isfinite(numbers) & (np.abs(numbers) < 3e38)].astype(np.float32).astype(np.float64)
        mine = np.array([getattr(kernels, f"{element}_bits")(float(x)) for x in numbers], dtype=np.uint16)
        assert np.array_equal(mine, encode(numbers, element))
