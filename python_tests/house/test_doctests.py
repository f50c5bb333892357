"""The examples in docstrings print what they say. They run on a process group of one rank."""

import doctest
import importlib
from pathlib import Path

import torch
from harness import run_ranks
from torch import nn

import rtp_ext

ROOT = Path(__file__).resolve().parents[2]
FILES = [file for file in sorted((ROOT / "rtp_ext").rglob("*.py")) if ">>> " in file.read_text()]
NAMES = {"rtp_ext": rtp_ext, "torch": torch, "nn": nn}
SHOWN = {"fully_rotate", "explain", "rotate_for_inference", "stream_weights", "schedules", "timeline", "search"}


def _fail(rank, ranks):
    wrong = doctest.DocTestParser().get_doctest(">>> rtp_ext.__name__\n'rtp'\n", NAMES, "control", None, 0)
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(wrong, out=lambda text: None)
    return runner.summarize(verbose=False).failed


def _run(rank, ranks, names):
    """Returns the objects with examples."""
    found, problems = [], []
    for name in names:
        module = importlib.import_module(name)
        for test in doctest.DocTestFinder(exclude_empty=True).find(module, name, extraglobs=NAMES):
            if test.examples:
                found.append(test.name.rsplit(".", 1)[-1])
                doctest.DocTestRunner(verbose=False).run(test, out=problems.append)
    assert not problems, "".join(problems)
    return found


def test_examples_of_docstrings():
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in FILES]
    (found,) = run_ranks(_run, 1, names)
    assert set(found) >= SHOWN
    assert run_ranks(_fail, 1) == [1], "control"
