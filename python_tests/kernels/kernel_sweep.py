"""Runs many random cases of every kernel in one process, for tools that watch it from outside.

    python python_tests/kernels/kernel_sweep.py --runner cuda --cases 1000
    compute-sanitizer --tool memcheck python python_tests/kernels/kernel_sweep.py --runner cuda --cases 20
    compute-sanitizer --tool racecheck python python_tests/kernels/kernel_sweep.py --runner cuda --cases 20

`--runner emulated` and `sanitized` use emulated threads, the second with the address sanitizer in a process of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from kernel_checks import CHECKS, run_checks

sys.path.append(str(Path(__file__).resolve().parents[1] / "simulators"))


def make_runner(name: str):
    if name in ("cpu", "cuda"):
        from torch_kernels import Torch

        return Torch(name)
    from emulated_kernels import Emulated
    from kernel_emulation import build

    return Emulated(build(name == "sanitized"), sanitized=name == "sanitized")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runner", choices=("cuda", "cpu", "emulated", "sanitized"), default="cuda")
    parser.add_argument("--cases", type=int, default=20, help="of every kernel")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernels", nargs="+", choices=tuple(CHECKS), default=list(CHECKS))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # the sanitizer is loaded already
    options = parser.parse_args(arguments)
    if options.runner == "sanitized" and not options.inside:
        from kernel_emulation import build, sanitizer_environment

        build(sanitized=True)  # the compiler itself runs without the sanitizer
        command = [sys.executable, __file__, *(arguments if arguments is not None else sys.argv[1:]), "--inside"]
        return subprocess.run(command, env=sanitizer_environment()).returncode
    ran = run_checks(make_runner(options.runner), options.cases, options.seed, options.kernels)
    print(f"{options.runner}: {ran} cases passed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
