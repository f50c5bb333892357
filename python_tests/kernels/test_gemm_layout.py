"""Products for a column-major BLAS, against a naive one on flat memory; and the engine's `gemm` on a CPU."""

import ctypes
from itertools import product

import numpy as np
import pytest
from compiled import ROOT, build, compiler
from gemm_checks import run_gemm_checks

FIELDS = ("left_is_b", "transpose_left", "transpose_right", "m", "n", "k", "left_stride", "right_stride", "out_stride")
Matrix = tuple[int, int, int, int]  # rows, columns, row stride, column stride


@pytest.fixture(scope="module")
def layout_of():
    if compiler() is None:
        pytest.skip("no C++ compiler on PATH")
    sources = [ROOT / "csrc/compute/gemm/gemm_layout.cpp", ROOT / "python_tests/simulators/gemm_layout_export.cpp"]
    library = ctypes.CDLL(str(build("gemm_layout", sources, ["-std=c++20", "-fPIC", "-Wall"], [ROOT / "csrc"])))

    def ask(out: Matrix, a: Matrix, b: Matrix) -> dict[str, int] | None:
        result = (ctypes.c_int64 * len(FIELDS))()
        matrices = [(ctypes.c_int64 * 4)(*matrix) for matrix in (out, a, b)]
        if library.gemm_layout(*matrices, result) == 0:
            return None
        return dict(zip(FIELDS, result, strict=True))

    return ask


def naive_gemm(layout: dict[str, int], left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """Emulates a column-major BLAS on flat memory; refuses the leading dimensions that it would refuse."""
    m, n, k = layout["m"], layout["n"], layout["k"]
    lda, ldb, ldc = layout["left_stride"], layout["right_stride"], layout["out_stride"]
    assert lda >= max(1, k if layout["transpose_left"] else m), layout
    assert ldb >= max(1, n if layout["transpose_right"] else k), layout
    assert ldc >= max(1, m), layout
    for j in range(n):
        for i in range(m):
            total = 0.0
            for p in range(k):
                x = left[p + i * lda] if layout["transpose_left"] else left[i + p * lda]
                y = right[j + p * ldb] if layout["transpose_right"] else right[p + j * ldb]
                total += x * y
            out[i + j * ldc] = total


def storages(rows: int, columns: int) -> list[Matrix]:
    """Ways in which a matrix lies in memory: by rows and by columns, dense and not; single rows and columns have
    strides that mean nothing."""
    ways = [
        (rows, columns, columns, 1),
        (rows, columns, columns + 3, 1),
        (rows, columns, 1, rows),
        (rows, columns, 1, rows + 2),
    ]
    if rows == 1:
        ways += [(1, columns, 0, 1), (1, columns, 999, 1), (1, columns, 1, 4)]
    if columns == 1:
        ways += [(rows, 1, 1, 0), (rows, 1, 1, 999), (rows, 1, 4, 1)]
    return ways


def memory_of(matrix: Matrix, values: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Flat memory that ends with the matrix, and a view of the matrix in it."""
    rows, columns, row_stride, column_stride = matrix
    memory = np.full((rows - 1) * row_stride + (columns - 1) * column_stride + 1, np.nan)
    strides = (row_stride * memory.itemsize, column_stride * memory.itemsize)
    view = np.lib.stride_tricks.as_strided(memory, (rows, columns), strides)
    if values is not None:
        view[:] = values
    return memory, view


def check(layout_of, out: Matrix, a: Matrix, b: Matrix, change=lambda layout: layout) -> None:
    rng = np.random.default_rng(0)
    left = memory_of(a, rng.standard_normal(a[:2]))
    right = memory_of(b, rng.standard_normal(b[:2]))
    result, view = memory_of(out, None)
    layout = layout_of(out, a, b)
    assert layout is not None, (out, a, b)
    layout = change(layout)
    first, second = (right[0], left[0]) if layout["left_is_b"] else (left[0], right[0])
    naive_gemm(layout, first, second, result)
    assert np.allclose(view, left[1] @ right[1], rtol=1e-12, atol=1e-12), (out, a, b)
    view[:] = np.nan
    assert np.isnan(result).all(), f"elements around the result were written: {out}"


def test_every_layout(layout_of):
    """Yields all ways to store three matrices, for sizes that differ in all dimensions and for single rows and
    columns."""
    for m, n, k in ((2, 3, 4), (4, 2, 3), (3, 3, 3), (1, 3, 2), (3, 1, 2), (2, 3, 1), (1, 1, 4), (1, 4, 1), (4, 1, 1)):
        for out, a, b in product(storages(m, n), storages(m, k), storages(k, n)):
            if m == 1 and n == 1 and out[2:] == (0, 1):
                continue
            check(layout_of, out, a, b)


def test_wrong_calls_are_refused(layout_of):
    """The controls: every field of a call matters."""
    out, a, b = (2, 3, 7, 1), (2, 4, 1, 5), (4, 3, 6, 1)
    check(layout_of, out, a, b)
    for field in FIELDS:
        wrong = (lambda value: 1 - value) if field.startswith(("left_is", "transpose")) else (lambda value: value - 1)
        with pytest.raises((AssertionError, IndexError)):
            check(layout_of, out, a, b, lambda layout, f=field, w=wrong: {**layout, f: w(layout[f])})


@pytest.mark.parametrize(
    "matrix",
    [
        (3, 4, 10, 2),  # gaps along both dimensions
        (3, 4, 0, 1),  # a row repeated
        (3, 4, 3, 1),  # rows that overlap
        (3, 4, 1, 2),  # columns that overlap
        (3, 4, -4, 1),
    ],
)
def test_what_a_blas_cannot_take_is_said(layout_of, matrix):
    rows, columns = matrix[:2]
    assert layout_of((rows, 2, 2, 1), matrix, (columns, 2, 2, 1)) is None
    assert layout_of((2, columns, columns, 1), (2, rows, rows, 1), matrix) is None
    assert layout_of(matrix, (rows, 2, 2, 1), (2, columns, columns, 1)) is None


def test_products_on_a_cpu():
    run_gemm_checks("cpu", 300)
