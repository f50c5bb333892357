"""The site of the pages, by Sphinx: `make docs` writes it to build/docs, and fails where a link leads nowhere.

The pages are Markdown that can be read without the site, too. So the lists of links in index.md and api/index.md are
its tables of contents, and examples.md, which links the programs, contains them on the site.
"""

from __future__ import annotations

import os
import re
from typing import Any

from sphinx.ext.autodoc.mock import mock
from sphinx.util import logging

import rtp_ext
from rtp_ext import integrations

logger = logging.getLogger(__name__)

project = "rtp_ext"
copyright = "the rtp_ext authors"
release = rtp_ext.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = f"rtp_ext {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
pygments_style, pygments_dark_style = "friendly", "native"
highlight_language = "none"  # of code that names no language: commands and their output
myst_heading_anchors = 4
default_role = "literal"  # docstrings mark code by single backticks, as Markdown does
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
autodoc_member_order = "bysource"
autodoc_typehints = "description"  # signatures stay short
autodoc_typehints_description_target = "documented"
autodoc_inherit_docstrings = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Topologies", "params_style")]

# The integrations import these packages, which are large.
with mock(["lightning", "torchtitan"]):
    for _name in integrations.__all__:
        getattr(integrations, _name)

# Links from signatures to the documentation of torch need its inventory from the network. A build without network is
# complete but for these links, so they are an option.
INVENTORIES = "RTP_DOCS_INVENTORIES"
intersphinx_mapping = {}
if os.environ.get(INVENTORIES) == "1":
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable/", None),
    }
else:
    logger.info("no links to the documentation of torch and Python: set %s=1 where there is a network", INVENTORIES)

CONTENTS = ("index", "api/index")  # pages whose lists are tables of contents
_GROUP = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"^- \[[^\]]+\]\(([\w/-]+)\.md\)", re.MULTILINE)
_EXAMPLE = re.compile(r"`(examples/[\w/-]+\.py)`")


def groups(text: str) -> dict[str, list[str]]:
    """The pages that the lists of a page of contents link, by heading."""
    found = {heading: _ENTRY.findall(body) for heading, body in _GROUP.findall(text)}
    return {heading: pages for heading, pages in found.items() if pages}


def _toctree(caption: str, pages: list[str]) -> str:
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def _program(file: str) -> str:
    return f"\n## {file}\n\n```{{literalinclude}} ../{file}\n:language: python\n```\n"


def _anchor(file: str) -> str:
    return re.sub(r"[^\w-]", "", file)


def read(_app: Any, page: str, source: list[str]) -> None:
    """Adds to a page the parts that it has on the site alone."""
    text = source[0]
    if page in CONTENTS:
        text += "".join(_toctree(caption, pages) for caption, pages in groups(text).items())
    if page == "examples":
        files = re.findall(r"\]\(\.\./(examples/[\w/-]+\.py)\)", text)
        text = re.sub(r"\]\(\.\./(examples/[\w/-]+\.py)\)", lambda found: f"](#{_anchor(found[1])})", text)
        text += "".join(map(_program, files))
    elif not page.startswith("api/"):
        text = _EXAMPLE.sub(lambda found: f"[{found[0]}](/examples.md#{_anchor(found[1])})", text)
    source[0] = text


def code_blocks(_app: Any, _kind: str, _name: str, _value: Any, _options: Any, lines: list[str]) -> None:
    """Marks the indented code of a docstring, which stands outside of the sections `Args:`, `Attributes:`, ..., as code
    of reStructuredText."""
    found: list[str] = []
    section, before = False, ""
    for number, line in enumerate(lines):
        if line and not line.startswith(" "):
            section = bool(re.fullmatch(r"[A-Z]\w+:", line))
        if line.startswith("    ") and not section and number and not lines[number - 1] and not before.startswith(" "):
            found += ["::", ""]
        if line:
            before = line
        found.append(line)
    lines[:] = found


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", code_blocks, priority=400)  # before that of napoleon
    return {"parallel_read_safe": True, "parallel_write_safe": True}
