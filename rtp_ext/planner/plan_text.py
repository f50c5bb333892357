"""Plans as text: `rtp=8,recompute=full` of `--plan`, and the names of plans in tables."""

from __future__ import annotations

import dataclasses
from typing import Any

from rtp_ext.command_line import did_you_mean
from rtp_ext.planner.rotation.family import BUILT, pieces_of
from rtp_ext.planner.specs.strategy import Strategy


def changes_of(plan: str) -> dict[str, Any]:
    """Parses one --plan: each field has the type of its default."""
    defaults = {field.name: field.default for field in dataclasses.fields(Strategy)}
    changes: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in plan.split(","))):
        key, equals, value = item.partition("=")
        key = key.strip().replace("-", "_")
        if key not in defaults:
            near = did_you_mean(key, defaults)
            raise ValueError(f"--plan: unknown field {key!r}: expected one of {', '.join(defaults)}{near}")
        if not equals and not isinstance(defaults[key], bool):
            kind = "NUMBER" if _counts(key, defaults[key]) else "VALUE"
            raise ValueError(f"--plan: expected {key}={kind}, got {key} alone")
        changes[key] = _value(key, value.strip() if equals else "yes", defaults[key])
    return changes


def _value(key: str, value: str, default: Any) -> Any:
    words = {"yes": True, "true": True, "no": False, "false": False}
    if key == "bundle" and value == "recompute":
        return value
    if isinstance(default, tuple):
        return numbers(value)
    if isinstance(default, bool):
        if value.lower() not in words:
            raise ValueError(f"--plan: expected {key} to be yes or no, got {value!r}")
        return words[value.lower()]
    if _counts(key, default):
        try:
            return int(value)
        except ValueError:
            raise ValueError(f"--plan: expected {key} to be a whole number, got {value!r}") from None
    return value


def _counts(key: str, default: Any) -> bool:
    return isinstance(default, int) or key == "late_gradients"


def numbers(result: str) -> tuple[int, ...]:
    """Parses a list such as 8+9+9+6. Raises ValueError for any other text."""
    try:
        return tuple(int(part) for part in result.split("+"))
    except ValueError:
        raise ValueError(f"expected whole numbers such as 8+9+9+6, got {result!r}") from None


def name_of(strategy: Strategy) -> str:
    """Formats the fields that differ from the defaults, such as `dp=2 tp=4 zero=1`."""
    shown = []
    for field in dataclasses.fields(strategy):
        value = getattr(strategy, field.name)
        if value == field.default:
            continue
        if isinstance(value, tuple):
            value = "+".join(map(str, value))
        shown.append(f"{field.name}={'yes' if value is True else 'no' if value is False else value}")
    if pieces_of(strategy.to_come) - BUILT:
        shown.append("(NOT BUILT YET)")
    return " ".join(shown) or "one GPU"
