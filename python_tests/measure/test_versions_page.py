"""The table of Pythons and torches is what the committed results say."""

import pytest
from compatibility.versions import PAGE, PYTHONS, TORCHES, counts, last_of_each, page, table
from shared.card import RESULTS


def test_the_table_is_made_from_the_results():
    text = PAGE.read_text()
    assert page(text, RESULTS) == text, "run python benchmarks/compatibility/versions.py --page"
    with pytest.raises(ValueError, match="expected a block"):
        page("nothing", RESULTS)


def test_every_pair_has_a_row(tmp_path):
    path = tmp_path / "versions.jsonl"
    assert "Not tried yet" in table(last_of_each(path))
    card = '"commit": "a", "date": "2026-01-01", "command": "c"'
    path.write_text(
        f'{{"wanted_python": "3.10", "wanted_torch": "newest", "python": null, "torch": null, {card}, '
        '"outcome": "no such Python here"}\n'
        f'{{"wanted_python": "3.13", "wanted_torch": "2.11.0", "python": "3.13.0", "torch": "2.11.0+cpu", {card}, '
        '"outcome": "works", "wheel_bytes": 2097152, "tests": {"passed": 12, "failed": 0, "skipped": 3}}\n'
    )
    made = table(last_of_each(path))
    assert "| 3.10 | newest | no such Python here |  |  |" in made
    assert "| 3.13.0 | 2.11.0+cpu | works | 12 passed, 3 skipped | 2.0 |" in made
    assert made.count("| not tried |") == len(PYTHONS) * len(TORCHES) - 2


def test_counts_are_those_of_the_last_line():
    assert counts("3 failed\n1 failed, 219 passed, 2 skipped, 3 errors in 5.0s (0:00:05)\n") == {
        "passed": 219,
        "failed": 4,
        "skipped": 2,
    }
    assert counts("") == {"passed": 0, "failed": 0, "skipped": 0}
