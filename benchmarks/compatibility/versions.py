"""Pythons and torches that the package is built with and tried: a wheel of the source archive, a quickstart, and tests.

    python benchmarks/compatibility/versions.py         # every pair; takes an hour and more
    python benchmarks/compatibility/versions.py --python 3.12 --torch 2.11.0,2.14.1
    python benchmarks/compatibility/versions.py --page  # run nothing: write the table of docs/limits.md

For each pair: an environment of its own, torch from the registry, a wheel built from the source archive (without CUDA),
installed, `doctor`, examples/quickstart.py on two ranks, and uninstalled again. With the first Python of each torch,
the tests of FOLDERS run against the installed wheel. A Python that is not there, or a torch that the registry has not
got for it, is a line that says so. Lines are appended to results/MACHINE/versions.jsonl; the table has the last of each
pair. Exit status 1 where a pair that could be had does not work.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.card import (
    RESULTS,
    append_line,
    command_line,
    environment_card,
    machine_name,
    refusal_to_write,
    result_line,
)
from shared.reports.own_pages import block, last_lines, made_anew

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "limits.md"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.11.0", "2.13.0", "newest")
FOLDERS = ("ring", "convert", "outer")  # of python_tests: half an hour of two cores
BUILDS_WITH = ("setuptools>=77", "wheel", "cmake", "ninja", "pybind11")


class Failed(Exception):
    """A step that failed, with the end of its output."""


class Missing(Exception):
    """A version of Python or torch that is not available here."""


def environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**inherited, "RTP_WITH_CUDA": "0", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def call(*command: str, **options: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), **options)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise Failed(f"{Path(command[0]).name} {' '.join(command[1:4])}: {said[-1] if said else done.returncode}")
    return done.stdout


def find_python(version: str) -> str:
    """Returns a Python of that version: on the path, or from pyenv. Raises Missing."""
    places = [shutil.which(f"python{version}"), sys.executable]
    places += sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")), reverse=True)
    for place in places:
        if place and Path(place).exists():
            told = subprocess.run([place, "--version"], capture_output=True, text=True).stdout
            if told.startswith(f"Python {version}."):
                return place
    raise Missing("no such Python here")


def counts(said: str) -> dict[str, int]:
    """Returns how many tests passed, failed and were skipped, by the last line of pytest; errors are failures."""
    number = dict.fromkeys(("passed", "failed", "skipped"), 0)
    for count, what in re.findall(r"(\d+) (passed|failed|skipped|error)", said.strip().rpartition("\n")[2]):
        number["failed" if what == "error" else what] += int(count)
    return number


def run_tests(here: str, archive: Path, folder: Path) -> dict[str, int]:
    """Returns the counts of the tests of FOLDERS, from the archive without its package. Raises Failed."""
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    shutil.rmtree(source / "rtp_ext")
    options = ("-q", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider", "--tb=line")
    command = (here, "-m", "pytest", *options, *(f"python_tests/{each}" for each in FOLDERS))
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=source)
    found = counts(done.stdout)
    if done.returncode not in (0, 1) or not found["passed"]:
        raise Failed(f"tests: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1]}")
    print(*re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE), sep="\n", end="", flush=True)
    return found


def attempt(python: str, wanted: str, folder: Path, tested: bool) -> dict[str, Any]:
    """Returns the result of one pair of versions, `tested`: and of the tests. Raises Failed or Missing."""
    call(python, "-m", "venv", str(folder / "venv"))
    here = str(folder / "venv" / "bin" / "python")
    pip = (here, "-m", "pip", "--quiet", "--disable-pip-version-check")
    try:
        call(*pip, "install", "torch" if wanted == "newest" else f"torch=={wanted}", "numpy")
    except Failed as problem:
        if "No matching distribution" not in str(problem):
            raise
        raise Missing("no such torch for it on the registry") from problem
    call(*pip, "install", *BUILDS_WITH)
    found = call(here, "-c", "import platform, torch; print(platform.python_version(), torch.__version__)").split()
    began = time.monotonic()
    call(here, "setup.py", "-q", "sdist", "--dist-dir", str(folder / "sdist"), cwd=ROOT)
    (archive,) = (folder / "sdist").glob("*.tar.gz")
    call(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(archive))
    seconds = time.monotonic() - began
    (wheel,) = folder.glob("*.whl")
    call(*pip, "install", "--no-deps", str(wheel))
    call(here, "-m", "rtp_ext", "doctor", cwd=folder)
    shutil.copy(ROOT / "examples" / "quickstart.py", folder)
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "quickstart.py")
    said = re.findall(r"loss (\S+), (\d+) parameters", call(here, *ranks, cwd=folder))
    if len(said) != 2 or not all(float(loss) < 5.0 for loss, _ in said):
        raise Failed(f"quickstart: expected two losses below 5, got {said}")
    tests = None
    if tested:
        call(*pip, "install", f"{wheel}[dev]", f"torch=={found[1].partition('+')[0]}")
        tests = run_tests(here, archive, folder)
    call(*pip, "uninstall", "-y", "rtp-ext")
    left = list((folder / "venv").rglob("rtp_ext*"))
    if left:
        raise Failed(f"uninstall: left {left[0]}")
    return {
        "outcome": f"{tests['failed']} tests fail" if tests and tests["failed"] else "works",
        "tests": tests,
        "python": found[0],
        "torch": found[1],
        "loss": float(said[0][0]),
        "wheel_bytes": wheel.stat().st_size,
        "build_s": round(seconds),
    }


def last_of_each(path: Path) -> list[dict[str, Any]]:
    """Returns the last line of every pair, in the order of PYTHONS and TORCHES; pairs without a line are untried."""
    known = {(row["wanted_python"], row["wanted_torch"]): row for row in last_lines(path, _pair)}
    every = dict.fromkeys([*product(PYTHONS, TORCHES), *known])
    return [known.get(pair, {"wanted_python": pair[0], "wanted_torch": pair[1]}) for pair in every]


def _pair(line: dict[str, Any]) -> tuple[str, str]:
    return line["wanted_python"], line["wanted_torch"]


def table(rows: list[dict[str, Any]]) -> str:
    tried = [row for row in rows if "outcome" in row]
    if not tried:
        return "\nNot tried yet: `make versions`.\n\n"
    lines = [["Python", "torch", "result", f"tests of {', '.join(FOLDERS)}", "wheel, MiB"]]
    for row in rows:
        size = f"{row['wheel_bytes'] / 2**20:.1f}" if row.get("wheel_bytes") else ""
        python, torch = (row.get(key) or row[f"wanted_{key}"] for key in ("python", "torch"))
        tests = ", ".join(f"{count} {what}" for what, count in (row.get("tests") or {}).items() if count)
        lines.append([python, torch, row.get("outcome", "not tried"), tests, size])
    return block(tried, "Tried", "; builds without CUDA.", lines)


def page(text: str, results: Path) -> str:
    """Returns the page with a new table; `results`: the folder of the machines."""
    return made_anew(text, "versions", lambda machine: table(last_of_each(results / machine / "versions.jsonl")))


def main() -> int:
    parser = argparse.ArgumentParser(description="Tries Pythons and torches. See the top of the file.")
    parser.add_argument("--python", default=",".join(PYTHONS))
    parser.add_argument("--torch", default=",".join(TORCHES))
    parser.add_argument("--page", action="store_true", help="try nothing: write the table of docs/limits.md")
    args = parser.parse_args()
    if args.page:
        PAGE.write_text(page(PAGE.read_text(), RESULTS))
        return 0
    path, command = RESULTS / machine_name(torch.device("cpu")) / "versions.jsonl", command_line()
    if (refusal := refusal_to_write(path)) is not None:
        parser.error(refusal)
    failed, tested = False, set()
    for version, wanted in product(args.python.split(","), args.torch.split(",")):
        line: dict[str, Any] = {"python": None, "torch": None}  # those of the card are others
        try:
            with tempfile.TemporaryDirectory() as folder:
                line |= attempt(find_python(version), wanted, Path(folder), wanted not in tested)
            tested.add(wanted)
            failed |= line["outcome"] != "works"
        except Failed as problem:
            line["outcome"], failed = str(problem), True
        except Missing as problem:
            line["outcome"] = str(problem)
        card = environment_card(torch.device("cpu"), command)
        more = {"benchmark": "versions", "case": f"Python {version}, torch {wanted}"}
        line = result_line(card, **more, wanted_python=version, wanted_torch=wanted, **line)
        print(f"{line['case']}: {line['outcome']}", flush=True)
        append_line(path, line)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
