"""Helpers of operations: of passes that are driven from Python step by step, and of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rtp_ext._native import shard_sizes
from rtp_ext.compilers import eager
from rtp_ext.functional._call import Call
from rtp_ext.ring import Ring
from rtp_ext.ring.autograd import unseen


def owner_shapes(whole: Sequence[int], dim: int, ring: Ring) -> list[list[int]]:
    """Returns the shape of every owner's shard of a parameter of shape `whole` that is cut along `dim`."""
    return [[*whole[:dim], size, *whole[dim + 1 :]] for size in shard_sizes(whole[dim], ring.size)]


@eager
@unseen
def drive(call: Call, begin: Any, arguments: Sequence[Any], compute: Callable[[Any, Any], None]) -> None:
    """Begins a pass, `begin(executor, *arguments)`, and calls `compute(execution, step)` for each of its computes.

    If `compute` raises, the remaining hops still run, because neighbours wait for them. A failure of the ring is
    passed on to the neighbours. Offloaded parameters stay on the device until the pass has ended.
    """
    with call.on_device():
        execution = call.run(begin, *arguments)
        try:
            try:
                while (step := execution.next()) is not None:
                    compute(execution, step)
            finally:
                execution.finish()
        except BaseException as error:
            call.ring.abandon(error)
            raise


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of sums of several products: float32 for 16-bit dtypes, else `dtype`."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def add_scaled(out: torch.Tensor, arrived: torch.Tensor | None, values: torch.Tensor | None, scale: float) -> None:
    """Computes out = arrived + scale * values; None counts as zero. `arrived` may be `out`."""
    if values is None:
        if arrived is None:
            out.zero_()
        elif arrived.data_ptr() != out.data_ptr():
            out.copy_(arrived)
    elif arrived is None:
        torch.mul(values, scale, out=out)
    else:
        torch.add(arrived, values, alpha=scale, out=out)
