"""The site of the documentation: it is made, and no link leads nowhere."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_site_is_made_and_its_links_lead_somewhere(tmp_path):
    pytest.importorskip("markdown2")
    spec = importlib.util.spec_from_file_location("site_of_docs", ROOT / "docs" / "site.py")
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    site.build(tmp_path, [])
    made = {file.name for file in tmp_path.glob("*.html")}
    assert {"index.html", "which.html", "frameworks.html", "example-quickstart.html"} <= made
    assert made == {site.file_of(name) for name in site.pages()} | {
        site.example_file(file.name) for file in (ROOT / "examples").rglob("*.py")
    }
    assert site.broken(tmp_path) == []
    index = (tmp_path / "index.html").read_text()
    assert "<table>" in index and "|---" not in index and 'href="usage.html"' in index
    for page in made:
        assert not re.search(r'href="[^"]*\.md', (tmp_path / page).read_text()), page
    (tmp_path / "which.html").write_text('<a href="nowhere.html">a</a> <a href="usage.html#nowhere">b</a>')
    assert len(site.broken(tmp_path)) == 2, "control"
