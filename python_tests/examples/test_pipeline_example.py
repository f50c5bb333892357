"""examples/pipeline.py, on ranks of the harness."""

import importlib.util
import math
from pathlib import Path

from grids import needs_split_backwards
from harness import run_ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/pipeline.py"


def _trains(rank, ranks):
    spec = importlib.util.spec_from_file_location("pipeline_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train(steps=15), module.VOCABULARY


@needs_split_backwards
def test_it_learns():
    found = run_ranks(_trains, 4)
    assert [len(losses) for losses, _ in found] == [0, 0, 15, 15]
    for losses, vocabulary in found[2:]:
        assert abs(losses[0] - math.log(vocabulary)) < 1.0, f"expected chance, got {losses[0]}"
        assert losses[-1] < 0.5 * losses[0], f"expected less than half of {losses[0]}, got {losses[-1]}"
