"""A CUDA runtime and an NCCL in host memory, with which the sources of the transports run without a GPU.

`load()` returns the module, after compiling it if it is missing; ranks are threads, see `run_threads`. The simulation
covers the order of streams and events, captures and graphs, non-blocking communicators that return in-progress states,
the rendezvous of sends and receives, the order of one communicator's work across streams, signals counted by source,
and windows that all ranks register together. It does not cover speed, several GPUs, and undocumented behaviour of
NVIDIA's libraries.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import compiled

from simulated_cuda.mutants import write_ce_mutants, write_copied_mutants

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]

NAME = "rtp_simulated_cuda"
SOURCES = ["graphs", "modules", "nccl/nccl", "nccl/windows", "runtime", "transports"]


def include_folders() -> list[Path] | None:
    """Returns the folders of CUDA's and NCCL's headers; None if a header is missing."""
    site = [Path(folder) for folder in sys.path if (Path(folder) / "nvidia").is_dir()]
    pip = [include for folder in site for include in sorted((folder / "nvidia").glob("*/include"))]
    toolkit = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    folders = [folder for folder in toolkit + pip if folder.is_dir()]
    for header in ("cuda.h", "cuda_runtime_api.h", "nccl.h", "crt/host_defines.h"):
        if not any((folder / header).exists() for folder in folders):
            return None
    return folders


def build() -> Path:
    """Returns the path of the module, after compiling it if it is missing."""
    cuda = include_folders()
    if cuda is None:
        raise RuntimeError("the headers of CUDA and NCCL are not installed")
    generated = ROOT / "build" / NAME / "include"
    generated.mkdir(parents=True, exist_ok=True)
    write_ce_mutants(ROOT / "csrc" / "transport" / "ce" / "ce.cpp", generated)
    write_copied_mutants(ROOT / "csrc" / "engine" / "shards" / "copied", generated)
    flags = ["-DRTP_WITH_CUDA", *(f"-I{folder}" for folder in cuda)]
    folders = [generated, HERE / "include", ROOT / "csrc", HERE]
    versions = [folder / header for folder in cuda for header in ("cuda.h", "nccl.h") if (folder / header).exists()]
    return compiled.build_module(NAME, [HERE / f"{source}.cpp" for source in SOURCES], flags, folders, versions)


@functools.cache
def load() -> Any:
    """Returns the simulated module. The extension's Executor accepts its transports."""
    return compiled.load_module(NAME, build())


@contextlib.contextmanager
def simulation() -> Iterator[Any]:
    """Yields the reset module; checks at the end that all streams have ended and no call was forbidden."""
    module = load()
    module.reset(1)
    yield module
    module.controls.released = True
    assert settled(module), "streams did not end"
    assert module.mistakes() == [], module.mistakes()


def skip_without_headers() -> None:
    """Skips the calling test, or the calling module at import, if the headers are missing."""
    import pytest  # benchmarks load the simulation without pytest

    if include_folders() is None:
        pytest.skip("the headers of CUDA and NCCL are not installed", allow_module_level=True)


@contextlib.contextmanager
def one_of_ranks(module: Any, rank: int, *executors: Any, barrier: threading.Barrier | None = None) -> Iterator[None]:
    """Scope of a rank's work on its thread. If it raises, the other ranks stop waiting: at the `barrier` or, without
    one, for all events of the simulation; and `executors` fail. At the end, computes run on the host stream again."""
    try:
        yield
    except BaseException as error:
        if barrier is not None:
            barrier.abort()
        else:
            module.controls.released = True
        for executor in executors:
            executor.fail(f"rank {rank}: {error}")
        raise
    finally:
        module.set_compute(False)


def run_threads(work: Callable[..., Any], ranks: int, *args: Any, timeout: float = 30.0) -> list[Any]:
    """Calls `work(rank, *args)` on one thread per rank. Returns the result, or the raised error, of each.

    Raises AssertionError with the stacks of the threads that do not end within `timeout` seconds.
    """
    results: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, *args)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    stuck = [thread for thread in threads if thread.is_alive()]
    if stuck:
        frames = sys._current_frames()
        stacks = ["".join(traceback.format_stack(frames[thread.ident])) for thread in stuck if thread.ident in frames]
        load().controls.released = True
        for thread in stuck:
            thread.join(5.0)
        raise AssertionError(f"{len(stuck)} of {ranks} ranks did not end within {timeout} s:\n" + "\n".join(stacks))
    return results


def values(results: list[Any]) -> list[Any]:
    """Returns the results of `run_threads`; raises AssertionError if a rank raised."""
    for rank, result in enumerate(results):
        if isinstance(result, BaseException):
            raise AssertionError(f"rank {rank} failed") from result
    return results


def settled(module: Any, longest: float = 5.0) -> bool:
    """Returns whether the threads of all streams end within `longest` seconds."""
    gc.collect()
    deadline = time.monotonic() + longest
    while module.threads() > 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    return module.threads() == 0
