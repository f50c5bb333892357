"""Accidentally huge rings: a result within seconds, or an error that names the limit."""

import re
import time

import pytest

from rtp_ext import schedule, timeline
from rtp_ext.__main__ import main
from rtp_ext.planner import Cluster, ModelSpec, Strategy, estimate_memory, estimate_time, search
from rtp_ext.planner.specs.strategy import LARGEST

MANY = 100_000


def test_the_largest_ring_is_printed_within_seconds():
    start = time.process_time()
    every = schedule.schedules(schedule.LARGEST_RING)
    text = schedule.table(every)
    assert time.process_time() - start < 10, "control: with the steps of a rank read for every line, minutes"
    heads = re.findall(r"^step .*$", text, re.MULTILINE)  # of the tables that fit a terminal
    assert re.findall(r"rank (\d+)", " ".join(heads)) == [*map(str, range(schedule.LARGEST_RING))]
    assert len(text.splitlines()) == (3 + len(every[0].steps)) * len(heads) - 1
    alone = schedule.schedule_of(schedule.LARGEST_RING, 7)
    assert [step.label for step in alone.steps] == [step.label for step in every[7].steps]


def test_schedules_and_timelines_name_their_limits(capsys):
    with pytest.raises(ValueError, match=f"at most {schedule.LARGEST_RING} ranks .*, got {MANY}; schedule_of"):
        schedule.schedules(MANY)
    with pytest.raises(ValueError, match=f"at most {timeline.LARGEST_RING} ranks .*, got 129; .* Lockstep"):
        timeline.timeline(schedule.schedules(timeline.LARGEST_RING + 1))
    assert len(schedule.schedule_of(MANY, 0).steps) > MANY, "that of one rank has no limit"
    for more in ([], ["--rank-only", "3"], ["--pass", "backward", "--plot", "timeline.png"]):
        with pytest.raises(SystemExit) as ended:
            main(["schedule", "--ranks", str(MANY), *more])
        told = capsys.readouterr()
        assert ended.value.code == 2 and told.out == "" and "expected at most 512 ranks" in told.err


@pytest.mark.parametrize("degree", ["rtp", "pp"])
def test_the_planner_names_its_limit(degree, capsys):
    sizes = ["--layers", str(MANY), "--hidden", "128", "--heads", "1", "--gpus", str(MANY)]
    assert main(["plan", *sizes, f"--{degree}", str(MANY)]) == 2
    expected = f"strategy: expected {degree} of at most {LARGEST}, since rings are simulated step by step"
    assert expected in capsys.readouterr().err
    plan = Strategy(**{degree: LARGEST})
    model = ModelSpec.gpt(layers=LARGEST, hidden=128, heads=1, vocab=128, seq=128)
    cluster = Cluster.preset("h100-80gb", gpus=LARGEST)
    start = time.process_time()
    assert len(estimate_memory(model, cluster, plan).stages) == plan.pp
    assert estimate_time(model, cluster, plan).step_seconds > 0
    assert time.process_time() - start < 10


def test_a_search_among_many_gpus_ends():
    model = ModelSpec.gpt(layers=2 * LARGEST, hidden=128, heads=1, vocab=128, seq=128)
    start = time.process_time()
    plans = search(model, Cluster.preset("h100-80gb", gpus=2 * LARGEST), global_batch=2 * LARGEST, top=1)
    assert plans[0].strategy.gpus == 2 * LARGEST and time.process_time() - start < 20
