"""Schedules that are wrong, and which checks must say so; test_schedule_mutations.py runs them."""

from collections.abc import Callable

from schedule_cases import Case
from schedule_races import Ring

MUTATIONS: list[tuple[str, Case, Callable[[Ring], None], set[str]]] = []


def mutation(this: Case, *checks: str):
    def register(change: Callable[[Ring], None]) -> Callable[[Ring], None]:
        MUTATIONS.append((change.__name__, this, change, set(checks)))
        return change

    return register


def swap(steps, one, other):
    steps[one], steps[other] = steps[other], steps[one]
