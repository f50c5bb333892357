"""No module imports itself through others, not even for types alone."""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def modules_in(folder: Path, prefix: str) -> dict[str, str]:
    """Sources by module name; `prefix`: of the package that `folder` is, or empty for a folder of scripts."""
    sources = {}
    for file in sorted(folder.rglob("*.py")):
        parts = [*prefix.split(), *file.relative_to(folder).with_suffix("").parts]
        sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file.read_text()
    return sources


def imported(text: str, modules: set[str]) -> set[str]:
    """The modules that a source imports, anywhere in it; from a package, the module that has the name."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {
                f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in modules else node.module
                for alias in node.names
            }
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & modules


def circle(sources: dict[str, str]) -> list[str]:
    """The modules of one circle, the first again at the end; empty where there is none."""
    graph = {name: imported(text, set(sources)) - {name} for name, text in sources.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize(("folder", "prefix"), [("rtp_ext", "rtp_ext"), ("benchmarks", "")])
def test_there_is_no_circle(folder, prefix):
    sources = modules_in(ROOT / folder, prefix) | {"rtp_ext._C": "", "rtp_ext._R": ""}  # compiled
    assert len(sources) > 50
    assert circle(sources) == []


def test_circles_are_found():
    late = "def run():\n    from package.a import thing"
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package import a"
    for back in (late, types):
        assert set(circle({"package.a": "from package import b", "package.b": back})) == {"package.a", "package.b"}
    assert circle({"package.a": "from package import b", "package.b": "import package.c", "package.c": ""}) == []
