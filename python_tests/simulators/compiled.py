"""Compiles the simulators and caches the libraries by their inputs.

A library is build/NAME/DIGEST.so, with a digest of its sources, of this project's headers that they include, of the
flags, and of the versions of the compiler and of other projects' headers. A loaded library therefore always matches the
current sources, a second run compiles nothing, and a change recompiles only the objects that depend on it.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)
_compilers = threading.Semaphore(os.cpu_count() or 1)  # limits concurrent compilers over all builds


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")


def closure(source: Path, folders: Sequence[Path]) -> list[Path]:
    """Returns the source and all files that it includes, directly or indirectly, from its own folder or `folders`."""
    found: dict[Path, None] = {}
    waiting = [source.resolve()]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found[file] = None
        for name in _INCLUDE.findall(file.read_bytes()):
            candidates = (folder / name.decode() for folder in (file.parent, *folders))
            if existing := next((each for each in candidates if each.is_file()), None):
                waiting.append(existing.resolve())
    return list(found)


def digest(*parts: bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()[:20]


def build(
    name: str,
    sources: Sequence[Path],
    flags: Sequence[str],
    folders: Sequence[Path],
    links: Sequence[str] = (),
    foreign: Sequence[Path] = (),
) -> Path:
    """Returns the path of build/NAME's shared object, after compiling it if it is missing.

    Args:
        folders: include folders of this project's headers, searched before all others.
        foreign: files that identify the versions of other projects' headers.
    """
    cxx = compiler()
    if cxx is None:
        raise RuntimeError("no C++ compiler: neither $CXX, g++ nor c++ is on PATH")
    given = [*(f"-I{folder}" for folder in folders), *flags]
    command = digest(repr((version(cxx), given)).encode(), *(file.read_bytes() for file in foreign)).encode()
    digests = {}
    for source in sources:
        texts = [text for file in closure(source, folders) for text in (str(file).encode(), file.read_bytes())]
        digests[source] = digest(command, *texts)
    folder = ROOT / "build" / name
    whole = digest(command, repr(links).encode(), *(each.encode() for each in digests.values()))
    library = folder / f"{whole}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test process may be compiling
        if library.exists():
            return library

        def compiled(source: Path) -> Path:
            target = folder / f"{digests[source]}.o"
            if not target.exists():
                make(target, cxx, *given, "-x", "c++", "-c", str(source))
            return target

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, sources))
        for old in {*folder.glob("*.o"), *folder.glob("*.so")} - {*objects}:
            old.unlink()
        make(library, cxx, *given, "-shared", *map(str, objects), *links)
    return library


def make(target: Path, *command: str) -> None:
    """Runs a compiler that writes `target`, which appears once it is complete."""
    made = target.with_suffix(".part")
    with _compilers:
        done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    made.replace(target)


@functools.cache
def version(cxx: str) -> str:
    return cxx + subprocess.run([cxx, "--version"], capture_output=True, text=True, check=True).stdout


def build_module(
    name: str, sources: Sequence[Path], flags: Sequence[str], folders: Sequence[Path], foreign: Sequence[Path] = ()
) -> Path:
    """Returns the path of a Python extension that uses torch. `flags`: additional flags."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError("torch is not installed")
    torch = Path(found.submodule_search_locations[0])
    needed = [
        *("-std=c++20", "-fPIC", "-fvisibility=hidden", "-g0", "-O0"),
        f"-DTORCH_EXTENSION_NAME={name}",
    ]
    where = name
    if sanitizers := os.environ.get("RTP_SANITIZE"):  # like the extension: benchmarks/reliability/sanitize.py
        needed += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=undefined", "-g1"]
        where = f"{name}-{sanitizers.replace(',', '-')}"
    for include in (torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]):
        needed += ["-isystem", str(include)]
    links = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    return build(where, sources, [*flags, *needed], folders, links, [*foreign, torch / "version.py"])


def load_module(name: str, path: Path) -> Any:
    from rtp_ext import _native  # noqa: F401  must be first: it registers the types that both extensions share

    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module
