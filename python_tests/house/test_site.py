"""The site of the pages: each page has its kind and is short enough, links say what they lead to, examples are listed.
`make docs` makes the site itself, by docs/conf.py."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
INDEX = (DOCS / "index.md").read_text()
PAGES = {page.relative_to(DOCS).with_suffix("").as_posix(): page.read_text() for page in DOCS.rglob("*.md")}
KINDS = ["Tutorial", "How-to guides", "Reference", "Explanation"]
MOST_WORDS = 2500
FILE_NAME = re.compile(r"\[[^\]]*\.md[^\]]*\]\(")


def kinds(index: str) -> dict[str, list[str]]:
    """The pages of each kind, as docs/conf.py reads them."""
    sections = re.split(r"^## ", index, flags=re.MULTILINE)[1:]
    return {
        section.split("\n", 1)[0]: re.findall(r"^- \[[^\]]+\]\(([\w/-]+)\.md\)", section, re.MULTILINE)
        for section in sections
    }


def title(text: str) -> str:
    return re.search(r"^# (.+)$", text, re.MULTILINE)[1]


def test_every_page_has_one_kind():
    found = kinds(INDEX)
    assert list(found) == KINDS
    counts = Counter(page for pages in found.values() for page in pages)
    (api,) = kinds(PAGES["api/index"]).values()
    counts += Counter(f"api/{page}" for page in api)
    assert counts == dict.fromkeys(PAGES.keys() - {"index"}, 1)


def test_contents_name_pages_by_their_titles():
    for page, text in (("", INDEX), ("api/", PAGES["api/index"])):
        for name, target in re.findall(r"^- \[([^\]]+)\]\(([\w/-]+)\.md\)", text, re.MULTILINE):
            assert name == title(PAGES[page + target])


def too_long(pages: dict[str, str]) -> dict[str, int]:
    """The pages that are too long to be read at once, and their words. Reference is for looking up."""
    reference = set(kinds(INDEX)["Reference"])
    counts = {page: len(text.split()) for page, text in pages.items()}
    return {page: count for page, count in counts.items() if count > MOST_WORDS and page not in reference}


def test_pages_are_short():
    assert too_long(PAGES) == {}
    assert too_long({"usage": "word " * 2501, "results": "word " * 2501, "design": "word " * 2500}) == {"usage": 2501}


def test_links_say_what_they_lead_to():
    texts = {"README": (ROOT / "README.md").read_text(), **PAGES}
    assert {page: FILE_NAME.findall(text) for page, text in texts.items() if FILE_NAME.search(text)} == {}
    assert FILE_NAME.search("see [usage.md](usage.md)") and not FILE_NAME.search("see [Usage](usage.md)")


def test_every_example_is_listed():
    listed = re.findall(r"^\| \[([\w/]+\.py)\]\(\.\./examples/\1\) \| \S", PAGES["examples"], re.MULTILINE)
    assert listed == sorted(str(file.relative_to(ROOT / "examples")) for file in (ROOT / "examples").rglob("*.py"))
