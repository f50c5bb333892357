"""The tables and figures of README and docs/results.md say what the results say."""

import json
import re
from pathlib import Path

import plot
import pytest
import report
from reliability import faults
from shared import reports
from shared.table import read_lines, today

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES_OF_THEIR_OWN = {  # of results that planner_page.py shows, or sentences
    "capacity": "predictions.md",
    "planner_grid": "predictions.md",
    "recorder": "reliability.md",
    "soak_hosts": "reliability.md",
}
GONE = {  # results of experiments that were removed, and their pages, which name the commit that had the script
    "benchmarks/planner/search_ways.py": "predictions.md",
    "benchmarks/travel_curves.py": "results.md",
}
COMPARE = RESULTS / "cpu-2core" / "compare.jsonl"


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_the_numbers_of_a_page_are_those_of_the_results(page, tmp_path, capsys):
    report.main(["--check", "--page", str(page)])
    text = page.read_text()
    wish, table = next((found[2], found[3]) for found in report.BLOCK.finditer(text))
    number = re.search(r"\| (\d+)", table)[1]
    wrong = tmp_path / page.name
    wrong.write_text(text.replace(table, table.replace(f"| {number}", f"| {int(number) + 1}", 1)))
    with pytest.raises(SystemExit, match=f"{page.name} differs from the results"):
        report.main(["--check", "--page", str(page), "--page", str(wrong)])
    report.main(["--write", "--page", str(wrong)])
    assert wrong.read_text() == text
    report.main(["--page", str(page)])
    assert f"<!-- report: {wish} -->" in capsys.readouterr().out


def test_every_result_of_this_machine_is_on_a_page():
    requested = [found[2] for page in report.PAGES for found in report.BLOCK.finditer(page.read_text())]
    kinds = {tuple(wish.split()[:2]) for wish in requested}
    files = {(file.parent.name, file.stem) for file in RESULTS.glob("*/*.jsonl")}
    left = files - {(machine, report.TABLES[kind].file) for machine, kind in kinds}
    gone = {Path(script).stem for script in GONE}
    assert {stem for _, stem in left} <= set(PAGES_OF_THEIR_OWN) | gone
    for script, page in GONE.items():
        told = re.search(rf"`{Path(script).name}` \(last in commit (\w+)", (ROOT / "docs" / page).read_text())
        assert told and not (ROOT / script).exists(), script
    for stem, page in PAGES_OF_THEIR_OWN.items():
        assert today(f"benchmarks/{stem}.py") in (ROOT / "docs" / page).read_text()


def test_tables_show_the_last_run_and_only_what_is_known():
    unknown = {"kept_efficiency": None, "peak_efficiency": None}
    lines = [line | {"cores_shared": True} for line in read_lines(COMPARE) if line["case"] == "mlp/rtp"]
    lines = [line | unknown for line in lines if line["ranks"] == 2]
    passes = {"forward_backward_ms": 8.0, "reference_forward_backward_ms": 4.0, "exposed_ms": 4.0}
    later = [line | {"date": "2027-01-01", "step_ms": 12.3, **passes} for line in lines[:1]]
    shown = reports.last_runs(lines + later, "mlp")
    assert shown == later
    text = report.TABLES["compare"].page(shown)
    assert (
        "| 12 (" in text
        and "| 8 (2.00) |" in text
        and "forward + backward, ms" in text
        and "take turns" in text
        and "memory efficiency" not in text
    )


def test_tables_show_how_far_runs_lie_apart(tmp_path):
    lines = [line for line in read_lines(COMPARE) if line["tokens"] == 256 and line["case"] == "mlp/fsdp2"][:1]
    lines += [line | {"date": f"2027-01-0{day}", "rtp_ratio": day / 4} for line in lines for day in (1, 3)]
    lines += [lines[0] | {"date": "2026-01-01", "rtp_ratio": 9.0, "dtype": "bfloat16"}]
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "compare.jsonl").write_text("\n".join(map(json.dumps, [*lines[::-1], lines[2]])))
    few, most = sorted([lines[0]["rtp_ratio"], 0.25])[0], max(lines[0]["rtp_ratio"], 0.75)
    assert f"| 0.75 ({few:.2f} to {most:.2f} in 4) |" in report.block("m compare mlp", tmp_path)
    with pytest.raises(ValueError, match="rows of one dtype"):
        report.TABLES["compare"].page([lines[0], lines[-1]])


def test_e_hide_has_the_range_of_all_runs_or_the_error_of_its_medians():
    row = {"e_hide": 0.5, "t_gr_us": 100.0, "t_c_us": 50.0, "iterations": 25}
    row |= {f"t_{name}_{end}_us": value for name in ("gr", "c", "ov") for end, value in (("p20", 0.0), ("p80", 16.8))}
    error = 1.25 * 10 * 3**0.5 / 5 / 50
    assert reports.e_hide(row) == f"0.5 ± {error:.1f}" and error > 0.05
    assert reports.e_hide(row | {"e_hides": [0.5, -1.5]}) == "0.50 (-1.50 to 0.50 in 2)"
    assert reports.e_hide(row | {"iterations": 2500}) == f"0.50 ± {error / 10:.2f}"
    assert reports.e_hide(row | {"ceiling_percent": 106.0}) == "-" != reports.e_hide(row | {"ceiling_percent": 104.0})
    assert reports.e_hide({"e_hide": 0.5}) == "0.50" and reports.e_hide({"e_hide": None}) is None


def test_tables_of_overlap_and_memory(tmp_path):
    card = {"date": "2026-01-01T00", "commit": "abc", "device": "made up", "cores": 2, "torch": "2", "dtype": "float32"}
    card |= {"direction": "step", "ranks": 8, "transport": "emulated", "command": "python x", "base": "hops"}
    card |= {"loss_split_us": 1.0, "loss_interference_us": 2.0, "loss_exposed_us": None}
    times = {f"t_{name}_us": 10.0 for name in ("g1", "gr", "c", "ov", "base", "ov_p20", "ov_p80")}
    overlap = [
        card | times | {"case": f"s/{tokens}", "shape": "s", "tokens": tokens, "link": link, "e_hide": hidden}
        for tokens, link, hidden in ((8, "a", 0.1), (8, "a", 0.9), (16, "a", 0.7), (8, "b", 0.3))
    ]
    memory = card | {"case": "tiny/tp", "strategy": "tp", "shape": "t", "tokens": 8, "link": None, "layers": 2}
    memory |= {"full_layers": 4, "computed_tokens": 64, "peak_bytes": 3 << 20}
    (tmp_path / "here").mkdir()
    for name, rows in (("overlap", overlap), ("memory_per_rank", [memory])):
        (tmp_path / "here" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = report.block("here overlap", tmp_path)
    assert "| 0.90 (0.10 to 0.90 in 2) |" in text and "| 0.70 |" in text and "| 0.30 |" in text and "| 0.10" not in text
    assert "10 (hops)" in text and "| 1, 2, - |" in text
    assert "CTAs" not in text and "    python x\n" in text
    assert report.block("here overlap a T8", tmp_path).count("| s |") == 1
    assert "| 2 of 4 | 64 | 3 |" in report.block("here memory", tmp_path)
    for wish, message in (
        ("here overlap c", "expected results with c"),
        ("here memories", "got 'here memories'"),
        ("here", "got 'here'"),
        ("here compare", "got 'here compare'"),
        ("here brief", "got 'here brief'"),
        ("cpu-2core brief mlp R7", "expected results with R7"),
        ("here scaling", "got 'here scaling'"),
        ("there overlap", "found none"),
        ("cpu-2core compare gpt9", "results of gpt9"),
    ):
        with pytest.raises(ValueError, match=message):
            report.block(wish, RESULTS if wish.startswith("cpu-2core") else tmp_path)
    with pytest.raises(ValueError, match="expected a block"):
        report.rewrite("", tmp_path)


def rows_between_hosts() -> list[dict]:
    card = {"date": "2026-01-01T00", "commit": "abc", "device": "made up", "cores": 2, "torch": "2", "dtype": "float32"}
    card |= {"command": "python x", "hosts": 2, "ranks_per_host": 1, "cores_per_host": 1, "delay": None, "ranks": 2}
    card |= {"shape": "s", "direction": "step", "link": None, "transport": "c10d", "threads": 1, "kept_bytes": 3 << 20}
    card |= {"loss_spread": 1e-7, "gradient_spread": 2e-7, "p20_ms": 90.0, "p80_ms": 130.0, "exposed_ms": 7.0}
    card |= {"sent_bytes": 5 << 20, "closed_form_bytes": 4 << 20, "hidden_share": 0.25, "roof_ms": 80.0}
    card |= {"forward_backward_ms": 75.0, "reference_forward_backward_ms": 60.0}
    values = (("rtp", "2gbit", 100.0, 1.0), ("ddp", "2gbit", 125.0, 0.8), ("ddp", "none", 50.0, 0.5))
    rows = [
        card
        | {"case": f"mlp/{name}", "strategy": name, "rate": rate, "step_ms": ms, "rtp_ratio": ratio, "tokens": tokens}
        for tokens in (256, 1024)
        for name, rate, ms, ratio in values
    ]
    return [*rows, rows[1] | {"step_ms": 110.0, "rtp_ratio": 0.9}, rows[0] | {"case": "gpt/rtp", "delay": "1ms"}]


def test_tables_between_hosts(tmp_path):
    assert report.block("m hosts mlp", tmp_path) == report.block("m hosts-overlap", tmp_path) == "\n", "none yet"
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "hosts.jsonl").write_text("\n".join(map(json.dumps, rows_between_hosts())))
    assert report.block("m hosts llama", tmp_path) == report.block("m hosts mlp 8gbit", tmp_path) == "\n"
    text = report.block("m hosts mlp", tmp_path)
    assert text.count("| 2gbit |") == 4 and text.count("| none |") == 2
    assert (
        "| 2gbit | 256 | DDP | 110 (90-130) | 0.90 (0.80 to 0.90 in 2) | 80 (1.38) | 75 (1.25) | 0.25 | 5 (4) | 3 |"
        in text
    )
    about = " ".join(text.split())
    assert "2 hosts made on this machine, of 1 core each, 1 rank on each; links: 2gbit, none. Largest" in about
    brief = report.block("m hosts-brief mlp 2gbit T256", tmp_path)
    assert brief.count("(90-130)") == 2 and "hidden" not in brief and "links: 2gbit. Largest" in " ".join(brief.split())
    more = {"frozen": "nf4", "reference_forward_backward_ms": 70.0, "optimizer_ms": 10.0}
    rows = [row | more for row in rows_between_hosts()[:1]]
    (tmp_path / "m" / "lora.jsonl").write_text("\n".join(map(json.dumps, rows)))
    adapters = report.block("m hosts-lora mlp", tmp_path)
    assert "| 2gbit | 256 | rtp | frozen weights nf4 | 100 (90-130) | 80 (1.25) |" in adapters
    assert "| step / no communication |" in adapters and adapters.rstrip().endswith("| 1.25 |"), "of 70 + 10 ms"
    for wish, message in (("m hosts", "got 'm hosts'"), ("m hosts-lora", "got 'm hosts-lora'")):
        with pytest.raises(ValueError, match=message):
            report.block(wish, tmp_path)
    with pytest.raises(ValueError, match="rows of one kind of hosts"):
        report.TABLES["hosts"].page(rows_between_hosts())


def test_figures_come_from_committed_results_alone(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    card = {"device": "made up", "commit": "abc", "date": "2026-01-01", "cores": 2}
    base = card | {"dtype": "bfloat16", "shape": "s", "ranks": 8, "direction": "step", "transport": "emulated"}
    times = {"e_hide": 0.5, "roofline": 0.8, "t_g1_us": 9.0, "ceiling_us": 10.0}
    overlap = [base | times | {"link": link, "tokens": tokens} for link in ("a", "b") for tokens in (1024, 4096)]
    scaling = [
        card
        | {"case": "mlp/rtp", "strategy": "rtp", "tokens": 8, "ranks": r, "command": "c", "tokens_per_s": 1.0 * r}
        | {"step_ms": 10.0, "p20_ms": 9.0, "p80_ms": 12.0}
        | {"cores_shared": r > 2}
        for r in (1, 2, 4)
    ]
    for name, rows in (("overlap", overlap), ("scaling", scaling)):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        options = [name, str(file), "--output", str(tmp_path / name)]
        with pytest.raises(SystemExit, match="is not committed"):
            plot.main(options)
        plot.main([*options, "--uncommitted"])
        drawn = (tmp_path / f"{name}.svg").read_text()
        assert "DRAFT" in drawn and (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "R = 4 take turns on 2 cores" in drawn and "ideal" in drawn
    file = tmp_path / "rates.jsonl"
    file.write_text("\n".join(map(json.dumps, rows_between_hosts())))
    plot.main(["rates", str(file), "--model", "mlp", "--output", str(tmp_path / "rates"), "--uncommitted"])
    drawn = (tmp_path / "rates.svg").read_text()
    assert all(
        text in drawn for text in ("no limit", "2gbit", "DDP", "256 tokens", "1024 tokens", "the least it could be")
    )
    assert "<!-- 0.00 -->" in drawn and "<!-- 0.1 -->" not in drawn
    plot.main(["rates", str(file), "--model", "mlp", "--log", "--output", str(tmp_path / "rates"), "--uncommitted"])
    drawn = (tmp_path / "rates.svg").read_text()
    assert "<!-- 0.00 -->" not in drawn and "<!-- 0.1 -->" in drawn, "a logarithmic axis with plain numbers"
    with pytest.raises(SystemExit, match="no line between made hosts of model 'gpt9'"):
        plot.main(["rates", str(file), "--model", "gpt9", "--output", str(tmp_path / "x"), "--uncommitted"])
    monkeypatch.setattr(plot, "committed", lambda path: True)
    options = ["memory", str(COMPARE), "--model", "mlp", "--tokens", "256", "--output", str(tmp_path / "m.v2")]
    plot.main(options)
    drawn = (tmp_path / "m.v2.svg").read_text()
    assert "DRAFT" not in drawn and all(part in drawn for part in plot.COMPONENTS)
    for options, message in (
        (["memory", str(COMPARE), "--model", "gpt9"], "no line with memory"),
        (["overlap", str(tmp_path / "overlap.jsonl"), "--shape", "other"], "no case has shape"),
        (["scaling", str(tmp_path / "scaling.jsonl"), "--tokens", "9"], "got too few"),
    ):
        with pytest.raises(SystemExit, match=message):
            plot.main([*options, "--output", str(tmp_path / "x")])
    capsys.readouterr()


def rows_of_policies(rate):
    """Returns the lines of two runs of outer.py, the last at `rate`."""
    card = {**json.loads(COMPARE.read_text().splitlines()[0]), "dtype": "float32"}
    rows = []
    for date, scale in (("2026-01-01", 2.0), ("2026-01-02", 1.0)):
        for name, sent in (("all-reduce", 40 * 2**20), ("diloco", 2**20)):
            row = {"case": f"gpt/{name}", "strategy": name, "policy": f"{name}()", "date": date, "command": "outer.py"}
            row |= {"replicas": 4, "ring": 1, "steps": 2, "tokens": 7, "shape": "byte GPT", "eval_loss": 1.25 * scale}
            row |= {"sent_bytes": sent, "kernel_ratio": 1.01 if rate else None, "seconds": 3.0, "losses": [3.0, 2.5]}
            row |= {"points": [1, 2], "point_bytes": [0, sent], "point_seconds": [1.0, 3.0]}
            rows.append({**card, **row, **({"rate": rate} if rate else {})})
    return rows


@pytest.mark.parametrize("rate", [None, "200mbit"])
def test_policies_between_replicas(tmp_path, rate):
    assert report.block("m outer", tmp_path) == "\n", "no results yet"
    (tmp_path / "m").mkdir()
    file = tmp_path / "m" / "outer.jsonl"
    file.write_text("\n".join(map(json.dumps, rows_of_policies(rate))))
    text = report.block("m outer", tmp_path)
    assert "| `diloco()` | 1.2500 | 2.5000 | 1.00 | 40.0 | " in text and "2.5000 | 40.00 | 1.0 |" in text
    assert ("1.010" in text and "links: 200mbit." in text) == bool(rate)
    assert report.block("m outer 9gbit", tmp_path) == "\n"
    plot.main(["outer", str(file), "--output", str(tmp_path / "outer"), "--uncommitted"])
    drawn = (tmp_path / "outer.svg").read_text()
    assert all(part in drawn for part in ("diloco", "MiB that a replica has sent", "seconds", "4 replicas of 1"))


def test_results_in_fewer_bits_are_cases_of_their_own():
    line = {**json.loads(COMPARE.read_text().splitlines()[-1]), "strategy": "rtp", "rtp_ratio": 1.0}
    narrow = {**line, "travel": "int8", "reduce_dtype": "bfloat16", "step_ms": 1.0}
    same = {**line, "reduce_dtype": "float32", "travel": None, "gradient_route": "auto"}
    assert [len(reports.last_cases(lines, [])) for lines in ([line, narrow], [line, same])] == [2, 1]
    told = [reports.COMPARE["travels"](row) for row in (line, narrow, same)]
    assert told == [None, "weights int8, gradients bfloat16", None]


def test_runs_under_sanitizers_stand_until_all_their_tests_have_run_again(tmp_path):
    def row(date, tests, kind="thread", failed=0):
        names = " ".join(f"python_tests/engine/test_{name}.py" for name in tests)
        counts = {"tests": 1, "skipped": 0, "failed": failed, "reports": 0, "seconds": 60.0}
        more = {"commit": "abc", "torch": "2", "date": f"2026-01-0{date}", "command": f"python sanitize.py {names}"}
        return {"sanitizers": kind, **counts, **more}

    def table(*rows):
        (tmp_path / "sanitize.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
        text = faults.TABLES["sanitize"].block(tmp_path)
        return re.findall(r"^\| (thread|address) \| ([^|]*) \|", text, re.MULTILINE)

    first, other = row(1, ["a", "b"], failed=1), row(2, ["a", "b"], "address")
    assert table(first, other, row(3, ["c"])) == [("address", "a, b"), ("thread", "a, b"), ("thread", "c")]
    assert table(first, row(3, ["b"])) == [("thread", "a, b"), ("thread", "b")]
    assert table(first, row(3, ["a", "b", "c"])) == [("thread", "a, b, c")]
    assert table(first, row(3, [])) == [("thread", "all")]
    assert table(row(1, []), row(3, ["a"])) == [("thread", "all"), ("thread", "a")]


def test_recorded_commands_name_scripts_where_they_are_today(tmp_path):
    for name in ("one.py", "deep/two.py", "deep/twice.py", "flat/twice.py", "shared/one.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = {
        "python benchmarks/one.py --output benchmarks/results/m/two.jsonl": None,
        "python benchmarks/two.py --ranks 2": "python benchmarks/deep/two.py --ranks 2",
        "torchrun --nproc-per-node 2 benchmarks/old/place/two.py": (
            "torchrun --nproc-per-node 2 benchmarks/deep/two.py"
        ),
        "python two.py tests/two.py --with=two.py": "python benchmarks/deep/two.py tests/two.py --with=two.py",
        "python deep/two.py": "python benchmarks/deep/two.py",
        "python ./benchmarks/two.py": "python benchmarks/deep/two.py",
        "python ../benchmarks/deep/two.py": "python benchmarks/deep/two.py",
        "python flat/two.py ../flat/two.py": None,
        "python benchmarks/twice.py": None,
        "python benchmarks/gone.py -- train.py": None,
    }
    assert {command: today(command, tmp_path) for command in found} == {
        command: told or command for command, told in found.items()
    }


def test_every_recorded_script_exists_today():
    lines = [json.loads(line) for file in RESULTS.glob("*/*.jsonl") for line in file.read_text().splitlines()]
    commands = {line["command"] for line in lines}
    moved = {command for command in commands if today(command) != command}
    assert moved and len(commands) > 40
    scripts = {word for command in commands for word in today(command).split() if word.endswith(".py")}
    scripts = {script for script in scripts if not script.startswith("python_tests/")}
    gone = {Path(script).name for script in scripts if not (ROOT / script).exists()}
    assert gone == {Path(script).name for script in GONE}
    before = {command.split()[1] for command in moved}
    assert [script for script in before if (ROOT / script).exists()] == [], "control: they are not where they were"


def test_scripts_of_benchmarks_have_names_of_their_own():
    """Else a recorded command would not say which one it was."""
    scripts = [
        file
        for file in (ROOT / "benchmarks").rglob("*.py")
        if "shared" not in file.parts and file.name != "__init__.py"
    ]
    names = [file.name for file in scripts]
    assert len(names) > 30 and sorted(names) == sorted(set(names))


def test_runs_of_a_script_that_has_moved_are_runs_of_the_same_command(tmp_path):
    row = {"programs": 1, "actions": 1, "failed": 0, "steps": 0, "added": [], "seconds": 60.0}
    row |= {"date": "2026-01-01", "commit": "abc", "torch": "2"}
    commands = ("benchmarks/soak.py --seed 7", "benchmarks/reliability/soak.py --seed 7", "benchmarks/soak.py --seed 8")
    rows = [{**row, "actions": 100 + at, "command": f"python {command}"} for at, command in enumerate(commands)]
    (tmp_path / "soak.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    text = faults.TABLES["soak"].block(tmp_path)
    assert re.findall(r"^\| 1 \| (\d+)", text, re.MULTILINE) == ["101", "102"]
    assert re.findall("^    (.*)", text, re.MULTILINE) == [
        f"python benchmarks/reliability/soak.py --seed {n}" for n in (7, 8)
    ]
