"""The programs in the README run as printed, and it is short. test_docs.py checks its names."""

import contextlib
import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path

from harness import run_ranks

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_readme_is_short():
    assert len(README.splitlines()) < 150


def test_quickstart(tmp_path):
    """It trains: its loss falls clearly below that of a guess, which it does not where the optimizer never steps."""
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    script = tmp_path / "quickstart.py"
    script.write_text(code)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    trained, untrained = _losses(done.stdout), _losses("".join(run_ranks(_never_steps, 2, code)))
    guess = math.log(256)
    assert all(0 < loss < 0.9 * guess for loss in trained), trained
    assert all(0.95 * guess < loss < 1.2 * guess for loss in untrained), f"control: {untrained}"


def _losses(printed: str) -> list[float]:
    lines = re.findall(r"loss (\S+), (\d+) parameters on this rank", printed)
    # 256*64 + 2*64 + 64*256 + 256 + 256*256 + 256 parameters, half of them on either rank
    whole = 256 * 64 + 2 * 64 + 64 * 256 + 256 + 256 * 256 + 256
    assert [int(count) for _, count in lines] == [whole // 2, whole // 2], printed
    return [float(loss) for loss, _ in lines]


def _never_steps(rank, ranks, code):
    """Returns the output of the quickstart without its optimizer's steps, on ranks with a process group."""
    meeting = "torch.distributed.init_process_group()\n", "torch.distributed.destroy_process_group()\n"
    for line in ("    optimizer.step()\n", *meeting):
        assert code.count(line) == 1, line
        code = code.replace(line, "")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    return printed.getvalue()
