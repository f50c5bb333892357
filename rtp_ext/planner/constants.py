"""The planner's constants, from one versioned data file that names the source of every number."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("constants.json")


@functools.cache
def constants() -> dict[str, Any]:
    """The contents of constants.json. Quantities carry their units in their names."""
    return json.loads(FILE.read_text())


def memory_constant(name: str) -> float:
    """A number of the section `memory`."""
    return constants()["memory"][name]["value"]


def check_known(what: str, name: str, known: Any) -> None:
    """Raises ValueError for a name that is not among the known ones."""
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}: expected one of {', '.join(sorted(known))}")


def check_at_least(owner: str, least: int, **numbers: Any) -> None:
    """Raises ValueError for anything but a whole number of at least `least`, by name."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{owner}: expected {name} to be a whole number of at least {least}, got {value!r}")
