"""Bytes of an embedding that sends rows of its table instead of the table. Loads no torch, for the planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rtp_ext._rules import shard_sizes

ID_BYTES = 8  # of an id on the wire


class RowsTraffic(NamedTuple):
    """What one rank sends to the others in a step. messages: those of both passes, of ids and of rows, without the
    exchange of counts that begins each pass."""

    forward: float
    gradients: float
    messages: int


def rows_traffic(
    shape: Sequence[int],
    dim: int,
    ranks: int,
    rank: int,
    tokens: int,
    row_bytes: float,
    gradient_bytes: float,
) -> RowsTraffic:
    """Returns what `rank` sends where each rank looks up `tokens` ids in a table [V, h] that is cut along `dim`.

    Along the features (1), with h_r of them on this rank, exactly:

        forward    8 T (R-1) + T (R-1) h_r e       ids to all, its features of the rows of all
        backward   8 T (R-1) + T (h - h_r) e_g     ids again, gradients of features to their owners

    Along the vocabulary (0), with V_r rows on this rank, where ids are evenly spread over the table:

        forward    8 T (1 - V_r / V) + T (R-1) h e V_r / V     ids to their owners, rows to those who ask for them
        backward   (8 + h e_g) T (1 - V_r / V)                 ids again, gradients of rows to their owners

    row_bytes, gradient_bytes: e and e_g, bytes of one number; e_g is 0 where the table is not trained.
    """
    mine, whole, others = shard_sizes(shape[dim], ranks)[rank], shape[dim], ranks - 1
    trained = gradient_bytes > 0
    if dim == 1:
        asked, forward, gradients = ID_BYTES * tokens * others, mine * others * row_bytes, whole - mine
    else:
        away = (whole - mine) / max(whole, 1)
        asked, forward = ID_BYTES * tokens * away, shape[1] * others * row_bytes * mine / max(whole, 1)
        gradients = shape[1] * away
    return RowsTraffic(
        asked + tokens * forward,
        trained * asked + tokens * gradients * gradient_bytes,
        (2 + 2 * trained) * others,
    )
