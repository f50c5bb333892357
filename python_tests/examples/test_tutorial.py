"""docs/tutorial.md: its programs run as printed, and print what it shows."""

import contextlib
import io
import os
import re
import shlex
import sys
from pathlib import Path

from harness import run_ranks

from rtp_ext.__main__ import main

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tutorial.md").read_text()
TASK, TRAIN, EXPLAIN, SAVE, EVALUATE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(DIFF,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
(COMMAND,) = re.findall(r"```console\n\$ python -m rtp_ext (.*?)\n```", PAGE, re.DOTALL)
SHOWN = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
NUMBER = re.compile(r"\d+\.\d+|\d+")
# Ranks of tests have a process group, which outlives the program.
MEETING = "dist.init_process_group()\n", "dist.destroy_process_group()\n"


def rotated() -> str:
    """The program after the change of the page, with the checkpoint."""
    code, lines = TRAIN, DIFF.splitlines()
    for before, after in zip(lines[::2], lines[1::2], strict=True):
        assert (before[0], after[0]) == ("-", "+") and code.count(before[1:]) == 1, before
        code = code.replace(before[1:], after[1:])
    return code.replace(MEETING[1], f"{SAVE}{MEETING[1]}")


def printed(code: str) -> str:
    for line in MEETING:
        code = code.replace(line, "")
    with contextlib.redirect_stdout(io.StringIO()) as text:
        exec(compile(code, "tutorial", "exec"), {})
    return text.getvalue()


def _run(rank, ranks, folder):
    os.chdir(folder)
    sys.path.insert(0, folder)
    texts = [printed(TRAIN), printed(rotated())]
    return [*texts, printed(EXPLAIN), printed(EVALUATE)]


def differs(shown: str, got: str) -> bool:
    """Whether two texts differ in words, whole numbers, or in the last digits of other numbers by more than 2."""
    if NUMBER.sub("#", shown) != NUMBER.sub("#", got):
        return True
    for one, other in zip(NUMBER.findall(shown), NUMBER.findall(got), strict=True):
        digits = len(one.partition(".")[2])
        if abs(float(one) - float(other)) > (2.5 * 10.0**-digits if digits else 0):
            return True
    return False


def test_the_tutorial_prints_what_it_shows(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    texts = run_ranks(_run, 2, str(tmp_path))[0]
    with contextlib.redirect_stdout(io.StringIO()) as plan:
        assert main(shlex.split(COMMAND)) == 0
    texts.append(plan.getvalue())
    assert len(SHOWN) == len(texts) == 5
    for shown, got in zip(SHOWN, texts, strict=True):
        assert not differs(shown, got), f"shown:\n{shown}\nprinted:\n{got}"
    losses = [re.findall(r"loss (\S+)", text) for text in texts[:2]]
    assert len(losses[0]) == 3 and losses[0] == losses[1], "the ring trains as DDP does"
    assert (
        differs(SHOWN[0], SHOWN[1]) and differs("loss 1.234", "loss 1.237") and not differs("loss 1.234", "loss 1.235")
    )
