"""examples/replicas.py: a loss that falls, the same on every mesh of as many ranks."""

import importlib.util
from pathlib import Path

from harness import run_ranks

FILE = Path(__file__).resolve().parents[2] / "examples" / "replicas.py"


def _run(rank, ranks):
    spec = importlib.util.spec_from_file_location("replicas_example", FILE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return [example.main(["--ring", str(ring), "--steps", "12"]) for ring in (2, 4)]


def test_replicas():
    results = run_ranks(_run, 4)
    assert all(result == results[0] for result in results)
    replicas, one_ring = results[0]
    assert replicas[-1] < 0.5 * replicas[0], replicas
    assert max(abs(a - b) for a, b in zip(replicas, one_ring, strict=True)) < 1e-4 * replicas[0]
