"""Pythons and torches that the package is built with and tried: a wheel of the source archive, a quickstart, and tests.

    python benchmarks/compatibility/versions.py         # every pair; takes an hour and more
    python benchmarks/compatibility/versions.py --python 3.12 --torch 2.11.0,2.14.1

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

from shared.card import ROOT, add_output_options, append_line, complete_output, environment_card, result_line
from shared.table import Row, Table, last_of_each

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


def _pair(line: Row) -> tuple[str, str]:
    return line["wanted_python"], line["wanted_torch"]


def every_pair(rows: list[Row]) -> list[Row]:
    """Those of PYTHONS and TORCHES, also untried ones, and then others."""
    known = {_pair(row): row for row in rows}
    every = dict.fromkeys([*product(PYTHONS, TORCHES), *known])
    return [known.get(pair, {"wanted_python": pair[0], "wanted_torch": pair[1]}) for pair in every]


TABLE = Table(
    "versions",
    {
        "Python": lambda row: row.get("python") or row["wanted_python"],
        "torch": lambda row: row.get("torch") or row["wanted_torch"],
        "result": lambda row: row.get("outcome", "not tried"),
        f"tests of {', '.join(FOLDERS)}": lambda row: ", ".join(
            f"{count} {what}" for what, count in (row.get("tests") or {}).items() if count
        ),
        "wheel, MiB": lambda row: f"{row['wheel_bytes'] / 2**20:.1f}" if row.get("wheel_bytes") else "",
    },
    lambda lines, _: [row for row in every_pair(last_of_each(lines, _pair)) if "outcome" in row],
    lambda rows: "; builds without CUDA.",
    done="Tried",
    machine=False,
    empty="\nNot tried yet: `make versions`.\n\n",
    shown=every_pair,
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Tries Pythons and torches. See the top of the file.")
    parser.add_argument("--python", default=",".join(PYTHONS))
    parser.add_argument("--torch", default=",".join(TORCHES))
    add_output_options(parser)
    args = parser.parse_args()
    complete_output(args, "versions", parser.error)
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
        card = environment_card(torch.device("cpu"), args.command)
        more = {"benchmark": "versions", "case": f"Python {version}, torch {wanted}"}
        line = result_line(card, **more, wanted_python=version, wanted_torch=wanted, **line)
        print(f"{line['case']}: {line['outcome']}", flush=True)
        append_line(args.output, line)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
