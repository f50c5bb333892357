"""Tensors in nested containers: those of torch's pytrees, and dataclasses, which torch does not look into."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """Returns `values` with `change` applied to every tensor. A dataclass with a changed field is copied, whether it
    is frozen or not, with its other attributes."""

    def changed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        fields = _fields(value)
        new = {name: map_tensors(change, before) for name, before in fields.items()}
        if all(after is before for after, before in zip(tree_leaves(new), tree_leaves(fields), strict=True)):
            return value
        twin = copy.copy(value)
        for name, after in new.items():
            object.__setattr__(twin, name, after)
        return twin

    return tree_map(changed, values)


def leaves_of(values: Any) -> list[Any]:
    """Returns the leaves of nested containers, with those of dataclasses."""
    found = []
    for leaf in tree_leaves(values):
        fields = _fields(leaf)
        found += leaves_of([*fields.values()]) if fields else [leaf]
    return found


def _fields(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass's instance by name; {} for any other value."""
    if isinstance(value, type) or not hasattr(value, "__dataclass_fields__"):
        return {}
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if hasattr(value, each.name)}
