"""A sample of the fault matrix, and that it judges."""

import multiprocessing

import pytest
from reliability import faults
from reliability.fault_ranks import Cell

SAMPLE = [
    Cell("kill", "backward", "shm", 2),
    Cell("stop", "prefetch", "tcp", 2, pause=3.0),
    Cell("exception on all", "backward", "shm", 3),
    Cell("late rank", "optimizer", "c10d", 2),
    Cell("full shared memory", "backward", "shm", 2),
    Cell("skipped layer", "forward", "tcp", 3),
    Cell("NaN", "backward", "tcp", 2),
    Cell("kill", "outer reduction", "shm", 2),
]


@pytest.fixture(autouse=True)
def generous(monkeypatch):
    """Allows more time, for a loaded machine: the matrix itself runs alone."""
    monkeypatch.setattr(faults, "SLACK", 6.0)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["pytest", "torch._dynamo", "rtp_ext.convert"])


@pytest.mark.parametrize("cell", SAMPLE, ids=lambda cell: cell.name)
def test_a_sample_of_the_matrix(cell):
    row = faults.run(cell)
    assert row["verdict"] == "pass", (row["problems"], row["notes"])


def test_what_goes_wrong_is_judged_wrong():
    cell = Cell("kill", "forward", "shm", 3)
    who = "; who failed: global rank 1 (its process has ended); what this rank did last: rank1.bin"
    good = {"ended": "error", "at": 11.0, "kind": "RingTimeout", "text": "second.up forward, weight hop 1 of 2" + who}
    calm = {"hanging": [], "left": []}
    assert faults.judge(cell, {0: good, 2: good}, 10.0, calm)[0] == []
    for told, ended, problem in (
        ({0: good}, calm, "rank 2: expected an error, got nothing"),
        ({0: good, 2: {"ended": "done"}}, calm, "rank 2: expected an error, got done"),
        ({0: good, 2: {**good, "at": 30.0}}, calm, "rank 2: 20.0 s"),
        ({0: good, 2: {**good, "text": "broken pipe, hop 1" + who}}, calm, "no operation"),
        ({0: good, 2: {**good, "text": "all_gather on rank 2 of 3" + who}}, calm, "no hop"),
        ({0: good, 2: {**good, "text": good["text"].replace("global rank 1", "global rank 0")}}, calm, "got [0]"),
        ({0: good, 2: {**good, "text": good["text"].replace("rank 1 (", "ranks 0, 1 (")}}, calm, "got [0, 1]"),
        ({0: good, 2: {**good, "text": good["text"].replace(who, "; rank 1 did not answer")}}, calm, "got []"),
        ({0: good, 2: {**good, "kind": "KeyError"}}, calm, "KeyError"),
        ({0: good, 2: {**good, "descriptors": 3}}, calm, "3 descriptors more"),
        ({0: good, 2: good}, {"hanging": [2], "left": []}, "rank 2 hung"),
        ({0: good, 2: good}, {"hanging": [], "left": ["process 7"]}, "left: process 7"),
    ):
        problems, *_ = faults.judge(cell, told, 10.0, ended)
        assert len(problems) == 1 and problem in problems[0], problems
    assert faults.judge(cell, {}, None, calm)[0] == ["the fault was not reached"]
    late, losses = Cell("late rank", "forward", "shm", 2), faults.reference(2)
    ours = {rank: {"ended": "done", "losses": losses} for rank in range(2)}
    assert faults.judge(late, ours, 1.0, calm)[0] == []
    ours[1] = {"ended": "done", "losses": [*losses[:-1], losses[-1] + 1e-8]}
    assert "from those of one process" in faults.judge(late, ours, 1.0, calm)[0][0]


def test_of_a_connection_either_end_is_named():
    for text, named in (
        ("; who failed: global rank 1 (its connections broke)", None),
        ("; who failed: global ranks 1, 2 (the connection between them broke)", None),
        ("; who failed: global ranks 0, 2 (the connection between them broke)", "got [0, 2]"),
        ("; all ranks report, and the first error was that of global rank 2: planted", "got [2]"),
    ):
        wrong = faults.wrong_names("lost socket", {1}, text)
        assert wrong == named or named in wrong, (text, wrong)
        assert faults.wrong_names("kill", {1}, text) == wrong or "ranks 1, 2" in text, text
