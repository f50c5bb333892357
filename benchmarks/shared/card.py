"""The environment of a measurement, and the format of the lines that all benchmarks append to their files."""

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from rtp_ext import _native
from rtp_ext.host import cores, cpu_name
from shared.hosts import card as made_hosts

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
WITHOUT_RESULTS = (":/", ":(top,exclude)benchmarks/results")  # all files that git tracks except these
# fmt: off
KEYS = (
    "benchmark", "case", "shape", "n", "k", "tokens", "ranks", "direction", "transport", "link", "dtype",
    "t_g1_us", "t_gr_us", "t_c_us", "t_ov_us", "t_base_us", "e_hide", "roofline", "e_ect",
    "peak_bytes", "step_ms", "tokens_per_s", "strategy", "device", "driver", "cuda", "torch", "nccl",
    "commit", "date", "command",
)
# fmt: on


def output_of(*command: str) -> str | None:
    """First line that a program prints, or None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().partition("\n")[0] or None


def command_line() -> str:
    """The command of this process as it was typed, but for folders of this machine. To be asked before ranks are
    spawned, which have another one."""
    return shlex.join(["python", *(_told(word) for word in sys.orig_argv[1:])])


def _told(word: str) -> str:
    """Returns the path of a file within the project; the name of any other file."""
    path = Path(word)
    if not path.is_absolute():
        return word
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def environment_card(device: torch.device, command: str) -> dict[str, Any]:
    """Hardware, versions, commit, time (UTC, ISO 8601) and `command`; unknown values are None.

    On made hosts also how many, their links and their cores; `cores` are those of all.
    """
    on_gpu, hosts = device.type == "cuda", made_hosts()
    return {
        "machine": machine_name(device),
        "device": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "gpus": torch.cuda.device_count(),
        "cpu": cpu_name(),
        "cores": hosts.get("cores", cores()),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None,
        "cuda": torch.version.cuda if on_gpu else None,
        "torch": torch.__version__,
        "nccl": loaded_nccl() if on_gpu else None,
        "nccl_settings": {key: value for key, value in sorted(os.environ.items()) if key.startswith("NCCL_")},
        "python": platform.python_version(),
        "commit": _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        **hosts,
    }


def loaded_nccl() -> str | None:
    """Returns the version of the NCCL of this process, which LD_PRELOAD can change: torch tells that of its build."""
    versions = _native.nccl_versions()
    return None if versions is None else _native.version_name(versions[1])


def _commit() -> str | None:
    """Returns the commit that RTP_COMMIT names, of which a prebuilt extension is; else that of git, with `-dirty` if
    tracked files other than results differ from it."""
    if named := os.environ.get("RTP_COMMIT"):
        return named
    commit = output_of("git", "rev-parse", "--short=12", "HEAD")
    changed = output_of("git", "status", "--porcelain", "--untracked-files=no", "--", *WITHOUT_RESULTS)
    return commit if changed is None else f"{commit}-dirty"


def machine_name(device: torch.device) -> str:
    """Folder name for results from this kind of machine, such as `cpu-2core` or `h200-8gpu`."""
    if device.type == "cpu":
        return f"cpu-{made_hosts().get('cores', cores())}core"
    name = torch.cuda.get_device_name(device).lower().removeprefix("nvidia ")
    return f"{re.sub('[^a-z0-9]+', '-', name)}-{torch.cuda.device_count()}gpu"


def result_line(card: dict[str, Any], **values: Any) -> dict[str, Any]:
    """One result: every key of `KEYS` in order (unknown = None), then the other keys of `card` and `values`."""
    known = {**card, **values}
    return {**{key: known.get(key) for key in KEYS}, **known}


def add_output_options(parser: argparse.ArgumentParser, quick: str | None = None) -> None:
    """Adds --machine and --output, and --quick with a help `quick`, for `complete_output`."""
    add = parser.add_argument
    add("--machine", help="folder under results/ (default: from the CPU or GPU, such as cpu-2core)")
    add("--output", type=Path, metavar="FILE.jsonl", help="append the results here instead of results/MACHINE/")
    if quick is not None:
        add("--quick", action="store_true", help=quick)


def complete_output(
    args: argparse.Namespace, name: str, error: Callable[[str], Any], device: torch.device | None = None
) -> None:
    """Sets `command`, which ranks that are spawned no longer know, and `output`: that of --output, or the file of this
    name, of this machine; None with --quick alone. Calls `error` where it cannot be written, before anything runs.
    device: of the results; default: a CPU."""
    args.command = command_line()
    if args.output is None and not getattr(args, "quick", False):
        args.output = RESULTS / (args.machine or machine_name(device or torch.device("cpu"))) / f"{name}.jsonl"
    if args.output is not None and (refusal := refusal_to_write(args.output)) is not None:
        error(refusal)


def refusal_to_write(path: Path) -> str | None:
    """Why lines cannot be appended to `path`, or None. Makes the file and its folder: to be asked before a run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as problem:
        return f"the results file cannot be written: {problem}"
    return None


def append_line(path: Path | None, line: dict[str, Any]) -> None:
    """Appends `line` to a file of JSON lines, making its folder; None: does nothing."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def gpu_state() -> dict[str, float | None]:
    """Returns the current clocks, power and temperature of the first GPU; None for values that nvidia-smi lacks."""
    keys = {
        "sm_clock_mhz": "clocks.sm",
        "memory_clock_mhz": "clocks.mem",
        "power_w": "power.draw",
        "temperature_c": "temperature.gpu",
    }
    told = output_of("nvidia-smi", f"--query-gpu={','.join(keys.values())}", "--format=csv,noheader,nounits", "--id=0")
    values = told.split(", ") if told else [""] * len(keys)
    return {key: _number(value) for key, value in zip(keys, values, strict=True)}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
