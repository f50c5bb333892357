"""The PTX that nvcc emits from the CUDA kernels, interpreted: against float64, and with planted mistakes that the
interpreter must find. ATen's side of the same steps goes through the same checks."""

import itertools

import numpy as np
import ptx
import pytest
import torch
from grids import few
from kernel_arrays import Array
from kernel_checks import CHECKS, run_checks
from planted_kernels import PLANTED
from ptx.arithmetic import DTYPES, convert, fma
from ptx.machine import Launch, Machine
from ptx.memory import Buffer, Fault
from ptx.parse import parse
from ptx_kernels import Ptx
from reference import assert_same, differs, random
from torch_kernels import Torch

from rtp_ext import _native

needs_nvcc = pytest.mark.skipif(ptx.nvcc() is None, reason="no nvcc in PATH or /usr/local/cuda")


@pytest.fixture(scope="module")
def kernels() -> ptx.Compiled:
    return ptx.build()


@needs_nvcc
@pytest.mark.parametrize("kernel", [name for name in CHECKS if name != "code_paths"])
def test_ptx_matches_float64(kernels, kernel):
    run_checks(Ptx(kernels), 40, names=[kernel])


@pytest.mark.parametrize("kernel", CHECKS)
def test_aten_matches_float64(kernel):
    run_checks(Torch("cpu"), 40, names=[kernel])


@needs_nvcc
@pytest.mark.parametrize("name", few(["words wider than the alignment", "products and sums contracted"], [*PLANTED]))
def test_planted_mistakes_are_found(tmp_path, name):
    planted = PLANTED[name]
    changed = planted.write(tmp_path)
    sources = [changed if source.name == changed.name else source for source in ptx.KERNELS]
    flags = {} if planted.old else {"flags": lambda source: []}
    compiled = ptx.build(sources, capability=planted.capability, **flags)
    with pytest.raises(AssertionError, match=planted.message):
        run_checks(Ptx(compiled), 60, names=[planted.check])


@needs_nvcc
def test_a_write_between_rows_is_found(kernels):
    memory = Ptx(kernels).memory(Array(np.zeros((2, 8)), "float32", 12, 1, (2, 8)))
    memory.read()
    memory.bytes[64 + 4 + 9 * 4] = 0
    with pytest.raises(AssertionError, match="bytes around an array"):
        memory.read()


KERNEL = """
.visible .entry kernel(.param .u64 kernel_param_0)
{{
  .reg .pred %p<3>; .reg .b32 %r<9>; .reg .f32 %f<9>; .reg .b64 %rd<9>;
  .shared .align 4 .b8 area[256];
  ld.param.u64 %rd1, [kernel_param_0];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
  mov.u32 %r2, area;
  shl.b32 %r3, %r1, 2;
  add.s32 %r4, %r2, %r3;
  setp.lt.u32 %p1, %r1, 32;
  ld.global.f32 %f1, [%rd3];
  {body}
  ret;
}}
"""
CORRECT = (
    "st.shared.f32 [%r4], %f1; bar.sync 0; xor.b32 %r5, %r4, 4; ld.shared.f32 %f2, [%r5]; st.global.f32 [%rd3], %f2;"
)
# What the interpreter reports of a kernel of one block of 64 threads, by its body.
FAULTS = {
    CORRECT.replace("bar.sync 0; ", ""): "with no barrier between|nothing was written",
    "@%p1 bar.sync 0;": "only 32 of 64 threads reach a barrier",
    CORRECT.replace("[%r5]", "[%r5+4]"): "outside of all arrays",
    "ld.shared.f32 %f2, [%r4];": "nothing was written",
    "st.global.f32 [%rd1], %f1;": "two threads write to one place",
    "st.global.f32 [%rd3+2], %f1;": "no multiple of the 4 bytes",
    "@%p1 mov.f32 %f3, %f1; st.global.f32 [%rd3], %f3;": "%f3 is read before it is written",
    "@%p1 st.global.f32 [%rd1+252], %f1;": "two threads write|with no barrier between",
    "mov.b32 %r6, %f1; shfl.sync.bfly.b32 %r7|%p2, %r6, 1, 31, 65535;": "not in the mask",
    "@%p1 bra OUT; ld.global.f32 %f4, [%rd3+256]; OUT:": "outside of all arrays",
}


def run_text(body: str, seed: int) -> np.ndarray:
    values = np.arange(64, dtype=np.float32)
    text = KERNEL.format(body=body)
    buffer = Buffer.at(values.ctypes.data, np.ones(values.nbytes, bool), "values")
    launch = Launch("kernel", (1, 1, 1), (64, 1, 1), np.uint64(values.ctypes.data).tobytes())
    Machine(parse(text)["kernel"], launch, [buffer], np.random.default_rng(seed)).run()
    return values


@pytest.mark.parametrize("seed", range(3))
def test_the_interpreter_finds_faults(seed):
    assert np.array_equal(run_text(CORRECT, seed), np.arange(64) ^ 1)
    for body, message in FAULTS.items():
        with pytest.raises(Fault, match=message):
            run_text(body, seed)
    unknown = {
        "brev.b32 %r6, %r1;": "brev",
        "add.sat.s32 %r6, %r1, %r1;": "add.sat",
        "ld.global.L2::128B.f32 %f2, [%rd3];": "128B",
    }
    for body, name in unknown.items():
        with pytest.raises(NotImplementedError, match=name):
            run_text(body, seed)


def test_roundings_of_the_interpreter():
    """Products and sums that are rounded once, against integers; conversions of every 16-bit number."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(1 << 23, 1 << 24, 4000).astype(np.float32) for _ in range(2))
    shift = rng.integers(-30, 30, a.size)
    c = np.ldexp(rng.integers(-(1 << 24), 1 << 24, a.size).astype(np.float32), shift + 20)
    once = fma(a, b, c, "f32")
    for x, y, z, result in zip(a[:400], b[:400], c[:400], once[:400], strict=True):
        scale = 1 << 40
        exact = int(x) * int(y) * scale + int(float(z) * scale)
        assert float(z) * scale == int(float(z) * scale), "the control of this test's own arithmetic"
        near = [int(float(np.nextafter(result, np.float32(side))) * scale) for side in (-np.inf, np.inf)]
        assert abs(int(float(result) * scale) - exact) <= min(abs(each - exact) for each in near)
    assert (once != a * b + c).any(), "control: two roundings"
    down = fma(a, b, c, "f32", down=True)
    assert ((down == once) | (down == np.nextafter(once, np.float32(-np.inf)))).all() and (down != once).any()
    bits = np.arange(1 << 16, dtype=np.uint16)
    for kind in ("f16", "bf16"):
        there = convert(("f32", kind), bits.view(DTYPES[kind]))
        back = convert(("rn", kind, "f32"), there).view(np.uint16)
        assert np.array_equal(back[~np.isnan(there)], bits[~np.isnan(there)]), kind
    ties = (np.arange(0x3F80, 0x4000, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    rounded = convert(("rn", "bf16", "f32"), ties)
    assert (rounded % 2 == 0).all(), "ties go to even"


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_of_rows_apart_and_rows_together(activation, dtype):
    """Each operand lies in a dense matrix or in columns of a wider one: torch's gelu.out confuses the two on a CPU."""
    function = {
        "relu": torch.relu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "silu": torch.nn.functional.silu,
    }[activation]
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-5
    for apart in itertools.product((False, True), repeat=2):
        pre, d_value = (
            random(3, 64, dtype=dtype, seed=seed)[:, 5:36] if wide else random(3, 31, dtype=dtype, seed=seed)
            for seed, wide in enumerate(apart)
        )
        x = pre.clone().float().requires_grad_()
        expected = function(x)
        expected.backward(d_value.float())  # hidden_backward overwrites d_value by the value
        value, d_pre, _ = _native.kernels.hidden_backward(activation, d_value, pre)
        assert_same(value, expected, tolerance, f"value {apart}")
        assert_same(d_pre, x.grad, tolerance, f"gradient {apart}")
        assert differs(value, x, tolerance), "control"
