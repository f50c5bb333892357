"""Pythons and torches that the package is built with and tried: a wheel of the source archive, and a quickstart.

    python benchmarks/versions.py                                     # every pair; takes an hour and more
    python benchmarks/versions.py --python 3.12 --torch 2.11.0,2.14.1
    python benchmarks/versions.py --table                             # what was found

For each pair: an environment of its own, torch from the registry, a wheel built from the source archive (without CUDA),
installed, `doctor`, examples/quickstart.py on two ranks, and uninstalled again. A Python that is not there, or a torch
that the registry has not got for it, is a line that says so. Lines are appended to results/MACHINE/versions.jsonl; the
table has the last of each pair.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.11.0", "2.13.0", "newest")


class Failed(Exception):
    """A step that did not work, and the last of what it said."""


def call(*command: str, **options: Any) -> str:
    environment = {**os.environ, "RTP_WITH_CUDA": "0", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, **options)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise Failed(f"{Path(command[0]).name} {' '.join(command[1:4])}: {said[-1] if said else done.returncode}")
    return done.stdout


def find_python(version: str) -> str | None:
    """A Python of that version: on the path, or of pyenv."""
    places = [shutil.which(f"python{version}"), sys.executable]
    places += sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")), reverse=True)
    for place in places:
        if place and Path(place).exists():
            told = subprocess.run([place, "--version"], capture_output=True, text=True).stdout
            if told.startswith(f"Python {version}."):
                return place
    return None


def attempt(python: str, torch: str, folder: Path) -> dict[str, Any]:
    """What came of one pair. Raises Failed."""
    call(python, "-m", "venv", str(folder / "venv"))
    here = str(folder / "venv" / "bin" / "python")
    wanted = "torch" if torch == "newest" else f"torch=={torch}"
    call(
        here,
        "-m",
        "pip",
        "install",
        "--quiet",
        wanted,
        "numpy",
        "setuptools>=77",
        "wheel",
        "cmake",
        "ninja",
        "pybind11",
    )
    found = call(here, "-c", "import torch; print(torch.__version__)").strip()
    began = time.monotonic()
    call(here, "setup.py", "-q", "sdist", "--dist-dir", str(folder / "sdist"), cwd=ROOT)
    (archive,) = (folder / "sdist").glob("*.tar.gz")
    call(here, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder), str(archive))
    seconds = time.monotonic() - began
    (wheel,) = folder.glob("*.whl")
    call(here, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel))
    call(here, "-m", "rtp_ext", "doctor", cwd=folder)
    shutil.copy(ROOT / "examples" / "quickstart.py", folder)
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "quickstart.py")
    said = re.findall(r"loss (\S+), (\d+) parameters", call(here, *ranks, cwd=folder))
    if len(said) != 2 or not all(float(loss) < 5.0 for loss, _ in said):
        raise Failed(f"quickstart: expected two losses below 5, got {said}")
    call(here, "-m", "pip", "uninstall", "--quiet", "-y", "rtp-ext")
    left = list((folder / "venv").rglob("rtp_ext*"))
    if left:
        raise Failed(f"uninstall: left {left[0]}")
    return {"torch": found, "loss": float(said[0][0]), "wheel_bytes": wheel.stat().st_size, "build_s": round(seconds)}


def table(lines: list[dict[str, Any]]) -> str:
    rows = {(line["python"], line["wanted"]): line for line in lines}
    text = ["| Python | torch | came of it | wheel, MiB | build, s |", "| --- | --- | --- | --- | --- |"]
    for line in rows.values():
        size = f"{line['wheel_bytes'] / 2**20:.1f}" if line.get("wheel_bytes") else ""
        text.append(
            f"| {line['python']} | {line.get('torch') or line['wanted']} | {line['outcome']} | {size} | "
            f"{line.get('build_s') or ''} |"
        )
    dates = sorted(line["date"][:10] for line in rows.values())
    return f"\nTried {' to '.join(dict.fromkeys((dates[0], dates[-1])))}.\n\n" + "\n".join(text) + "\n\n"


def read(machine: str) -> list[dict[str, Any]]:
    path = ROOT / "benchmarks" / "results" / machine / "versions.jsonl"
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description="Tries Pythons and torches. See the top of the file.")
    parser.add_argument("--python", default=",".join(PYTHONS))
    parser.add_argument("--torch", default=",".join(TORCHES))
    parser.add_argument("--machine", default="cpu-2core", help="the folder under results/")
    parser.add_argument("--table", action="store_true", help="try nothing: print the last results of each")
    args = parser.parse_args()
    if args.table:
        print(table(read(args.machine)))
        return 0
    failed = 0
    for version in args.python.split(","):
        for torch in args.torch.split(","):
            line: dict[str, Any] = {"benchmark": "versions", "python": version, "wanted": torch}
            python = find_python(version)
            try:
                if python is None:
                    line["outcome"] = "no such Python here"
                else:
                    with tempfile.TemporaryDirectory() as folder:
                        line.update(attempt(python, torch, Path(folder)), outcome="works")
            except Failed as problem:
                line["outcome"] = str(problem)
                failed += 1
            line["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
            print(json.dumps(line), flush=True)
            path = ROOT / "benchmarks" / "results" / args.machine / "versions.jsonl"
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
