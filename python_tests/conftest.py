"""One thread per process in everything the tests start; the machine may have few cores. Benchmarks can be imported."""

import gc
import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))  # last: its models.py is not the tests'

gc.disable()  # until all tests are imported: that leaves no garbage, and to look for it takes a second or more


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture
def sim():
    import simulated_cuda  # here: its place on the import path is known when tests run

    with simulated_cuda.simulation() as module:
        yield module
