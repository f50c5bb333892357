"""Compiles the kernels for every GPU that is supported, warnings as errors, and keeps what ptxas says of registers and
spills, under a digest of the sources: a second run compiles nothing. What the host runs is left to the extension."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import compiled

KERNELS = sorted((compiled.ROOT / "csrc" / "kernels").glob("*.cu"))
ARCHITECTURES = (80, 90, 100)
FLAGS = ["-std=c++17", "-O3", "-Werror", "all-warnings", "-Xcompiler", "-fPIC,-Wall,-Wextra,-Werror", "-Xptxas", "-v"]
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
ENTRY = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\d+)\w*'")


def nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc", path=f"{home}/bin") or shutil.which("nvcc")


def report(kernel: Path) -> str:
    """What ptxas says of one source, for every architecture. RuntimeError where it warns or does not compile."""
    compiler = nvcc()
    assert compiler is not None
    include = compiled.ROOT / "csrc"
    texts = [text for file in compiled.closure(kernel, [include]) for text in (str(file).encode(), file.read_bytes())]
    generate = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ARCHITECTURES]
    command = [compiler, *FLAGS, *generate, f"-I{include}", "-fatbin", str(kernel), "-o", os.devnull]
    folder = compiled.ROOT / "build" / "ptxas"
    folder.mkdir(parents=True, exist_ok=True)
    said = folder / f"{kernel.stem}.{compiled.digest(repr(command).encode(), *texts)}.txt"
    if not said.exists():
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        made = said.with_suffix(f".{os.getpid()}")
        made.write_text(done.stderr)
        made.replace(said)
    return said.read_text()


def reports() -> dict[str, str]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip((kernel.stem for kernel in KERNELS), pool.map(report, KERNELS), strict=True))
