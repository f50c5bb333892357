"""Runs many random cases of every kernel in one process, for tools that watch it from outside.

    python python_tests/kernels/kernel_sweep.py --runner cuda --cases 1000
    compute-sanitizer --tool memcheck python python_tests/kernels/kernel_sweep.py --runner cuda --cases 20
    compute-sanitizer --tool racecheck python python_tests/kernels/kernel_sweep.py --runner cuda --cases 20

`--runner ptx` interprets the code that nvcc emits, without a GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kernel_checks import CHECKS, run_checks

sys.path.append(str(Path(__file__).resolve().parents[1] / "simulators"))


def make_runner(name: str):
    if name in ("cpu", "cuda"):
        from torch_kernels import Torch

        return Torch(name)
    from ptx import build
    from ptx_kernels import Ptx

    return Ptx(build())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runner", choices=("cuda", "cpu", "ptx"), default="cuda")
    parser.add_argument("--cases", type=int, default=20, help="of every kernel")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernels", nargs="+", choices=tuple(CHECKS), default=list(CHECKS))
    options = parser.parse_args(arguments)
    ran = run_checks(make_runner(options.runner), options.cases, options.seed, options.kernels)
    print(f"{options.runner}: {ran} cases passed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
