"""The last operations of a ring: recorded when it fails and on request; findings from the files of all ranks."""

import contextlib
import faulthandler
import os
import re
import resource
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

import rtp_ext
from rtp_ext.__main__ import main
from rtp_ext.functional import rotated_linear
from rtp_ext.observe import record
from rtp_ext.ring.prepared import Prepared

NAMES = ("first", "second", "third")
NAP = 0.4


class Steps:
    """Three layers by name, and what a rank does instead of the usual in one step."""

    def __init__(self, ring: rtp_ext.Ring) -> None:
        self.ring = ring
        self.weights = {name: torch.nn.Parameter(torch.ones(4, 6)) for name in NAMES}
        self.prepared = {name: Prepared() for name in NAMES}

    def __call__(self, skip: str = "", nap: str = "", seconds: float = NAP) -> None:
        total = torch.zeros(())
        for name, weight in self.weights.items():
            if name == nap:
                time.sleep(seconds)
            if name != skip:
                options = {"ring": self.ring, "prepared": self.prepared[name], "name": name}
                total = total + rotated_linear(torch.ones(3, 6), weight, **options).sum()
        total.backward()


def _tells(rank, ranks, folder, transport):
    faulthandler.unregister(signal.SIGUSR1)  # of the harness; the signal is the rings' then
    folder = Path(folder)
    os.environ["RTP_RECORD_DIR"] = str(folder)
    told = {}

    def keep(what, ring):
        path = folder / f"rtp_record_{ring.token}_rank{rank}.bin"
        (folder / what).mkdir(exist_ok=True)
        shutil.copy(path, folder / what)
        return str(path)

    with rtp_ext.Ring(transport=transport, timeout=20.0) as ring:
        step = Steps(ring)
        for _ in range(3):
            step()
        assert ring.record() == keep("calm", ring)
        step(nap="second" if rank == ranks - 1 else "")
        ring.record()
        keep("late", ring)
        dist.barrier()
    # A rank leaves out a layer.
    ring = rtp_ext.Ring(transport=transport, timeout=3.0)
    step = Steps(ring)
    for _ in range(2):
        step()
    with pytest.raises(rtp_ext.RotationError) as caught:
        for _ in range(2):
            step(skip="second" if rank == 1 else "")
    told["skipped"] = str(caught.value)
    assert keep("skipped", ring) in told["skipped"], told["skipped"]
    with pytest.raises(rtp_ext.RotationError, match=r"cannot be used any more.*did last: ") as caught:
        step()
    dist.barrier()
    # A rank that stays away, and gets a signal for its record meanwhile.
    ring = rtp_ext.Ring(transport=transport, timeout=1.0)
    step = Steps(ring)
    step()
    dist.barrier()
    if rank == 0:
        threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        time.sleep(2.0)
        assert ring.alive
    else:
        with pytest.raises(rtp_ext.RingTimeout) as caught:
            step()
        told["away"] = str(caught.value)
    keep("away", ring)
    dist.barrier()
    # A rank that stays away from a collective.
    ring = rtp_ext.Ring(transport=transport, timeout=1.0)
    step = Steps(ring)
    step()
    dist.barrier()
    if rank == 0:
        time.sleep(1.5)
    else:
        after = r"after first backward, (weight|gradient) hop \d of \d to rank \d"
        with pytest.raises(
            rtp_ext.RingTimeout, match=rf"^all_gather of values on rank {rank} of {ranks}, {after}: a rank of"
        ):
            ring.all_gather(torch.ones(2))
    dist.barrier()
    # A lost rank.
    ring = rtp_ext.Ring(transport=transport, timeout=3.0)
    step = Steps(ring)
    step()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(rtp_ext.RingTimeout):
        for _ in range(100):
            step()
    keep("lost", ring)
    return told


@pytest.mark.parametrize(("ranks", "transport"), [(2, "tcp"), (3, "shm")])
def test_records_of_all_ranks_say_who_was_late_skipped_or_stayed_away(ranks, transport, tmp_path, capsys):
    run_ranks(_tells, ranks, str(tmp_path), transport, lost={1})

    def told(what):
        assert main(["record", str(tmp_path / what)]) == 0
        return capsys.readouterr().out

    last = ranks - 1
    first_hop = f"second forward, weight hop 1 of {last}"
    calm, late = told("calm"), told("late")
    sleepy = rf"rank {last} was (\S+) s later than others, and waited for no rank, before {first_hop}"
    seconds, *others = map(float, re.findall(sleepy, late))  # the latest first; a machine under load adds others
    assert NAP * 0.8 < seconds < NAP + 1.0 and all(other < NAP / 2 for other in others), late
    assert all(float(found) < NAP / 2 for found in re.findall(sleepy, calm)), f"control: {calm}"
    assert "asked for by Ring.record" in calm and "none of" not in calm
    waited = re.findall(rf"rank 0 waited (\S+) s in all for rank {last}", late)
    assert waited and float(waited[0]) > NAP / 2, late

    skipped = told("skipped")
    assert re.search(r"out of step from weight hop \d+ on: rank 0 posted second forward.*rank 1 posted third", skipped)
    assert "rank 1 skipped second forward" in skipped and "rank 0 skipped" not in skipped, skipped

    away = told("away")
    assert re.search(r"rank 0 \(process \d+\): was in no operation for [01]\.\d+ s, after", away), away
    assert "written: asked for by SIGUSR1" in away
    assert re.search(r"rank 1 waited for first forward, weight hop 1 of \d, which rank 0 never posted", away), away
    assert "while others waited" in away

    lost = told("lost")
    assert "none of rank 1" in lost.splitlines()[0] and "which has left no record" in lost, lost


def test_what_is_no_record_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RTP_RECORD_DIR", str(tmp_path))
    ring = rtp_ext.Ring.emulated(2)
    assert list(ring.rotate(torch.ones(3)))
    path = Path(ring.record())
    assert path == tmp_path / f"rtp_record_{ring.token}_rank0.bin"
    found = record.read(path)
    told = [(event.kind, event.operation) for event in found.of("hop", "pass")]
    assert told == [("pass", "rotate"), ("hop", "rotate")]
    assert found.posted == {"weight": 1, "gradient": 0} and found.of("hop")[0].bytes == 12
    (tmp_path / "short").write_bytes(path.read_bytes()[:2000])
    (tmp_path / "other").write_bytes(b"text" * 1000)
    fields = list(record._HEADER.unpack_from(path.read_bytes()))
    for name, place, value in (("crowd", 7, 2**31 - 1), ("terminal", -1, b"\x1b[2J\x07said")):
        changed = [*fields]
        changed[place] = value
        (tmp_path / name).write_bytes(record._HEADER.pack(*changed) + path.read_bytes()[record._HEADER.size :])
    assert record.read(tmp_path / "terminal").reason == "\ufffd[2J\ufffdsaid"
    for files, message in (
        ([tmp_path / "crowd"], "expected a rank of at most 1048576 ranks, got rank 0 of 2147483647"),
        ([tmp_path / "short"], "of this version's layout, got 2000"),
        ([tmp_path / "other"], "expected a record of a ring"),
        ([path, path], "expected one record of a rank"),
        ([tmp_path / "none"], f"{tmp_path / 'none'}: no such file"),
    ):
        assert main(["record", *map(str, files)]) == 1
        assert message in capsys.readouterr().err
    monkeypatch.setenv("RTP_RECORD_DIR", str(tmp_path / "missing"))
    with pytest.raises(OSError, match=r"cannot write .*missing.*No such file"):
        rtp_ext.Ring.emulated(2).record()


def test_old_events_make_room(tmp_path, monkeypatch):
    """More events than there are places: the newest stay, whole and in order."""
    monkeypatch.setenv("RTP_RECORD_DIR", str(tmp_path))
    ring = rtp_ext.Ring.emulated(4)
    for _ in range(1200):
        list(ring.rotate(torch.ones(3)))
    found = record.read(ring.record())
    numbers = [event.number for event in found.events]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) and 8000 < len(numbers) <= 8192
    assert [event.count for event in found.of("hop")][-3:] == [3597, 3598, 3599]
    assert all(event.end >= event.begin > 0 for event in found.of("compute", "pass"))


def test_a_record_follows_nothing_that_others_put_in_its_place(tmp_path, monkeypatch):
    """Its folder may be one that everyone can write to."""
    monkeypatch.setenv("RTP_RECORD_DIR", str(tmp_path))
    ring = rtp_ext.Ring.emulated(2)
    list(ring.rotate(torch.ones(3)))
    path = Path(ring.record())
    partial = path.with_name(f"{path.name}.new")
    expected, mine = path.stat().st_size, tmp_path / "mine"
    for plant in (
        lambda: partial.symlink_to(mine),
        lambda: os.mkfifo(partial),
        lambda: os.link(mine, partial),
        lambda: partial.write_bytes(b"kept open by another user"),
    ):
        mine.write_text("mine")
        path.unlink()
        plant()
        with open(partial, "rb") if partial.is_file() else contextlib.nullcontext() as opened:
            assert ring.record() == str(path) and path.stat().st_size == expected
            assert opened is None or len(opened.read()) < 64, "the other user reads nothing of it"
        assert not path.is_symlink() and mine.read_text() == "mine" and not partial.exists()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))  # as a disk that is full
    try:
        with pytest.raises(OSError, match=r"cannot write .*File too large"):
            ring.record()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not partial.exists(), "the part that was written goes"


def test_a_rank_that_waits_for_a_gather():
    """It names the ranks that have not come, and no neighbour."""

    def record_of(rank, posted, waits):
        event = record.RecordedEvent(1, 10, 0, 0, 8, 2, "first forward", -1, -1, 0, 1, "hop", "weight", "forward")
        counts = {"weight": posted, "gradient": 0}
        waiting = (event, "received", 20) if waits else None
        events = [event] if waits else []
        return record.Record("", rank, 4, 1, "a", "nccl", "", "", True, 10**9, 0, counts, waiting, events)

    records = {0: record_of(0, 3, True), 1: record_of(1, 2, False), 3: record_of(3, 3, False)}
    assert record.not_posted(records) == [
        "rank 0 waited for first forward, weight gather, which rank 1 never posted",
        "rank 0 waited for first forward, weight gather of rank 2, which has left no record",
    ]
    assert "for first forward, weight gather, of all ranks" in record.report([record.to_dict(records)])
