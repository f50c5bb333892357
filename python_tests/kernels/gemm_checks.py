"""Random products for the engine's `gemm` on any device: strided outputs, transposed operands, sums in place, mixed
dtypes, empty dimensions, each against float64."""

from __future__ import annotations

import numpy as np
import torch
from reference import assert_same, differs
from torch import Tensor

from rtp_ext._native import kernels

# Dtypes of operands and of the result: those that the engine multiplies.
DTYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
CANARY = 77.0


def placed(rng: np.random.Generator, values: Tensor) -> tuple[Tensor, Tensor]:
    """A view of the values, stored by rows or by columns in a larger matrix; and that matrix."""
    rows, columns = values.shape
    wide, high, by_columns = (int(rng.integers(3)) * 5 for _ in range(3))
    room = torch.full((rows + high, columns + wide), CANARY, dtype=values.dtype, device=values.device)
    if by_columns:
        room = room.t().contiguous().t()
    view = room[high // 2 : high // 2 + rows, wide // 2 : wide // 2 + columns]
    view.copy_(values)
    return view, room


def check_gemm(rng: np.random.Generator, device: str) -> None:
    m, n, k = (int(size) for size in rng.choice([0, 1, 2, 3, 8, 33, 64, 129], 3))
    dtype, out_dtype = DTYPES[rng.integers(len(DTYPES))]
    alpha = float(rng.choice([1.0, 0.25]))
    source = str(rng.choice(["none", "itself", "another", "bias"]))

    def normal(*shape: int, of: torch.dtype) -> Tensor:
        return torch.from_numpy(rng.standard_normal(shape)).to(device, of)

    a, _ = placed(rng, normal(m, k, of=dtype))
    b, _ = placed(rng, normal(k, n, of=dtype))
    start = normal(m, n, of=out_dtype)
    if source == "none":
        start.fill_(float("nan"))  # must not be read
    out, room = placed(rng, start)
    before = {"none": None, "itself": out, "another": placed(rng, start)[0], "bias": normal(n, of=out_dtype)}[source]
    what = f"gemm {dtype} to {out_dtype} [{m}, {k}] [{k}, {n}] + {source} on {device}"

    expected = alpha * (a.double() @ b.double())
    if before is not None:
        expected = expected + before.double()
    outside = torch.ones_like(room, dtype=torch.bool)
    torch.as_strided(outside, out.shape, out.stride(), out.storage_offset()).fill_(False)
    kernels.gemm(out, before, a, b, alpha)
    tolerance = TOLERANCE[out_dtype] if out_dtype == dtype or out_dtype == torch.bfloat16 else TOLERANCE[torch.float32]
    assert_same(out, expected, tolerance, what)
    assert (room[outside] == CANARY).all(), f"{what}: elements around the result were written"
    if k > 1 and m > 1 and n > 1:
        assert differs(out, expected.roll(1, 0), tolerance), f"control of {what}: rows one place aside pass"
        assert differs(out, expected.roll(1, 1), tolerance), f"control of {what}: columns one place aside pass"


def run_gemm_checks(device: str, cases: int, seed: int = 0) -> int:
    for case in range(cases):
        try:
            check_gemm(np.random.default_rng([seed, case]), device)
        except Exception as error:
            raise AssertionError(f"seed {seed}, case {case}: {error}") from error
    return cases
