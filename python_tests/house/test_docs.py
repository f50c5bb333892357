"""Every name in the README and the pages of docs/ exists; the list of files that a layer passes through is complete;
the operations that docs/extending.md prints work."""

import ast
import importlib
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from grids import pairs
from harness import Cases, run_ranks
from offload_cases import assert_given_back, made_up
from operation_checks import (
    EXACT,
    FORMS,
    ROUNDING,
    Operation,
    check_checkpointing,
    check_controls,
    check_frozen,
    check_pass,
    make_features,
    train,
)
from reference import assert_same, random, whole_gradients
from test_imports import C_FLOORS, PYTHON_FLOORS, floor_of
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import rtp_ext
from rtp_ext.convert.plan import layers
from rtp_ext.nn._base import RotatedModule

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    page.relative_to(ROOT): page.read_text() for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
CODE, DEVELOPMENT, EXTENDING, USAGE = (
    PAGES[Path(f"docs/{name}.md")] for name in ("code", "development", "extending", "usage")
)
PATH = re.compile(r"`((?:csrc|rtp_ext|benchmarks|python_tests|docs)/[\w/.-]+)`")
# imported by their own names, beside the packages in rtp_ext.__all__
PUBLIC = {"integrations", "planner", "schedule", "timeline", "trace", "words"}
# imports packages that take seconds, or that are not installed
UNREAD = {"rtp_ext.integrations": sorted((ROOT / "rtp_ext" / "integrations").glob("*.py"))}
# of an example that the reader is to fill in
EXAMPLES = re.compile(r"MACHINE|NAME|FILE")
# Tolerances of the printed operation: in bfloat16 each product is rounded, and a gradient once more.
TOLERANCES = {
    torch.float64: (EXACT, EXACT),
    torch.float32: (1e-6, 1e-6),
    torch.bfloat16: (ROUNDING, 2 * ROUNDING),
}


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


def test_every_page_is_linked_from_the_index_and_the_readme_links_few():
    index, readme = PAGES[Path("docs/index.md")], PAGES[Path("README.md")]
    pages = [page.name for page in PAGES if page.parent.name == "docs" and page.name != "index.md"]
    assert [page for page in pages if f"]({page})" not in index] == []
    assert "](docs/index.md)" in readme and len(re.findall(r"\]\(docs/[^)]*\)", readme)) <= 20


def tree(page: str) -> list[tuple[str, str]]:
    """The folders of the tree that a page prints, in its order, each with its description."""
    section = page.split("## Where things are", 1)[1]
    block = section.split("```\n", 2)[1]
    found, path = [], []
    for line in block.splitlines():
        indent, name, description = re.fullmatch(r"( *)(\w+)/(?: +(\S.*))?", line).groups()
        depth, rest = divmod(len(indent), 2)
        assert rest == 0 and depth <= len(path), f"{line}: indented by two blanks for each folder above it"
        path[depth:] = [name]
        found.append(("/".join(path), description or ""))
    return found


def wrong_folders(page: str) -> list[str]:
    """Folders of code without exactly one described line in the tree of a page, and lines without a folder."""
    described = Counter(folder for folder, description in tree(page) if description)
    folders = {
        str(file.parent.relative_to(ROOT))
        for top, ending in (("csrc", ".h"), ("rtp_ext", ".py"))
        for file in (ROOT / top).rglob(f"*{ending}")
    }
    assert len(folders) > 15
    # a folder that holds nothing but folders, as csrc, needs a line too
    needed = folders | {str(parent) for folder in folders for parent in Path(folder).parents if str(parent) != "."}
    return sorted(
        [folder for folder in needed if described[folder] != 1]
        + [folder for folder, _ in tree(page) if not (ROOT / folder).is_dir()]
    )


def unordered(page: str) -> list[str]:
    """The folders directly below csrc and rtp_ext that stand after one of a higher floor."""
    found = []
    for top, floors in (("csrc", C_FLOORS), ("rtp_ext", PYTHON_FLOORS)):
        names = [folder.split("/")[1] for folder, _ in tree(page) if re.fullmatch(rf"{top}/\w+", folder)]
        numbers = [floor_of(name, floors) for name in names]
        found += [name for name, below, number in zip(names[1:], numbers, numbers[1:], strict=False) if number < below]
    return found


def test_every_folder_has_its_line_on_the_page_of_the_code():
    assert wrong_folders(CODE) == []
    assert wrong_folders(CODE.replace("    links/ ", "    chains/ ")) == ["rtp_ext/ring/chains", "rtp_ext/ring/links"]
    bare = re.sub(r"^    links/ .*$", "    links/", CODE, flags=re.MULTILINE)
    assert wrong_folders(bare) == ["rtp_ext/ring/links"]


def test_the_tree_of_the_code_is_in_the_order_of_the_floors():
    assert unordered(CODE) == []
    line = re.search(r"^  engine/ .*\n", CODE, re.MULTILINE)[0]
    moved = CODE.replace(line, "").replace("  base/ ", f"{line}  base/ ")
    assert unordered(moved) == ["base"]


def test_every_module_function_and_variable_has_its_place():
    for name in rtp_ext.nn.__all__:
        shorter = re.sub(r"^RotatedConv(?=\dd)", "", name)  # `RotatedConv1d`, `2d`, `3d`
        assert f"`{name}`" in USAGE or f"`{shorter}`" in USAGE, name
    assert [name for name in rtp_ext.functional.__all__ if f"`{name}`" not in USAGE] == []
    sources = [ROOT / "setup.py", *(ROOT / "rtp_ext").rglob("*.py")]
    texts = [file.read_text() for file in sources]
    ways = (r"environ\S*?\(\"(\w+)\"", r"= \"(RTP_[A-Z_]+)\"")
    used = {name for way in ways for text in texts for name in re.findall(way, text)}
    assert {"RTP_WITH_CUDA", "RTP_DEBUG_DELAY_US", "RTP_DEBUG_HOST", "CUDA_HOME"} <= used
    assert [name for name in sorted(used) if f"| `{name}` |" not in DEVELOPMENT] == []


def test_what_the_reference_is_made_of_has_docstrings():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    documented = re.findall(r"^\.\. automodule:: (\S+)$", pages, re.MULTILINE)
    packages = {name for name in rtp_ext.__all__ if isinstance(getattr(rtp_ext, name), type(rtp_ext))}
    assert {f"rtp_ext.{name}" for name in packages | PUBLIC} <= set(documented) and "autoclass:: rtp_ext.Ring" in pages
    first = re.search(r"^\.\. (.+)$", (ROOT / "docs" / "api" / "rtp_ext.md").read_text(), re.MULTILINE)[1]
    assert first == "autofunction:: rtp_ext.fully_rotate", "what most programs call comes first"
    bare = []
    for name in documented:
        module = importlib.import_module(name)
        texts = {key: getattr(module, key).__doc__ for key in getattr(module, "__all__", ()) if name not in UNREAD}
        for file in UNREAD.get(name, []):
            parts = [part for part in ast.parse(file.read_text()).body if getattr(part, "name", "") in module.__all__]
            texts |= {part.name: ast.get_docstring(part) for part in parts}
        assert texts.keys() >= set(getattr(module, "__all__", ()))
        bare += [f"{name} {key}" for key, text in {"": module.__doc__, **texts}.items() if not (text or "").strip()]
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


DELIVERY = "rtp_ext/ring/autograd/gradient_delivery.py"


def _walks(rank, ranks, described):
    """On a ring, whose parameters are DTensors, and on an emulated one, whose are plain."""
    with rtp_ext.Ring(timeout=30.0) as ring:
        for each in (ring, rtp_ext.Ring.emulated(2)):
            layer, x = rtp_ext.nn.RotatedLinear(6, 4, ring=each), torch.ones(3, 6, requires_grad=True)
            layer(x).sum().backward()
            found = walk(lambda layer=layer, x=x: layer(x).sum().backward())
            if each is ring:
                assert found == described, found
            else:  # the gradients of plain parameters need no delivery
                assert sorted(found) == sorted(set(described) - {DELIVERY}), found


def test_the_walk_of_a_linear_is_what_the_page_of_the_code_says():
    section = re.search(r"<!-- walk -->(.*?)<!-- end -->", CODE, re.DOTALL)[1]
    described = PATH.findall(section)
    assert len(described) <= 11
    whole = CODE.split("<!-- walk -->", 1)[1]  # Python, and behind it C++
    steps = [int(number) for number in re.findall(r"^(\d+)\. ", whole, re.MULTILINE)]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) <= 12
    run_ranks(_walks, 2, described)


class Scale(nn.Module):
    """A user's layer."""

    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(random(features, dtype=torch.float64, seed=1))

    def forward(self, x):
        return x * self.weight


class Subclass(Scale):
    pass


def _scales(rank, ranks, code):
    names: dict = {}
    exec(code, names)
    rotated_scale = names["rotated_scale"]

    class RotatedScale(RotatedModule, Scale):
        def _rotate(self, ring, **options):
            self._adopt(ring, {"weight": 0}, **options)

        def forward(self, x):
            return rotated_scale(self._cast(x), self.weight, **self._rotation())

    def make(features=7, dtype=torch.float64):
        return Operation(
            {"weight": random(features, dtype=dtype, seed=1)},
            {"weight": 0},
            lambda p, batch: batch[0] * p["weight"],
            lambda p, batch, **options: rotated_scale(batch[0], p["weight"], **options),
            lambda form, r, seed: [make_features(form, r, features, dtype, seed)],
            weights_return=lambda needs_inputs: needs_inputs,
        )

    cases = Cases()
    shift = replace(  # a bias, whose shards no gradient reads
        make(),
        plain=lambda p, batch: batch[0] + p["weight"],
        rotated=lambda p, batch, **o: batch[0] + rotated_scale(torch.ones_like(batch[0]), p["weight"], **o),
        weights_return=lambda needs_inputs: False,
    )
    with rtp_ext.Ring(timeout=30.0) as ring:
        for features, dtype, form in pairs((7, 2), TOLERANCES, forms=FORMS):
            with cases.case(f"{features} {dtype} {form}"):
                check_pass(make(features, dtype), ring, form, TOLERANCES[dtype])
        for dtype, tolerances in TOLERANCES.items():
            check_controls(make(dtype=dtype), ring, tolerances)
        check_controls(shift, ring, (EXACT, EXACT))
        for operation in (make(), shift):
            check_frozen(cases, operation, ring)
        check_checkpointing(cases, make(), ring)
        with cases.case("training"):
            train(make(), rank, ranks, True, torch.float64, ring=ring)
        x, shard = random(2, 7, dtype=torch.float64, seed=2).requires_grad_(), make().shards(rank, ranks)["weight"]
        y = rotated_scale(x, shard, ring=ring)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="rotated_scale: double backward is not supported"):
            (y.sum() + gradient.square().sum()).backward()
    with rtp_ext.Ring(transport="c10d", in_place=True, timeout=30.0) as ring:
        for features in (7, 2):
            with cases.case(f"{features} features, in place"):
                check_pass(make(features), ring)
        layers.DROP_INS[Scale] = RotatedScale  # of this process, which ends with the test
        for kind in (Scale, Subclass):
            with cases.case(f"{kind.__name__} in a model"):
                plain, model = kind(7), nn.Sequential(kind(7))
                rtp_ext.fully_rotate(model, mesh=ring)
                assert isinstance(model[0], RotatedScale) and isinstance(model[0], kind)
                for _ in range(2):
                    assert_same(model(x).detach(), plain(x).detach(), EXACT, "output")
    with cases.case("shards on the host"), made_up(), rtp_ext.Ring(timeout=30.0) as ring:
        plain, model = Scale(7), rtp_ext.fully_rotate(Scale(7), mesh=ring, offload_policy=CPUOffloadPolicy())
        gradients = {}
        for each in (plain, model):
            x = random(5, 7, dtype=torch.float64, seed=3).requires_grad_()
            each(x).square().sum().backward()  # of ranks with one batch, so that the mean of their gradients is each
            gradients[each] = x.grad, whole_gradients(each)["weight"]
        assert_same(gradients[model][0], gradients[plain][0], EXACT, "gradient of the input")
        assert_same(-gradients[model][1], gradients[plain][1], EXACT, "gradient of the weight, negated on the host")
        assert_given_back(model)
    cases.finish()


def _products(rank, ranks, code):
    """The printed Function between plain layers, against one process that computes the mean loss of all ranks."""
    names, wrong, cases = {}, {}, Cases()
    exec(code, names)
    exec(code.replace("alpha=1 / ctx.ring.size", "alpha=1"), wrong)

    def gradients(product, ring, features):
        """Outputs [M, O], and gradients of the inputs and of this rank's rows of the weight."""
        x = random(ranks, 4, 5, dtype=torch.float64, seed=2).requires_grad_()
        weight = random(features, 5, dtype=torch.float64, seed=1).requires_grad_()
        mine = weight.detach().tensor_split(ring.size)[rank].clone().requires_grad_()
        plain = nn.functional.linear(x.tanh(), weight)
        (plain.sin().flatten(1).sum(1).mean()).backward()
        own = x.detach()[rank].requires_grad_()
        y = product.apply(own.tanh(), mine, ring)
        y.sin().sum().backward()
        expected = plain[rank].detach(), x.grad[rank] * ranks, weight.grad.tensor_split(ring.size)[rank]
        return zip(("output", "x", "weight"), (y.detach(), own.grad, mine.grad), expected, strict=True)

    with rtp_ext.Ring(timeout=30.0) as ring:
        for features in (7, 2):
            with cases.case(f"{features} features"):
                for what, got, expected in gradients(names["RotatedProduct"], ring, features):
                    assert_same(got, expected, EXACT, what)
        differs = [what for what, a, b in gradients(wrong["RotatedProduct"], ring, 7) if not torch.allclose(a, b)]
        assert differs == ["weight"], "control: a sum instead of a mean"
        x, shard = torch.ones(2, 5, requires_grad=True), torch.ones(1, 5, requires_grad=True)
        y = names["RotatedProduct"].apply(x, shard, ring)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward is not supported"):
            gradient.square().sum().backward()
    cases.finish()


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_printed_twenty_lines_work(ranks):
    code, _ = re.findall(r"```python\n(.*?)```", EXTENDING, flags=re.DOTALL)
    run_ranks(_products, ranks, code)


def test_the_printed_operation_works():
    _, code = re.findall(r"```python\n(.*?)```", EXTENDING, flags=re.DOTALL)
    run_ranks(_scales, 3, code)
