"""The command line, as a user runs it."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from rtp_ext import _native
from rtp_ext.__main__ import main
from rtp_ext.observe import doctor
from rtp_ext.ring import ring


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "rtp_ext", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_schedule_prints_the_table_and_draws_the_timeline(tmp_path):
    path = tmp_path / "timeline.png"
    done = run("schedule", "--ranks", "4", "--op", "linear", "--pass", "backward", "--plot", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("linear backward, 4 ranks, route ring, out of place\n")
    assert "2 weight slots, 2 gradient slots" in done.stdout
    assert re.search(r"0 +weight +W0 -> 3, W1 <- 1 +W1 -> 0, W2 <- 2 +W2 -> 1, W3 <- 3 +W3 -> 2, W0 <- 0", done.stdout)
    assert re.search(r"13 +compute +wgrad G0 \+= +wgrad G1 \+= +wgrad G2 \+= +wgrad G3 \+=", done.stdout)
    assert str(path) in done.stdout
    assert path.read_bytes().startswith(b"\x89PNG")


def test_schedule_of_two_levels(tmp_path, capsys):
    two_levels = ["schedule", "--ranks", "4", "--route", "two-level", "--hosts", "2"]
    path = tmp_path / "timeline.svg"
    assert main([*two_levels, "--outer-time", "3.5", "--plot", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "linear forward, 4 ranks, route two-level (2 hosts of 2 ranks), out of place\n"
        "each rank: 4 forward, 3 weight hops, 0 gradient hops, 1 of them between hosts; 2 weight slots"
    )
    assert re.search(r"0 +outer weight +W0 -> 2, W2 <- 2 +W1 -> 3, W3 <- 3 +W2 -> 0, W0 <- 0", printed)
    drawn = path.read_text()
    assert "outer weight hop (what arrives)" in drawn and "time (5.5 in all, 4 without communication)" in drawn
    assert main([*two_levels, "--pass", "backward", "--halves"]) == 0
    assert "out of place (halves do not apply on two levels)" in capsys.readouterr().out
    assert main(["schedule", "--ranks", "3", "--route", "two-level"]) == 0
    assert "route ring (two-level does not apply to one host), out of place" in capsys.readouterr().out
    assert main(["schedule", "--ranks", "3", "--route", "two-level", "--hosts", "3"]) == 0
    assert "route ring (two-level does not apply to hosts of one rank)" in capsys.readouterr().out


def test_a_wrong_argument_ends_with_exit_code_2():
    done = run("schedule", "--ranks", "0")
    assert done.returncode == 2
    assert "argument --ranks: expected at least 1, got 0" in done.stderr
    assert done.stdout == ""


def test_doctor_runs():
    done = run("doctor")
    assert done.returncode == 0, done.stderr
    assert f"torch        {torch.__version__}" in done.stdout
    assert f"python       {sys.version.split()[0]}" in done.stdout
    said = " ".join(done.stdout.split())
    for name, (works, why) in doctor.transports().items():
        assert f"{name} {'works' if works else 'does not work'}: {why}" in said
    if _native.with_cuda:
        assert re.search(r"NCCL +compiled against 2\.\d+\.\d+, loaded 2\.\d+\.\d+", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: command"),
        (["conquer"], "invalid choice: 'conquer'"),
        (["shedule"], "did you mean schedule?"),
        (["schedule", "--ranks", "4", "--rout", "ringg"], "did you mean ring?"),
        (["schedule", "--ranks", "4", "--hosst", "2"], "unknown argument --hosst; did you mean --hosts?"),
        (["schedule"], "the following arguments are required: --ranks"),
        (["schedule", "--ranks", "two"], "argument --ranks: invalid"),
        (
            ["schedule", "--ranks", "4", "--hosts", "2"],
            "argument --hosts: expected --route two-level, got ring",
        ),
        (
            ["schedule", "--ranks", "4", "--hosts", "3", "--route", "two-level"],
            "hosts of equally many of the 4 ranks, got 3 hosts",
        ),
        (["schedule", "--ranks", "4", "--hosts", "2", "--route", "two-level", "--in-place"], "got in_place"),
        (["schedule", "--ranks", "2", "--op", "conv"], "argument --op: invalid choice: 'conv'"),
        (["schedule", "--ranks", "2", "--pass", "up"], "argument --pass: invalid choice: 'up'"),
        (["schedule", "--ranks", "2", "--route", "scenic"], "argument --route: invalid choice: 'scenic'"),
        (["schedule", "--ranks", "2", "--rank-only", "2"], "argument --rank-only: expected 0 to 1, got 2"),
        (["schedule", "--ranks", "2", "--rank-only", "-1"], "argument --rank-only: expected 0 to 1, got -1"),
        (["schedule", "--ranks", "2", "--copy-time", "-1"], "argument --copy-time: expected a finite time of at least"),
        (["schedule", "--ranks", "2", "--hop-time", "-1"], "argument --hop-time: expected a finite time of at least 0"),
        (
            ["schedule", "--ranks", "2", "--hop-time", "inf"],
            "argument --hop-time: expected a finite time of at least 0",
        ),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_schedule_of_one_rank_names_buffers(capsys):
    assert main(["schedule", "--ranks", "3", "--in-place", "--rank-only", "2"]) == 0
    text = capsys.readouterr().out
    assert "in place" in text and "1 weight slot, 0 gradient slots" in text
    assert re.search(r"0 +weight +W2 -> 0, W1 <- 1 +weight home +weight slot 0", text)
    assert re.search(r"6 +compute +W2 to home +weight slot 0 +weight home", text)


def test_schedule_options_reach_the_schedule(capsys):
    assert main(["schedule", "--ranks", "4", "--route", "direct"]) == 0
    assert re.search(r"2 +weight +W0 -> 2, W2 <- 2", capsys.readouterr().out)
    assert main(["schedule", "--ranks", "4", "--group", "2"]) == 0
    assert "groups of 2" in capsys.readouterr().out
    assert main(["schedule", "--ranks", "4", "--op", "embedding", "--pass", "backward", "--in-place"]) == 0
    text = capsys.readouterr().out
    assert "route ring, out of place (no weights travel)" in text
    assert "embedding backward" in text and "0 weight hops, 3 gradient hops" in text and "dgrad" not in text


def test_schedule_of_gathered_shards_halves_and_lanes(tmp_path, capsys):
    path = tmp_path / "timeline.svg"
    backward = ["schedule", "--ranks", "3", "--pass", "backward", "--plot", str(path)]
    assert main([*backward, "--route", "gather", "--two-lanes"]) == 0
    text = capsys.readouterr().out
    assert "route direct, out of place, groups of 3 (two lanes do not apply in groups)" in text
    assert "1 weight slot (1 of 3 shards)" in text and re.search(r"3 +compute +wgrad G0 and 2 more =", text)
    assert main([*backward, "--halves", "--two-lanes"]) == 0
    text = capsys.readouterr().out
    assert "out of place, gradients in halves, two lanes" in text and re.search(r"4 +side +wgrad G1b =", text)
    assert "<!-- G1b -->" in path.read_text() and "<!-- side -->" in path.read_text()


@pytest.mark.parametrize("op", ["mlp", "cross_entropy", "experts"])
def test_schedule_of_a_bundle(op, tmp_path, capsys):
    assert main(["schedule", "--ranks", "4", "--op", op]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{op} forward, 4 ranks, route ring, out of place\n")
    assert "each rank: 4 forward, 3 weight hops, 0 gradient hops; 2 weight slots, 0 gradient slots" in text

    path = tmp_path / "timeline.svg"  # each text stands in a comment
    assert main(["schedule", "--ranks", "4", "--op", op, "--pass", "backward", "--plot", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{op} backward, 4 ranks, route ring, out of place\n")
    assert "each rank: 4 dgrad, 4 wgrad, 3 weight hops, 3 gradient hops; 2 weight slots, 2 gradient slots" in text
    assert re.search(r"3 +compute +dgrad W1 .*\n +4 +compute +wgrad G1 = .*\n +5 +gradient +G1 -> 3, G2 <- 1 ", text)
    assert re.search(r"14 +compute +add G0 to home +add G1 to home +add G2 to home +add G3 to home", text)
    assert f"<!-- {op} backward, 4 ranks" in path.read_text() and "<!-- add to home -->" in path.read_text()

    path = tmp_path / "timeline.png"
    options = ["--in-place", "--rank-only", "2", "--copy-time", "0.5", "--plot", str(path)]
    assert main(["schedule", "--ranks", "3", "--op", op, "--pass", "backward", *options]) == 0
    text = capsys.readouterr().out
    assert "3 weight hops, 2 gradient hops; 1 weight slot, 2 gradient slots" in text
    assert re.search(r"compute +W2 to home +weight slot 0 +weight home\n.*wgrad G2 = +weight home +gradient home", text)
    assert re.search(r"compute +add G2 to home +gradient slot 0, gradient home +gradient home\n", text)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_drawn_ends_with_exit_code_1(tmp_path, capsys, monkeypatch):
    for path in (tmp_path / "missing" / "timeline.png", tmp_path / "timeline.unknown"):
        assert main(["schedule", "--ranks", "2", "--plot", str(path)]) == 1
        assert f"cannot draw {path}" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["schedule", "--ranks", "2", "--plot", str(tmp_path / "timeline.png")]) == 1
    assert "rtp-ext[plot]" in capsys.readouterr().err


# -- doctor ----------------------------------------------------------------------------------------------------------


def test_version_name():
    assert [_native.version_name(code) for code in (23007, 22809, 22105)] == ["2.30.7", "2.28.9", "2.21.5"]


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")
def test_shm_works_here():
    assert doctor.shm_refusal() is None


def test_transports_are_those_of_a_ring_and_say_why():
    found = doctor.transports()
    assert set(found) == (set(ring.TRANSPORTS) - {"auto"}) | {"emulated"}
    assert all(why for _, why in found.values())
    assert found["emulated"][0]
    assert found["c10d"] == (True, f"any backend of torch.distributed; here {', '.join(doctor.c10d_backends())}")
    assert found["nccl"][0] == (ring.nccl_refusal() is None)


def test_a_transport_that_fails_is_reported_with_its_reason(monkeypatch):
    def fail(*_):
        raise _native.RotationError("no memory files here")

    monkeypatch.setattr(_native, "ShmTransport", fail)
    monkeypatch.setattr(_native, "TcpTransport", fail)
    monkeypatch.setattr(_native, "emulated_transport", fail)
    monkeypatch.setattr(ring, "nccl_refusal", lambda: "no GPU at all")
    found = doctor.transports()
    assert found["shm"] == found["tcp"] == found["emulated"] == (False, "no memory files here")
    assert found["nccl"] == (False, "no GPU at all")
    assert "  shm        does not work: no memory files here" in doctor.report()


def test_another_process_that_cannot_open_our_memory_is_reported(monkeypatch):
    monkeypatch.setattr(doctor.sys, "executable", "/bin/false")
    refusal = doctor.shm_refusal()
    assert refusal is not None and "another process cannot open this one's memory" in refusal


def test_an_older_nccl_is_reported(monkeypatch):
    monkeypatch.setattr(_native, "nccl_versions", lambda: (23007, 22809))
    assert "the loaded NCCL is older than 2.30.7" in doctor.report()
    monkeypatch.setattr(_native, "nccl_versions", lambda: (23007, 23007))
    assert "older" not in doctor.report()


def test_gpus_and_links_are_reported(monkeypatch, tmp_path):
    device = SimpleNamespace(name="A GPU", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: 2 not in (one, other))
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho GPU0 NV18 $*\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    text = doctor.report()
    assert "  2: A GPU, 80.0 GiB, compute capability 9.0" in text
    assert "  0 - 1: direct access\n  0 - 2: no direct access\n  1 - 2: no direct access" in text
    assert "    GPU0 NV18 topo -m" in text
    program.write_text("#!/bin/sh\nexit 3\n")
    assert "returned non-zero exit status 3" in doctor.report()
    program.unlink()
    assert "nvidia-smi: not found" in doctor.report()
