"""Numbers of PTX as NumPy computes them: formats, roundings, and operations of arithmetic, logic and conversion.

Registers hold unsigned integers; an operation reads them in the type that its opcode names. Approximate operations
(`ex2.approx` and the like) return the exact result, rounded: the PTX ISA bounds their error, and does not define it.
Operations with `.ftz` replace subnormal numbers by zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

DTYPES = {
    **{f"{letter}{bits}": np.dtype(f"u{bits // 8}") for letter in "ub" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8"), "bf16": np.dtype("u2")},
    **{"f16x2": np.dtype("u4"), "bf16x2": np.dtype("u4"), "pred": np.dtype("?")},
}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def widen(values: np.ndarray, kind: str) -> np.ndarray:
    """Returns floating-point values of a type in float64."""
    if kind == "bf16":
        values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(invalid="ignore"):  # of signalling NaNs
        return values.astype(np.float64)


def narrow(values: np.ndarray, kind: str) -> np.ndarray:
    """Returns float64 rounded once to a type, to the nearest, ties to even; NaN of bfloat16 is 0x7fff."""
    if kind != "bf16":
        with np.errstate(all="ignore"):
            return values.astype(DTYPES[kind])
    _, exponent = np.frexp(values)
    step = np.maximum(exponent, -125) - 8
    whole = np.ldexp(np.rint(np.ldexp(values, -step)), step)  # bfloat16 has 8 bits, and subnormal numbers from 2^-133
    bits = (whole.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), bits)


def narrow_pair(high: np.ndarray, low: np.ndarray, kind: str) -> np.ndarray:
    """Returns float32 rounded and saturated to two numbers of 8 bits: e4m3x2, e5m2x2. Of a NaN only that it is one is
    defined: the sign is lost, and of the three of e5m2 this is another than a kernel writes."""
    mantissa, bias, largest, nan = {"e4m3x2": (3, 7, 448.0, 0x7F), "e5m2x2": (2, 15, 57344.0, 0x7E)}[kind]
    halves = []
    for values in (low.astype(np.float64), high.astype(np.float64)):
        magnitude = np.minimum(np.abs(values), largest)
        exponent = np.maximum(np.frexp(magnitude)[1] - 1, 1 - bias)
        exponent = np.where(magnitude == 0, 1 - bias, exponent)
        codes = np.rint(np.ldexp(magnitude, mantissa - exponent)) + ((exponent + bias - 1) << mantissa)
        codes = np.where(np.isnan(values), nan, codes + np.where(np.signbit(values), 128, 0))
        halves.append(codes.astype(np.uint16))
    return halves[0] | halves[1] << np.uint16(8)


def exact_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns a + b in float64, rounded to odd, so that a further rounding to at most 51 bits is that of the exact sum.

    Source: Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums" (2008).
    """
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    even = (total.view(np.int64) & 1) == 0
    inexact = np.isfinite(total) & (error != 0)
    return np.where(inexact & even, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray, kind: str, down: bool = False) -> np.ndarray:
    """Returns a * b + c of a type with at most 24 bits, rounded once: to the nearest, or down."""
    exact = exact_sum(widen(a, kind) * widen(b, kind), widen(c, kind))
    result = narrow(exact, kind)
    if down:
        result = np.where(result > exact, np.nextafter(result, np.float32(-np.inf)), result)
    return result


def pairs(operation: Callable[..., np.ndarray], kind: str, *words: np.ndarray) -> np.ndarray:
    """Applies an operation of 16 bits to both halves of words."""
    low, high = ([(word >> np.uint32(shift)).astype(np.uint16) for word in words] for shift in (0, 16))
    halves = (
        operation(*(half.view(DTYPES[kind]) for half in side)).view(np.uint16).astype(np.uint32) for side in (low, high)
    )
    first, second = halves
    return first | second << np.uint32(16)


def flush(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) < np.float32(2.0**-126), np.copysign(np.float32(0), values), values)


def _extreme(a: np.ndarray, b: np.ndarray, larger: bool) -> np.ndarray:
    if a.dtype.kind != "f":
        return np.maximum(a, b) if larger else np.minimum(a, b)
    chosen = np.fmax(a, b) if larger else np.fmin(a, b)
    both_zero = (a == 0) & (b == 0)
    zero = np.signbit(a) & np.signbit(b) if larger else np.signbit(a) | np.signbit(b)
    return np.where(both_zero, np.where(zero, a.dtype.type(-0.0), a.dtype.type(0.0)), chosen)


def whole_quotient(a: np.ndarray, b: np.ndarray, remainder: bool) -> np.ndarray:
    """Returns a / b of integers, rounded towards zero, or what remains of a."""
    left = np.fmod(a, b)
    return left if remainder else (a - left) // b


def shift(a: np.ndarray, by: np.ndarray, left: bool) -> np.ndarray:
    bits = a.dtype.itemsize * 8
    by = np.broadcast_to(by, a.shape)
    inside = np.minimum(by, bits - 1).astype(a.dtype)
    moved = a << inside if left else a >> inside
    signed = a.dtype.kind == "i" and not left
    return np.where(
        by >= bits, np.where(a < 0, a.dtype.type(-1), a.dtype.type(0)) if signed else a.dtype.type(0), moved
    )


def insert(a: np.ndarray, b: np.ndarray, place: np.ndarray, count: np.ndarray) -> np.ndarray:
    """`bfi`: the lowest bits of a in place of some of b."""
    one = np.ones_like(a)
    field = shift(shift(one, count, left=True) - one, place, left=True)
    return (b & ~field) | (shift(a, place, left=True) & field)


def _permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out = np.zeros_like(a)
    for place in range(4):
        choice = (selector >> np.uint32(4 * place)) & np.uint32(15)
        byte = (both >> (np.uint64(8) * (choice & np.uint32(7)).astype(np.uint64))).astype(np.uint8)
        byte = np.where(choice & np.uint32(8), np.where(byte & 0x80, np.uint8(0xFF), np.uint8(0)), byte)
        out |= byte.astype(np.uint32) << np.uint32(8 * place)
    return out


def compare(test: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    tests = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater}
    tests |= {"ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
    nan = (np.isnan(a) | np.isnan(b)) if a.dtype.kind == "f" else np.zeros(a.shape, bool)
    if test in ("num", "nan"):
        return nan if test == "nan" else ~nan
    if test in tests:
        return tests[test](a, b) & ~nan  # of NaNs `ne` is false, too
    return tests[test[:-1]](a, b) | nan  # ltu, equ, ...


# Operations of equal types by the first word of their opcode.
PLAIN: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "neg": lambda a: -a if a.dtype.kind == "f" else (~a + a.dtype.type(1)),
    "abs": np.abs,
    "min": lambda a, b: _extreme(a, b, False),
    "max": lambda a, b: _extreme(a, b, True),
    "copysign": lambda a, b: np.copysign(b, a),
    "mov": lambda a: a,
    "prmt": _permute,
}
APPROXIMATE: dict[str, Callable[..., np.ndarray]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda a: 1 / a,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "tanh": np.tanh,
    "div": np.divide,
}


def convert(words: tuple[str, ...], a: np.ndarray) -> np.ndarray:
    """`cvt`: words after the opcode, such as ("rn", "bf16", "f32"). `a`: in the source type."""
    *rules, to, source = words
    floats = {"f16", "bf16", "f32", "f64"}
    if to in floats:
        value = widen(a, source) if source in floats else a
        if "sat" in rules:
            value = np.where(np.isnan(value), 0.0, np.clip(value, 0.0, 1.0))
        if source in floats:
            return narrow(value, to)
        return value.astype(DTYPES[to]) if to != "bf16" else narrow(value.astype(np.float64), to)
    if source in floats:
        value = widen(a, source)
        round_to = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
        value = round_to[next(rule for rule in rules if rule in round_to)](value)
        limits = np.iinfo(DTYPES[to])
        if limits.bits > 32:
            raise NotImplementedError("conversion of floating-point numbers to 64 bits")
        return np.where(np.isnan(value), 0, np.clip(value, limits.min, limits.max)).astype(DTYPES[to])
    return a.astype(DTYPES[to])
