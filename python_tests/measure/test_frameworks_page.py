"""The table of docs/frameworks.md is what the committed results say."""

import pytest
from compatibility.frameworks_report import page, table
from shared.card import RESULTS

from rtp_ext.integrations import checkpoints

PAGE = RESULTS.parents[1] / "docs" / "frameworks.md"


def test_the_table_is_made_from_the_results():
    text = PAGE.read_text()
    assert page(text, RESULTS) == text, "run python benchmarks/compatibility/frameworks.py --page"
    assert f"`{checkpoints.FOLDER}`" in text
    with pytest.raises(ValueError, match="expected a block"):
        page("nothing", RESULTS)


def test_a_run_that_differs_shows():
    line = {"framework": "x", "framework_version": "1", "reference": "DDP", "steps": 2, "ranks": 2, "torch": "t"}
    line |= {"loss_spread": 0.2, "norm_spread": None, "kept": 0.5, "resumed": 0.0, "reloaded": 3e-3}
    made = table([{**line, "command": "c", "date": "2026-01-01", "commit": "a"}])
    assert "| x 1 | 2 | DDP | 2 | 2e-01 |  | 50.0 % | equal | differs by 3e-03 |" in made
    several = {**line, "ranks": 4, "replicas": 2, "command": "c", "date": "2026-01-01", "commit": "a"}
    assert "| x 1 | 2 x 2 | DDP |" in table([several])
    assert "| trl 1, GRPO | 2 x 2 |" in table([{**several, "framework": "grpo"}])
