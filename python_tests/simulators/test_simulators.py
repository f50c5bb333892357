"""The inputs of a simulator determine which library is loaded; a stale library is never loaded."""

import ctypes
import os

import compiled
import pytest

FLAGS = ["-shared", "-fPIC"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    if compiled.compiler() is None:
        pytest.skip("no C++ compiler on PATH")
    monkeypatch.setattr(compiled, "ROOT", tmp_path)
    (tmp_path / "headers" / "deep").mkdir(parents=True)
    (tmp_path / "one.cpp").write_text('#include "deep/outer.h"\nextern "C" int value() { return VALUE + other(); }\n')
    (tmp_path / "two.cpp").write_text("int other() { return 100; }\n")
    (tmp_path / "headers" / "deep" / "outer.h").write_text("#include <inner.h>\nint other();\n")
    (tmp_path / "headers" / "inner.h").write_text("#define VALUE 1\n")
    (tmp_path / "version.h").write_text("1\n")
    return tmp_path


def made(project, *flags):
    sources = [project / "one.cpp", project / "two.cpp"]
    return compiled.build("it", sources, [*FLAGS, *flags], [project / "headers"], (), [project / "version.h"])


def test_every_text_flag_and_version_counts(project):
    first = made(project)
    assert ctypes.CDLL(str(first)).value() == 101
    times = {file: file.stat().st_mtime_ns for file in first.parent.iterdir() if file.name != "lock"}
    assert made(project) == first
    assert {file: file.stat().st_mtime_ns for file in first.parent.iterdir() if file.name != "lock"} == times

    inner = project / "headers" / "inner.h"
    stamp = inner.stat()
    inner.write_text("#define VALUE 2\n")
    os.utime(inner, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # the digest depends on the text, not on the time
    second = made(project)
    assert second != first and ctypes.CDLL(str(second)).value() == 102
    kept = [file for file in second.parent.glob("*.o") if file in times]
    assert len(kept) == 1, "the object that does not depend on the header must be kept"
    assert not first.exists(), "libraries of old inputs must be removed"

    names = {second}
    for change in (lambda: made(project, "-O1"), lambda: (project / "version.h").write_text("2\n") and made(project)):
        names.add(change())
    assert len(names) == 3


def test_a_mistake_in_the_source_is_told(project):
    (project / "two.cpp").write_text("int other() { return none; }\n")
    with pytest.raises(RuntimeError, match=r"two\.cpp failed:[\s\S]*none"):
        made(project)
