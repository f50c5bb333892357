"""Plants known mistakes in the package, one at a time, and reports which of them the tests notice.

    python benchmarks/reliability/mutants.py                      # mistakes in Python files: a quarter of an hour
    python benchmarks/reliability/mutants.py --engine             # those in C++ files too, each with a build of its own
    python benchmarks/reliability/mutants.py --only outer,bias    # those whose file or name has one of these parts

Each mistake of mutants.txt replaces a text that occurs once in one file; one of its tests has to fail then. Mistakes
are planted in a copy of the working tree, which `--folder` keeps, with the builds for C++ mistakes. A text that does
not occur once, or a test file that does not exist, is an error. Exit status 1 if a mistake is not noticed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 600.0  # seconds for the tests of one mistake
PASSED, FAILED = (0,), (1, 2)  # exit statuses of pytest; 2: not importable

_CONTRACT = "functional/test_operations.py::test_"
CONTRACT = tuple(
    _CONTRACT + test
    for test in (
        "outputs_and_gradients[{}-2-shm]",
        "outputs_and_gradients[{}-3-c10d]",
        "training_freezing_and_checkpointing[{}-3-shm]",
    )
)


class Mutant(NamedTuple):
    name: str
    file: str  # of the repository
    before: str
    after: str
    tests: tuple[str, ...]  # files of python_tests, or tests in them: path::name


def read_mutants(text: str) -> list[Mutant]:
    groups: dict[str, tuple[str, ...]] = {}

    def tests_of(listed: str) -> tuple[str, ...]:
        tests: tuple[str, ...] = ()
        for each in listed.split(", "):
            _, contract, operation = each.rpartition("contract of ")
            tests += tuple(test.format(operation) for test in CONTRACT) if contract else groups.get(each, (each,))
        return tests

    _, head, *blocks = text.split("\n\n")
    for line in head.splitlines():
        name, _, listed = line.partition(" = ")
        groups[name] = tests_of(listed)
    file, mutants = "", []
    for block in blocks:
        first, *lines = block.splitlines()
        if first.startswith("== "):
            file = first.removeprefix("== ")
            continue
        name, _, listed = first.partition(": ")
        before, after = ("\n".join(line[2:] for line in lines if line.startswith(sign)) for sign in ("- ", "+ "))
        mutants.append(Mutant(name, file, before, after, tests_of(listed)))
    return mutants


def planted(mutant: Mutant, root: Path) -> str:
    """The text of the file with the mistake. Raises ValueError where it or a test is not found."""
    text = (root / mutant.file).read_text()
    if text.count(mutant.before) != 1:
        raise ValueError(
            f"{mutant.name}: expected once in {mutant.file}, got {text.count(mutant.before)} times:\n{mutant.before}"
        )
    missing = [test for test in mutant.tests if not (root / "python_tests" / test.partition("::")[0]).exists()]
    if missing:
        raise ValueError(f"{mutant.name}: expected test files, got {', '.join(missing)}")
    return text.replace(mutant.before, mutant.after)


def copy_tree(folder: Path) -> None:
    """Tracked files of the working tree, the extension, and what tests run on CPUs instead of CUDA."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    files += [*ROOT.glob("rtp_ext/_[CR].*.so"), *ROOT.glob("build/*/*.so"), *ROOT.glob("build/*/*.o")]
    for file in files:
        if "cmake" not in file.parent.name:
            target = folder / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists() or target.read_bytes() != file.read_bytes():
                shutil.copy2(file, target)


@contextmanager
def engine(folder: Path) -> Iterator[None]:
    """The extension as csrc of the copy is now."""
    sources = sorted(file for file in (folder / "csrc").rglob("*") if file.is_file())
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:16]
    kept, current = folder / "build" / "mutants" / digest, sorted(folder.glob("rtp_ext/_[CR].*.so"))
    if not kept.exists():
        build = folder / "build" / "cmake"
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        configure = ["cmake", "-G", "Ninja", "-S", folder, "-B", build, f"-DPython_EXECUTABLE={sys.executable}"]
        for command in (configure, ["cmake", "--build", build]):
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        kept.mkdir(parents=True)
        for module in current:
            shutil.copy2(build / module.name, kept)
    before = {module: module.read_bytes() for module in current}
    for module in current:
        shutil.copy2(kept / module.name, module)
    try:
        yield
    finally:
        for module, content in before.items():
            module.write_bytes(content)


def run_tests(mutant: Mutant, folder: Path) -> tuple[bool, str]:
    """Returns whether a test of the row fails, and the first that does."""
    tests = [f"python_tests/{test}" for test in mutant.tests]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return True, "timeout"
    if done.returncode not in (*PASSED, *FAILED):
        raise RuntimeError(f"{mutant.name}: pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return done.returncode in FAILED, failed[0] if failed else ""


def try_mutant(mutant: Mutant, folder: Path) -> tuple[bool, str]:
    file, wrong = folder / mutant.file, planted(mutant, folder)
    right = file.read_text()
    file.write_text(wrong)
    try:
        if mutant.file.startswith("csrc"):
            with engine(folder):
                return run_tests(mutant, folder)
        return run_tests(mutant, folder)
    finally:
        file.write_text(right)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="store_true", help="mistakes in csrc too")
    parser.add_argument("--only", default="", help="parts of names or files, with commas between them")
    parser.add_argument("--folder", type=Path, help="where the copy is made and kept; default: a temporary folder")
    options = parser.parse_args()
    parts = options.only.split(",")
    mutants = read_mutants((Path(__file__).parent / "mutants.txt").read_text())
    for mutant in mutants:
        planted(mutant, ROOT)
    chosen = [
        mutant
        for mutant in mutants
        if (options.engine or not mutant.file.startswith("csrc"))
        and any(part in mutant.name or part in mutant.file for part in parts)
    ]
    with tempfile.TemporaryDirectory(prefix="rtp_mutants_") as temporary:
        folder = options.folder or Path(temporary)
        copy_tree(folder)
        noticed = 0
        for mutant in chosen:
            start = time.monotonic()
            caught, test = try_mutant(mutant, folder)
            noticed += caught
            word = "caught" if caught else "SURVIVED"
            print(f"{word:8} {time.monotonic() - start:5.0f} s  {mutant.file}: {mutant.name}  {test}", flush=True)
    print(f"{noticed} of {len(chosen)} mistakes were noticed")
    return int(noticed < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
