"""Comparison of what ranks are about to do. Where they differ, every rank raises the same error."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Members(Protocol):
    """Ranks of a ring, or replicas of one rank."""

    def exchange(self, value: Any) -> list[Any]: ...


def expect_same(
    what: str,
    answers: Sequence[Any],
    *,
    show: Callable[[Any], str] = str,
    key: Callable[[Any], Any] = lambda answer: answer,
    member: str = "on rank",
    hint: str = "",
) -> None:
    """Raises ValueError where the answers of the members differ: "WHAT: expected ... (rank 0), got ... on rank 1HINT".
    The first answer counts. key: returns what is compared of one; show: what an error says of it."""
    first = answers[0]
    for rank, theirs in enumerate(answers):
        if key(theirs) != key(first):
            of_first = f"{member.split()[-1]} 0"
            text = f"{what}: expected {show(first)} ({of_first}), got {show(theirs)} {member} {rank}{hint}"
            raise ValueError(text)


def agree(what: str, members: Members, mine: Any, *, show: Callable[[Any], str] = str) -> None:
    """Raises the error of `expect_same` on every member where `mine` differs. Collective: one exchange of a digest, and
    of the values where digests differ."""
    digests = members.exchange(hashlib.sha256(repr(mine).encode()).digest())
    if any(theirs != digests[0] for theirs in digests):
        expect_same(what, members.exchange(mine), show=show)


def expect_same_lines(what: str, answers: Sequence[Sequence[str]], ranks: Sequence[int], nothing: str) -> None:
    """`expect_same` of lists of words, whose error has the first that differs. nothing: in place of a missing one."""
    first = [*answers[0], nothing]
    for theirs, rank in zip(answers[1:], ranks[1:], strict=True):
        for left, right in zip(first, [*theirs, nothing], strict=False):
            if left != right:
                text = f"{what}: expected {left} (rank {ranks[0]}), got {right} on rank {rank}"
                raise ValueError(text)
