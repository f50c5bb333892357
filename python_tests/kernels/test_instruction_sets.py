"""The loops of the extension on a CPU: which instruction sets they are compiled for, which one runs, and that all of
them, and the kernels of GPUs, give the same bytes."""

import platform
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from grids import few
from kernel_arrays import ELEMENTS, place
from ptx import build, nvcc
from ptx_kernels import Ptx
from quantize_checks import BLOCKS, decoded, layout, random_blocks, random_bytes, values_of
from torch_kernels import Torch

from rtp_ext import _C
from rtp_ext._native import kernels

NEEDED = {"avx2": {"avx2"}, "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}  # of /proc/cpuinfo
WIDER = tuple(NEEDED)
ALL = ("baseline", *WIDER)
SIZES = (1, 5, 127, 128, 300, 5 * 128 * 256 + 37)  # the last one: many blocks, on several threads
CPUINFO = Path("/proc/cpuinfo")


@pytest.fixture
def chosen():
    """Runs before and after each test."""
    before = kernels.instruction_set()
    yield before
    kernels.set_instruction_set(before)


def test_what_runs_is_the_widest_that_the_processor_has(chosen):
    flags = set(re.search(r"^flags\s*:(.*)$", CPUINFO.read_text() + "\nflags :", re.MULTILINE)[1].split())
    wide = platform.machine() == "x86_64"
    had = [name for name in ALL if name == "baseline" or (wide and NEEDED[name] <= flags)]
    assert kernels.instruction_sets() == had
    assert chosen == had[-1]
    kernels.set_instruction_set("baseline")
    assert kernels.instruction_set() == "baseline"
    for wrong in {"neon", *ALL} - {*had}:
        with pytest.raises(ValueError, match=rf"the widest is {had[-1]}, got {wrong}"):
            kernels.set_instruction_set(wrong)
    assert kernels.instruction_set() == "baseline"


def test_loops_are_compiled_for_what_their_names_say():
    """Registers of 256 bits and of 512 in the machine code, no product and sum in one rounding, and no call: a function
    that was not inlined would be the baseline's."""
    if platform.machine() != "x86_64" or shutil.which("objdump") is None:
        pytest.skip("needs objdump on x86_64")
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", _C.__file__], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    bodies = re.findall(r"^[0-9a-f]+ <\S*run_with_(avx2|avx512)\S*>:\n((?:.+\n)+)", listing, re.MULTILINE)
    if not bodies:
        pytest.skip("the extension was stripped of its symbols")
    found = {name: Counter[str]() for name in WIDER}
    for name, code in bodies:
        found[name].update(re.findall(r"\b(?:[yz]mm|vfn?m(?:add|sub)|call\s+\w+ <(?!mem)\S+>)", code))
    assert found["avx2"]["ymm"] > 500 and found["avx512"]["zmm"] > 100, found
    assert set(found["avx2"]) == {"ymm"} and set(found["avx512"]) == {"ymm", "zmm"}, found


def test_every_instruction_set_and_every_kernel_gives_the_same_bytes(chosen):
    """Includes non-finite numbers. Sums in float32 of dequantized numbers distinguish one rounding from two."""
    emulated = [("PTX", Ptx(build()))] if nvcc() else []
    for element in ELEMENTS:
        for numbers in SIZES:
            rng = np.random.default_rng(numbers)
            values = values_of(rng, numbers, element)
            packed = random_bytes(rng, numbers)
            before = place(rng, rng.standard_normal((1, numbers)), element, dense=True)
            total = place(rng, rng.standard_normal((1, numbers)), "float32", dense=True)
            results = {}
            chips = emulated if numbers < SIZES[-1] or element in few(ELEMENTS[1:2], ELEMENTS) else []
            for name, runner in [*((name, Torch("cpu")) for name in kernels.instruction_sets()), *chips]:
                if name in ALL:
                    kernels.set_instruction_set(name)
                sent = runner.quantize(values)
                start, _ = layout(numbers)
                results[name] = {
                    "quantized": np.concatenate([sent[:numbers], sent[start:]]),  # without the padding
                    "dequantized": runner.dequantize(packed, before.same_place(None), False),
                    "sum": runner.dequantize(packed, total, True),
                }
                for kind in BLOCKS:
                    blocks = random_blocks(np.random.default_rng(numbers), numbers, kind)
                    results[name][kind] = runner.dequantize_blocks(blocks, before.same_place(None), kind)
                results[name]["added"] = runner.add_converted(total, [before] * 3)
            for name, result in results.items():
                for what, given in result.items():
                    wanted = results["baseline"][what]
                    differ = int((given != wanted).sum())
                    same = np.array_equal(given, wanted, equal_nan=what == "mxfp4")  # its scale of 255 is NaN
                    assert same, f"{what} {element} {numbers}: {differ} differ with {name}"
            if numbers == SIZES[-1]:
                once = decoded(packed, numbers) + total.values[0]
                assert (once.astype(np.float32) != results["baseline"]["sum"][0]).any(), "control: a single rounding"


def test_float64_is_the_same_with_every_instruction_set(chosen):
    values = torch.randn(SIZES[-1], dtype=torch.float64)
    results = []
    for name in kernels.instruction_sets():
        kernels.set_instruction_set(name)
        sent = torch.zeros(kernels.quantized_bytes(values.numel()), dtype=torch.uint8)
        kernels.quantize(sent, values)
        back, total = torch.empty_like(values), values.clone()
        kernels.dequantize(back, sent)
        kernels.dequantize_add(total, sent)
        results.append((sent, back, total))
    for result in results:
        assert all(map(torch.equal, result, results[0]))
    assert not torch.equal(results[0][1], values), "control"
