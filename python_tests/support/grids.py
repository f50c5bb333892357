"""Grids of parameters, thinned: every two values of two parameters meet, not every combination of all of them.

`make sweep` sets RTP_SWEEP, which restores the combinations that `few` omits in `make test`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch

SWEEP = os.environ.get("RTP_SWEEP", "0") != "0"


def few(enough: Sequence[Any], everything: Sequence[Any]) -> Sequence[Any]:
    """Returns `enough` values of a parameter for a normal run, all values in a sweep."""
    assert all(value in everything for value in enough), (enough, everything)
    return everything if SWEEP else enough


# torch 2.11: stage_backward_weight of torch.distributed.pipelining fails behind any autograd.Function in Python
# ("Attribute '_input_metadata' is invalid"); a V schedule over Gloo sends to its own rank ("Pair is not connected").
SPLITS_BACKWARDS = torch.__version__ >= (2, 13)
needs_split_backwards = pytest.mark.skipif(
    not SPLITS_BACKWARDS, reason="torch before 2.13 fails in zero-bubble schedules with any autograd.Function in Python"
)


def schedules(wanted: Sequence[Any], everything: Sequence[Any]) -> Sequence[Any]:
    """Returns `wanted` rows, each with a pipeline schedule; with a torch that does not split backwards, those of
    `everything` without a zero-bubble one."""
    return wanted if SPLITS_BACKWARDS else [row for row in everything if "ZeroBubble" not in str(row)]


def pairs(*parameters: Iterable[Any], forms: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
    """Rows with a value of each parameter, such that every two values of two parameters stand together in some row.

    Every call gives the same rows in the same order. An error that needs one value, or two values together, occurs in
    one of them; for three values together, use the product of one parameter with the pairs of the rest.

    Args:
        forms: values of one more parameter, the form of a batch. If the batch is empty on some rank, an error in
            another parameter may stay hidden: each form is combined with every value of the others besides their pairs.
    """
    if given := list(forms):
        full = [form for form in given if "empty" not in form]
        empty = [form for form in given if "empty" in form]
        values = [list(parameter) for parameter in parameters]
        return pairs(*values, full) + [
            (*(value[row % len(value)] for value in values), form)
            for form in empty
            for row in range(max(map(len, values)))
        ]
    values = [tuple(parameter) for parameter in parameters]
    if len(values) < 2:
        return list(product(*values))
    # A pair: the number of a parameter and of its value, twice.
    missing = dict.fromkeys(
        ((a, i), (b, j))
        for a, b in combinations(range(len(values)), 2)
        for i, j in product(range(len(values[a])), range(len(values[b])))
    )
    rows = []
    while missing:
        row = dict(next(iter(missing)))  # the combination that has been missing longest
        for place in sorted(set(range(len(values))) - set(row), key=lambda place: -len(values[place])):

            def gained(value: int, place: int = place, row: dict[int, int] = row) -> int:
                return sum(tuple(sorted([(place, value), each])) in missing for each in row.items())

            start = len(rows)  # ties go to another value each time
            choices = [(start + n) % len(values[place]) for n in range(len(values[place]))]
            row[place] = max(choices, key=gained)
        for pair in combinations(sorted(row.items()), 2):
            missing.pop(pair, None)
        rows.append(tuple(values[place][row[place]] for place in range(len(values))))
    return rows


# Rings for one pass of a layer. Its results depend on the size of the ring, not on the transport: linear layers run
# with every pair, the others with sizes up to 3 and both transports, and with more of the pairs in training.
RINGS = few([(1, "c10d"), (2, "shm"), (3, "c10d"), (3, "shm")], list(product((1, 2, 3, 4), ("shm", "c10d"))))
