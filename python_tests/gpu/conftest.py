"""Everything in this folder needs a GPU: tests are skipped, with the reason, where there is none.

With FAKE_GPU=1 the tests run on CPUs (`simulators/fake_gpu`), but for those marked `real_gpu(reason)`. Tests marked
`alone` measure time, or take most of a GPU's memory: run no other tests beside them.
"""

import os
from pathlib import Path

import pytest
import torch
from support import end_if_broken, record

FOLDER = Path(__file__).resolve().parent
MARKERS = {
    "alone": "wants the GPU for itself: it measures time, or takes most of the memory",
    "real_gpu(reason)": "means nothing on the fake GPU",
}


def pytest_configure(config):
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def pytest_collection_modifyitems(items):
    found, fake = torch.cuda.is_available(), os.environ.get("FAKE_GPU") == "1"
    for item in items:
        if FOLDER not in Path(item.path).parents:
            continue
        if not found:
            item.add_marker(pytest.mark.skip(reason="torch.cuda.is_available() is False: no GPU, or no driver"))
        elif fake and (real := item.get_closest_marker("real_gpu")) is not None:
            item.add_marker(pytest.mark.skip(reason=f"needs a real GPU: {real.args[0]}"))


def pytest_runtest_logreport(report):
    """Records a failure at once: a run that is stopped reports nothing at its end."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:  # a worker's reports reach the main process
        record(failed=report.nodeid, text=str(report.longrepr)[-6000:])


@pytest.fixture(autouse=True)
def full_float32():
    """TF32 off, as the tolerances assume: of cuBLAS, and of cuDNN, where torch allows it by default.

    Not by monkeypatch, which would delete the attribute afterwards: torch.backends has no such entry to restore.
    """
    places = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [place.allow_tf32 for place in places]
    for place in places:
        place.allow_tf32 = False
    yield
    for place, value in zip(places, before, strict=True):
        place.allow_tf32 = value


@pytest.fixture(autouse=True)
def usable_gpu():
    """Waits for a test's work, so that an error that CUDA reports later is an error of this test."""
    yield
    if torch.cuda.is_initialized():
        end_if_broken()
