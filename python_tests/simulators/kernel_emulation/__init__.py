"""Builds the kernels for emulated threads with the system's C++ compiler.

`sanitized` adds the address and undefined-behaviour sanitizers; Python itself must then run with them (see
`sanitizer_environment`).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import compiled

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SOURCES = [
    # delay.cu only reads the GPU's clock
    *sorted(file for file in (ROOT / "csrc" / "kernels").rglob("*.cu") if file.stem != "delay"),
    ROOT / "csrc" / "compute" / "gemm" / "gemm_layout.cpp",
    *sorted(HERE.glob("*.cu")),
    *sorted(HERE.glob("*.cpp")),
]
# Few blocks, so that kernels stride over small arrays several times. `telling_pattern` fills unset locals.
FLAGS = ["-std=c++17", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fno-strict-aliasing"]
FLAGS += ["-DRTP_KERNEL_EMULATION", "-DRTP_MOST_BLOCKS=6"]
FLAGS += ["-ffp-contract=off"]  # like the extension and the kernels: results are bitwise equal
PLAIN = ["-O1"]
SANITIZED = ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


def telling_pattern(cxx: str) -> list[str]:
    """Returns the flag that fills unset locals with a pattern, if the compiler supports it."""
    flag = "-ftrivial-auto-var-init=pattern"
    probe = subprocess.run([cxx, flag, "-x", "c++", "-fsyntax-only", os.devnull], capture_output=True)
    return [flag] if probe.returncode == 0 else []


def build(sanitized: bool = False) -> Path:
    """Returns the path of the library, after compiling it if it is missing."""
    cxx = compiled.compiler()
    flags = [*FLAGS, *(telling_pattern(cxx) if cxx else []), *(SANITIZED if sanitized else PLAIN)]
    name = "kernel_emulation_sanitized" if sanitized else "kernel_emulation"
    return compiled.build(name, SOURCES, flags, [ROOT / "csrc", HERE])


def sanitizer_runtimes() -> list[str]:
    """Returns the libraries that Python must preload; fewer than two if the compiler does not provide them."""
    cxx, found = compiled.compiler() or "c++", []
    for name in ("libasan.so", "libubsan.so"):
        asked = subprocess.run([cxx, f"-print-file-name={name}"], capture_output=True, text=True)
        found.append(asked.stdout.strip())
    return [path for path in found if Path(path).is_absolute()]


def sanitizer_environment() -> dict[str, str]:
    """Returns an environment in which Python can load the sanitized library."""
    options = "detect_leaks=0:detect_stack_use_after_return=0:handle_segv=0"
    preload = ":".join(sanitizer_runtimes())
    return {**os.environ, "LD_PRELOAD": preload, "ASAN_OPTIONS": options, "OPENBLAS_NUM_THREADS": "1"}
