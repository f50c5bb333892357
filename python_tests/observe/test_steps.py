"""The log of steps, and the ranges that torch.profiler shows."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from harness import on_ranks
from reference import random
from torch.profiler import ProfilerActivity, profile

import rtp_ext
from rtp_ext.nn import RotatedLinear
from rtp_ext.observe.steps import StepLog


@on_ranks([2, 3])
def test_log_and_ranges(rank, ranks, cases, tmp_path):
    folder = str(tmp_path)
    file = Path(folder) / f"{rank}.jsonl"
    with rtp_ext.Ring(timeout=60.0) as ring:
        layer = RotatedLinear(6, 7, ring=ring, dtype=torch.float64)
        x = random(4, 6, dtype=torch.float64, seed=rank).requires_grad_()
        with StepLog(ring, file, exposed_every=2, first=5) as log:
            for number in range(3):
                with log.step() as line:
                    layer(x).sum().backward()
                    line["loss"] = float(number)
            with pytest.raises(KeyError), log.step():
                raise KeyError("a step that fails")
        with cases.case("lines"):
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            assert [line["step"] for line in lines] == [5, 6, 7] and [line["loss"] for line in lines] == [0.0, 1.0, 2.0]
            for line in lines:
                assert line["hops"] == 3 * (ranks - 1), line
                assert line["weight_bytes"] > 0 and line["gradient_bytes"] > 0 and line["seconds"] > 0, line
                assert line["slot_bytes"] > 0 and line["peak_bytes"] > 1 << 20, line
            exposed = [line["exposed_seconds"] for line in lines]
            assert exposed[0] is None and exposed[1] > 0 and exposed[2] is None, exposed
            assert exposed[1] <= lines[1]["seconds"], lines[1]
        with cases.case("ranges of torch.profiler"):
            layer(x)
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                layer(x).sum().backward()
            names = {event.name for event in profiled.events()}
            for expected in ("RotatedLinear forward", "RotatedLinear backward"):
                assert expected in names, sorted(names)
                steps = [name for name in names if name.startswith(f"{expected}: ")]
                assert any(": wait" in name for name in steps), steps
                assert any(" hop " in name or "->" in name or "send" in name for name in steps), steps
                assert len(steps) >= 2 * ranks - 1, steps
    with cases.case("refused"):
        with pytest.raises(ValueError, match="exposed_every"):
            StepLog(ring, exposed_every=-1)
        if importlib.util.find_spec("tensorboard") is None:
            with pytest.raises(ValueError, match="pip install tensorboard"):
                StepLog(ring, tensorboard=folder)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs the package tensorboard")
def test_tensorboard(tmp_path):
    ring = rtp_ext.Ring.emulated(2)
    with StepLog(ring, tensorboard=tmp_path) as log, log.step() as line:
        line["loss"] = 1.0
    assert list(tmp_path.iterdir())
