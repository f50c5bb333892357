"""Comparison of what ranks are about to do. Where they differ, or one has failed, every rank raises an error."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Members(Protocol):
    """Ranks of a ring, or replicas of one rank."""

    def exchange(self, value: Any) -> list[Any]: ...


def differing(members: Members, mine: Any) -> list[Any]:
    """Returns every member's `mine` where they differ, [] where all are equal. Collective: one exchange of a digest,
    and of the values where digests differ."""
    digests = members.exchange(hashlib.sha256(repr(mine).encode()).digest())
    return [] if all(theirs == digests[0] for theirs in digests) else members.exchange(mine)


def expect_same(
    what: str,
    answers: Sequence[Any],
    *,
    show: Callable[[Any], str] = str,
    key: Callable[[Any], Any] = lambda answer: answer,
    named: Callable[[int], str] = "rank {}".format,
    hint: str = "",
) -> None:
    """Raises ValueError where the answers of the members differ: "WHAT: expected ... (rank 0), got ... on rank 1HINT".
    The first answer counts. key: returns what is compared of one; show: what an error says of it; named: what it says
    of a member."""
    first = answers[0]
    for place, theirs in enumerate(answers):
        if key(theirs) != key(first):
            where = f"{'in' if named(place).startswith('replica') else 'on'} {named(place)}"
            text = f"{what}: expected {show(first)} ({named(0)}), got {show(theirs)} {where}{hint}"
            raise ValueError(text)


def expect_same_lines(
    what: str,
    answers: Sequence[Sequence[str]],
    *,
    nothing: str = "nothing",
    named: Callable[[int], str] = "rank {}".format,
) -> None:
    """`expect_same` of lists of words, whose error has the first that differs. nothing: in place of a missing one."""
    missing = _Missing(nothing)
    for place, theirs in enumerate(answers):
        for pair in itertools.zip_longest(answers[0], theirs, fillvalue=missing):
            expect_same(what, pair, named=lambda side, place=place: named(place if side else 0))  # type: ignore[misc]


class _Missing:
    """What an error says of a line that one list lacks; it equals no line."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


def agree(what: str, members: Members, mine: Any) -> None:
    """Raises the error of `expect_same` on every member where `mine` differs. Collective."""
    if answers := differing(members, mine):
        expect_same(what, answers)


def expect_success(
    what: str,
    failures: Sequence[str | None],
    mine: BaseException | None = None,
    *,
    raises: type[Exception] = ValueError,
    named: Callable[[int], str] = "rank {}".format,
    hint: str = "",
) -> None:
    """Raises an error on every member where one has failed: `mine` on a member with a failure of its own, elsewhere
    "WHAT failed on rank 1HINT: the failure"."""
    if mine is not None:
        raise mine
    for place, failure in enumerate(failures):
        if failure is not None:
            raise raises(f"{what} failed on {named(place)}{hint}: {failure}")


def in_words(failure: BaseException | None) -> str | None:
    """Returns a failure as `expect_success` takes it from other members."""
    return None if failure is None else f"{type(failure).__name__}: {failure}"
