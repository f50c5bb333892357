"""What travels in fewer bits than it is computed with: bytes on the wire, and slots that hold them.

Eight bits: a float32 scale for every 128 values, behind them at a multiple of 4 bytes. Biases travel as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rtp_ext.planner.engine import engine
from rtp_ext.planner.rotation.operations import RotatedOperation

BLOCK = 128  # values that share a scale


def wire_bytes(values: int, travel: str | None, element_bytes: int) -> int:
    """Of one part: n + 4 n / 128 in int8, 2 n in bfloat16, both rounded up to whole scales."""
    if travel == "int8":
        return -(-values // 4) * 4 + 4 * -(-values // BLOCK)
    return values * (2 if travel == "bfloat16" and element_bytes > 2 else element_bytes)


def narrow_slots_bytes(
    rotations: Sequence[RotatedOperation],
    ranks: int,
    *,
    travel: str | None,
    compute_bytes: int,
    gradient_travel: str | None,
    reduce_bytes: int,
    hosts: int = 1,
) -> tuple[int, int, int]:
    """Slots of weights and of gradients at the peak of the pool, and the place where weights are widened.

    As `rtp_bytes` reckons slots, with what is on the wire in the place of what is computed with; a copy leaves, so that
    one more weight slot holds the home shard. The place is as large as the largest shard that is widened.
    """
    weights = _peaks(rotations, ranks, travel, compute_bytes, hosts)[0]
    gradients = _peaks(rotations, ranks, gradient_travel, reduce_bytes, hosts)[1]
    widened = 0
    if ranks > 1 and (travel == "int8" or (travel == "bfloat16" and compute_bytes > 2)):
        for rotation in set(rotations):
            pieces = rotation.pieces(ranks, max(compute_bytes, reduce_bytes))
            own = sum(weight.shard_elements(ranks) for weight in rotation.weights if not weight.is_bias)
            widened = max(widened, -(-own // pieces) * compute_bytes)
    return weights, gradients, widened


def _peaks(
    rotations: Sequence[RotatedOperation], ranks: int, travel: str | None, element_bytes: int, hosts: int
) -> tuple[int, int]:
    """Peaks of both pools of `footprint` where a row of every part is as long as it is on the wire."""
    sizes: dict[RotatedOperation, Any] = {}
    for rotation in set(rotations):
        travelling, parts = rotation.backward_weights, []
        for weight in rotation.weights:
            rows, *rest = weight.shard_shape(ranks) or (1,)
            values = rows * math.prod(rest)
            size = values * element_bytes if weight.is_bias else wire_bytes(values, travel, element_bytes)
            pieces = rotation.pieces(ranks, element_bytes)
            one = -(-rows // pieces)
            parts.append((one, -(-size // max(rows, 1)), weight in travelling))
        sizes[rotation] = engine().OperationSize(parts, rotation.bundle, False)
    held = engine().footprint(
        [sizes[rotation] for rotation in rotations],
        ranks=ranks,
        in_place=False,
        sends_anywhere=True,
        receives_anywhere=True,
        cast=True,
        compute_bytes=1,
        reduce_bytes=1,
        slot_cap=0,
        route="two-level" if hosts > 1 else "ring",
        hosts=hosts,
    )
    return held.weight.peak_bytes, held.gradient.peak_bytes
