"""Builds the extension with sanitizers, and runs the tests of threads and shared memory with them.

    python benchmarks/reliability/sanitize.py                 # make sanitize: all three
    python benchmarks/reliability/sanitize.py --kinds thread  # one

`address` and `undefined` share one build, `thread` is another; each has its own folder below build/, for CPUs only (the
simulators run the CUDA code). torch, Gloo and Python are not instrumented: the lists below suppress reports about
them alone, each with a reason. A line for each build is appended to benchmarks/results/MACHINE/sanitize.jsonl. The
exit status is 1 if there is any other report or a test fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"address,undefined": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
CALLS = {"address,undefined": b"__asan_report_load", "thread": b"__tsan_read"}  # symbols that prove instrumentation
TESTS = [
    "python_tests/engine/test_ordering.py",  # executor and schedules, on the recording transport
    "python_tests/engine/test_prefetch.py",
    "python_tests/engine/test_late_gradients.py",
    "python_tests/transport/test_shared_memory.py",
    "python_tests/transport/test_transport_tcp.py",
    "python_tests/transport/test_checksum.py",
    "python_tests/observe/test_record.py",
    "python_tests/simulators/test_simulated_cuda.py",  # the watchdog, on the simulated NCCL
]
# tests that need a simulator
SIMULATED = {TESTS[0]: "recording_transport", TESTS[-1]: "simulated_cuda"}
LEFT_OUT = {
    # The test uses up all descriptors, and the undefined-behaviour runtime probes memory through a pipe: without a
    # descriptor it takes valid memory for inaccessible and ends the process without a report. Source: LLVM's
    # sanitizer_posix_libcdep.cpp, IsAccessibleMemoryRange.
    "address,undefined": [f"{TESTS[3]}::test_too_many_open_files_are_not_taken_for_another_host"],
    # The race is intended: the test counts how often unordered copies finish in either order.
    "thread": [f"{TESTS[-1]}::test_streams_run_side_by_side_and_events_order_them"],
}
# No leak detection: the interpreter and torch's registries do not free all their memory at exit.
ADDRESS = "detect_leaks=0:detect_odr_violation=0:allocator_may_return_null=1"
UNDEFINED = "print_stacktrace=1"
# Each line with the reason that it is no race of ours.
THREAD = """
# One thread creates an error and another destroys it: libstdc++ counts the references to its text with its own atomics.
race:std::runtime_error::~runtime_error
# Works of Gloo that torch's thread destroys: counted by atomics in code that is not instrumented. This project's code
# is rtp::.
race:c10d::ProcessGroupGloo::runLoop
race:c10d::*Async*Work
# Buffers that a failed pass releases before they were waited for: the counts of shared_ptr (Gloo's common/memory.h)
# order Gloo's thread and their destruction, in code that is not instrumented. Destroyed slots are still reported.
race:gloo::transport::tcp::UnboundBuffer::~UnboundBuffer
race:c10d::ProcessGroupGloo::SendWork::~SendWork
race:c10d::ProcessGroupGloo::RecvWork::~RecvWork
# Locks that torch's libraries take in code that is not instrumented, when Python ends.
mutex:capsule_dealloc
mutex:TorchLibraryInit
# Python passes the interpreter lock between threads with atomics that are not instrumented either.
race:^_Py
race:^Py
"""


def runtime(name: str) -> str:
    """Returns the path of a sanitizer's runtime, from the compiler."""
    compiler = os.environ.get("CXX", "c++")
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def build(kind: str) -> Path:
    """Builds a package rtp_ext with an instrumented extension. Returns its folder."""
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
    shutil.copytree(ROOT / "rtp_ext", target, ignore=shutil.ignore_patterns("_[CR].*.so", "__pycache__"))
    engine, rules = sorted((place / "installed" / "rtp_ext").glob("_[CR].*.so"))
    for library in (engine, rules):
        if CALLS[kind] not in library.read_bytes():
            raise RuntimeError(f"{library} is not instrumented: it has no {CALLS[kind].decode()}")
        shutil.copy(library, target)
    return package


def run(kind: str, package: Path, tests: list[str]) -> dict[str, Any]:
    """Runs the tests; counts them, and what the sanitizers have reported of any process."""
    place = package.parent
    for old in place.glob("report.*"):
        old.unlink()
    suppressions = place / "thread.txt"
    suppressions.write_text(THREAD)
    log = f"log_path={place / 'report'}"
    environment = {
        **os.environ,
        "PYTHONPATH": str(package),
        "RTP_SANITIZE": kind,  # the simulators are built the same way
        "ASAN_OPTIONS": f"{ADDRESS}:{log}",
        "UBSAN_OPTIONS": f"{UNDEFINED}:{log}",
        "TSAN_OPTIONS": f"suppressions={suppressions}:exitcode=66:halt_on_error=0:die_after_fork=0:{log}",
        "OMP_NUM_THREADS": "1",
    }
    for test, simulator in SIMULATED.items():  # compiled before a runtime is preloaded into compilers, too
        if test in tests:
            made = f"import sys; sys.path.append(sys.argv[1]); import {simulator}; print({simulator}.build())"
            folder = str(ROOT / "python_tests" / "simulators")
            subprocess.run([sys.executable, "-c", made, folder], check=True, env=environment)
    results = place / "tests.xml"
    results.unlink(missing_ok=True)
    # Not run from the root, where Python would import the package of the work tree. setarch -R disables address
    # randomization, which the runtime of `thread` requires.
    command = ["setarch", "-R", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), *(str(ROOT / test) for test in tests)]
    command += [f"--deselect={test}" for test in LEFT_OUT[kind]]
    preloaded = {"LD_PRELOAD": " ".join(runtime(name) for name in KINDS[kind])}
    began = time.monotonic()
    status = subprocess.run(command, cwd=package, env=environment | preloaded).returncode
    row: dict[str, Any] = {"benchmark": "sanitize", "sanitizers": kind, "seconds": round(time.monotonic() - began, 1)}
    counts = next(iter(ElementTree.parse(results).getroot())).attrib if results.exists() else {}
    row |= {"tests": int(counts.get("tests", 0)), "skipped": int(counts.get("skipped", 0))}
    row["failed"] = int(counts.get("failures", 0)) + int(counts.get("errors", 0))
    reports = [file.read_text(errors="replace") for file in sorted(place.glob("report.*"))]
    for report in reports:
        print(report[:4000], flush=True)
    row["reports"] = sum(len(re.findall("^SUMMARY: ", report, re.MULTILINE)) or 1 for report in reports)
    return row | {"verdict": "fail" if status or reports else "pass"}


def main() -> int:
    import torch
    from shared.card import add_output_options, append_line, complete_output, environment_card

    parser = argparse.ArgumentParser(description="Tests under sanitizers. See the top of the file.")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument("--build-only", action="store_true")
    add_output_options(parser)
    parser.add_argument("tests", nargs="*", help="default: those of executor, prefetch, transports, recorder, watchdog")
    args = parser.parse_args()
    complete_output(args, "sanitize", parser.error)
    card = environment_card(torch.device("cpu"), args.command)
    failed = []
    for kind in args.kinds:
        package = build(kind)
        if args.build_only:
            continue
        row = run(kind, package, args.tests or TESTS)
        append_line(args.output, {**row, **card})
        if row["verdict"] == "fail":
            failed.append(kind)
    print(f"sanitizers: {', '.join(failed) or 'none'} found something" if not args.build_only else "built")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
