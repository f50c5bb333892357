"""A thinned grid holds every two values of two parameters, and little more."""

from itertools import combinations, product

import pytest
from grids import pairs


@pytest.mark.parametrize(
    ("sizes", "most"),
    [((3,), 3), ((7, 5), 35), ((2, 2, 2), 4), ((3, 3, 2, 2, 2, 6), 24), ((2,) * 6, 8), ((3, 1, 4), 12)],
)
def test_every_pair_of_values_stands_in_a_row(sizes, most):
    rows = pairs(*(range(size) for size in sizes))
    assert rows == pairs(*(range(size) for size in sizes)) and len(set(rows)) == len(rows) <= most
    assert set(rows) <= set(product(*(range(size) for size in sizes)))
    for a, b in combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in rows} == set(product(range(sizes[a]), range(sizes[b])))


def test_values_need_not_be_hashable_or_different():
    assert pairs(({}, {"a": 1}), [None]) == [({}, None), ({"a": 1}, None)]


def test_forms_without_tokens_come_on_top():
    rows = pairs("ab", "xyz", forms=("2d", "1d", "empty"))
    assert rows[:-3] == pairs("ab", "xyz", ("2d", "1d"))
    assert rows[-3:] == [("a", "x", "empty"), ("b", "y", "empty"), ("a", "z", "empty")]
