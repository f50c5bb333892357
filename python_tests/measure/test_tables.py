"""The tables of frameworks, compilation, optimizers, versions and faults show what differs."""

import json

from compatibility import compiled, frameworks, third_party_optimizers, versions
from reliability import faults
from shared.card import RESULTS, ROOT
from shared.table import read_lines

from rtp_ext.integrations import checkpoints

CARD = {"date": "2026-01-01", "commit": "a", "command": "c", "torch": "t"}


def test_a_framework_that_differs_shows():
    line = {**CARD, "framework": "x", "framework_version": "1", "reference": "DDP", "steps": 2, "ranks": 2}
    line |= {"loss_spread": 0.2, "norm_spread": None, "kept": 0.5, "resumed": 0.0, "reloaded": 3e-3}
    several = {**line, "ranks": 4, "replicas": 2}
    made = frameworks.TABLE.page([line, several, {**several, "framework": "grpo"}])
    assert "| x 1 | 2 | DDP | 2 | 2e-01 |  | 50.0 % | equal | differs by 3e-03 |" in made
    assert "| x 1 | 2 x 2 | DDP |" in made and "| trl 1, GRPO | 2 x 2 |" in made


def test_the_page_names_the_folder_of_checkpoints():
    assert f"`{checkpoints.FOLDER}`" in (ROOT / "docs" / "frameworks.md").read_text()


def test_every_mode_of_compilation_has_a_row():
    line = {**CARD, "ranks": 2, "shape": "s", "tokens": 8, "dtype": "float32", "checkpoint": False, "fused_head": True}
    line |= {"strategy": "rtp", "mode": "eager", "graphs": 0, "graph_breaks": 0, "hops": 6, "step_ms": 10.0}
    line |= {"against_eager": 1.0, "first_step_s": 0.25, "peak_bytes": 3 << 20}
    other = {**line, "strategy": "fully_shard", "mode": "inductor", "fused_head": False, "hops": None}
    made = compiled.TABLE.page([line, {**other, "graphs": 9, "graph_breaks": 8, "step_ms": 5.0, "against_eager": 0.5}])
    assert "| 2 | a ring, fused head | eager | 0 | 0 | 6 | 10.0 | 1.00 | 0.2 | 3 |" in made
    assert "| 2 | `fully_shard` | inductor | 9 | 8 |  | 5.0 | 0.50 | 0.2 | 3 |" in made


def test_the_worse_of_an_optimizer_on_several_numbers_of_ranks_shows():
    right, failed = {"built": "", "trained": "", "off": 1e-9}, {"built": "", "trained": "mixed", "off": None}
    refused = {"built": "ValueError: on_shards: X does not", "trained": "", "off": None}
    line = {**CARD, "package": "p 1", "plain": ""}
    made = third_party_optimizers.TABLE.page(
        [
            {**line, "class": "A", "ranks": 2, "as_is": right, "on_shards": right},
            {**line, "class": "A", "ranks": 3, "as_is": failed, "on_shards": {**right, "off": 0.1}},
            {**line, "class": "B", "ranks": 2, "as_is": {**right, "off": 0.2}, "on_shards": refused},
            {**line, "class": "C", "ranks": 2, "plain": "fails"},
        ]
    )
    assert "| an error | wrong numbers | 1 | A |" in made
    assert "| wrong numbers | refused | 1 | B |" in made
    assert "on 2 and 3 ranks" in made and "C |" in made


def test_optimizers_by_on_shards_are_right_or_refused():
    lines = read_lines(RESULTS / "cpu-2core" / "third_party_optimizers.jsonl")
    for row in third_party_optimizers.TABLE.rows(lines, []):
        assert row["plain"] or third_party_optimizers.outcome(row["on_shards"]) in ("right", "refused"), row


def test_every_pair_of_versions_has_a_row(tmp_path):
    assert "Not tried yet" in versions.TABLE.block(tmp_path)
    card = {"commit": "a", "date": "2026-01-01", "command": "c"}
    missing = {"wanted_python": "3.10", "wanted_torch": "newest", "python": None, "torch": None}
    works = {"wanted_python": "3.13", "wanted_torch": "2.11.0", "python": "3.13.0", "torch": "2.11.0+cpu"}
    works |= {"outcome": "works", "wheel_bytes": 2 << 20, "tests": {"passed": 12, "failed": 0, "skipped": 3}}
    lines = [{**card, **missing, "outcome": "no such Python here"}, {**card, **works}]
    (tmp_path / "versions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    made = versions.TABLE.block(tmp_path)
    assert "| 3.10 | newest | no such Python here |  |  |" in made
    assert "| 3.13.0 | 2.11.0+cpu | works | 12 passed, 3 skipped | 2.0 |" in made
    assert made.count("| not tried |") == len(versions.PYTHONS) * len(versions.TORCHES) - 2


def test_counts_of_tests_are_those_of_the_last_line():
    told = "3 failed\n1 failed, 219 passed, 2 skipped, 3 errors in 5.0s (0:00:05)\n"
    assert versions.counts(told) == {"passed": 219, "failed": 4, "skipped": 2}
    assert versions.counts("") == {"passed": 0, "failed": 0, "skipped": 0}


def test_a_fault_that_failed_shows():
    rows = [row for row in read_lines(RESULTS / "cpu-2core" / "faults.jsonl") if row["verdict"] == "pass"]
    assert "planted" in faults.table([*rows, {**rows[0], "verdict": "fail", "problems": ["planted"]}])
    assert "planted" not in faults.table(rows)
