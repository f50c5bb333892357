"""Reinforcement on completions that end at different lengths, where TRL is installed."""

import pytest
from compatibility.frameworks import missing
from harness import run_ranks
from test_examples import _call


def _grpo(rank, ranks, folder):
    return _call(rank, ranks, "grpo", [["--steps", "20", "--output", folder]])[1]


def test_grpo(tmp_path):
    if missing(["trl"]):
        pytest.skip("trl is not installed: make frameworks")
    log, other = run_ranks(_grpo, 2, str(tmp_path), timeout=240.0)
    assert [entry["reward"] for entry in log] == [entry["reward"] for entry in other], "a mean over all ranks"
    assert log[0]["completions/min_length"] + 5 < log[0]["completions/max_length"], "control: they end at random"
    assert log[-1]["reward"] > log[0]["reward"] + 0.3, f"{log[0]['reward']}, then {log[-1]['reward']}"
