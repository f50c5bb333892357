"""A CUDA runtime and an NCCL in host memory: the transports' own sources run against it where there is no GPU.

`load()` builds the module once (kept under build/) and returns it; ranks are threads, see
`run_threads`. What the simulation keeps of the real ones: the order of streams and events, non-blocking communicators
that must settle, the rendezvous of sends and receives, one communicator's work in order whatever stream it is on,
signals counted by their source, windows that every rank registers together. What it does not know: speed, capture,
several GPUs, and whatever NVIDIA's libraries do that their documentation does not say.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simulated_cuda.mutants import write_ce_mutants

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]

SOURCES = ["bindings.cpp", "ce.cpp", "nccl.cpp", "nccl_windows.cpp", "runtime.cpp", "transports.cpp"]


def include_folders() -> list[str] | None:
    """The folders of CUDA's and NCCL's headers, the simulation's own first; None where there are none."""
    site = [Path(folder) for folder in sys.path if (Path(folder) / "nvidia").is_dir()]
    pip = [include for folder in site for include in sorted((folder / "nvidia").glob("*/include"))]
    toolkit = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    folders = [folder for folder in toolkit + pip if folder.is_dir()]
    for header in ("cuda.h", "cuda_runtime_api.h", "nccl.h", "crt/host_defines.h"):
        if not any((folder / header).exists() for folder in folders):
            return None
    return [str(folder) for folder in [HERE / "include", ROOT / "csrc", HERE, *folders]]


@functools.cache
def load() -> Any:
    """The simulated module. Its transports are accepted by the ordinary extension's Executor."""
    from torch.utils import cpp_extension

    from rtp_ext import _native  # noqa: F401  first: it registers the types that both extensions share

    folder = ROOT / "build" / "simulated_cuda"
    folder.mkdir(parents=True, exist_ok=True)
    write_ce_mutants(ROOT / "csrc" / "transport" / "ce" / "ce.cpp", folder)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return cpp_extension.load(
        name="rtp_simulated_cuda",
        sources=[str(HERE / source) for source in SOURCES],
        extra_include_paths=[str(folder), *(include_folders() or [])],
        extra_cflags=["-std=c++20", "-O1", "-g0", "-fvisibility=hidden", "-DRTP_WITH_CUDA"],
        build_directory=str(folder),
        with_cuda=False,
    )


def run_threads(work: Callable[..., Any], ranks: int, *args: Any, timeout: float = 30.0) -> list[Any]:
    """Calls `work(rank, *args)` on a thread for each rank. Returns what each returned or, where it raised, the error.

    Raises AssertionError with the stacks of the threads that do not end in `timeout` seconds.
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
    """The results of `run_threads`, if no rank raised."""
    for rank, result in enumerate(results):
        if isinstance(result, BaseException):
            raise AssertionError(f"rank {rank} failed") from result
    return results


def settled(module: Any, longest: float = 5.0) -> bool:
    """Whether the threads of all streams end within `longest` seconds."""
    gc.collect()
    deadline = time.monotonic() + longest
    while module.threads() > 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    return module.threads() == 0
