"""Comments, docstrings, messages and pages use the field's words: docs/glossary.md has those that are the project's."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# word: what to write
WORDS = {
    r"who(m)?ever": "the subject: 'the rank that'",
    r"(no|any|every|some)body": "the subject: 'no rank', 'every caller'",
    r"\w*cargo\w*": "shard bundle",
    r"home shards?": "local shard",
    r"\w*quantis\w*": "quantize",
    r"\w*enrol\w*": "register",
    r"roll call": "failure report",
    r"manieth": "index",
}
PATTERN = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
SUFFIXES = (".py", ".cpp", ".h", ".cu", ".cuh", ".md")


def private_words(text: str) -> list[str]:
    return [match.group().lower() for match in PATTERN.finditer(text)]


@pytest.mark.parametrize("folder", ["csrc", "rtp_ext", "docs", "examples", "benchmarks"])
def test_there_are_no_private_words(folder):
    files = [file for file in sorted((ROOT / folder).rglob("*")) if file.suffix in SUFFIXES]
    assert len(files) > 10
    found = {str(file.relative_to(ROOT)): private_words(file.read_text()) for file in files}
    assert {name: words for name, words in found.items() if words} == {}


def test_private_words_are_found():
    text = "Whoever dequantises the home shard waits for nobody. weight_cargo; enrolled"
    assert private_words(text) == ["whoever", "dequantises", "home shard", "nobody", "weight_cargo", "enrolled"]
    assert private_words("the rank that dequantizes the local shard; somewhere; embody") == []
