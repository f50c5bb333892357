"""What the README and the pages of docs/ name exists; the list of files that a layer passes through is complete; the
operation that docs/development.md prints works."""

import importlib
import re
import sys
from pathlib import Path

import torch
from harness import Cases, run_ranks
from reference import assert_same, chunk, random

import rtp_ext

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    page.relative_to(ROOT): page.read_text() for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
DESIGN, DEVELOPMENT, USAGE = (PAGES[Path(f"docs/{name}.md")] for name in ("design", "development", "usage"))
PATH = re.compile(r"`((?:csrc|rtp_ext|benchmarks|python_tests|docs)/[\w/.-]+)`")
# of an example that the reader is to fill in
EXAMPLES = re.compile(r"MACHINE|NAME|FILE")


def anchors(text: str) -> set[str]:
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path, text: str) -> list[str]:
    """The files, links and headings that a page names and that are not there."""
    missing = [name for name in PATH.findall(text) if not EXAMPLES.search(name) and not (ROOT / name).exists()]
    for name, anchor in re.findall(r"\]\((?!http)([\w/.-]*)(?:#([\w-]+))?\)", text):
        target = ROOT / page.parent / name if name else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            missing.append(f"{name}#{anchor}")
    return missing


def test_what_pages_name_exists():
    assert {Path("README.md"), Path("docs/planner.md"), Path("docs/limits.md")} <= set(PAGES)
    assert {str(page): broken(page, text) for page, text in PAGES.items() if broken(page, text)} == {}
    assert broken(
        Path("docs/x.md"), "`csrc/nothing.cpp` [a](limits.md#in-general) [b](limits.md#nowhere) [c](x/y.md)"
    ) == [
        "csrc/nothing.cpp",
        "limits.md#nowhere",
        "x/y.md#",
    ]


def test_every_page_is_linked_from_the_readme():
    readme = PAGES[Path("README.md")]
    assert [str(page) for page in PAGES if page.parent.name == "docs" and f"]({page})" not in readme] == []


def test_every_folder_has_its_line_in_the_design():
    folders = {
        file.parent.relative_to(ROOT)
        for top, ending in (("csrc", ".h"), ("rtp_ext", ".py"))
        for file in (ROOT / top).rglob(f"*{ending}")
    }
    assert len(folders) > 15
    assert [
        str(folder) for folder in sorted(folders) if len(folder.parts) > 1 and f"| `{folder}/` |" not in DESIGN
    ] == []


def test_every_module_function_and_variable_has_its_place():
    for name in rtp_ext.nn.__all__:
        shorter = re.sub(r"^RotatedConv(?=\dd)", "", name)  # `RotatedConv1d`, `2d`, `3d`
        assert f"`{name}`" in USAGE or f"`{shorter}`" in USAGE, name
    assert [name for name in rtp_ext.functional.__all__ if f"`{name}`" not in USAGE] == []
    sources = [ROOT / "setup.py", *(ROOT / "rtp_ext").rglob("*.py")]
    used = {name for file in sources for name in re.findall(r"environ\S*?\(\"(\w+)\"", file.read_text())}
    assert {"RTP_WITH_CUDA", "RTP_DEBUG_DELAY_US", "CUDA_HOME"} <= used
    assert [name for name in sorted(used) if f"| `{name}` |" not in DEVELOPMENT] == []


def test_what_the_reference_is_made_of_has_docstrings():
    (documented,) = re.findall(r"^DOCUMENTED := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    bare = []
    for name in [*documented.split(), "rtp_ext.nn", "rtp_ext.functional"]:
        module = importlib.import_module(name)
        members = {f"{name}.{key}": getattr(module, key) for key in getattr(module, "__all__", ())}
        bare += [key for key, value in {name: module, **members}.items() if not (value.__doc__ or "").strip()]
    assert bare == []


def walk(action) -> list[str]:
    """The files of rtp_ext that an action passes through, in order."""
    found: dict[str, None] = {}
    package = str(ROOT / "rtp_ext")

    def see(frame, event, _argument):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            found[str(Path(frame.f_code.co_filename).relative_to(ROOT))] = None

    sys.setprofile(see)
    try:
        action()
    finally:
        sys.setprofile(None)
    return list(found)


def test_the_walk_of_a_linear_is_what_the_design_says():
    layer = rtp_ext.nn.RotatedLinear(6, 4, ring=rtp_ext.Ring.emulated(2))
    x = torch.ones(3, 6, requires_grad=True)
    layer(x).sum().backward()
    walked = walk(lambda: layer(x).sum().backward())
    section = re.search(r"<!-- walk -->(.*?)<!-- end -->", DESIGN, re.DOTALL)[1]
    described = [PATH.search(line)[1] for line in section.splitlines() if re.match(r"\d+\. ", line)]
    assert sorted(walked) == sorted(described)


def _scales(rank, ranks, code):
    names: dict = {}
    exec(code, names)
    cases = Cases()
    for features in (7, 2):
        whole = random(features, dtype=torch.float64, seed=1)
        batches = [random(2, 3 + r, features, dtype=torch.float64, seed=2 + r) for r in range(ranks)]
        outer = [random(*batch.shape, dtype=torch.float64, seed=20 + r) for r, batch in enumerate(batches)]
        gradient = sum((dy * x).sum((0, 1)) for dy, x in zip(outer, batches, strict=True)) / ranks
        with rtp_ext.Ring(timeout=30.0) as ring:
            for needs_x, needs_weight in ((True, True), (True, False), (False, True)):
                with cases.case(f"{features} features, gradients of x {needs_x}, of w {needs_weight}"):
                    shard = chunk(whole, ranks, rank).clone().requires_grad_(needs_weight)
                    x = batches[rank].clone().requires_grad_(needs_x)
                    y = names["rotated_scale"](x, shard, ring=ring)
                    y.backward(outer[rank])
                    assert_same(y.detach(), batches[rank] * whole, 1e-10, "output")
                    assert_same(x.grad, outer[rank] * whole if needs_x else None, 1e-10, "dx")
                    assert_same(shard.grad, chunk(gradient, ranks, rank) if needs_weight else None, 1e-10, "dw")
    cases.finish()


def test_the_operation_of_the_development_page_works():
    (code,) = re.findall(r"```python\n(.*?)```", DEVELOPMENT, flags=re.DOTALL)
    run_ranks(_scales, 3, code)
