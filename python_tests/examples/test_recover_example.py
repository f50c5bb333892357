"""examples/recover.py: a rank dies under torchrun, another one while it saves, and more ranks go on; the loss is that
of an undisturbed run in one process."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from torch import nn

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/recover.py"
STEPS, MORE = 24, 30
SAVES = ["--save-every", "4"]


def load():
    spec = importlib.util.spec_from_file_location("recover_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def undisturbed(steps: int) -> list[float]:
    """The losses of the plain model, which has whole batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 4)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    losses = []
    for step in range(steps):
        x, target = load().batch(step, 0, 1)
        loss = nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _dies_in_a_save(rank, ranks, folder):
    """The life after the first death, without torchrun. The other rank gets an error, which ends it."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    with pytest.raises(Exception, match=r"(?i)connection|peer|rank 1"):
        load().main(["--folder", folder, "--steps", str(MORE), *SAVES, "--die-every", "0", "--deaths", "2"])


def _goes_on(rank, ranks, folder):
    arguments = ["--folder", folder, "--steps", str(MORE)]
    return load().main(arguments), load().main(arguments)


def test_ranks_that_die_change_no_loss(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RTP_RECORD_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", "--monitor-interval", "0.1", str(EXAMPLE), "--folder", str(tmp_path)]
    command += ["--steps", str(STEPS), *SAVES, "--step-time", "0.05", "--die-every", "0.5", "--deaths", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    rough = json.loads(done.stdout.strip().splitlines()[-1])
    expected = undisturbed(MORE)
    assert rough["lives"] == 2 and rough["first"] in range(0, STEPS, 4), rough
    assert abs(rough["loss"] - expected[STEPS - 1]) < 1e-6 < abs(rough["loss"] - expected[STEPS - 2])
    assert 0 < rough["effective_time"] < 0.9, "control: who dies loses time"
    lives = [json.loads(line)["life"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert set(lives) == {0, 1} and len(lives) >= STEPS, "control: both lives made steps"
    run_ranks(_dies_in_a_save, 2, str(tmp_path), lost={1})
    assert (tmp_path / f"unfinished_{STEPS + 4}").exists(), "control: rank 1 has died in this save"
    for told, again in run_ranks(_goes_on, 3, str(tmp_path)):
        assert (told["ranks"], told["first"]) == (3, STEPS) and abs(told["loss"] - expected[-1]) < 1e-6, told
        assert (again["first"], again["loss"]) == (MORE, None), "no step was left to do"
