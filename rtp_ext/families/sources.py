"""What the source of a forward says: which layers get one input, and whether a head and a loss follow each other."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

# Expressions of which a part may not be evaluated.
_CONDITIONAL = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)


@functools.cache
def parsed(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """Returns the syntax tree of a method; None where its source is not at hand."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) and tree.args.args else None


def forward_of(cls: Any) -> ast.FunctionDef | None:
    """Returns the syntax tree of a class's forward, below its decorators."""
    function = inspect.unwrap(cls.forward)
    return parsed(function) if inspect.isfunction(function) else None


@functools.cache
def called_with_one_input(cls: Any) -> tuple[tuple[str, ...], ...]:
    """Returns groups of modules, by their names, that the forward of a class always calls with the same input, one
    after the other."""
    tree = forward_of(cls)
    if tree is None:
        return ()
    found: list[tuple[str, ...]] = []
    for body in _bodies(tree):
        groups: dict[str, list[str]] = {}
        for statement in body:
            if isinstance(statement, _SIMPLE):
                for name, value in _calls(statement, tree.args.args[0].arg):
                    groups.setdefault(value, []).append(name)
            for name in _stored(statement):
                found.append(tuple(groups.pop(name, ())))
        found += map(tuple, groups.values())
    mentioned = [each.attr for each in ast.walk(tree) if _is_own(each, tree)]  # type: ignore[attr-defined]
    once = {name for name in mentioned if mentioned.count(name) == 1}
    kept = (tuple(name for name in group if name in once) for group in found)
    return tuple(group for group in kept if len(group) > 1)


def _bodies(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list) and not (isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node is not tree):
                yield body


def _calls(node: ast.AST, self: str) -> Iterator[tuple[str, str]]:
    """Yields the calls `self.NAME(VALUE)` of a statement in the order of their evaluation, as (NAME, VALUE)."""
    for part in ast.iter_child_nodes(node):
        if not isinstance(part, _CONDITIONAL):
            yield from _calls(part, self)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and len(node.args) == 1
        and not node.keywords
    ):
        owner, value = node.func.value, node.args[0]
        if isinstance(owner, ast.Name) and owner.id == self and isinstance(value, ast.Name):
            yield node.func.attr, value.id


def _stored(statement: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(statement) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def _is_own(node: ast.AST, tree: ast.FunctionDef, name: str | None = None) -> bool:
    """Returns whether an expression is an attribute of `self`, the one called `name` if it is given."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return False
    return node.value.id == tree.args.args[0].arg and name in (None, node.attr)


@functools.cache
def loss_follows_head(cls: Any) -> bool:
    """Returns whether the forward of a class computes `lm_head`, gives its result and the labels to `loss_function`,
    and otherwise only returns it as `logits`."""
    tree = forward_of(cls)
    if tree is None:
        return False
    nodes = [*ast.walk(tree)]
    heads = [each for each in nodes if _is_own(each, tree, "lm_head")]
    losses = [each for each in nodes if isinstance(each, ast.Call) and _is_own(each.func, tree, "loss_function")]
    made = [
        each.targets[0].id
        for each in nodes
        if isinstance(each, ast.Assign)
        and isinstance(each.value, ast.Call)
        and each.value.func in heads
        and isinstance(each.targets[0], ast.Name)
    ]
    if len(heads) != 1 or len(losses) != 1 or len(made) != 1 or "labels" in _stored(tree):
        return False
    names = {"logits": made[0], "labels": "labels"}
    given: dict[Any, Any] = dict(zip(names, losses[0].args, strict=False)) | {
        each.arg: each.value for each in losses[0].keywords
    }
    if any(not isinstance(given.get(key), ast.Name) or given[key].id != name for key, name in names.items()):
        return False
    returned = [each.value for each in nodes if isinstance(each, ast.Return) and isinstance(each.value, ast.Call)]
    allowed = [given["logits"]] + [each.value for call in returned for each in call.keywords if each.arg == "logits"]
    uses = [each for each in nodes if isinstance(each, ast.Name) and each.id == made[0]]
    loads = [each for each in uses if isinstance(each.ctx, ast.Load)]
    return len(uses) == len(loads) + 1 and all(any(each is other for other in allowed) for each in loads)
