"""The table of third-party optimizers in docs/optimizers.md is what the committed results say."""

import pytest
from compatibility.third_party_table import last_lines, outcome, page, table
from shared.card import RESULTS

PAGE = RESULTS.parents[1] / "docs" / "optimizers.md"
RIGHT, FAILED = {"built": "", "trained": "", "off": 1e-9}, {"built": "", "trained": "mixed", "off": None}
REFUSED = {"built": "ValueError: on_shards: X does not", "trained": "", "off": None}


def test_the_table_is_made_from_the_results():
    text = PAGE.read_text()
    assert page(text, RESULTS) == text, "run python benchmarks/compatibility/third_party_optimizers.py --page"
    for row in last_lines(RESULTS / "cpu-2core" / "third_party_optimizers.jsonl"):
        assert row["plain"] or outcome(row["on_shards"]) in ("right", "refused"), row
    with pytest.raises(ValueError, match="expected a block"):
        page("nothing", RESULTS)


def test_the_worse_of_several_numbers_of_ranks_shows():
    line = {"torch": "t", "package": "p 1", "command": "c", "date": "2026-01-01", "commit": "a", "plain": ""}
    rows = [
        {**line, "class": "A", "ranks": 2, "as_is": RIGHT, "on_shards": RIGHT},
        {**line, "class": "A", "ranks": 3, "as_is": FAILED, "on_shards": {**RIGHT, "off": 0.1}},
        {**line, "class": "B", "ranks": 2, "as_is": {**RIGHT, "off": 0.2}, "on_shards": REFUSED},
        {**line, "class": "C", "ranks": 2, "plain": "fails"},
    ]
    made = table(rows)
    assert "| an error | wrong numbers | 1 | A |" in made
    assert "| wrong numbers | refused | 1 | B |" in made
    assert "on 2 and 3 ranks" in made and "C |" in made
