"""The order of the house: imports and includes run downward only, and files and folders stay short."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from reliability.mutants import planted, read_mutants

from rtp_ext.compilers import _TRACED

ROOT = Path(__file__).resolve().parents[2]
LINES = 700
FILES = 20  # of code, directly in a folder

# From the bottom up: a floor is what its files may be imported by from above. A unit is a folder, or a module that lies
# loose; the files of a folder import each other too, and those of folders in it that are not listed.
PYTHON_FLOORS = [
    {"_rules", "command_line", "host", "gpu_rates", "words"},
    {"_native", "cost", "embedding_rows", "options", "recipe_planes"},
    {"dtensor_hooks", "recipes"},
    {"compilers"},
    {"ring/links"},
    {"ring/routes"},
    {"ring"},
    {"parameters", "observe"},
    {"outer"},
    {"functional"},
    {"functional/torch_compile"},
    {"families"},
    {"nn"},
    {"convert/modules"},
    {"convert"},
    {"inference", "integrations", "measure", "optim", "planner"},
    {"__init__", "schedule", "timeline", "trace", "bench"},  # public names
    {"__main__"},
]

C_FLOORS = [
    {"base"},
    {"schedule", "kernels/common"},
    {"kernels"},
    {"device", "device/nccl"},
    {"compute/gemm"},
    {"compute"},
    {"transport"},
    {"transport/shm", "transport/tcp", "transport/composite"},
    {"transport/emulated", "transport/nccl"},
    {"transport/ce"},
    {"engine/hops"},
    {"engine/shards"},
    {"engine/shards/copied"},
    {"engine"},
    {"ops"},
    {"ops/bundles"},
    {"python"},
]


COMPILED = {"_C": "_native", "_R": "_rules"}  # extension modules, and the one module that imports each
LISTED = set().union(*PYTHON_FLOORS)


def floor_of(unit: str, floors: list[set[str]]) -> int:
    for number, names in enumerate(floors):
        if unit in names:
            return number
    raise AssertionError(f"{unit} has no place in the table of floors; give it one here")


def python_unit(name: str, modules: set[str]) -> str:
    """rtp_ext.nn.linear -> nn, rtp_ext.ring.links.hosts -> ring/links, rtp_ext.Ring -> __init__.

    `modules`: names of the modules of rtp_ext."""
    parts = name.split(".")[1:]
    if not parts or parts[0] not in modules:
        return "__init__"
    return next((unit for end in range(len(parts), 1, -1) if (unit := "/".join(parts[:end])) in LISTED), parts[0])


def python_imports(source: str, module: str, modules: set[str]) -> Iterator[str]:
    """The units of rtp_ext that a module imports, wherever in it."""
    package = module.split(".")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level]) if node.level else ""
            stem = ".".join(part for part in (base, node.module) if part)
            found = [f"{stem}.{alias.name}" for alias in node.names]  # a name that is no module counts as its module
        else:
            continue
        yield from (python_unit(name, modules) for name in found if name.split(".")[0] == "rtp_ext")


def python_violations(sources: dict[str, str]) -> list[str]:
    """`sources`: dotted module name -> text."""
    modules = {module.split(".")[1] for module in sources if "." in module} | {*COMPILED}
    found = []
    for module, source in sources.items():
        unit = python_unit(module, modules)
        for imported in python_imports(source, module, modules):
            if imported in COMPILED:
                if unit != COMPILED[imported]:
                    found.append(f"{module} imports the extension itself; only {COMPILED[imported]} does")
            elif imported != unit and floor_of(imported, PYTHON_FLOORS) >= floor_of(unit, PYTHON_FLOORS):
                found.append(f"{module} imports {imported}, which is not below it")
    return found


def c_unit(path: str) -> str:
    """ops/linear.cpp -> ops, transport/nccl/nccl.h -> transport/nccl"""
    return str(Path(path).parent)


def c_includes(source: str) -> tuple[list[str], list[str]]:
    """Own headers and headers of others, in quotes or not."""
    own = re.findall(r'^\s*#\s*include\s*"([^"]+)"', source, re.MULTILINE)
    others = re.findall(r"^\s*#\s*include\s*<([^>]+)>", source, re.MULTILINE)
    return own, others


def c_violations(sources: dict[str, str]) -> list[str]:
    """`sources`: path below csrc -> text."""
    found = []
    for path, source in sources.items():
        unit = c_unit(path)
        own, others = c_includes(source)
        for header in own:
            included = c_unit(header)
            if included != unit and floor_of(included, C_FLOORS) >= floor_of(unit, C_FLOORS):
                found.append(f"{path} includes {header}, which is not below it")
        for header in [*own, *others]:
            if ("pybind" in header or header == "torch/extension.h") and unit != "python":
                found.append(f"{path} includes {header}; only bindings do")
            foreign = re.match(r"(torch|ATen|c10|caffe2|cuda|nccl)", header)
            if (unit == "schedule" or path.startswith("base/checks")) and foreign:
                found.append(f"{path} includes {header}; it needs neither torch nor CUDA")
            if unit.startswith("kernels") and re.match(r"(torch|ATen|c10)", header):
                found.append(f"{path} includes {header}; kernels take plain pointers")
    return found


def python_sources() -> dict[str, str]:
    modules = {}
    for file in sorted((ROOT / "rtp_ext").rglob("*.py")):
        parts = list(file.relative_to(ROOT).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        modules[".".join(parts)] = file.read_text()
    return modules


def c_sources() -> dict[str, str]:
    folder = ROOT / "csrc"
    return {
        str(file.relative_to(folder)): file.read_text()
        for file in sorted(folder.rglob("*"))
        if file.suffix in (".h", ".cpp", ".cu", ".cuh")
    }


def test_python_imports_run_downward():
    sources = python_sources()
    assert {"rtp_ext", "rtp_ext.ring", "rtp_ext.functional.linear", "rtp_ext.convert.model"} <= set(sources)
    assert python_violations(sources) == []


def test_includes_run_downward():
    sources = c_sources()
    assert {"python/bindings.cpp", "schedule/schedule.cpp", "engine/executor.h", "ops/linear.cpp"} <= set(sources)
    assert c_violations(sources) == []


@pytest.mark.parametrize(
    ("module", "text", "found"),
    [
        ("rtp_ext.ring", "from rtp_ext.functional import rotated_linear", "functional"),
        ("rtp_ext.ring", "def late():\n    import rtp_ext.nn.linear", "nn"),
        ("rtp_ext.ring", "from rtp_ext import convert", "convert"),
        ("rtp_ext.ring", "from . import convert", "convert"),
        ("rtp_ext.nn.linear", "from ..convert import fully_rotate", "convert"),
        ("rtp_ext.ring", "import rtp_ext", "__init__"),
        ("rtp_ext.ring", "from rtp_ext import _C", "only _native"),
        ("rtp_ext._native", "from rtp_ext import _R", "only _rules"),
        ("rtp_ext.ring.routes.route_planner", "from rtp_ext.observe import trace", "observe"),
        ("rtp_ext.ring.routes.route_planner", "from rtp_ext.ring import Ring", "imports ring,"),
        ("rtp_ext.ring.routes.route_planner", "import rtp_ext.ring.ring", "imports ring,"),
        ("rtp_ext.ring.links.hosts", "from rtp_ext.ring.routes.weight_routes import choose_route", "ring/routes"),
        ("rtp_ext.functional.linear", "from rtp_ext.functional import torch_compile", "functional/torch_compile"),
        ("rtp_ext.convert.modules.head", "from rtp_ext.convert.scopes import install", "imports convert,"),
    ],
)
def test_python_violations_are_found(module, text, found):
    others = dict.fromkeys(python_sources(), "")
    violations = python_violations({**others, module: text})
    assert len(violations) == 1 and found in violations[0], violations


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        ("engine/executor.h", '#include "ops/linear.h"', "ops/linear.h"),
        ("transport/shm/shm.cpp", '#include "engine/executor.h"', "engine/executor.h"),
        ("transport/transport.h", '#include "transport/shm/shm.h"', "transport/shm/shm.h"),
        ("schedule/schedule.cpp", "#include <ATen/core/Tensor.h>", "neither torch"),
        ("schedule/schedule.h", "#  include <cuda_runtime.h>", "neither torch"),
        ("schedule/schedule.h", '#include "transport/transport.h"', "transport/transport.h"),
        ("ops/linear.cpp", "#include <torch/extension.h>", "only bindings"),
        ("engine/executor.cpp", "#include <torch/csrc/utils/pybind.h>", "only bindings"),
        ("kernels/embedding.cu", "#include <ATen/ATen.h>", "plain pointers"),
        ("base/checks.h", '#include "schedule/schedule.h"', "schedule/schedule.h"),
        ("engine/hops/slots.h", '#include "engine/executor.h"', "engine/executor.h"),
    ],
)
def test_include_violations_are_found(path, text, found):
    violations = c_violations({path: text})
    assert len(violations) == 1 and found in violations[0], violations


def test_what_is_allowed_is_not_reported():
    assert python_violations({"rtp_ext.nn.linear": "from rtp_ext.nn._base import RotatedModule\nimport torch"}) == []
    assert c_violations({"ops/linear.cpp": '#include "compute/gemm/gemm.h"\n#include <torch/csrc/Exceptions.h>'}) == []


def long_files(lengths: dict[str, int]) -> list[str]:
    return [f"{name}: {length} lines" for name, length in lengths.items() if length > LINES]


def test_files_are_short():
    files = [
        file
        for folder in ("csrc", "rtp_ext", "python_tests", "benchmarks")
        for file in sorted((ROOT / folder).rglob("*"))
        if file.suffix in (".py", ".h", ".cpp", ".cu", ".cuh")
    ]
    assert len(files) > 30
    assert long_files({str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in files}) == []
    assert long_files({"made_up.py": LINES + 1, "short.py": LINES}) == [f"made_up.py: {LINES + 1} lines"]


def full_folders(files: list[Path]) -> list[str]:
    counts = Counter(str(file.parent) for file in files)
    return [f"{folder}: {count} files" for folder, count in counts.items() if count > FILES]


def test_folders_are_short():
    files = [
        file.relative_to(ROOT)
        for folder in ("csrc", "rtp_ext", "python_tests", "benchmarks", "examples", "docs")
        for file in sorted((ROOT / folder).rglob("*"))
        if file.suffix in (".py", ".h", ".cpp", ".cu", ".cuh", ".sh")
    ]
    assert len(files) > 300
    assert full_folders(files) == []
    made_up = [Path("full") / str(n) for n in range(FILES + 1)] + [Path("short") / str(n) for n in range(FILES)]
    assert full_folders(made_up) == [f"full: {FILES + 1} files"]


def test_files_that_compilers_may_trace_exist():
    assert [file for file in (*_TRACED, "nn/nothing.py") if not (ROOT / "rtp_ext" / file).exists()] == ["nn/nothing.py"]


def shared_names(files: list[Path]) -> list[str]:
    counts = Counter(file.name for file in files)
    return [name for name, count in counts.items() if count > 1]


def test_test_modules_have_names_of_their_own():
    """Tests import each other by name, from any folder."""
    files = list((ROOT / "python_tests").rglob("test_*.py"))
    assert len(files) > 200
    assert shared_names(files) == []
    assert shared_names([Path("a/test_state.py"), Path("b/test_state.py"), Path("b/test_more.py")]) == ["test_state.py"]


def test_known_mistakes_can_be_planted():
    """The texts that mutants.txt replaces occur once, and its test files exist."""
    mutants = read_mutants((ROOT / "benchmarks" / "reliability" / "mutants.txt").read_text())
    assert len(mutants) > 50 and all(planted(mutant, ROOT) for mutant in mutants)
    with pytest.raises(ValueError, match="expected once"):
        planted(mutants[0]._replace(before="no such text"), ROOT)
