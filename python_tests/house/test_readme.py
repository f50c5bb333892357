"""What README prints runs as printed, and it is short. What it names is checked in test_docs.py."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_readme_is_short():
    assert len(README.splitlines()) < 150


def test_quickstart(tmp_path):
    """It trains: its loss falls clearly below that of a guess, which it does not where the optimizer never steps."""
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    step = "    optimizer.step()\n"
    assert code.count(step) == 1
    variants = {"trained": code, "untrained": code.replace(step, "")}
    runs = {name: _start(tmp_path / f"{name}.py", text) for name, text in variants.items()}
    losses = {}
    # 256*64 + 2*64 + 64*256 + 256 + 256*256 + 256 parameters, half of them on either rank
    whole = 256 * 64 + 2 * 64 + 64 * 256 + 256 + 256 * 256 + 256
    for name, run in runs.items():
        printed, errors = run.communicate(timeout=180)
        assert run.returncode == 0, printed + errors
        lines = re.findall(r"loss (\S+), (\d+) parameters on this rank", printed)
        assert [int(count) for _, count in lines] == [whole // 2, whole // 2], printed
        losses[name] = [float(loss) for loss, _ in lines]
    guess = math.log(256)
    assert all(0 < loss < 0.9 * guess for loss in losses["trained"]), losses
    assert all(0.95 * guess < loss < 1.2 * guess for loss in losses["untrained"]), f"control: {losses}"


def _start(script, code):
    script.write_text(code)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
