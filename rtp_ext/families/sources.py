"""What the source of a forward says."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import operator
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

# -- which layers get one input, and whether a loss follows a head -----------------------------------------------------

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


# -- which weights of other modules it reads ---------------------------------------------------------------------------

# Attributes of a tensor, and functions, whose result does not depend on its values.
_PROPERTIES = (
    *("dtype", "device", "shape", "requires_grad", "ndim", "is_meta", "is_cuda", "layout", "itemsize", "nbytes"),
    *("size", "dim", "numel", "nelement", "element_size", "stride", "type", "__class__"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_sparse", "is_quantized"),
)
_QUESTIONS = ("isinstance", "hasattr", "id", "type", "len")
# Methods that a forward may mention but that do not take part in its computation.
_OUTSIDE = ("merge", "unmerge", "reset_parameters", "extra_repr")
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_ELEMENT = "*"  # in a path: every element of a container
_BASE = "base_layer"  # in a path: the module that layers of peft wrap, one inside the other


class _Read(NamedTuple):
    path: tuple[str, ...]  # from the reading module
    key: str  # the name of the parameter
    tests: tuple[tuple[str, bool], ...] = ()  # the conditions on attributes of `self` around it, with their outcome


def modules_read_by(part: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules below `part` whose parameters its forward reads itself."""
    cls: Any = type(part)
    for read in _reads(cls):
        if not all(_may_be(part, *test) for test in read.tests):
            continue
        for module in _resolve(part, read.path):
            if module is not part and module._parameters.get(read.key) is not None:
                yield module


def adds_to_forward(cls: Any, base: type[nn.Module]) -> bool:
    """Returns whether the forward of a subclass of `base` calls that of `base`, and reads no weight itself: it changes
    inputs and outputs, as a scaled embedding does."""
    between = cls.__mro__[: cls.__mro__.index(base)]
    functions = [function for each in between if (function := _function_of(vars(each).get("forward"))) is not None]
    reads = any(read.path == () and read.key in ("weight", "_parameters", "parameters") for read in _reads(cls))
    return bool(functions) and all(_facts(function)[2] for function in functions) and not reads


_UNKNOWN = object()


def _may_be(part: nn.Module, test: str, outcome: bool) -> bool:
    """Returns whether a condition may have an outcome, as far as constants and plain attributes of the module say."""
    value = _value_of(ast.parse(test, mode="eval").body, part)
    return value is _UNKNOWN or bool(value) == outcome


def _value_of(node: ast.expr, part: nn.Module) -> Any:
    """Evaluates an expression; _UNKNOWN for one whose value is not known before a forward."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        value = _UNKNOWN if node.attr == "training" else part.__dict__.get(node.attr, _UNKNOWN)
        return value if value is None or isinstance(value, (bool, int, float, str)) else _UNKNOWN
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = _value_of(node.operand, part)
        return value if value is _UNKNOWN else not value
    if isinstance(node, ast.BoolOp):
        values, decides = [_value_of(each, part) for each in node.values], isinstance(node.op, ast.Or)
        if any(value is not _UNKNOWN and bool(value) == decides for value in values):
            return decides
        return _UNKNOWN if _UNKNOWN in values else not decides
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        values = [_value_of(each, part) for each in (node.left, *node.comparators)]
        with contextlib.suppress(TypeError):  # such as None < 1, where the forward would fail
            return _UNKNOWN if _UNKNOWN in values else _COMPARISONS[type(node.ops[0])](*values)
    return _UNKNOWN


def _resolve(part: nn.Module, path: tuple[str, ...]) -> list[nn.Module]:
    found = [part]
    for name in path:
        if name == _ELEMENT:
            found = [child for module in found for child in module.children()]
        else:
            found = [child for module in found if (child := module._modules.get(name)) is not None]
        if name == _BASE:
            found = [_innermost(module) for module in found]
    return found


def _innermost(module: nn.Module) -> nn.Module:
    while (inner := module._modules.get(_BASE)) is not None:
        module = inner
    return module


@functools.cache
def _reads(cls: Any) -> tuple[_Read, ...]:
    """Returns what the forward of a class may read. A class of torch reads nothing: its layers rotate as a whole."""
    between = [each for each in cls.__mro__ if each is not nn.Module and issubclass(each, nn.Module)]
    if any(each.__module__.startswith("torch.") for each in between[:1]):
        return ()
    found: dict[_Read, None] = {}
    left, known = ["forward"], {"forward", *_OUTSIDE}
    while left:
        name = left.pop()
        for each in between:
            if each.__module__.startswith("torch."):
                break
            function = _function_of(vars(each).get(name))
            if function is None:
                continue
            reads, mentioned, _ = _facts(function)
            found.update(dict.fromkeys(reads))
            left += mentioned - known
            known |= mentioned
    return tuple(found)


def _function_of(member: Any) -> Callable[..., Any] | None:
    if isinstance(member, property):
        member = member.fget
    member = inspect.unwrap(getattr(member, "__func__", member)) if member is not None else None
    return member if inspect.isfunction(member) else None


@functools.cache
def _facts(function: Callable[..., Any]) -> tuple[frozenset[_Read], frozenset[str], bool]:
    """Returns the reads in one method, the names of attributes of `self` that it mentions, and whether it calls the
    same method of its base class."""
    tree = parsed(function)
    if tree is None:
        return frozenset(), frozenset(), False
    method = _Method(tree)
    return frozenset(method.reads), frozenset(method.mentioned), method.calls_super


class _Method(ast.NodeVisitor):
    """One pass over a method: `paths` has for each local name the modules that it may stand for."""

    def __init__(self, tree: ast.FunctionDef) -> None:
        self.paths: dict[str, set[tuple[str, ...]]] = {tree.args.args[0].arg: {()}}
        self.reads: set[_Read] = set()
        self.name, self.calls_super = tree.name, False
        self.mentioned: set[str] = set()
        self.harmless: set[int] = set()  # ids of expressions whose values are not used
        self.tests: tuple[tuple[str, bool], ...] = ()  # around the node that is visited
        count = -1
        while count != len(self.paths):  # a name may be bound below its use, in a loop
            count = len(self.paths)
            for node in ast.walk(tree):
                self._bind(node)
        self.visit(tree)

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Assign, ast.NamedExpr, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    self._add(target, self._of(node.value))
        elif isinstance(node, (ast.For, ast.comprehension)):
            elements = {path for each in self._iterated(node.iter) for path in self._of(each)}
            for name in ast.walk(node.target):
                if isinstance(name, ast.Name):
                    self._add(name, {(*path, _ELEMENT) for path in elements})

    def _add(self, name: ast.Name, paths: set[tuple[str, ...]]) -> None:
        if paths:
            self.paths.setdefault(name.id, set()).update(path for path in paths if len(path) < 6)

    @staticmethod
    def _iterated(node: ast.expr) -> list[ast.expr]:
        """Returns the containers that a loop runs over: those in `enumerate`, `zip`, `.values()` and similar calls."""
        if not isinstance(node, ast.Call):
            return [node]
        return [*node.args, node.func.value] if isinstance(node.func, ast.Attribute) else node.args

    def _of(self, node: ast.expr) -> set[tuple[str, ...]]:
        """Returns the paths of the modules that an expression may stand for."""
        if isinstance(node, ast.Name):
            return self.paths.get(node.id, set())
        if isinstance(node, ast.Attribute):
            return {(*path, node.attr) for path in self._of(node.value)}
        if isinstance(node, ast.Subscript):
            return {(*path, _ELEMENT) for path in self._of(node.value)}
        if isinstance(node, ast.IfExp):
            return self._of(node.body) | self._of(node.orelse)
        getter = node.func if isinstance(node, ast.Call) else None
        if isinstance(getter, ast.Attribute) and getter.attr == f"get_{_BASE}":
            return {(*path, _BASE) for path in self._of(getter.value)}
        return set()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in _PROPERTIES:
            self.harmless.add(id(node.value))
        paths = self._of(node.value)
        if () in paths or _is_super(node.value):
            self.mentioned.add(node.attr)
            self.calls_super = self.calls_super or (node.attr == self.name and _is_super(node.value))
        if isinstance(node.ctx, ast.Load) and id(node) not in self.harmless:
            self.reads |= {_Read(path, node.attr, self.tests) for path in paths}
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        around = self.tests
        for outcome, statements in ((True, node.body), (False, node.orelse)):
            self.tests = (*around, (ast.unparse(node.test), outcome))
            for statement in statements:
                self.visit(statement)
            self.tests = around

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if isinstance(node.func, ast.Name) and name in _QUESTIONS:
            self.harmless.update(map(id, node.args))
        if name == "grad":  # torch.autograd.grad, which takes the registered parameters
            self.harmless.update(id(part) for each in node.args[1:] for part in ast.walk(each))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if all(isinstance(each, (ast.Is, ast.IsNot)) for each in node.ops):
            self.harmless.update(map(id, (node.left, *node.comparators)))
        self.generic_visit(node)


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
