"""All runs by name, and the packages that they need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

from compatibility.framework_runs import Run, accelerate, lightning, peft, transformers


def trl(folder: str, steps: int) -> Run:
    from compatibility.trl_runs import sft

    return sft(folder, steps)


def grpo(folder: str, steps: int, rotate: Callable[[], dict[str, Any]] = dict) -> Run:
    from compatibility.trl_runs import grpo as run

    return run(folder, steps, rotate)


def dpo(folder: str, steps: int) -> Run:
    from compatibility.trl_runs import dpo as run

    return run(folder, steps)


def torchtitan(folder: str, steps: int) -> Run:
    from compatibility.titan import run

    return run(folder, steps)


RUNS: dict[str, Callable[..., Run]] = {
    each.__name__: each for each in (transformers, peft, trl, grpo, dpo, accelerate, lightning, torchtitan)
}
PACKAGES = {"grpo": "trl", "dpo": "trl"}  # of runs that are not named after theirs
WITH_REPLICAS = ("transformers", "grpo", "lightning")  # which take `rotate`


def missing(names: Iterable[str]) -> list[str]:
    """Returns those of the named runs whose packages are not installed."""
    return [name for name in names if find_spec(PACKAGES.get(name, name)) is None]
