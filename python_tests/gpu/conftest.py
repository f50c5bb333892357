"""Everything in this folder needs a GPU: tests are skipped, with the reason, where there is none."""

from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if FOLDER in Path(item.path).parents:
            item.add_marker(pytest.mark.skip(reason="torch.cuda.is_available() is False: no GPU, or no driver"))


@pytest.fixture(autouse=True)
def full_float32(monkeypatch):
    """TF32 off, as the tolerances assume."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
