"""The table of docs/compile.md is what the committed results say."""

import pytest
from compatibility.compiled_report import page, table
from shared.card import RESULTS

PAGE = RESULTS.parents[1] / "docs" / "compile.md"


def test_the_table_is_made_from_the_results():
    text = PAGE.read_text()
    assert page(text, RESULTS) == text, "run python benchmarks/compatibility/compiled.py --page"
    with pytest.raises(ValueError, match="expected a block"):
        page("nothing", RESULTS)


def test_every_mode_has_a_row():
    line = {"ranks": 2, "shape": "s", "tokens": 8, "dtype": "float32", "checkpoint": False, "fused_head": True}
    line |= {"strategy": "rtp", "mode": "eager", "graphs": 0, "graph_breaks": 0, "hops": 6, "step_ms": 10.0}
    line |= {"against_eager": 1.0, "first_step_s": 0.25, "peak_bytes": 3 << 20, "command": "c", "torch": "t"}
    line |= {"date": "2026-01-01", "commit": "a"}
    other = {**line, "strategy": "fully_shard", "mode": "inductor", "fused_head": False, "hops": None}
    made = table([line, {**other, "graphs": 9, "graph_breaks": 8, "step_ms": 5.0, "against_eager": 0.5}])
    assert "| 2 | a ring, fused head | eager | 0 | 0 | 6 | 10.0 | 1.00 | 0.2 | 3 |" in made
    assert "| 2 | `fully_shard` | inductor | 9 | 8 |  | 5.0 | 0.50 | 0.2 | 3 |" in made
