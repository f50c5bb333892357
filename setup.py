"""Builds the extension with CMake and Ninja.

    pip install --no-build-isolation .        (or -e .)

torch must be installed already: isolation would fetch another one than the one that the extension will run with.
CUDA and NCCL are compiled in when torch has them and nvcc is found, even where no GPU is installed: for the GPUs of
this machine, or for all of ARCHITECTURES where it has none. `RTP_WITH_CUDA=0` turns CUDA off, `RTP_WITH_CUDA=1` makes
its absence an error, `RTP_CUDA_ARCHITECTURES` names the architectures, `CUDA_HOME` the toolkit.

What is installed requires the minor version of torch that it was compiled with: any patch release of it can load it. A
source archive requires any torch that it can be compiled with. `RTP_LOCAL_VERSION` is appended to the version of a
wheel, after a +: benchmarks/compatibility/wheels.py sets it.
"""

from __future__ import annotations

import glob
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
ARCHITECTURES = (80, 90, 100)  # compute capabilities that are compiled for where the machine has no GPU
OLDEST_TORCH = "torch>=2.11"
HINT = """\
rtp_ext: compiling takes minutes. RTP_WITH_CUDA=0 leaves CUDA out (for CPUs only, the fastest build);
rtp_ext: RTP_CUDA_ARCHITECTURES names the GPUs to compile for, such as "90-real" (default: those of this machine)."""


def find_library(pattern: str, folders: list[Path]) -> Path | None:
    """The first file that matches `pattern` in `folders`."""
    for folder in folders:
        for match in sorted(glob.glob(str(folder / pattern))):
            return Path(match)
    return None


NO_NVCC = "no nvcc in CUDA_HOME, /usr/local/cuda or PATH"


def toolkit() -> Path | None:
    """The folder of the CUDA toolkit: where nvcc is."""
    candidates = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    on_path = shutil.which("nvcc")
    if on_path:
        candidates.append(str(Path(on_path).resolve().parent.parent))
    return next((Path(c) for c in candidates if c and (Path(c) / "bin" / "nvcc").exists()), None)


def architectures(torch, nvcc: str) -> str:
    """What to compile for, as CMake writes it: what the environment says; else the GPUs of this machine, if this nvcc
    knows them; else ARCHITECTURES.

    The newest one brings PTX, for what is newer still.
    """
    if named := os.environ.get("RTP_CUDA_ARCHITECTURES"):
        return named.replace(";", " ")  # between which CMakeLists.txt would take a line for another fact
    chosen = set()
    if torch is not None and torch.cuda.is_available():
        present = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
        chosen = {10 * major + minor for major, minor in present}
        known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout.split()
        if min(chosen) < min(ARCHITECTURES) or not {f"compute_{number}" for number in chosen} <= set(known):
            chosen = set()
    *older, newest = sorted(chosen or ARCHITECTURES)
    return " ".join([*(f"{number}-real" for number in older), str(newest)])


def cuda_facts(torch) -> dict[str, str]:
    """Where nvcc, cudart, cuBLAS and NCCL are, or the reason why the build goes without them."""
    wish = os.environ.get("RTP_WITH_CUDA", "auto")
    if wish == "0":
        return {"WITH_CUDA": "OFF", "CUDA_REASON": "RTP_WITH_CUDA=0"}
    missing = None
    facts: dict[str, str] = {}
    if torch.version.cuda is None:
        missing = "this torch has no CUDA"
    else:
        root = toolkit()
        site = Path(torch.__file__).resolve().parent.parent
        pip_folders = [Path(folder) for folder in sorted(glob.glob(str(site / "nvidia" / "*")))]
        libraries = [folder / "lib" for folder in pip_folders]
        if root is None:
            missing = NO_NVCC
        else:
            libraries += [root / "lib64", Path("/usr/lib/x86_64-linux-gnu")]
            cudart = find_library("libcudart.so.1?", libraries)
            cublas = find_library("libcublas.so.1?", libraries)
            cublas_lt = find_library("libcublasLt.so.1?", libraries)
            nccl = find_library("libnccl.so.2", libraries)
            found = {"libcudart": cudart, "libcublas": cublas, "libcublasLt": cublas_lt, "libnccl.so.2": nccl}
            absent = [name for name, path in found.items() if path is None]
            if absent:
                missing = f"{absent[0]} was not found"
            else:
                facts = {
                    "CUDA_ROOT": str(root),
                    "NVCC": str(root / "bin" / "nvcc"),
                    "CUBLAS_LIBRARY": str(cublas),
                    "CUBLASLT_LIBRARY": str(cublas_lt),
                    "CUDART_LIBRARY": str(cudart),
                    "NCCL_LIBRARY": str(nccl),
                    "PIP_CUDA_INCLUDES": "|".join(
                        str(folder / "include") for folder in pip_folders if (folder / "include").exists()
                    ),
                    "CUDA_ARCHITECTURES": architectures(torch, str(root / "bin" / "nvcc")),
                }
    if missing is not None:
        if wish == "1":
            raise SystemExit(f"rtp_ext: RTP_WITH_CUDA=1 but {missing}")
        return {"WITH_CUDA": "OFF", "CUDA_REASON": missing}
    return {"WITH_CUDA": "ON", "CUDA_REASON": f"toolkit {facts['CUDA_ROOT']}", **facts}


def kernel_facts() -> dict[str, str]:
    """What the kernels are compiled with, where torch may be missing still; see `cuda_facts`."""
    root = toolkit()
    if root is None:
        return {"WITH_CUDA": "OFF", "CUDA_REASON": NO_NVCC}
    nvcc = str(root / "bin" / "nvcc")
    facts = {"CUDA_ROOT": str(root), "NVCC": nvcc, "CUDA_ARCHITECTURES": architectures(None, nvcc)}
    return {"WITH_CUDA": "ON", "CUDA_REASON": f"toolkit {root}", **facts}


def import_torch():
    try:
        import torch
    except ImportError as error:
        raise SystemExit(
            "rtp_ext: torch is not installed in this environment. Install it first, then: "
            "pip install --no-build-isolation ."
        ) from error
    return torch


def torch_facts() -> dict[str, str]:
    torch = import_torch()
    return {
        "TORCH_VERSION": torch.__version__,
        "TORCH_ROOT": str(Path(torch.__file__).resolve().parent),
        "CXX11_ABI": str(int(torch.compiled_with_cxx11_abi())),
        **cuda_facts(torch),
    }


def tool(name: str) -> str | None:
    """A program of PATH, or else beside Python."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def run_cmake(target: str, *settings: str) -> tuple[str, Path]:
    """Configures CMakeLists.txt and builds `target`; CMake, and the folder in which that happened."""
    build = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
    build.mkdir(parents=True, exist_ok=True)
    cache = build / "CMakeCache.txt"
    kept = re.search(r"^CMAKE_MAKE_PROGRAM:\w+=(.+)$", cache.read_text() if cache.exists() else "", re.MULTILINE)
    # Another version of Ninja may not understand this one's log, and compile everything again.
    ninja = kept[1] if kept and Path(kept[1]).exists() else tool("ninja")
    cmake = tool("cmake")
    if cmake is None or ninja is None:
        missing = "ninja" if cmake else "cmake"
        raise SystemExit(f"rtp_ext: {missing} was not found. pip install {missing}")
    given = [f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_MAKE_PROGRAM={ninja}", *settings]
    if "RTP_WERROR" in os.environ:  # CMake keeps what it was told first
        given.append(f"-DRTP_WERROR={os.environ['RTP_WERROR']}")
    subprocess.run([cmake, "-G", "Ninja", "-S", str(ROOT), "-B", str(build), *given], check=True)
    subprocess.run([cmake, "--build", str(build), "--target", target], check=True)
    return cmake, build


def compile_kernels() -> None:
    """Compiles the kernels ahead of `build_ext`, which finds them compiled, where that is possible without torch."""
    wanted, root = os.environ.get("RTP_WITH_CUDA") != "0", toolkit()
    complete = root is not None and (root / "include" / "cuda_runtime.h").exists()  # or else pip brings the headers
    known = os.environ.get("RTP_CUDA_ARCHITECTURES") or shutil.which("nvidia-smi") is None  # torch will know the GPUs
    if wanted and complete and known and tool("cmake") and tool("ninja"):
        run_cmake("kernels", "-DRTP_KERNELS_ONLY=ON")


# Asked by CMakeLists.txt, and what needs no setuptools.
FACTS = {"torch_facts": torch_facts, "kernel_facts": kernel_facts}
if __name__ == "__main__" and sys.argv[1:] and sys.argv[1] in FACTS:
    print("\n".join(f"{key}={value}" for key, value in FACTS[sys.argv[1]]().items()))
    raise SystemExit(0)
if __name__ == "__main__" and sys.argv[1:] == ["kernels"]:
    compile_kernels()
    raise SystemExit(0)

from setuptools import Extension, setup  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402
from setuptools.command.egg_info import egg_info  # noqa: E402


class CMakeBuild(build_ext):
    """Configures, builds and installs CMakeLists.txt into the package."""

    def build_extensions(self) -> None:
        import_torch()
        print(HINT, flush=True)
        target = Path(self.get_ext_fullpath(self.extensions[0].name)).resolve().parent
        cmake, build = run_cmake("all", "-DRTP_KERNELS_ONLY=OFF", f"-DCMAKE_INSTALL_PREFIX={target.parent}")
        subprocess.run([cmake, "--install", str(build)], check=True)


def torch_requirement(commands: list[str]) -> str:
    """The torch that a source archive (`sdist`) can be compiled with, or else the minor version of the one here."""
    if "sdist" in commands:
        return OLDEST_TORCH
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # somebody asks for the metadata where nothing can be compiled
        return OLDEST_TORCH
    return f"torch=={'.'.join(version.split('.')[:2])}.*"


class EggInfo(egg_info):
    """Appends RTP_LOCAL_VERSION to the version, here because the setup.cfg of a source archive has the last word on
    options."""

    def finalize_options(self) -> None:
        if local := os.environ.get("RTP_LOCAL_VERSION"):
            self.tag_build = f"+{local}"
        super().finalize_options()


if __name__ == "__main__":
    setup(
        ext_modules=[Extension(f"rtp_ext.{name}", sources=[]) for name in ("_C", "_R")],
        cmdclass={"build_ext": CMakeBuild, "egg_info": EggInfo},
        install_requires=[torch_requirement(sys.argv[1:]), "numpy"],
    )
