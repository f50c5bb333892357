"""Which kernels make codes of 8 bits, by their PTX; and the interpreter's instructions that only they need."""

from itertools import product

import numpy as np
import ptx
import pytest
import torch
from code_checks import CODE_PATHS, FORMATS, check_code_path, kernels_of_codes
from grids import SWEEP, few
from kernel_arrays import ELEMENTS
from ptx.arithmetic import DTYPES, convert, insert, narrow_pair
from ptx_kernels import Ptx


@pytest.mark.skipif(ptx.nvcc() is None, reason="no nvcc in PATH or /usr/local/cuda")
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_is_checked(capability):
    """Of every type, chosen by sizes, blocks, strides and addresses. 90: with the conversion of the GPU; 80 differs by
    the conversion alone, and in sweeps alone meets every kernel with every type."""
    compiled = ptx.build(capability=capability)
    assert any("cvt.rn.satfinite.e5m2x2" in text for text in compiled.texts) == (capability == 90)
    runner, rng, taken = Ptx(compiled), np.random.default_rng(7), set()
    types = [*product(ELEMENTS, FORMATS)]
    least = {path.kernels: path for path in sorted(CODE_PATHS, key=lambda path: -np.prod(path.shape))}
    small = [(path, number) for path in least.values() for number in range(len(types))]
    other = [(path, number % len(types)) for number, path in enumerate(CODE_PATHS) if path not in least.values()]
    some = few([each for at, each in enumerate(small) if at % 5 == 0], small)  # types in turns: 5 and 6 are coprime
    for path, number in some + other if capability == 80 else small:
        check_code_path(runner, rng, path, *types[number])
        taken.update(runner.launched)
    every = {name for name in runner.kernels if kernels_of_codes([name])}
    assert taken == every or (capability == 80 and not SWEEP), every - taken


def test_conversions_of_the_interpreter():
    """To 8 bits as torch's, of every number of 16 bits; fields of bits as Python's."""
    every = convert(("f32", "bf16"), np.arange(1 << 16, dtype=np.uint16).view(DTYPES["bf16"]))
    numbers = ~np.isnan(every)
    for kind, dtype in (("e4m3x2", torch.float8_e4m3fn), ("e5m2x2", torch.float8_e5m2)):
        pair, most = narrow_pair(every, every[::-1], kind), torch.finfo(dtype).max
        codes = torch.from_numpy(every).clamp(-most, most).to(dtype).view(torch.uint8).numpy()
        assert np.array_equal((pair >> 8)[numbers], codes[numbers]), kind
        assert np.array_equal((pair & 255)[::-1], pair >> 8)
        assert not np.array_equal((pair >> 8)[~numbers], codes[~numbers]), "NaNs lose their sign"
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 1 << 32, 200).astype(np.uint32) for _ in range(2))
    place, count = rng.integers(0, 16, 200).astype(np.uint32), rng.integers(0, 17, 200).astype(np.uint32)
    for x, y, at, bits, result in zip(
        *(each.tolist() for each in (a, b, place, count)), insert(a, b, place, count), strict=True
    ):
        field = ((1 << bits) - 1) << at
        assert result == (y & ~field | x << at & field)
