"""`python python_tests/simulators` compiles all simulators; `make test` does it first, so that no test waits."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels"))

import compiled
import emulated_kernels
import ptxas
import recording_transport
import simulated_cuda


def main() -> None:
    if compiled.compiler() is None:
        print("no C++ compiler: tests that need simulators will say so")
        return
    builds = [recording_transport.build, emulated_kernels.build]
    if len(emulated_kernels.sanitizer_runtimes()) == 2:
        builds.append(lambda: emulated_kernels.build(sanitized=True))
    if simulated_cuda.include_folders() is not None:
        builds.insert(0, simulated_cuda.build)
    if ptxas.nvcc() is not None:
        ptxas.reports()
    with ThreadPoolExecutor(len(builds)) as pool:
        for path in pool.map(lambda each: each(), builds):
            print(path)


if __name__ == "__main__":
    main()
