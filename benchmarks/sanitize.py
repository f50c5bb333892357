"""Builds the extension with sanitizers, and runs the tests of what has threads and shares memory under them.

    python benchmarks/sanitize.py                     # make sanitize: all three
    python benchmarks/sanitize.py --kinds thread      # one

`address` and `undefined` are one build, `thread` is another; each in a folder of its own below build/, for CPUs alone
(the simulators run what is CUDA's). torch, Gloo and Python are not instrumented: what the sanitizers say of them alone
is in the lists below, with the reason of each. Exit status 1 where anything else is found or a test fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = {"address,undefined": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
TESTS = [
    "python_tests/engine/test_ordering.py",  # executor and schedules, on the recording transport
    "python_tests/engine/test_prefetch.py",
    "python_tests/engine/test_late_gradients.py",
    "python_tests/transport/test_shared_memory.py",
    "python_tests/transport/test_transport_tcp.py",
    "python_tests/transport/test_checksum.py",
    "python_tests/observe/test_record.py",
    "python_tests/transport/test_simulated_cuda.py",  # the watchdog, on the simulated NCCL
]
# Leaks: none are looked for. An interpreter that ends leaves what it holds, and so do torch's registries.
ADDRESS = "detect_leaks=0:detect_odr_violation=0:allocator_may_return_null=1"
UNDEFINED = "print_stacktrace=1"
# Each line with the reason that it is no race of ours.
THREAD = """
# not instrumented, so that the sanitizer does not see its locks
called_from_lib:libtorch_cpu.so
called_from_lib:libtorch_python.so
called_from_lib:libc10.so
called_from_lib:libgomp
# Python hands threads the interpreter lock by atomics that it cannot see either
called_from_lib:python3
race:^_Py
race:^Py
# the copy of a shard into a neighbour's memory: another process, which is told of it by an atomic in the same memory
"""


def runtime(name: str) -> str:
    """The path of a sanitizer's runtime, as the compiler knows it."""
    compiler = os.environ.get("CXX", "c++")
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def build(kind: str) -> Path:
    """A package rtp_ext whose extension is instrumented; returns the folder that it is in."""
    place = ROOT / "build" / f"sanitize-{kind.replace(',', '-')}"
    package = place / "package"
    package.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "RTP_WITH_CUDA": "0", "RTP_SANITIZE": kind}
    configure = ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(place / "cmake")]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_INSTALL_PREFIX={place / 'installed'}"]
    configure += [f"-DRTP_SANITIZE={kind}"]
    made = str(place / "cmake")
    for command in (configure, ["cmake", "--build", made], ["cmake", "--install", made]):
        subprocess.run(command, check=True, env=environment)
    target = package / "rtp_ext"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "rtp_ext", target, ignore=shutil.ignore_patterns("_C*.so", "__pycache__"))
    for library in (place / "installed" / "rtp_ext").glob("_C*.so"):
        shutil.copy(library, target)
    return package


def run(kind: str, package: Path, tests: list[str]) -> int:
    suppressions = package.parent / "thread.txt"
    suppressions.write_text(THREAD)
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(runtime(name) for name in KINDS[kind]),
        "PYTHONPATH": str(package),
        "RTP_SANITIZE": kind,  # the simulators are built alike
        "ASAN_OPTIONS": ADDRESS,
        "UBSAN_OPTIONS": UNDEFINED,
        "TSAN_OPTIONS": f"suppressions={suppressions}:exitcode=66:halt_on_error=1:die_after_fork=0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    # Not from the root: the package that is there would come first.
    command += ["--rootdir", str(ROOT), *(str(ROOT / test) for test in tests)]
    return subprocess.run(command, cwd=package, env=environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Tests under sanitizers. See the top of the file.")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("tests", nargs="*", help="default: those of executor, prefetch, transports, recorder, watchdog")
    args = parser.parse_args()
    failed = []
    for kind in args.kinds:
        package = build(kind)
        if not args.build_only and run(kind, package, args.tests or TESTS) != 0:
            failed.append(kind)
    print(f"sanitizers: {', '.join(failed) or 'none'} found something" if not args.build_only else "built")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
