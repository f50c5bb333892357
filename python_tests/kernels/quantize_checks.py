"""Random cases for numbers in eight bits and for sums of numbers with fewer bits: see kernel_checks.

A number in a block whose largest magnitude is m is dequantized to q * m / 127 with an integer q: at most m / 254 away,
except for roundings of float32, which are a thousandth of a step here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from kernel_arrays import BYTES, ELEMENTS, ROUNDING, Array, assert_close, assert_refused, place, rounded

BLOCK = 128
LEAST = 2.0**-120  # blocks with nothing larger are zero
SLACK = 1e-3  # of a step
NAN = np.array(0x7FF8_0000_2000_0000).view(np.float64)[()]  # in float32 its lowest bits are not all 0


def layout(numbers: int) -> tuple[int, int]:
    """Returns the offset of the scales, and the total bytes."""
    scales = -(-numbers // 4) * 4
    return scales, scales + 4 * -(-numbers // BLOCK)


def scales_of(packed: np.ndarray, numbers: int) -> np.ndarray:
    """Returns the scale of every number."""
    start, _ = layout(numbers)
    return np.repeat(packed[start:].view(np.float32).astype(np.float64), BLOCK)[:numbers]


def decoded(packed: np.ndarray, numbers: int) -> np.ndarray:
    return packed[:numbers].view(np.int8).astype(np.float64) * scales_of(packed, numbers)


def largest(values: np.ndarray) -> np.ndarray:
    """The largest magnitude in the block of every number."""
    blocks = [np.abs(values[start : start + BLOCK]).max() for start in range(0, values.size, BLOCK)]
    return np.repeat(np.array(blocks, np.float64), BLOCK)[: values.size]


def numbers_of(rng: np.random.Generator) -> int:
    if rng.random() < 0.04:
        return 6 * 256 * 8 * 2 + 131  # the whole grid, twice
    return int(rng.choice([0, 1, 3, 4, 5, 127, 128, 129, 255, 256, 260, 1000, 1031]))


def values_of(rng: np.random.Generator, numbers: int, element: str) -> Array:
    values = rng.standard_normal((1, numbers)) * 10.0 ** rng.integers(-3, 4)
    for start in range(0, numbers, BLOCK):
        kind, block = rng.random(), values[0, start : start + BLOCK]
        if kind < 0.1:
            block[:] = 0.0
        elif kind < 0.2:
            block[:] = 1e-38 * rng.integers(0, 3, block.size)  # too small for a scale
        elif kind < 0.3:
            block[rng.integers(block.size)] = rng.choice([np.inf, -np.inf, NAN])
    return place(rng, values, element, dense=True)


def quantized(values: np.ndarray) -> np.ndarray:
    """Returns the bytes of finite numbers [n] and their scales, as every processor computes them: in float32, each
    operation rounded by itself."""
    numbers, single = values.size, values.astype(np.float32)
    most = largest(values).astype(np.float32)
    zero = most < LEAST
    one, steps = np.where(zero, np.float32(1), most), np.float32(127)
    with np.errstate(under="ignore"):
        rounded = np.rint(single * np.where(zero, np.float32(0), steps / one)).astype(np.int8)
        scales = np.where(zero, np.float32(0), most / steps)[::BLOCK]
    start, size = layout(numbers)
    packed = np.zeros(size, np.uint8)
    packed[:numbers], packed[start:] = rounded.view(np.uint8), np.ascontiguousarray(scales).view(np.uint8)
    return packed


def check_quantize(runner, rng: np.random.Generator) -> None:
    element, numbers = str(rng.choice(ELEMENTS)), numbers_of(rng)
    array = values_of(rng, numbers, element)
    packed, what = runner.quantize(array), f"quantize {element} {numbers}"
    assert packed.size == layout(numbers)[1], what
    if numbers == 0:
        return
    values, most = array.values[0], largest(array.values[0])
    finite = np.isfinite(most)
    got = decoded(packed, numbers)
    assert np.isnan(got[~finite]).all(), f"{what}: a block with an infinity or a NaN is NaN"
    assert (packed[:numbers][~finite] == 0).all(), f"{what}: its values are 0, not what is left of the bits of a NaN"
    assert (got[most < LEAST] == 0).all(), f"{what}: tiny blocks are zero"
    usual = finite & (most >= LEAST)
    step = most / 127
    error = np.abs(got - values, where=usual, out=np.zeros(numbers))
    assert (error[usual] <= (0.5 + SLACK) * step[usual]).all(), f"{what}: {error.max()} of {step}"
    assert np.abs(packed[:numbers].view(np.int8)[usual].astype(int)).max(initial=0) <= 127
    if finite.all():
        exact, (start, _) = quantized(values), layout(numbers)
        assert np.array_equal(packed[:numbers], exact[:numbers]), f"expected the bytes of float32 from {what}"
        assert np.array_equal(packed[start:], exact[start:]), f"expected the scales of float32 from {what}"
    wrong = np.roll(got, 1)
    with np.errstate(invalid="ignore"):
        apart = usual & np.roll(usual, 1) & (np.abs(np.roll(values, 1) - values) > 3 * (step + np.roll(step, 1)))
        assert not apart.any() or (np.abs(wrong - values)[apart] > step[apart]).any(), f"control of {what}"


def random_bytes(rng: np.random.Generator, numbers: int) -> np.ndarray:
    start, size = layout(numbers)
    packed = np.zeros(size, np.uint8)
    packed[:numbers] = rng.integers(-127, 128, numbers).astype(np.int8).view(np.uint8)
    packed[start:] = np.abs(rng.standard_normal((size - start) // 4)).astype(np.float32).view(np.uint8)
    return packed


def check_dequantize(runner, rng: np.random.Generator) -> None:
    element, numbers, add = str(rng.choice(ELEMENTS)), numbers_of(rng), rng.random() < 0.6
    if add:
        element = "float32"
    packed = random_bytes(rng, numbers)
    before = place(rng, rng.standard_normal((1, numbers)), element, dense=True)
    expected = decoded(packed, numbers)[None, :] + (before.values if add else 0.0)
    error = 4 * ROUNDING["float32"] * (np.abs(expected) + np.abs(before.values))
    actual = runner.dequantize(packed, before if add else before.same_place(None), add)
    what = f"dequantize to {element} {numbers} add={add}"
    assert_close(actual, expected, element, error, what)
    product = packed[:numbers].view(np.int8).astype(np.float32) * scales_of(packed, numbers).astype(np.float32)
    exact = product + before.values[0].astype(np.float32) if add else product
    assert np.array_equal(actual[0], rounded(exact.astype(np.float64), element)), f"expected two roundings from {what}"
    if numbers > 1:
        assert_refused(actual, expected, element, error, what)


def check_add_converted(runner, rng: np.random.Generator) -> None:
    element, numbers, count = str(rng.choice(ELEMENTS)), numbers_of(rng), int(rng.integers(1, 6))
    values = [place(rng, rng.standard_normal((1, numbers)), element, dense=True) for _ in range(count)]
    total = place(rng, rng.standard_normal((1, numbers)), "float32", dense=True)
    expected = total.values + sum(each.values for each in values)
    error = ROUNDING["float32"] * count * (np.abs(total.values) + sum(np.abs(each.values) for each in values))
    actual, what = runner.add_converted(total, values), f"add_converted {element} {numbers} {count}"
    assert_close(actual, expected, "float32", error, what)
    assert np.array_equal(actual, added_in_turn(total, values)), f"expected one rounding an addend from {what}"
    if count > 1 and numbers > 100:
        assert not np.array_equal(actual, added_in_turn(total, values[::-1])), "control: another order"
    if numbers > 1:
        assert_refused(actual, expected, "float32", error, what)


def added_in_turn(total: Array, values: Sequence[Array]) -> np.ndarray:
    """The float32 sum of the values in their order, rounded after every one."""
    result = total.values
    for each in values:
        result = rounded(result + each.values, "float32")
    return result


def bytes_array(rng: np.random.Generator, numbers: int) -> Array:
    """Room for the bytes of so many numbers, as words of four."""
    words = layout(numbers)[1] // 4
    return Array(None, "float32", words, int(rng.integers(16 // BYTES["float32"])), (1, words))


# Numbers and bytes of a block of frozen weights, in the order of BlockFormat.
BLOCKS = {
    "nf4": (64, 36),
    "mxfp4": (32, 17),
    "int8": (128, 132),
    "fp4": (64, 36),
    "nf4-torchao": (64, 36),
    "nf4-torchao-bfloat16": (64, 36),
}
NF4 = (
    "-1 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334 "
    "-0.09105003625154495 0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224 "
    "0.44070982933044434 0.5626170039176941 0.7229568362236023 1"
)  # bitsandbytes.functional.get_4bit_type("nf4")
E2M1 = "0 0.5 1 1.5 2 3 4 6 -0 -0.5 -1 -1.5 -2 -3 -4 -6"
# torchao.quantization.NF4Tensor.from_tensor
NF4_TORCHAO = "-1 -0.6962 -0.5251 -0.3949 -0.2844 -0.1848 -0.0911 0 0.0796 0.1609 0.2461 0.3379 0.4407 0.5626 0.7230 1"
CODES = {
    "nf4": np.array(NF4.split(), np.float32),
    "mxfp4": np.array(E2M1.split(), np.float32),
    "fp4": np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / np.float32(12),
    "nf4-torchao": np.array(NF4_TORCHAO.split(), np.float32),
    "nf4-torchao-bfloat16": rounded(np.array(NF4_TORCHAO.split(), np.float64), "bfloat16").astype(np.float32),
}


def decoded_blocks(packed: np.ndarray, numbers: int, kind: str, *, swapped: bool = False) -> np.ndarray:
    """Returns the float32 numbers of blocks. swapped: the two codes of a byte in the wrong order."""
    size, total = BLOCKS[kind]
    blocks = packed.reshape(-1, total)
    if kind == "int8":
        values = blocks[:, :size].view(np.int8).astype(np.float32)
    else:
        both = [blocks[:, : size // 2] >> 4, blocks[:, : size // 2] & 15]
        ordered = both if (kind != "mxfp4") != swapped else both[::-1]
        values = CODES[kind][np.stack(ordered, 2).reshape(len(blocks), size)]
    if kind == "mxfp4":
        exponents = blocks[:, -1:].astype(np.int32)
        scales = np.where(exponents == 255, np.nan, np.ldexp(1.0, exponents - 127)).astype(np.float32)
    else:
        scales = np.ascontiguousarray(blocks[:, -4:]).view(np.float32)
    with np.errstate(under="ignore", invalid="ignore", over="ignore"):
        return (values * scales).reshape(-1)[:numbers]


def random_blocks(rng: np.random.Generator, numbers: int, kind: str) -> np.ndarray:
    size, total = BLOCKS[kind]
    count = -(-numbers // size)
    packed = rng.integers(0, 256, (count, total)).astype(np.uint8)
    if kind == "mxfp4":
        packed[:, -1] = np.where(rng.random(count) < 0.1, rng.choice([0, 1, 255], count), rng.integers(110, 140, count))
    else:
        packed[:, -4:] = np.abs(rng.standard_normal((count, 1))).astype(np.float32).view(np.uint8)
    return packed.reshape(-1)


def check_dequantize_blocks(runner, rng: np.random.Generator) -> None:
    kind, element, numbers = str(rng.choice([*BLOCKS])), str(rng.choice(ELEMENTS)), numbers_of(rng)
    packed = random_blocks(rng, numbers, kind)
    out = place(rng, np.zeros((1, numbers)), element, dense=True).same_place(None)
    actual, what = runner.dequantize_blocks(packed, out, kind)[0], f"dequantize_blocks {kind} to {element} {numbers}"

    def same(values: np.ndarray) -> bool:
        return np.array_equal(actual, rounded(values.astype(np.float64), element), equal_nan=True)

    assert same(decoded_blocks(packed, numbers, kind)), f"expected one rounding of one product from {what}"
    if numbers > 100 and kind != "int8":
        assert not same(decoded_blocks(packed, numbers, kind, swapped=True)), f"control of {what}: codes swapped"


QUANTISE_CHECKS = {
    "dequantize_blocks": check_dequantize_blocks,
    "quantize": check_quantize,
    "dequantize": check_dequantize,
    "add_converted": check_add_converted,
}
