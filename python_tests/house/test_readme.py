"""What README prints runs as printed, and it is short. What it names is checked in test_docs.py."""

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
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    script = tmp_path / "quickstart.py"
    script.write_text(code)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    # 256*64 + 2*64 + 64*256 + 256 + 256*256 + 256 parameters, half of them on either rank
    whole = 256 * 64 + 2 * 64 + 64 * 256 + 256 + 256 * 256 + 256
    lines = re.findall(r"loss (\S+), (\d+) parameters on this rank", result.stdout)
    assert [int(count) for _, count in lines] == [whole // 2, whole // 2], result.stdout
    assert all(0 < float(loss) < 6 for loss, _ in lines), result.stdout
