"""One thread per process in everything the tests start; the machine may have few cores. Benchmarks can be imported."""

import contextlib
import gc
import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor compiles scalar kernels, on the thread that asks. Otherwise it first compiles a program for each instruction
# set, and starts a Python that loads torch to run it.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

# A thread of Gloo that wakes up while its rank holds the lock of a socket polls until that rank continues: this takes a
# sixth of the time of sampled tests (from nothing to a quarter), on two cores. Threads of batch jobs preempt no other
# thread when they wake up; all processes of the tests inherit the policy.
with contextlib.suppress(OSError):  # sandboxes whose kernel supports only the default policy
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

gc.disable()  # until all tests are imported: that leaves no garbage, and collections take a second or more


# The longest tests, a quarter of a minute and more for some, come first; idle workers take from the remaining tests.
LONG = (
    *("outer", "meshes", "families", "hosts", "convert/test_behaviour", "convert/torch_compile"),
    *("engine/test_memory", "examples/test_recover", "house/test_readme", "engine/pass_graphs/test_graph_combinations"),
    *("kernels/test_code_kernels", "measure/test_compare.py", "planner/test_planner_frozen"),
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Each worker of pytest-xdist gets an equal run of tests to begin with, and some of the long ones at its start."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    folder = Path(__file__).resolve().parent
    long, others = [], []
    for item in items:
        where = os.path.relpath(item.path, folder)
        (long if where.startswith(LONG) else others).append(item)
    size = -(-len(others) // workers)
    runs = ([*long[n::workers], *others[n * size : (n + 1) * size]] for n in range(workers))
    items[:] = [item for run in runs for item in run]


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture
def sim():
    import simulated_cuda  # here: its place on the import path is known when tests run

    simulated_cuda.skip_without_headers()
    with simulated_cuda.simulation() as module:
        yield module
