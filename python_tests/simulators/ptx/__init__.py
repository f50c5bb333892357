"""Compiles the kernels with nvcc, for compute capability 8.0 or another, and keeps their PTX and the host code that
launches them.

`build` returns the PTX of each source and a library that records launches in place of starting them.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import compiled

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
KERNELS = tuple(
    # delay.cu only reads the GPU's clock
    sorted(file for file in (ROOT / "csrc" / "kernels").rglob("*.cu") if file.stem != "delay")
)
HOST = [HERE / "launches.cpp", HERE / "exports.cpp"]
# Few blocks, so that kernels stride over small arrays several times.
FLAGS = ["-std=c++17", "-DRTP_WITH_CUDA", "-DRTP_MOST_BLOCKS=6"]


def nvcc() -> str | None:
    found = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    return found if Path(found).exists() else None


def own_flags(kernel: str) -> list[str]:
    """Returns the flags that CMakeLists.txt gives to one source, such as quantize.cu."""
    text = (ROOT / "CMakeLists.txt").read_text()
    pattern = rf"set_source_files_properties\(csrc/kernels/{kernel} PROPERTIES COMPILE_OPTIONS ([^)]+)\)"
    return [flag for flags in re.findall(pattern, text) for flag in flags.split()]


@dataclass(frozen=True)
class Compiled:
    """library: records launches. texts: the PTX of each source."""

    library: Path
    texts: tuple[str, ...]


def build(
    sources: Sequence[Path] = KERNELS, flags: Callable[[str], list[str]] = own_flags, capability: int = 80
) -> Compiled:
    """Returns the compiled kernels, after compiling those that are missing. `sources`: those of the project, or changed
    copies of some. `flags`: further flags by the name of a source."""
    compiler = nvcc()
    if compiler is None:
        raise RuntimeError("no nvcc in PATH or /usr/local/cuda")
    folder = ROOT / "build" / "ptx"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test process may be compiling
        told = [f"-arch=compute_{capability}", *FLAGS]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            stems = list(
                pool.map(lambda source: _compile(compiler, source, [*told, *flags(source.name)], folder), sources)
            )
        objects = [str(stem.with_suffix(".o")) for stem in stems]
        library = folder / f"{compiled.digest(repr(objects).encode(), *(file.read_bytes() for file in HOST))}.so"
        if not library.exists():
            told = ["-std=c++17", "-O1", "-fPIC", "-shared", f"-I{ROOT / 'csrc'}", "-Wl,-Bsymbolic"]
            compiled.make(library, compiled.compiler() or "c++", *told, *map(str, HOST), *objects)
    return Compiled(library, tuple(stem.with_suffix(".ptx").read_text() for stem in stems))


def _compile(compiler: str, source: Path, told: list[str], folder: Path) -> Path:
    """Compiles a source, unless that has been done. Returns the common path of its object and PTX without a suffix."""
    files = compiled.closure(source, [ROOT / "csrc"])
    stem = folder / compiled.digest(
        repr((compiled.version(compiler), told)).encode(), *(file.read_bytes() for file in files)
    )
    if not stem.with_suffix(".ptx").exists():
        with tempfile.TemporaryDirectory(dir=folder) as kept:
            keep = ["-Xcompiler=-fPIC", "-keep", "--keep-dir", kept]
            compiled.make(stem.with_suffix(".o"), compiler, *told, f"-I{ROOT / 'csrc'}", *keep, "-c", str(source))
            shutil.move(Path(kept) / f"{source.stem}.ptx", stem.with_suffix(".ptx"))
    return stem
