"""Random cases for codes of 8 bits and the scales of their blocks: see kernel_checks. Every result is exact."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from kernel_arrays import BYTES, ELEMENTS, Array, place, rounded

FORMATS = {"e4m3": (3, 7, 448.0), "e5m2": (2, 15, 57344.0)}  # bits of the mantissa, bias, largest number
RULES = ("linear", "power_of_two", "e8m0_floor", "e8m0_ceil")  # in the order of ScaleRule
EXTREMES = {
    "float32": [0.0, -0.0, 1e-45, -3e-39, 1e-30, 9.9e-13, 1e-12, 3e38, -1e30],
    "bfloat16": [0.0, -0.0, 1e-40, -3e-39, 1e-30, 9.9e-13, 1e-12, 3e38, -1e30],
    "float16": [0.0, -0.0, 6e-8, -6e-8, 1e-6, 6e4, -6e4],
}


def numbers_of(format: str) -> np.ndarray:
    """Returns the numbers of the codes from 0 to 126, without a sign; of e5m2 up to the largest finite one."""
    mantissa, bias, largest = FORMATS[format]
    codes = np.arange(127)
    exponent, fraction = codes >> mantissa, (codes & ((1 << mantissa) - 1)) / (1 << mantissa)
    numbers = np.where(exponent == 0, np.ldexp(fraction, 1 - bias), np.ldexp(1 + fraction, exponent - bias))
    return numbers[numbers <= largest]


def encoded(scaled: np.ndarray, negative: np.ndarray, format: str) -> np.ndarray:
    """Returns the codes of float32 numbers, rounded to the nearest, ties to even codes, and saturated."""
    numbers = numbers_of(format)
    magnitude = np.minimum(np.abs(np.nan_to_num(scaled.astype(np.float64), posinf=1e300)), numbers[-1])
    above = np.clip(np.searchsorted(numbers, magnitude), 1, numbers.size - 1)
    up, down = numbers[above] - magnitude, magnitude - numbers[above - 1]
    codes = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
    return (np.where(np.isnan(scaled), 127, codes) | np.where(negative, 128, 0)).astype(np.uint8)


def expanded(blocks: np.ndarray, shape: tuple[int, int], block: tuple[int, int]) -> np.ndarray:
    rows, columns = (np.arange(size) // step for size, step in zip(shape, block, strict=True))
    return blocks[np.ix_(rows, columns)]


def amax_of(values: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Returns the largest magnitude of every block, NaN with a NaN."""
    grid = [range(0, size, step) for size, step in zip(values.shape, block, strict=True)]
    return np.array(
        [[np.abs(values[i : i + block[0], j : j + block[1]]).max() for j in grid[1]] for i in grid[0]], np.float32
    ).reshape(len(grid[0]), len(grid[1]))


def scales_of(amax: np.ndarray, format: str, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the factors of the numbers, and the scales: float32, or bytes of exponents."""
    largest = FORMATS[format][2]
    wide = amax.astype(np.float64)
    with np.errstate(all="ignore"):
        if rule in ("linear", "power_of_two"):
            factor = (largest / np.maximum(wide, 1e-12)).astype(np.float32)
            if rule == "power_of_two":
                factor = np.exp2(np.floor(np.log2(factor.astype(np.float64)).astype(np.float32)))
            factor = np.where(np.isfinite(amax), factor, np.float32(np.nan))
            return factor, np.float32(1) / factor
        if rule == "e8m0_floor":
            exponent = np.where(wide < 2.0**-126, -127, np.frexp(wide)[1] - 1) - (np.frexp(largest)[1] - 1) + 127
            exponent = np.where(np.isinf(amax), 255 - (np.frexp(largest)[1] - 1), np.maximum(exponent, 0))
            used = np.maximum(exponent, 1)
        else:
            fraction, exponent = np.frexp((amax / np.float32(largest)).astype(np.float64))
            exponent = np.where(fraction == 0.5, exponent - 1, exponent) + 127
            exponent = np.where(fraction == 0, 0, np.maximum(exponent, 0))
            used = exponent = np.where(np.isinf(amax), 254, exponent)
        factor = np.where((rule == "e8m0_ceil") & (exponent == 0), 1.0, np.ldexp(1.0, 127 - used))
        factor = np.where(np.isnan(amax), np.nan, factor).astype(np.float32)
        return factor, np.where(np.isnan(amax), 255, exponent).astype(np.uint8)


def codes_of(values: np.ndarray, amax: np.ndarray, block, format: str, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns codes of 8 bits and scales, each operation in float32 rounded by itself."""
    factor, scales = scales_of(amax, format, rule)
    with np.errstate(all="ignore"):
        scaled = values.astype(np.float32) * expanded(factor, values.shape, block)
    return encoded(scaled, np.signbit(values), format), scales


def swizzled(scales: np.ndarray) -> np.ndarray:
    """Returns exponents in tiles of 128 rows x 4 columns, as cuBLAS takes them."""
    rows, columns = (-(-size // step) * step for size, step in zip(scales.shape, (128, 4), strict=True))
    padded = np.zeros((rows, columns), np.uint8)
    padded[: scales.shape[0], : scales.shape[1]] = scales
    return padded.reshape(rows // 128, 4, 32, columns // 4, 4).transpose(0, 3, 2, 1, 4).reshape(-1)


def block_of(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[int, int]:
    rows, columns = (max(size, 1) for size in shape)
    kinds = [(rows, columns), (1, columns), (rows, 1), (128, 128), (1, 128), (128, 1), (1, 32), (32, 1)]
    return kinds[int(rng.integers(len(kinds)))]


def values_of(rng: np.random.Generator, shape: tuple[int, int], element: str, finite: bool) -> Array:
    values = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4)
    if values.size and rng.random() < 0.4:
        some = rng.random(shape) < 0.3
        values[some] = rng.choice(EXTREMES[element], int(some.sum()))
    if values.size and rng.random() < 0.3:
        values[rng.random(shape[0]) < 0.3] = rng.choice([0.0, 1e-13, 1e-38 if element != "float16" else 0.0])
    if values.size and rng.random() < 0.5:  # ties of the rounding
        values[:] = rng.integers(-1000, 1000, shape) * 2.0 ** rng.integers(-8, 4)
    if values.size and not finite:
        values[rng.integers(shape[0]), rng.integers(shape[1])] = rng.choice([np.inf, -np.inf, np.nan])
    array = place(rng, values, element)
    array.values = np.where(np.isinf(array.values) & np.isfinite(values), 1.0, array.values)
    array.values = rounded(array.values, element)
    return array


def shape_of(rng: np.random.Generator) -> tuple[int, int]:
    rows = int(rng.choice([0, 1, 2, 31, 33, 64, 130]))
    columns = int(rng.choice([0, 1, 3, 31, 32, 33, 100, 128, 136, 257]))
    if rng.random() < 0.03:
        columns = 1100
    return (rows, columns) if rows * columns < 20000 else (3, columns)


def check_block_amax(runner, rng: np.random.Generator) -> None:
    element, shape = str(rng.choice(ELEMENTS)), shape_of(rng)
    array = values_of(rng, shape, element, finite=rng.random() < 0.7)
    block = block_of(rng, shape)
    actual, what = runner.block_amax(array, block), f"block_amax {element} {shape} {block}"
    expected = amax_of(array.values, block)
    assert np.array_equal(actual, expected, equal_nan=True), f"expected other magnitudes from {what}"
    if array.values.size > 1 and np.isfinite(array.values).all() and np.abs(array.values).max() > 0:
        less = array.values.copy()
        less[np.unravel_index(np.abs(less).argmax(), shape)] = 0
        other = amax_of(less, block)
        assert not np.array_equal(actual, other) or np.array_equal(expected, other), f"control of {what}"


def check_quantize_codes(runner, rng: np.random.Generator) -> None:
    element, shape = str(rng.choice(ELEMENTS)), shape_of(rng)
    array = values_of(rng, shape, element, finite=rng.random() < 0.7)
    block, format, transposed = block_of(rng, shape), str(rng.choice([*FORMATS])), bool(rng.integers(2))
    check_codes(runner, rng, array, block, format, transposed, given=rng.random() < 0.5)


def check_codes(runner, rng: np.random.Generator, array: Array, block, format: str, transposed: bool, given: bool):
    """given: the largest magnitudes are; some are not those of the values, and none is a NaN."""
    rule, swizzle = str(rng.choice(RULES)), bool(rng.integers(2))
    swizzle = swizzle and rule.startswith("e8m0")
    what = f"quantize_codes {array.element} {array.shape} {block} {format} {rule} transposed={transposed}"
    what += f" swizzled={swizzle} given={given}"
    amax = amax_of(array.values, block)
    if given:
        amax = np.where(np.isnan(amax), 3, np.minimum(amax, np.float32(1e38))) * rng.choice([1, 1, 1, 2], amax.shape)
        amax = amax.astype(np.float32)
    codes, scales = runner.quantize_codes(array, amax if given else None, block, format, rule, transposed, swizzle)
    right, expected = codes_of(array.values, amax, block, format, rule)
    expected = swizzled(expected.T if block[1] == 1 < block[0] else expected) if swizzle else expected
    if array.values.size == 0:
        return
    known = ~np.isnan(array.values)  # the sign of a NaN is not given on
    differ = (codes != right)[known]
    assert not differ.any(), f"expected other codes from {what}: {int(differ.sum())} of {differ.size}"
    assert ((codes & 127) == 127)[~known].all(), f"expected the code of NaN for a NaN from {what}"
    assert np.array_equal(scales, expected, equal_nan=scales.dtype == np.float32), f"expected other scales from {what}"
    largest = numbers_of(format).size - 1
    sure = np.isfinite(array.values).all() and (right & 127).max() > largest // 2 and np.unique(right).size > 2
    if sure:
        assert not np.array_equal(codes, np.roll(right, 1)), f"control of {what}: codes of the neighbour"


class CodePath(NamedTuple):
    """A matrix, and the kernels that make its codes: in order, with the layout of their tiles if it is not `wide`.

    offset: bytes between a multiple of 16 and the first value. gap: values between rows."""

    shape: tuple[int, int]
    block: tuple[int, int]
    kernels: str
    transposed: bool = False
    given: bool = False
    offset: int = 0
    gap: int = 8


CODE_PATHS = [
    CodePath((9, 264), (1, 264), "code_tiles_rows"),
    CodePath((9, 264), (1, 264), "code_tiles", given=True),
    CodePath((40, 40), (40, 1), "code_tiles_turned", transposed=True, gap=0),
    CodePath((5, 2056), (1, 2056), "code_tiles_rows"),
    CodePath((60, 2056), (1, 2056), "code_tiles_rows"),
    CodePath((3, 8200), (1, 8200), "code_tiles_rows", gap=0),
    CodePath((2, 16392), (1, 16392), "amax_tiles code_tiles"),
    CodePath((130, 264), (1, 32), "code_tiles"),
    CodePath((130, 264), (1, 32), "code_tiles", given=True),
    CodePath((130, 264), (1, 128), "code_tiles"),
    CodePath((260, 264), (128, 128), "code_tiles"),
    CodePath((100, 104), (100, 104), "code_tiles"),
    CodePath((130, 136), (130, 136), "amax_tiles code_tiles"),
    CodePath((390, 392), (390, 392), "amax_tiles code_tiles"),
    CodePath((136, 264), (136, 264), "amax_tiles code_tiles_turned", transposed=True),
    CodePath((264, 136), (32, 1), "code_tiles_turned", transposed=True),
    CodePath((264, 136), (32, 1), "code_tiles_turned", transposed=True, given=True),
    CodePath((264, 136), (128, 1), "code_tiles_turned", transposed=True),
    CodePath((136, 40), (136, 1), "amax_tiles_turned code_tiles_turned", transposed=True),
    CodePath((392, 264), (392, 1), "amax_tiles_turned code_tiles_turned", transposed=True),
    # blocks or layouts that no recipe has, odd sizes and addresses
    CodePath((40, 192), (1, 64), "amax_each code_tiles"),
    CodePath((70, 136), (5, 136), "amax_each code_tiles"),
    CodePath((40, 136), (1, 32), "amax_tiles code_each", transposed=True),
    CodePath((40, 136), (32, 1), "amax_tiles_turned code_each"),
    CodePath((33, 136), (32, 1), "amax_tiles_turned code_each", transposed=True),
    CodePath((33, 40), (33, 1), "amax_tiles_turned code_each", transposed=True),
    CodePath((33, 100), (1, 100), "amax_each code_each"),
    CodePath((40, 136), (1, 136), "amax_each code_each", offset=8),
    CodePath((40, 136), (1, 136), "amax_each code_each", gap=1),
]


def kernels_of_codes(names) -> list[str]:
    """The names of kernels of codes.cu without types, with the layout of their tiles if it is not `wide`."""
    found = [re.search(r"\d((?:code|amax)_(?:tiles|each))I(?:.*LayoutE(\d))?", name) for name in names]
    return [each[1] + ("", "_turned", "_rows")[int(each[2] or 0)] for each in found if each]


def check_code_path(runner, rng: np.random.Generator, path: CodePath | None = None, element="", format="") -> None:
    """Any path, element and format if they are not given."""
    path = path or CODE_PATHS[int(rng.integers(len(CODE_PATHS)))]
    element, format = element or str(rng.choice(ELEMENTS)), format or str(rng.choice([*FORMATS]))
    values = values_of(rng, path.shape, element, finite=bool(rng.integers(2))).values
    array = Array(values, element, path.shape[1] + path.gap, path.offset // BYTES[element], path.shape)
    runner.aligned, runner.launched = True, []
    check_codes(runner, rng, array, path.block, format, path.transposed, path.given)
    runner.aligned, launched = False, kernels_of_codes(runner.launched)
    assert launched in ([], path.kernels.split()), f"other kernels for {path}: {launched}"


def bytes_room(rng: np.random.Generator, count: int) -> Array:
    """Room for so many bytes, as words of four."""
    words = -(-count // 4)
    return Array(None, "float32", words, int(rng.integers(16 // BYTES["float32"])), (1, words))


CODE_CHECKS = {
    "block_amax": check_block_amax,
    "quantize_codes": check_quantize_codes,
    "code_paths": check_code_path,
}
