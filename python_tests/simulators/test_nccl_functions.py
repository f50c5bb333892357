"""The functions of NCCL that csrc links or looks up are in the libnccl of this environment, from their version on."""

import ctypes
import re
from pathlib import Path

import pytest

from rtp_ext.ring.links.transports import BLOCKING_SINCE

ROOT = Path(__file__).resolve().parents[2]
LINKED = re.compile(r"\b(nccl[A-Z]\w+)\(")
LOOKED_UP = re.compile(r'nccl_function<\w+>\("(nccl\w+)"\)')
COMMENT = re.compile(r"//.*$", re.MULTILINE)
# The first tag of NCCL with the function. Every other function is older than 2.19.1, and is linked.
SINCE = {
    "ncclCommWindowRegister": 22703,
    "ncclCommWindowDeregister": 22703,
    "ncclCommRevoke": 22807,
    "ncclGetPeerDevicePointer": 22902,
}


def _named(look):
    sources = [file for file in (ROOT / "csrc").rglob("*") if file.suffix in (".cpp", ".h", ".cu", ".cuh")]
    return {name for file in sources for name in look.findall(COMMENT.sub("", file.read_text()))}


def test_functions_that_are_looked_up_have_a_version():
    assert _named(LOOKED_UP) == SINCE.keys()
    assert SINCE["ncclCommRevoke"] == BLOCKING_SINCE
    simulated = (ROOT / "python_tests" / "simulators" / "simulated_cuda" / "nccl" / "windows.cpp").read_text()
    assert {name: int(since) for name, since in re.findall(r'\{"(nccl\w+)", \{(\d+),', simulated)} == SINCE


def test_the_installed_library_has_the_functions():
    nvidia = pytest.importorskip("nvidia", reason="no package of NVIDIA here, as beside a CPU torch")
    found = [file for folder in nvidia.__path__ for file in Path(folder).glob("nccl/lib/libnccl.so.2")]
    if not found:
        pytest.skip("no libnccl.so.2 in this environment")
    library, version = ctypes.CDLL(str(found[0])), ctypes.c_int()
    assert library.ncclGetVersion(ctypes.byref(version)) == 0
    linked = _named(LINKED)
    assert {"ncclSend", "ncclCommInitRankConfig", "ncclMemAlloc"} <= linked and not linked & SINCE.keys()
    assert [name for name in sorted(linked) if not hasattr(library, name)] == []
    assert not hasattr(library, "ncclSendd"), "control"
    told = {name: hasattr(library, name) for name in SINCE}
    assert told == {name: version.value >= since for name, since in SINCE.items()}, version
