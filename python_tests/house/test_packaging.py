"""Packaging: an archive that builds, the torch that it needs, and the architectures that it is compiled for."""

import re
import runpy
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from setuptools import Distribution

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def setup():
    """The names that setup.py defines."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "setup.py"), run_name="setup"))


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    """Returns the files that setuptools writes before it builds or packs anything."""
    folder = tmp_path_factory.mktemp("egg")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    return folder / "rtp_ext.egg-info"


def test_the_source_archive_is_complete(metadata):
    packed = set((metadata / "SOURCES.txt").read_text().splitlines())
    built = {".so", ".o", ".pyc"}
    needed = {
        str(file.relative_to(ROOT))
        for folder in ("csrc", "rtp_ext", "python_tests", "benchmarks", "docs")
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and file.suffix not in built and ".egg-info" not in str(file)
    }
    needed |= {"LICENSE", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md"}
    needed |= {"CMakeLists.txt", "MANIFEST.in", "Makefile", "README.md", "CHANGELOG.md", "pyproject.toml", "setup.py"}
    assert len(needed) > 300
    assert sorted(needed - packed) == []
    assert not [name for name in packed if Path(name).suffix in built]
    description = (ROOT / "CMakeLists.txt").read_text()
    assert all(source in packed for source in re.findall(r"(?<!/)csrc/[\w/]+[.]\w+", description))


def test_what_is_compiled_requires_its_minor_torch_and_a_source_archive_any(setup, metadata):
    minor = ".".join(version("torch").split(".")[:2])
    assert re.fullmatch(r"\d+\.\d+", minor)
    assert (metadata / "requires.txt").read_text().startswith(f"torch=={minor}.*\nnumpy\n")
    for command in ("bdist_wheel", "dist_info", "editable_wheel"):
        assert setup.torch_requirement([command]) == f"torch=={minor}.*"
    assert setup.torch_requirement(["-q", "sdist", "--dist-dir", "x"]) == "torch>=2.11"


def test_the_version_of_a_wheel_names_torch_and_its_variant(setup, metadata, monkeypatch):
    wheels = SimpleNamespace(
        **runpy.run_path(str(ROOT / "benchmarks" / "compatibility" / "wheels.py"), run_name="wheels")
    )
    assert wheels.local_version("2.14.1+cu130", "13.0") == "torch2.14.cu130"
    assert wheels.local_version("2.14.0", None) == "torch2.14.cpu"
    assert "\nVersion: 0.1.0\n" in (metadata / "PKG-INFO").read_text()
    monkeypatch.setenv("RTP_LOCAL_VERSION", "torch2.14.cu130")
    made = Distribution({"name": "rtp-ext", "version": "0.1.0"})
    made.command_options["egg_info"] = {"tag_build": ("setup.cfg", "")}  # as in a source archive
    command = setup.EggInfo(made)
    made._set_command_options(command)
    command.egg_base = str(ROOT)
    command.ensure_finalized()
    assert command.egg_version == made.get_version() == "0.1.0+torch2.14.cu130"


def test_every_package_and_its_data_are_installed(monkeypatch):
    monkeypatch.chdir(ROOT)
    distribution = Distribution()
    distribution.parse_config_files(["pyproject.toml"])
    files = [
        file.relative_to(ROOT)
        for file in (ROOT / "rtp_ext").rglob("*")
        if file.suffix in (".py", ".json", ".typed", ".css")
    ]
    assert set(distribution.packages) == {str(file.parent).replace("/", ".") for file in files}
    data = {Path(*package.split("."), name) for package, names in distribution.package_data.items() for name in names}
    assert data == {file for file in files if file.suffix != ".py"} and Path("rtp_ext/py.typed") in data


def test_architectures_are_those_of_the_gpus_present(setup, tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\n[ $1 = --list-gpu-arch ] && printf 'compute_%s\\n' 75 80 86 90 100\n")
    nvcc.chmod(0o755)

    def chosen(*capabilities):
        cuda = SimpleNamespace(
            is_available=lambda: bool(capabilities),
            device_count=lambda: len(capabilities),
            get_device_capability=lambda index: capabilities[index],
        )
        return setup.architectures(SimpleNamespace(cuda=cuda), str(nvcc))

    everything = "80-real 90-real 100"
    assert chosen() == everything
    assert chosen((9, 0)) == chosen((9, 0), (9, 0)) == "90"
    assert chosen((9, 0), (8, 6)) == "86-real 90"
    assert chosen((10, 0)) == "100"
    assert chosen((7, 5)) == everything  # older than anything that is compiled for
    assert chosen((10, 3)) == everything  # unknown to this nvcc, which can make PTX for it


def test_cuda_is_compiled_as_the_environment_says(setup, tmp_path, monkeypatch):
    for name in (
        "bin/nvcc",
        *(f"lib64/lib{name}" for name in ("cudart.so.13", "cublas.so.13", "cublasLt.so.13", "nccl.so.2")),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    cuda = SimpleNamespace(is_available=lambda: False)
    torch = SimpleNamespace(version=SimpleNamespace(cuda="13.0"), __file__=str(tmp_path / "torch" / "x.py"), cuda=cuda)
    for asked, expected in (
        (None, "80-real 90-real 100"),
        ("90a", "90a"),
        ("", "80-real 90-real 100"),
        ("80;90", "80 90"),
    ):
        monkeypatch.delenv("RTP_CUDA_ARCHITECTURES", raising=False)
        if asked is not None:
            monkeypatch.setenv("RTP_CUDA_ARCHITECTURES", asked)
        facts = setup.cuda_facts(torch)
        assert facts["WITH_CUDA"] == "ON" and facts["CUDA_ARCHITECTURES"] == expected
        ahead = setup.kernel_facts()  # these contain the kernels that are compiled ahead
        assert ahead.items() <= facts.items()
    monkeypatch.setenv("RTP_WITH_CUDA", "0")
    assert setup.cuda_facts(torch) == {"WITH_CUDA": "OFF", "CUDA_REASON": "RTP_WITH_CUDA=0"}
    monkeypatch.setenv("RTP_WITH_CUDA", "1")
    torch.version.cuda = None
    with pytest.raises(SystemExit, match="RTP_WITH_CUDA=1 but this torch has no CUDA"):
        setup.cuda_facts(torch)
    assert "RTP_WITH_CUDA=0" in setup.HINT and "RTP_CUDA_ARCHITECTURES" in setup.HINT


def test_kernels_are_compiled_ahead_where_it_is_known_for_which_gpus(setup, tmp_path, monkeypatch):
    """And left to the build, without an error, where there is nothing to compile them with."""
    made = []
    monkeypatch.setitem(setup.compile_kernels.__globals__, "run_cmake", lambda *given: made.append(given))
    folders = {
        "tools": ("cmake", "ninja"),
        "driver": ("nvidia-smi",),
        "cuda/bin": ("nvcc",),
        "cuda/include": ("cuda_runtime.h",),
        "bare/bin": ("nvcc",),
    }
    for folder, names in folders.items():
        for name in names:
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).touch(0o755)

    def ahead(path=("tools",), cuda="cuda", **variables):
        made.clear()
        monkeypatch.setenv("PATH", ":".join(str(tmp_path / folder) for folder in path))
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / cuda))
        monkeypatch.setattr(sys, "executable", str(tmp_path / "none" / "python"))
        for name in ("RTP_WITH_CUDA", "RTP_CUDA_ARCHITECTURES"):
            monkeypatch.delenv(name, raising=False)
            if name in variables:
                monkeypatch.setenv(name, variables[name])
        setup.compile_kernels()
        return made == [("kernels", "-DRTP_KERNELS_ONLY=ON")]

    assert ahead() and not ahead(path=()) and not ahead(RTP_WITH_CUDA="0")
    assert not ahead(path=("tools", "driver")) and not ahead(cuda="bare")
    assert ahead(path=("tools", "driver"), RTP_CUDA_ARCHITECTURES="90-real")


def test_a_build_folder_keeps_its_ninja_and_hears_of_warnings(setup, tmp_path, monkeypatch):
    asked = []
    fake = SimpleNamespace(run=lambda command, check: asked.append(command))
    for name, value in (("subprocess", fake), ("ROOT", tmp_path), ("tool", lambda name: f"/tools/{name}")):
        monkeypatch.setitem(setup.run_cmake.__globals__, name, value)
    monkeypatch.delenv("RTP_WERROR", raising=False)
    cmake, build = setup.run_cmake("all", "-DX=1")
    assert cmake == "/tools/cmake" and asked[1] == [cmake, "--build", str(build), "--target", "all"]
    assert "-DX=1" in asked[0] and "-DCMAKE_MAKE_PROGRAM=/tools/ninja" in asked[0] and "RTP_WERROR" not in str(asked)
    monkeypatch.setenv("RTP_WERROR", "1")
    kept = tmp_path / "ninja"
    (build / "CMakeCache.txt").write_text(f"A:STRING=b\nCMAKE_MAKE_PROGRAM:UNINITIALIZED={kept}\nC:BOOL=1\n")
    for found in ("/tools/ninja", str(kept)):  # gone, and there
        asked.clear()
        setup.run_cmake("all")
        assert f"-DCMAKE_MAKE_PROGRAM={found}" in asked[0] and "-DRTP_WERROR=1" in asked[0]
        kept.touch()
    assert (ROOT / "Makefile").read_text().count("RTP_WERROR=1 ") == 2  # of the kernels ahead, and of the package
