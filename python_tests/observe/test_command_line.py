"""What all commands share: no torch for help, errors in words, lines that fit, progress, completion, values as JSON."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hf_models import make

import rtp_ext
from rtp_ext import command_line, host
from rtp_ext.__main__ import main
from rtp_ext.command_line import WIDTH, did_you_mean, in_words, progress
from rtp_ext.observe import doctor
from rtp_ext.planner.display import plot
from rtp_ext.planner.plans import when

COMMANDS = ("schedule", "plan", "explain", "doctor", "record", "bench", "completion")


def test_help_needs_no_torch():
    """Nor numpy, whose import takes longer than all others: help is there at once."""
    code = f"""
import contextlib, io, sys
from rtp_ext.__main__ import main
for arguments in (["--help"], *([command, "--help"] for command in {COMMANDS}), ["--version"], ["plan", "--zer0"]):
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.redirect_stderr(shown):
        try:
            main(arguments)
        except SystemExit as end:
            assert end.code == (2 if "--zer0" in arguments else 0), arguments
    assert shown.getvalue().startswith(("usage: rtp-ext", "rtp-ext ")), shown.getvalue()
with contextlib.redirect_stderr(io.StringIO()) as said:
    try:
        main(["bench", "--device", "cuda"]) if {not host.gpu_driver()} else None
    except SystemExit as end:
        assert end.code == 2 and "found no driver" in said.getvalue()
print(*sorted({{"torch", "numpy", "matplotlib"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_the_installed_command_is_this_one():
    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert '[project.scripts]\nrtp-ext = "rtp_ext.__main__:main"\n' in project
    assert f'\nversion = "{rtp_ext.__version__}"\n' in project


def test_a_reader_that_ends():
    """As in `rtp-ext schedule | head`: no traceback, and the status of a process that SIGPIPE has ended."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "rtp_ext", "schedule", "--ranks", "2"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_near_words():
    known = ("h100-80gb", "a100-80gb", "--fused-loss")
    assert did_you_mean("H100", known) == "; did you mean h100-80gb?"
    assert did_you_mean("--fused_loss", known) == "; did you mean --fused-loss?"
    assert did_you_mean("abacus", known) == ""


def test_errors_in_words(tmp_path):
    for fail, said in (
        (lambda: (tmp_path / "none").read_text(), f"{tmp_path / 'none'}: no such file or directory"),
        (lambda: tmp_path.read_text(), f"{tmp_path}: is a directory"),
        (lambda: json.loads("a,b"), "expected JSON, got other text (Expecting value, line 1)"),
        (lambda: b"\xff".decode(), "expected text, got binary data"),
        (lambda: int("one\n two"), r"invalid literal for int() with base 10: 'one\n two'"),
    ):
        with pytest.raises((OSError, ValueError)) as error:
            fail()
        assert in_words(error.value) == said


def test_progress_on_a_terminal_only(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(command_line, "PATIENCE", 0.02)
    for stream, shown in ((Terminal(), "\rsearching: 0 s\r\x1b[K"), (io.StringIO(), "")):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress("searching"):
            time.sleep(0.2)
        assert stream.getvalue() == shown
    monkeypatch.setattr(command_line, "PATIENCE", 60.0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(ValueError, match="x"), progress("short"):
        raise ValueError("x")
    assert sys.stderr.getvalue() == ""


def test_completion(capsys, tmp_path):
    script = tmp_path / "script"
    assert main(["completion", "zsh"]) == 0
    script.write_text(capsys.readouterr().out)
    assert "\nautoload -U +X bashcompinit && bashcompinit\n" in script.read_text()
    if zsh := shutil.which("zsh"):  # in a shell that has not loaded completion
        command = [zsh, "-f", "-c", f'source {script} && print -r -- "$_comps[rtp-ext]"']
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, env={"ZDOTDIR": str(tmp_path)})
        assert (done.stderr, done.stdout) == ("", "_bash_complete -o default -F _rtp_ext\n")
    assert main(["completion", "bash"]) == 0
    asked = {
        "rtp-ext pl": "plan",
        "rtp-ext plan --mode": "--model",
        "rtp-ext plan --model llama-3-8": "llama-3-8b",
        "rtp-ext plan --gpu h200": "h200-141gb",
        "rtp-ext schedule --ranks 2 --ro": "--route",
        "rtp-ext schedule --route two": "two-level",
        "rtp-ext completion z": "zsh",
        "rtp-ext plan --cluster x": "",  # any file
    }
    lines = [capsys.readouterr().out]
    for typed in asked:
        words = typed.split()
        lines.append(f'COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}; _rtp_ext; echo "${{COMPREPLY[*]}}"')
    script.write_text("\n".join(lines))
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, timeout=30)
    assert (done.stderr, done.stdout.splitlines()) == ("", [*asked.values()])


def test_tables_fit_a_terminal(capsys):
    with torch.device("meta"):
        model = make("mixtral")
    long = torch.nn.ModuleDict({"a_long_name_of_the_module_around": model})
    for shown in (model, long):
        text = str(rtp_ext.explain(shown, ranks=4, travel="int8"))
        assert max(map(len, text.splitlines())) <= WIDTH, text
        assert "self_attn.q_proj.weight (" in text and "in int8" in text and "by collectives" in text
    for command in (["--ranks", "8"], ["--ranks", "5", "--op", "mlp", "--pass", "backward"]):
        assert main(["schedule", *command]) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= WIDTH
        assert all(text.count(f"rank {rank}") == 1 for rank in range(int(command[1])))
    assert max(map(len, doctor.report().splitlines())) <= WIDTH + 60  # paths of files stay whole


def test_torches_that_no_test_has_seen_are_named(monkeypatch):
    root = Path(__file__).resolve().parents[2]
    assert f"(tested: {', '.join(doctor.TESTED)})" in (root / "README.md").read_text()
    rows = re.findall(r"^\| (2\.[\d., ]+) \|", (root / "docs" / "install.md").read_text(), re.MULTILINE)
    assert sorted(", ".join(rows).split(", ")) == sorted(doctor.TESTED)
    for release, words in (("2.14.1+cu130", "2.14.1+cu130, "), ("2.14.7+cpu", "; untested")):
        monkeypatch.setattr(torch, "__version__", release)
        told = doctor._versions()["torch"]
        assert words in told and ("untested" in told) == (release.partition("+")[0] not in doctor.TESTED)


def test_values_for_other_programs(capsys, monkeypatch):
    assert main(["schedule", "--ranks", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["rank"] for each in told["ranks"]] == [0, 1, 2] and told["ranks"][1]["weight_slots"] == 2
    assert told["ranks"][0]["steps"][0] == {
        "label": "W0 -> 1, W2 <- 2",
        "lane": "weight",
        "reads": ["weight home"],
        "writes": ["weight slot 0"],
    }
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["versions"]["rtp_ext"] and told["transports"]["emulated"]["works"] is True
    cells = [when.compare("gpt-3-small", 8, link, 2048) for link in when.LINKS[:1]]
    monkeypatch.setattr(when, "grid", lambda *models, **base: cells)
    assert main(["plan", "--when", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["winner"] == cells[0].winner and told["plans"]["rtp"]["step_seconds"] > 0


def test_a_plot_without_matplotlib_says_what_to_install(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    plan = ["plan", "--model", "gpt-3-small", "--gpus", "2", "--rtp", "2", "--plot", str(tmp_path / "x.png")]
    assert main(plan) == 1
    assert "pip install 'rtp-ext[plot]'" in capsys.readouterr().err
    with pytest.raises(ImportError, match="plot"):
        plot.plot_when(str(tmp_path / "x.png"), [])
