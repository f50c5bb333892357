"""docs/planner.md and docs/predictions.md say what published.py and the planner give."""

import argparse
import dataclasses
import functools
import re
import shlex
from types import SimpleNamespace

import pytest
from grids import SWEEP
from planner import capacity, planner_hosts, planner_page, planner_runs, scale
from planner.planned import Case, planned_again

from rtp_ext.planner import Cluster, cli, estimate_memory
from rtp_ext.planner.plans.against import STEPS, match
from rtp_ext.planner.plans.differences import differences
from rtp_ext.planner.plans.when import compare

TEXTS = {page: (planner_page.DOCS / page).read_text() for page in planner_page.PAGES}
ROOMY = Cluster.preset("h100-80gb")
CASES = [Case(family, 4, 256, "rtp", ranks, 256) for family in ("llama", "gpt") for ranks in (2, 3)]
# what the prose quotes from its sources
QUOTED = (
    *("f/h = 3.5", "up to 100 %", "as 0.44", "Its 0.3 for", "fitted to 0.3", "HBM2e of 2.4 TB/s", "the rule of 80 %"),
    *("a failure in 1.8 hours", "above 90 % effective", "2602.00277: 44 and 80 %", "issues a layer in 3.5 ms"),
    *("some 15 % too fast", "is 18 % too fast", "a regret of 5 % on vTrain's runs", "error of 12 % on one node"),
    # tested in other files, and what the test of each says
    *("15.5 with torchtitan's", "0.4347 for GPT-3", "63 % of 700 GB", "gives 0.63 for 1.4e12 tokens"),
    *("at 100,000 GPUs 44 % where each failure costs ten minutes, and 85 % with",),
)

SAMPLES = (  # cells of the two long tables
    *(("gpt-3-xl", 8, "PCIe", 4096), ("llama-3-8b", 8, "NVLink", 4096)),
    *(("llama-3-70b", 64, "400 Gb/s", 8192), ("llama-3-405b", 512, "NVLink", 16384)),
)


def _rows(name):
    text = next(found[3] for page in TEXTS.values() for found in planner_page.BLOCK.finditer(page) if found[2] == name)
    return _cells(text), text


def _cells(text):
    lines = [line for line in text.splitlines() if re.match(r"\| (gpt|llama)-", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _plan_samples(monkeypatch):
    """Compares SAMPLES with their rows on the page, which then stands for both tables: all cells take three minutes."""
    monkeypatch.setattr(planner_page, "cells", lambda: [compare(*each) for each in SAMPLES])
    found = [match(*each, steps=STEPS) for each in SAMPLES]
    monkeypatch.setattr(planner_page, "matched", lambda: [each for each in found if each])
    for name in ("against", "when"):
        rows, text = _rows(name)
        again = _cells(planner_page.BLOCKS[name]())
        assert len(again) >= 3 and [row for row in again if row not in rows] == []
        monkeypatch.setitem(planner_page.BLOCKS, name, lambda text=text: text)
    counted = [SimpleNamespace(winner=row[-2], advantage=9 * (row[-2] == "rtp")) for row in rows]
    monkeypatch.setattr(planner_page, "cells", lambda: counted)


def test_the_page_is_what_the_planner_gives(tmp_path, capsys, monkeypatch):
    if not SWEEP:
        _plan_samples(monkeypatch)
    made_once = {name: functools.cache(make) for name, make in planner_page.BLOCKS.items()}  # it is asked five times
    monkeypatch.setattr(planner_page, "BLOCKS", made_once)
    monkeypatch.setattr(planner_page, "claims", functools.cache(planner_page.claims))
    planner_page.main(["--check"])

    def put(before, after):
        assert sum(text.count(before) for text in TEXTS.values()) == 1
        for page, text in TEXTS.items():
            (tmp_path / page).write_text(text.replace(before, after))

    folder = ["--folder", str(tmp_path)]
    for before, after in (("| +37.0 % |", "| +16.0 % |"), ("within 6 % of a rank's", "within 5 % of a rank's")):
        put(before, after)
        with pytest.raises(SystemExit, match=r"differs from the planner|does not say: Plans within 6 %"):
            planner_page.main(["--check", *folder])
    put("| +37.0 % |", "| +16.0 % |")
    planner_page.main(["--write", *folder])
    assert {page: (tmp_path / page).read_text() for page in TEXTS} == TEXTS
    put("<!-- planner: runs -->", "<!-- planner: walks -->")
    with pytest.raises(SystemExit, match=r"expected the blocks like, memory, .*walks"):
        planner_page.main(["--check", *folder])


def test_commands_of_the_pages_compare_like_with_like():
    """Plans of one command of a page differ in the way to share the work alone."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    docs = planner_page.DOCS
    pages = [docs.parent / "README.md", *docs.glob("*.md")]
    found = [
        (page, line)
        for page in pages
        for line in re.findall(r"^python -m rtp_ext plan (.*--plan .*)$", page.read_text(), re.MULTILINE)
    ]
    assert {page.name for page, _ in found} == {"planner.md", "usage.md"}

    def unlike(line):
        options = parser.parse_args(shlex.split(line, comments=True))
        return differences(cli.strategies_of(options, cli.cluster_of(options)))

    for page, line in found:
        assert unlike(line) == {}, f"{page.name}: {line}"
    assert unlike("--model llama-3-8b --plan rtp=8,fused_loss --plan zero=3") == {"loss": ["fused", "eager"]}, "control"


def test_the_first_lines_say_what_rotation_does_not_win():
    """The pages say before any example where a ring is faster than `fully_shard` by prediction, and where not."""
    for text, ends, says, least, most in (
        (
            *(TEXTS["planner.md"], "```"),
            "In these predictions, which no run on a GPU has confirmed, rotation takes less memory than `fully_shard`, "
            "and no more time.",
            *(0.0, 1.0),
        ),
        (scale.PAGE.read_text(), "![", "rings win little time, and some memory", 0.94, 1.0),
    ):
        first = text[: text.index(ends)]
        assert says in " ".join(first.split())
        times = [float(cell) for cell in re.findall(r" (\d\.\d\d) \|$", first, re.MULTILINE)]
        assert len(times) >= 4 and least <= min(times) <= max(times) <= most, "else the sentence is to change"


def test_no_number_of_the_prose_goes_unchecked():
    """Percentages and decimals stand in blocks, in claims, or are quoted."""
    prose = planner_page.prose([re.sub(r"```.*?```", "", text, flags=re.DOTALL) for text in TEXTS.values()])
    for phrase in (*planner_page.claims(), *QUOTED):
        assert phrase in prose
        prose = prose.replace(phrase, " ")
    prose = re.sub(r"`[^`]*`|arXiv [\d., ]+", " ", prose)
    assert re.findall(r"\S*\d\s?%|\d+\.\d+", prose) == []
    assert re.findall(r"\S*\d\s?%|\d+\.\d+", "wrong by 7 %, or 0.5 s") == ["7 %", "0.5"], "control"


def test_slots_of_our_runs_are_those_that_were_counted():
    """To the byte."""
    rotated = [row for row in planned_again(planner_page.recorded("planner_grid")) if row["counted_slots_bytes"]]
    for row in rotated:
        assert row["counted_slots_bytes"] == row["predicted_slots_bytes"], (row["case"], row["ranks"], row["tokens"])
    in_time = [
        estimate_memory(
            case.model, dataclasses.replace(ROOMY, cpus=True), dataclasses.replace(case.plan, late_gradients=0)
        )
        for case in CASES
    ]
    slots = [report.components["rotation_slots"] for report in in_time]
    assert len(rotated) > 80 and all(
        held < case.predicted()["slots"] for held, case in zip(slots, CASES, strict=True)
    ), "control: slots without gradients that land late"


def test_the_largest_model_is_found_and_its_neighbours_are_tried():
    for count, answer in ((1, -1), (1, 0), (9, -1), (9, 4), (9, 8), (40, 17)):
        for first in range(count):
            asked = {place: place <= answer for place in range(count)}
            assert capacity.largest(count, asked.pop, first) == answer, "each is asked once"
            assert not {answer, answer + 1} & set(asked), "both have been"


def test_steps_between_hosts_are_predicted_from_what_was_measured_beside_them():
    """The wire decides at 1 Gbit/s and 256 tokens: rotation is then right; a link of twice the rate would not be."""
    rows = planner_hosts.measured()
    (row,) = (row for row in rows if (row["case"], row["rate"], row["tokens"]) == ("mlp/rtp", "1gbit", 256))
    beside = [other for other in rows if other["command"] == row["command"]]
    near = [each for each in planner_hosts.predictions(beside) if each.row is row]
    assert abs(near[0].error) < 0.05
    faster = [{**other, "rate": "2gbit"} for other in beside if other["rate"] == "1gbit"]
    wrong = [each for each in planner_hosts.predictions(faster) if each.row["case"] == "mlp/rtp"]
    assert wrong[0].row["tokens"] == 256 and wrong[0].error < -0.3, "control"


def test_eight_bit_runs_are_predicted_in_eight_bits():
    """A run of eight-bit products, predicted in sixteen, would look better than the model is."""
    runs = planner_runs.torchtitan()
    assert all(run.strategy.fp8 == ("Float8" in run.name) for run in runs)
    assert {run.measured for run in runs if "405B, 128 H100" in run.name} == {109, 185}
    assert [run.name for run in runs if not run.ran] == ["Llama 2 70B, 64 A100, 4096 tokens, eager"]


def test_the_page_of_scale_is_what_the_planner_gives(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scale, "table", functools.cache(scale.table))
    monkeypatch.setattr("sys.argv", ["scale.py", "--check"])
    scale.main()
    text = scale.PAGE.read_text()
    number = re.search(r"<!-- scale: rings -->.*?\d+\.\d+", text, re.DOTALL)
    wrong = tmp_path / "scale.md"
    wrong.write_text(text[: number.end() - 1] + str(9 - int(text[number.end() - 1])) + text[number.end() :])
    monkeypatch.setattr(scale, "PAGE", wrong)
    with pytest.raises(SystemExit, match="differs from the planner"):
        scale.main()
