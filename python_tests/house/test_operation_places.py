"""A new operation is one file in rtp_ext/functional, one in csrc/ops and one row of the table in
csrc/schedule/operations.h, with its passes bound in csrc/python: no other file tells operations by name, but for those
that are about certain ones. docs/extending.md shows the way."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import rtp_ext
from rtp_ext import _native
from rtp_ext.functional._operation import OPERATIONS

ROOT = Path(__file__).resolve().parents[2]
PASS = re.compile(r"\b([a-z_]+)_(?:forward|backward)\(Executor&")
# file or folder: why it names operations
ABOUT_SOME = {
    "rtp_ext/functional": "each its own",
    "csrc/ops": "each its own",
    "csrc/schedule/operations.h": "the table",
    "csrc/python/bindings.cpp": "binds their passes",
    "csrc/python/bundles.cpp": "binds the passes of bundles",
    "rtp_ext/nn": "modules, which are public",
    "rtp_ext/convert/modules": "blocks of models that rotate as one operation",
    "rtp_ext/convert/plan/rotation_plan.py": "which operation a layer is",
    "rtp_ext/convert/plan/traffic.py": "the route planner decides on linear layers",
    "rtp_ext/ring/routes/route_planner.py": "decides on linear layers and MLPs",
    "rtp_ext/planner/rotation/operations.py": "a transformer, as planned",
    "rtp_ext/observe/schedule.py": "names of its command line",
    "rtp_ext/measure/layer.py": "measures a linear layer",
}


def native_passes():
    headers = [*(ROOT / "csrc/ops").rglob("*.h")]
    return {match.group(1) for header in headers for match in PASS.finditer(header.read_text())}


def named_in_python(text, passes):
    """Operations that a module names: classes it imports, their native passes, rows of the table."""
    found, classes = set(), {cls.__name__: key for key, cls in OPERATIONS.items()}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rtp_ext.functional"):
            found |= {classes[name.name] for name in node.names if name.name in classes}
        elif isinstance(node, ast.Attribute) and node.attr.rpartition("_")[0] in passes:
            if node.attr.endswith(("_forward", "_backward")):
                found.add(node.attr.rpartition("_")[0])
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("OperationFacts", "operation_kind"):
                found |= {
                    each.value for each in node.args if isinstance(each, ast.Constant) and each.value in OPERATIONS
                }
        elif isinstance(node, ast.ClassDef) and node.name in classes:
            found.add(classes[node.name])
    return found


def named_in_native(text, passes):
    return set(re.findall(rf"\b({'|'.join(passes)})_(?:forward|backward)\b", text)) | {
        key for key in re.findall(r'operation_kind\("([^"]+)"\)|\.key = "([^"]+)"', text) for key in key if key
    }


def places():
    passes, found = native_passes(), defaultdict(set)
    for folder, pattern, named in (("rtp_ext", "*.py", named_in_python), ("csrc", "*.*", named_in_native)):
        for file in sorted((ROOT / folder).rglob(pattern)):
            if file.suffix in (".py", ".cpp", ".h", ".cu") and (names := named(file.read_text(), passes)):
                found[str(file.relative_to(ROOT))] = names
    return found


def test_other_files_do_not_tell_operations_by_name():
    found = places()
    other = {file: names for file, names in found.items() if not file.startswith(tuple(ABOUT_SOME))}
    assert other == {}
    used = {about for about in ABOUT_SOME if any(file.startswith(about) for file in found)}
    assert used | {
        "rtp_ext/planner/rotation/operations.py",
        "rtp_ext/observe/schedule.py",
        "rtp_ext/ring/routes/route_planner.py",
    } == set(ABOUT_SOME)


def test_names_are_found():
    passes = native_passes()
    assert {"linear", "scaled_linear", "partial_linear", "embedding", "mlp", "experts", "cross_entropy"} == passes
    assert named_in_python("from rtp_ext.functional.mlp import MLP", passes) == {"mlp"}
    assert named_in_python("_native.experts_backward(x)\n_native.OperationFacts('linear', [])", passes) == {
        "experts",
        "linear",
    }
    assert named_in_python("from torch.nn import Linear\nlinear_forward = 3", passes) == set()
    assert named_in_native('operation_kind("mlp"); embedding_forward(x)', passes) == {"mlp", "embedding"}


@pytest.mark.parametrize("key", [kind.key for kind in _native.operation_kinds()])
def test_an_operation_is_in_one_file_of_each_kind(key):
    """Virtual copies of modules are made from Python."""
    found = places()
    operation = OPERATIONS[key]
    in_python = [file for file, names in found.items() if file.startswith("rtp_ext/functional") and key in names]
    in_native = [file for file, names in found.items() if file.startswith("csrc/ops") and key in names]
    assert operation.__module__.replace(".", "/") + ".py" in in_python
    sources = {file for file in in_native if file.endswith(".cpp")}
    assert len(sources) == (0 if key == "flyweight" else 1)


def test_a_new_operation_in_python_is_one_file(monkeypatch):
    """That of docs/extending.md: every other file stays as it is. python_tests/house/test_docs.py trains with it."""
    monkeypatch.setattr("rtp_ext.functional._operation.OPERATIONS", known := dict(OPERATIONS))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)
    (program,) = (block for block in blocks if "(Operation)" in block)
    space: dict = {"__name__": "scale"}
    exec(program, space)
    assert set(known) - set(OPERATIONS) == {"scale"}
    x, weight = torch.randn(4, 15, requires_grad=True), torch.randn(5, requires_grad=True)
    y = space["rotated_scale"](x, weight, ring=rtp_ext.Ring.emulated(3))
    y.sum().backward()
    whole = weight.detach().repeat(3)
    assert torch.equal(y, x * whole) and torch.equal(x.grad, whole.expand_as(x))
    kind = known["scale"].kind
    assert (kind.bundle, kind.late, kind.dgrad, kind.captured, kind.dims) == (False, False, True, False, 2)
