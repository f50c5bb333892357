"""Training runs inside of other people's frameworks, as `make frameworks` records them, but shorter."""

import pytest
from harness import run_ranks
from shared.frameworks import RUNS, as_torchrun, missing

CLOSE = 1e-4
HEAVY = ("trl", "lightning", "torchtitan")  # the others have tests of their own


def _run(rank, ranks, name, folder, steps):
    as_torchrun(rank, ranks)
    return RUNS[name](folder, steps)


@pytest.mark.parametrize("name", HEAVY)
def test_trains_like_it_does_without_rotation(name, tmp_path):
    if missing([name]):
        pytest.skip(f"{name} is not installed: make frameworks")
    for run in run_ranks(_run, 2, name, str(tmp_path), 6, timeout=400.0):
        assert run.worst("losses", "reference_losses") < CLOSE, f"{run.losses}, expected {run.reference_losses}"
        assert run.worst("norms", "reference_norms") < CLOSE, f"{run.norms}, expected {run.reference_norms}"
        assert len(run.losses) == 6 and run.losses[-1] < run.losses[0] - 100 * CLOSE, "control: it learns"
        assert 0.49 < run.kept < 0.55 and run.reloaded == 0.0, run
        assert run.resumed == (None if name == "lightning" else 0.0), run
