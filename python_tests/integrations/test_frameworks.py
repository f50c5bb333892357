"""Training runs inside of other people's frameworks, as `make frameworks` records them, but shorter."""

import pytest
from compatibility.framework_runs import as_torchrun
from compatibility.frameworks import RUNS, WITH_REPLICAS, missing
from harness import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from trainer_cases import with_frameworks

import rtp_ext
from rtp_ext.outer import ZeroOuter

CLOSE = 1e-4
HEAVY = ("trl", "grpo", "dpo", "lightning", "torchtitan")  # the others have tests of their own


def _check_curves(run, name):
    assert run.worst("losses", "reference_losses") < CLOSE, f"{run.losses}, expected {run.reference_losses}"
    assert run.worst("norms", "reference_norms") < CLOSE, f"{run.norms}, expected {run.reference_norms}"
    falls = run.losses[0] - run.losses[-1]
    if name in ("grpo", "dpo"):  # whose losses compare batches, and do not show the progress of training
        falls = max(run.losses) - min(run.losses)
    assert len(run.losses) == 6 and falls > 100 * CLOSE, "control: losses change"


def _run(rank, ranks, name, folder, steps):
    as_torchrun(rank, ranks)
    return RUNS[name](folder, steps)


@pytest.mark.parametrize("name", HEAVY)
def test_trains_like_it_does_without_rotation(name, tmp_path):
    if missing([name]):
        pytest.skip(f"{name} is not installed: make frameworks")
    for run in run_ranks(_run, 2, name, str(tmp_path), 6, timeout=400.0):
        _check_curves(run, name)
        assert 0.49 < run.kept < 0.55 and run.reloaded == 0.0, run
        assert run.resumed == 0.0, run


def _replicas(rank, ranks, name, folder, zero):
    as_torchrun(rank, ranks)
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicas", "ring"))
    rotate = {"mesh": mesh, "dims": rtp_ext.RotationDims(ring="ring", replicate="replicas")}
    return RUNS[name](folder, 6, rotate=lambda: {**rotate, "outer": ZeroOuter() if zero else None})


@with_frameworks
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("name", WITH_REPLICAS)
def test_two_rings_of_two(name, zero, tmp_path):
    for run in run_ranks(_replicas, 4, name, str(tmp_path), zero, timeout=500.0):
        _check_curves(run, name)
        assert run.resumed == 0.0 and run.reloaded == 0.0, run
        assert 0.24 < run.kept < 0.3 if zero else 0.49 < run.kept < 0.55, run
