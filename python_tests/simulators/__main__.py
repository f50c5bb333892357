"""`python python_tests/simulators` compiles all simulators; `make test` runs it first, so that no test waits. The
argument `kernels` limits it to those of the kernels, which need no Python package."""

import sys
from concurrent.futures import ThreadPoolExecutor

import compiled
import ptx
import recording_transport
import simulated_cuda


def main(arguments: list[str]) -> None:
    if compiled.compiler() is None:
        print("no C++ compiler: tests that need simulators will fail or be skipped")
        return
    builds = []
    if ptx.nvcc() is not None:
        builds.append(lambda: ptx.build().library)
    if arguments != ["kernels"]:
        builds.append(recording_transport.build)
        if simulated_cuda.include_folders() is not None:
            builds.insert(0, simulated_cuda.build)
    with ThreadPoolExecutor(max(len(builds), 1)) as pool:
        for path in pool.map(lambda each: each(), builds):
            print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
