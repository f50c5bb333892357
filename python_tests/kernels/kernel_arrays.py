"""Arrays as the checks of kernels see them: values in float64, and where in memory they lie in which element type.

No torch here: the checks also run under the address sanitizer, where torch would take minutes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ELEMENTS = ("float32", "bfloat16", "float16")  # in the order of the kernels' enumeration
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# The largest relative error of one rounding, and the smallest distance of two numbers.
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
TINY = {"float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}
WINDOW = 16  # bytes that kernels move at once

CANARY = 0xA5  # around arrays: must stay
POISON = 0xFF  # in arrays not yet written: NaN in every element type


def encode(values: np.ndarray, element: str) -> np.ndarray:
    """Float64 to the bits of an element type, rounded to the nearest, ties to even."""
    with np.errstate(over="ignore", invalid="ignore"):
        if element == "float16":
            return values.astype(np.float16).view(np.uint16)
        single = values.astype(np.float32)
        bits = single.view(np.uint32)
        if element == "float32":
            return bits
        rounded = ((bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(single), np.uint16(0x7FFF), rounded)


def decode(bits: np.ndarray, element: str) -> np.ndarray:
    if element == "float16":
        return bits.view(np.float16).astype(np.float64)
    if element == "bfloat16":
        bits = bits.astype(np.uint32) << np.uint32(16)
    with np.errstate(invalid="ignore"):
        return bits.view(np.float32).astype(np.float64)


def rounded(values: np.ndarray, element: str) -> np.ndarray:
    """Rounds float64 values to an element type, through float32 as in the kernels."""
    return decode(encode(values, element), element)


@dataclass
class Array:
    """A matrix [rows, columns] in memory.

    values   float64, exact in the element type; None where a kernel is to write
    stride   elements from row to row
    offset   elements between an address that is a multiple of 16 bytes and the first one
    """

    values: np.ndarray | None
    element: str
    stride: int
    offset: int
    shape: tuple[int, int]

    @property
    def extent(self) -> int:
        """Elements from the first to the last one."""
        rows, columns = self.shape
        return (rows - 1) * self.stride + columns if rows and columns else 0

    def same_place(self, values: np.ndarray | None) -> Array:
        return Array(values, self.element, self.stride, self.offset, self.shape)


def place(rng: np.random.Generator, values: np.ndarray, element: str, dense: bool = False) -> Array:
    """Rounds values to `element`, and gives them a random alignment and, unless `dense`, a random stride."""
    columns = values.shape[1]
    gaps = [0, 0, 1, 5, 8, -columns % 8 + 8]  # the last one keeps every row at the same alignment
    offset = int(rng.integers(WINDOW // BYTES[element])) if rng.random() < 0.5 else 0
    stride = columns if dense else columns + int(rng.choice(gaps))
    return Array(rounded(values, element), element, stride, offset, (values.shape[0], columns))


def close(actual: np.ndarray, expected: np.ndarray, element: str, error: np.ndarray) -> np.ndarray:
    """Where `actual` is `expected` rounded to `element` after an error of `error`; infinities and NaNs must agree."""
    with np.errstate(invalid="ignore", over="ignore"):
        bound = ROUNDING[element] * (np.abs(expected) + error) + TINY[element] + error
        near = np.abs(actual - expected) <= bound
        ends = rounded(expected, element)
        # a number that rounds to infinity may be either side of the last finite one
        return near | (actual == ends) | (np.isnan(actual) & np.isnan(expected))


def assert_close(actual: np.ndarray, expected: np.ndarray, element: str, error, what: str) -> None:
    assert actual.shape == expected.shape, f"{what}: expected shape {expected.shape}, got {actual.shape}"
    good = close(actual, expected, element, np.broadcast_to(error, expected.shape))
    if good.all():
        return
    at = tuple(int(i) for i in np.argwhere(~good)[0])
    raise AssertionError(
        f"{what} at {at} of {expected.shape}: expected {expected[at]!r}, got {actual[at]!r} in {element}; "
        f"{int((~good).sum())} of {good.size} differ"
    )


def assert_refused(actual: np.ndarray, expected: np.ndarray, element: str, error, what: str) -> None:
    """The control of a comparison: a result that is one row or column aside must not pass."""
    for axis in range(expected.ndim):
        wrong = np.roll(actual, 1, axis)
        bound = np.broadcast_to(error, expected.shape) + 4 * ROUNDING[element] * np.abs(expected) + TINY[element]
        with np.errstate(invalid="ignore"):
            apart = np.abs(np.roll(expected, 1, axis) - expected) > 4 * (bound + np.roll(bound, 1, axis))
        if not apart.any():
            continue  # all neighbours are equal, so there is nothing to distinguish
        good = close(wrong, expected, element, np.broadcast_to(error, expected.shape))
        assert not good.all(), f"control of {what}: a result one place aside along dimension {axis} passes"
