"""Random cases for every kernel, each against float64: the same for its PTX, for a GPU and for ATen on a CPU.

A check takes a runner (`ptx_kernels.Ptx`, `torch_kernels.Torch`) and a random generator, makes one case of
any size, dtype, alignment and stride, and raises AssertionError where the result is not what float64 says, or where a
result that is one place aside would pass as well.

Errors: results are rounded once to their element type (`ROUNDING`); before it, a float32 computation may be wrong by
STEPS float32 roundings of the magnitude that the formula of each check names.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from code_checks import CODE_CHECKS
from kernel_arrays import BYTES, ELEMENTS, ROUNDING, Array, assert_close, assert_refused, decode, encode, place, rounded
from quantize_checks import QUANTISE_CHECKS

STEPS = 32 * ROUNDING["float32"]
SUM_STEPS = 64 * ROUNDING["float32"]  # of sums over a row, made by many threads
LOWEST = float(np.finfo(np.float32).min)
EXTREMES = {  # the product of two of them may be infinite, and is then infinite in float64 rounded
    "float32": [0.0, -0.0, 1e-30, 88.0, -88.0, 104.0, -104.0, 1e4, -1e4, 1e12, -1e12, 1e20, -1e20],
    "bfloat16": [0.0, -0.0, 1e-30, 88.0, -88.0, 104.0, -104.0, 1e4, -1e4, 1e12, -1e12, 1e20, -1e20],
    "float16": [0.0, -0.0, 6e-8, 11.0, -17.0, 88.0, -88.0, 6e4, -6e4],
}
_erf = np.vectorize(math.erf, otypes=[np.float64])


def shape(rng: np.random.Generator) -> tuple[int, int]:
    """Rows and columns: empty ones, single ones, odd ones, rows longer than a block takes at once."""
    rows = int(rng.choice([0, 1, 1, 2, 3, 7, 20, 70]))
    columns = int(rng.choice([0, 1, 2, 3, 7, 8, 9, 16, 31, 64, 129, 500, 1031]))
    if rng.random() < 0.04:
        rows, columns = 1, 2 * 6 * 256 * 8 + 5  # the whole grid, twice
    return (rows, columns) if rows * columns < 20000 else (2, columns)


def normal(rng: np.random.Generator, shape: tuple[int, int], element: str, extreme: bool) -> np.ndarray:
    values = rng.standard_normal(shape) * 2
    if extreme and values.size:
        some = rng.random(shape) < 0.3
        values[some] = rng.choice(EXTREMES[element], int(some.sum()))
    return values


def activation_and_slope(activation: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(over="ignore", under="ignore"):
        if activation == "relu":
            return np.maximum(x, 0), (x > 0).astype(np.float64)
        if activation == "gelu":
            below = 0.5 * (1 + _erf(x / math.sqrt(2)))
            return x * below, below + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        if activation == "gelu_tanh":
            scale, cubic = math.sqrt(2 / math.pi), 0.044715
            t = np.tanh(scale * (x + cubic * x**3))
            slope = np.where(np.abs(t) < 1, 0.5 * x * (1 - t * t) * scale * (1 + 3 * cubic * x * x), 0)
            return 0.5 * x * (1 + t), 0.5 * (1 + t) + slope
        sigmoid = 1 / (1 + np.exp(-x))
        return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))


def hidden_error(runner, element: str) -> float:
    """The errors of hidden values and their gradients, before the last rounding, relative to their factors."""
    return STEPS + runner.hidden_roundings * ROUNDING[element]


def check_hidden_forward(runner, rng: np.random.Generator) -> None:
    element, activation = str(rng.choice(ELEMENTS)), str(rng.choice(["relu", "gelu", "gelu_tanh", "silu"]))
    size, gated, dense = shape(rng), rng.random() < 0.6, rng.random() < 0.4
    extreme = rng.random() < 0.3 and not runner.hidden_roundings  # products between roundings overflow float16
    pre = place(rng, normal(rng, size, element, extreme), element, dense)
    gate = place(rng, normal(rng, size, element, extreme), element, dense) if gated else None
    what = f"hidden_forward {activation} {element} {size} gated={gated}"

    x = gate.values if gate else pre.values
    other = pre.values if gate else 1.0
    expected = activation_and_slope(activation, x)[0] * other
    error = hidden_error(runner, element) * np.abs(x * other)
    actual = runner.hidden_forward(activation, pre, gate)
    assert_close(actual, expected, element, error, what)
    if not extreme:
        assert_refused(actual, expected, element, error, what)


def check_hidden_backward(runner, rng: np.random.Generator) -> None:
    element, activation = str(rng.choice(ELEMENTS)), str(rng.choice(["relu", "gelu", "gelu_tanh", "silu"]))
    size, gated, dense = shape(rng), rng.random() < 0.6, rng.random() < 0.4
    extreme = rng.random() < 0.3 and not runner.hidden_roundings  # products between roundings overflow float16
    pre = place(rng, normal(rng, size, element, extreme), element, dense)
    gate = place(rng, normal(rng, size, element, extreme), element, dense) if gated else None
    d_value = place(rng, normal(rng, size, element, False), element, dense)
    what = f"hidden_backward {activation} {element} {size} gated={gated}"

    d, x = d_value.values, pre.values
    if gate is None:
        value, slope = activation_and_slope(activation, x)
        expected = [value, d * slope]
        magnitudes = [np.abs(x), 2 * np.abs(d)]
    else:
        through, slope = activation_and_slope(activation, gate.values)
        expected = [through * x, d * through, d * x * slope]
        magnitudes = [np.abs(gate.values * x), np.abs(d * gate.values), 2 * np.abs(d * x)]
    steps = hidden_error(runner, element)
    actual = runner.hidden_backward(activation, d_value, pre, gate)
    for name, mine, right, magnitude in zip(("value", "d_pre", "d_gate"), actual, expected, magnitudes, strict=False):
        assert_close(mine, right, element, steps * magnitude, f"{what} {name}")
        if not extreme:
            assert_refused(mine, right, element, steps * magnitude, f"{what} {name}")
    assert len(actual) == len(expected)


def random_logits(rng: np.random.Generator, element: str, finite: bool) -> tuple[Array, np.ndarray, tuple, float]:
    """Logits, targets, (first column, ignored target, soft cap), and the error of a logit after the cap."""
    rows = int(rng.choice([0, 1, 2, 3, 5]))
    columns = int(rng.choice([1, 2, 7, 8, 31, 129, 500, 1000]))
    if rng.random() < 0.05:
        columns = int(rng.choice([2600, 4200]))  # more than one turn of a block, and the largest block
    if rng.random() < 0.2:
        rows, columns = 20, int(rng.integers(1, 40))  # more than one row for a block
    scale = float(rng.choice([1.0, 30.0, 1e4]))
    soft_cap = float(rng.choice([0.0, 0.0, 30.0]))
    values = rng.standard_normal((rows, columns)) * scale
    if rng.random() < 0.3:
        values[rng.random((rows, columns)) < 0.3] = -np.inf
    if rows and rng.random() < 0.2:
        values[rng.integers(rows)] = -np.inf  # a shard that is masked out
    if rows and not finite and rng.random() < 0.1:
        values[rng.integers(rows), rng.integers(columns)] = rng.choice([np.inf, np.nan])
    first = int(rng.choice([0, 40, 1000]))
    targets = rng.integers(first - 3, first + columns + 3, rows)
    ignored = int(rng.choice([-100, first]))
    targets[rng.random(rows) < 0.2] = ignored
    error = STEPS * soft_cap if soft_cap else 0.0
    return place(rng, values, element), targets, (first, ignored, soft_cap), error


def capped(values: np.ndarray, soft_cap: float) -> np.ndarray:
    return soft_cap * np.tanh(values / soft_cap) if soft_cap else values


def column_of(targets: np.ndarray, columns: int, rules: tuple) -> np.ndarray:
    column = targets - rules[0]
    return np.where((targets != rules[1]) & (column >= 0) & (column < columns), column, -1)


def check_logit_sums(runner, rng: np.random.Generator) -> None:
    element = str(rng.choice(runner.logit_elements))
    logits, targets, rules, z_error = random_logits(rng, element, finite=False)
    rows, columns = logits.shape
    fresh = rng.random() < 0.5
    wanted = bool(rng.random() < 0.5)
    most = np.full(rows, LOWEST) if fresh else rounded(rng.standard_normal(rows) * 30, "float32")
    scaled = np.zeros(rows) if fresh else rounded(1 + rng.random(rows) * 100, "float32")
    hit = np.zeros(rows) if fresh else rounded(rng.standard_normal(rows), "float32")
    total = (np.zeros(rows) if fresh else rounded(rng.standard_normal(rows) * 9, "float32")) if wanted else None
    what = f"logit_sums {element} {logits.shape} cap={rules[2]}"

    z = capped(logits.values, rules[2])
    at = column_of(targets, columns, rules)
    with np.errstate(invalid="ignore", over="ignore"):
        higher = np.maximum(most, z.max(1, initial=-np.inf))
        sums = scaled * np.exp(most - higher) + np.exp(z - higher[:, None]).sum(1)
        hits = hit + np.where(at >= 0, np.take_along_axis(z, np.maximum(at, 0)[:, None], 1)[:, 0], 0)
        totals = None if total is None else total + z.sum(1)
    lost = np.isnan(sums)  # a logit of NaN or +inf: the loss is NaN, whatever the other sums are
    new = runner.add_logits(logits, targets, rules, [most, scaled, hit, total])
    assert np.isnan(new[1][lost]).all(), f"{what}: expected NaN where a logit is NaN or +inf, got {new[1][lost]}"
    good = ~lost
    relative = SUM_STEPS + 2 * z_error
    size = np.abs(np.where(np.isfinite(z), z, 0))
    for name, mine, right, error in (
        ("most", new[0], higher, z_error),
        ("scaled", new[1], sums, relative * np.abs(sums)),
        ("hit", new[2], hits, z_error + 2 * ROUNDING["float32"] * (np.abs(hit) + size.max(1, initial=0))),
        ("total", new[3], totals, z_error * columns + SUM_STEPS * (size.sum(1) + 9)),
    ):
        if right is None:
            continue
        bound = np.broadcast_to(error, right.shape)[good]
        assert_close(mine[good], right[good], "float32", bound, f"{what} {name}")
        if np.isfinite(right[good]).all():
            assert_refused(mine[good], right[good], "float32", bound, f"{what} {name}")


def check_logit_gradient(runner, rng: np.random.Generator) -> None:
    element = str(rng.choice(runner.logit_elements))
    out = str(rng.choice(runner.gradient_elements)) if element == "float32" else element
    logits, targets, rules, z_error = random_logits(rng, element, finite=True)
    rows, columns = logits.shape
    smoothing = float(rng.choice([0.0, 0.1]))
    everywhere = smoothing / 500
    z = capped(logits.values, rules[2])
    most = rounded(np.maximum(z.max(1, initial=-1e30), rng.standard_normal(rows)), "float32")
    factor = rounded(rng.standard_normal(rows), "float32")
    upstream = rounded(np.where(targets == rules[1], 0, rng.standard_normal(rows)), "float32")
    what = f"logit_gradient {element} to {out} {logits.shape} cap={rules[2]} smoothing={smoothing}"

    hits = np.arange(columns)[None, :] == column_of(targets, columns, rules)[:, None]
    with np.errstate(invalid="ignore"):
        p = np.exp(z - most[:, None]) * factor[:, None]
        slope = 1 - np.tanh(logits.values / rules[2]) ** 2 if rules[2] else np.ones_like(z)
    g = upstream[:, None]
    expected = (p - (1 - smoothing) * g * hits - everywhere * g) * slope
    magnitude = np.abs(p) + np.abs(g) * (hits + everywhere)
    distance = np.where(np.isfinite(z), np.abs(z - most[:, None]), 0)  # rounded before its exponential
    error = (STEPS + 2 * z_error + 2 * ROUNDING["float32"] * distance) * magnitude
    error = error + 2.0**-126 * (1 + np.abs(factor[:, None]))  # exponentials below the normal numbers may be zero
    actual = runner.logit_gradient(logits, targets, rules, [most, factor, upstream], (1 - smoothing, everywhere), out)
    assert_close(actual, expected, out, error, what)
    assert_refused(actual, expected, out, error, what)


def check_gather(runner, rng: np.random.Generator) -> None:
    element = str(rng.choice(ELEMENTS))
    tokens, rows = int(rng.choice([0, 1, 7, 40])), int(rng.choice([0, 1, 9]))
    columns = int(rng.choice([1, 3, 4, 8, 64, 129, 600]))
    table = place(rng, rng.standard_normal((rows, columns)), element, dense=True)
    out = place(rng, np.zeros((tokens, columns)), element)
    first = int(rng.choice([0, 5]))
    ids = rng.integers(max(first - 3, 0), first + rows + 3, tokens)
    expected = out.values.copy()
    here = (ids >= first) & (ids < first + rows)
    expected[here] = table.values[ids[here] - first]
    actual = runner.gather_rows(ids, table, first, out)
    what = f"gather_rows {element} {tokens} of {table.shape}"
    assert_close(actual, expected, element, 0.0, what)
    assert_refused(actual, expected, element, 0.0, what)


def check_scatter(runner, rng: np.random.Generator) -> None:
    values_element, element = str(rng.choice(ELEMENTS)), str(rng.choice(ELEMENTS))
    tokens, rows = int(rng.choice([0, 1, 7, 40])), int(rng.choice([1, 2, 9]))
    columns = int(rng.choice([1, 2, 3, 4, 5, 8, 64, 129, 600]))
    values = place(rng, rng.standard_normal((tokens, columns)), values_element)
    out = place(rng, rng.standard_normal((rows, columns)), element)
    first, alpha = int(rng.choice([0, 5])), float(rng.choice([1.0, 0.125, 1 / 3]))
    ids = rng.integers(max(first - 3, 0), first + rows + 3, tokens)
    padding = int(rng.choice([-1, first]))
    expected, magnitude, count = out.values.copy(), np.abs(out.values), np.zeros((rows, 1))
    for token, index in enumerate(ids):
        if first <= index < first + rows and index != padding:
            expected[index - first] += alpha * values.values[token]
            magnitude[index - first] += np.abs(alpha * values.values[token])
            count[index - first] += 1
    # Every addition rounds the addend and the sum to the element type of the table.
    error = magnitude * (2 * count * ROUNDING[element] + STEPS)
    actual = runner.add_rows(out, ids, values, first, padding, alpha)
    what = f"add_rows {values_element} to {element} {tokens} into {out.shape}"
    assert_close(actual, expected, element, error, what)
    assert_refused(actual, expected, element, error, what)


def check_pack(runner, rng: np.random.Generator) -> None:
    """One launch for a bundle; now and then more tensors than one launch takes."""
    count = 70 if rng.random() < 0.05 else int(rng.integers(1, 6))
    sources, targets = [], []
    for _ in range(count):
        size = int(rng.choice([0, 1, 7, 8, 9, 31, 1000]))
        if count < 6 and rng.random() < 0.05:
            size = 2 * 6 * 1024 * 8 + 3  # the whole grid, twice
        kind, to = str(rng.choice(ELEMENTS)), str(rng.choice(ELEMENTS))
        values = normal(rng, (1, size), kind, rng.random() < 0.3)
        if size and rng.random() < 0.2:
            values[0, rng.integers(size)] = rng.choice([np.inf, -np.inf, np.nan])
        sources.append(place(rng, values, kind, dense=True))
        targets.append(Array(None, to, size, int(rng.integers(16 // BYTES[to])), (1, size)))
    for source, target, actual in zip(sources, targets, runner.pack(sources, targets), strict=True):
        expected = decode(encode(source.values, target.element), target.element)
        what = f"pack {source.element} to {target.element} {source.shape}"
        assert np.array_equal(actual, expected, equal_nan=True), what
        if np.isfinite(expected).all() and len(np.unique(expected)) > 1:
            assert not np.array_equal(np.roll(actual, 1), expected), f"control of {what}"


CHECKS: dict[str, Callable] = {
    "hidden_forward": check_hidden_forward,
    "hidden_backward": check_hidden_backward,
    "logit_sums": check_logit_sums,
    "logit_gradient": check_logit_gradient,
    "gather_rows": check_gather,
    "add_rows": check_scatter,
    "pack": check_pack,
    **QUANTISE_CHECKS,
    **CODE_CHECKS,
}


def run_checks(runner, cases: int, seed: int = 0, names=tuple(CHECKS)) -> int:
    """`cases` random cases of each check; returns how many ran. The seed of a case is in the message of a failure."""
    for name in names:
        for case in range(cases):
            rng = np.random.default_rng([seed, list(CHECKS).index(name), case])
            try:
                CHECKS[name](runner, rng)
            except Exception as error:
                raise AssertionError(f"{runner.name}, {name}, seed {seed}, case {case}: {error}") from error
    return cases * len(names)
