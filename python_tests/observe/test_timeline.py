"""The simulated timeline of a schedule, and its picture."""

import re
import sys
from itertools import product
from types import SimpleNamespace

import pytest

from rtp_ext import schedule, timeline

RANKS = range(1, 17)
SOME_RANKS = (1, 2, 3, 5, 8)


def duration(made, **times) -> float:
    return max(event.end for event in timeline.timeline(made, **times))


@pytest.mark.parametrize("route", ["ring", "direct"])
@pytest.mark.parametrize("hop", [0.0, 0.25, 1.0, 1.5, 4.0])
def test_timeline_of_a_pass(hop, route):
    # Out of place, step s of the forward starts when both the compute and the hop of step s - 1 have ended. In place
    # one hop more brings the shard home. In the backward wgrad -> gradient hop -> wgrad is the chain that limits,
    # with a dgrad under each hop, so that only what a hop outlasts its dgrad by is seen.
    for ranks in RANKS:
        slower = max(1.0, hop)
        forward = schedule.schedules(ranks, route=route)
        assert duration(forward, hop_time=hop) == pytest.approx(1 + (ranks - 1) * slower)
        backward = schedule.schedules(ranks, pass_="backward", route=route)
        assert duration(backward, hop_time=hop) == pytest.approx(ranks + 1 + (ranks - 1) * slower)
        if ranks > 1:
            in_place = schedule.schedules(ranks, route=route, in_place=True)
            assert duration(in_place, hop_time=hop) == pytest.approx(ranks * slower)


@pytest.mark.parametrize("hop", [0.0, 0.25, 1.0, 4.0])
def test_timeline_of_collectives(hop):
    for ranks in range(2, 9):
        times = {"hop_time": hop, "copy_time": 0.125}
        forward = schedule.schedules(ranks, group=ranks, collective=True)
        expected = 0.125 + (ranks - 1) * hop + ranks
        assert duration(forward, **times) == pytest.approx(expected)
        backward = schedule.schedules(ranks, pass_="backward", group=ranks, collective=True)
        expected_back = 0.25 + ranks + max(ranks, (ranks - 1) * hop)
        assert duration(backward, **times) == pytest.approx(expected_back)
        durations = {"forward": 1, "dgrad": 1, "wgrad": 1, "weight": hop, "gradient": hop, "copy": 0.125}
        ends = [timeline.Lockstep(made[0]).makespan(durations) for made in (forward, backward)]
        assert ends == pytest.approx([expected, expected_back])
        late = duration(forward, compute_time=lambda rank, step: float(rank + 1), **times)
        assert late == pytest.approx(0.125 + (ranks - 1) * hop + ranks), "the slowest rank"
        text = schedule.table(
            forward,
            title=schedule.describe(forward, op="linear", pass_="forward", route="ring", in_place=False, group=ranks),
        )
        assert "gather W" in text and "1 weight hop, 0 gradient hops" in text
    waits = schedule.schedules(3, group=3, collective=True)
    slow = timeline.timeline(waits, hop_time=0.5, copy_time=lambda rank, step: 1.0 + rank)
    gathers = [(event.start, event.end) for event in slow if event.label == "gather W"]
    assert gathers == [(3.0, 4.0)] * 3, "from when the last rank has come"


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("hop", [0.0, 0.25, 1.0, 1.5, 4.0])
def test_timeline_of_a_bundle(hop, in_place):
    # wgrad follows dgrad, so that the first weight hop has one dgrad to hide under, every gradient hop but the last the
    # next dgrad, and the last one the wgrad that starts from zero; then it is added.
    for ranks in RANKS[1:]:
        backward = schedule.schedules(ranks, op="mlp", pass_="backward", in_place=in_place)
        expected = ranks + ranks * max(1.0, hop)
        assert duration(backward, hop_time=hop) == pytest.approx(expected)
        if not in_place:
            assert duration(backward, hop_time=hop, copy_time=0.25) == pytest.approx(expected + 0.25)
    assert duration(schedule.schedules(1, op="mlp", pass_="backward"), hop_time=hop, copy_time=0.25) == 2.0


# Hops of weights and gradients, in dgrads
HOPS = [(0.0, 0.0), (0.65, 1.3), (1.0, 2.0), (1.5, 3.0), (3.5, 1.0), (2.5, 4.0)]


def hops_of(weight, gradient):
    """Returns the durations of hops; half a gradient takes half the time."""
    return lambda rank, step: weight if step.channel == "weight" else gradient * (0.5 if step.half else 1.0)


@pytest.mark.parametrize(("route", "slots"), [("ring", False), ("direct", False), ("ring", True)])
@pytest.mark.parametrize(("weight", "gradient"), HOPS)
def test_timeline_of_halves(weight, gradient, route, slots):
    # One and a half computes can hide a half's hop, and the two halves share a channel: the exposed time is the excess
    # of a whole hop over a dgrad and a wgrad.
    for ranks in SOME_RANKS:
        spent = {}
        for halves in (False, True):
            options = {"pass_": "backward", "route": route, "receive_in_slots": slots, "halves": halves}
            spent[halves] = duration(schedule.schedules(ranks, **options), hop_time=hops_of(weight, gradient))
        assert spent[False] == pytest.approx(2 * ranks + (ranks - 1) * max(0.0, gradient - 1, weight - 2))
        assert spent[True] == pytest.approx(2 * ranks + (ranks - 1) * max(0.0, gradient - 2, weight - 2))


def test_what_halves_save():
    """A gradient hop of 1.3 dgrads costs a backward of 8 ranks 13 %, as a whole; in halves nothing."""
    times = {"hop_time": hops_of(0.65, 1.3)}
    pure = 2 * 8
    whole, halves = (
        duration(schedule.schedules(8, pass_="backward", halves=halves), **times) / pure for halves in (False, True)
    )
    assert whole == pytest.approx(1 + 7 * 0.3 / 16)  # 1.131; 1.15 with many ranks
    assert halves == pytest.approx(1.0)


@pytest.mark.parametrize("copy", [0.0, 0.25, 20.0])
@pytest.mark.parametrize(("weight", "gradient"), HOPS)
def test_timeline_of_a_gathered_pass(weight, gradient, copy):
    for ranks, compute in product(SOME_RANKS, (0.1, 1.0)):
        times = {"compute_time": compute, "hop_time": hops_of(weight, gradient), "copy_time": copy}
        whole = ranks * compute
        forward = schedule.schedules(ranks, route="gather")
        assert duration(forward, **times) == pytest.approx(copy * (ranks > 1) + (ranks - 1) * weight + whole)
        start = copy + max(copy + whole, (ranks - 1) * weight)  # of dgrad
        summed = max(start + whole, copy + whole + gradient) + (ranks - 1) * copy + (ranks - 2) * gradient
        backward = schedule.schedules(ranks, pass_="backward", route="gather")
        assert duration(backward, **times) == pytest.approx(summed if ranks > 1 else 2 * whole)


def test_timeline_of_two_lanes_shows_order():
    forward = timeline.timeline(schedule.schedules(4, two_lanes=True), hop_time=0.25)
    computes = [(event.lane, event.label, event.start) for event in forward if "forward" in event.label]
    assert computes[::4] == [
        *(("compute", "forward W0", 0.0), ("side", "forward W3", 0.25)),
        *(("compute", "forward W2", 1.0), ("side", "forward W1", 1.5)),  # W1 lands in the slot that W3 leaves at 1.25
    ]
    for options in ({}, {"halves": True}):
        made = schedule.schedules(4, pass_="backward", two_lanes=True, **options)
        events = timeline.timeline(made, hop_time=0.25)
        lanes = {made[0].steps[event.step].compute: event.lane for event in events if event.rank == 0}
        assert (lanes["dgrad"], lanes["wgrad"]) == ("compute", "side")
        dgrads = [event.start for event in events if event.rank == 0 and event.lane == "compute"]
        assert dgrads == [0.0, 1.0, 2.0, 3.0]  # no wgrad between them


def test_timeline_of_an_addition():
    made = schedule.schedules(4, op="experts", pass_="backward")
    for hop in (0.5, 3.0):
        events = timeline.timeline(made, hop_time=hop, copy_time=0.25)
        for rank in range(4):
            own = [event for event in events if event.rank == rank]
            (add,) = (event for event in own if event.label == f"add G{rank} to home")
            arrived = max(event.end for event in own if event.lane == "gradient")
            (wgrad,) = (event for event in own if event.label == f"wgrad G{rank} =")
            assert (add.lane, add.end - add.start, add.start) == ("compute", 0.25, max(arrived, wgrad.end))
    added = {"copy_time": lambda rank, step: {"add": 2.0, "copy": 0.5}[step.action] * (rank + 1)}
    events = timeline.timeline(schedule.schedules(3, op="mlp", pass_="backward", in_place=True), **added)
    lasting = {event.label: event.end - event.start for event in events if event.label.endswith("home")}
    assert lasting == {
        **{"W0 to home": 0.5, "W1 to home": 1.0, "W2 to home": 1.5},
        **{"add G0 to home": 2.0, "add G1 to home": 4.0, "add G2 to home": 6.0},
    }


def test_timeline_hides_hops_that_are_no_longer_than_a_compute():
    for ranks, hop in product(RANKS, (0.0, 0.5, 1.0)):
        assert duration(schedule.schedules(ranks), hop_time=hop) == pytest.approx(ranks)
        for op in ("linear", "mlp"):
            backward = schedule.schedules(ranks, op=op, pass_="backward")
            assert duration(backward, hop_time=hop) == pytest.approx(2 * ranks)


@pytest.mark.parametrize("op", ["linear", "mlp"])
def test_timeline_lanes_run_in_order_and_steps_appear_once(op):
    made = schedule.schedules(5, op=op, pass_="backward", in_place=True)
    events = timeline.timeline(made, hop_time=1.7, copy_time=0.1)
    assert sorted((event.rank, event.step) for event in events) == [
        (rank, step) for rank in range(5) for step in range(len(made[rank].steps))
    ]
    free: dict = {}
    for event in sorted(events, key=lambda event: (event.rank, event.step)):
        assert event.lane == schedule.lane(made[event.rank].steps[event.step])
        assert event.label == made[event.rank].steps[event.step].label
        assert event.start >= free.get((event.rank, event.lane), 0.0)
        free[event.rank, event.lane] = event.end
    assert [event.start for event in events] == sorted(event.start for event in events)


def test_timeline_waits_for_a_slow_rank():
    slow = {"compute_time": lambda rank, step: 3.0 if rank == 0 else 1.0, "hop_time": 0.5}
    last = {event.rank: event.end for event in timeline.timeline(schedule.schedules(2), **slow)}
    assert last == {0: 6.0, 1: 2.0}  # the only hop is over before either rank has computed once
    in_place = timeline.timeline(schedule.schedules(2, in_place=True), **slow)
    local = [(event.start, event.end) for event in in_place if event.lane == "weight"][2:]
    assert local == [(3.0, 3.5)] * 2  # home of rank 0 is free when rank 0 has computed with it


def test_timeline_takes_durations_of_the_receiver():
    events = timeline.timeline(schedule.schedules(2), hop_time=lambda rank, step: 1.0 + step.receive_owner)
    assert {event.rank: event.end for event in events if event.lane == "weight"} == {0: 2.0, 1: 2.0}
    assert {event.rank: event.end for event in events if event.lane == "compute"} == {0: 3.0, 1: 2.0}


def test_errors_of_timeline():
    made = schedule.schedules(3)
    with pytest.raises(ValueError, match="expected a finite hop_time >= 0, got -1"):
        timeline.timeline(made, hop_time=-1)
    with pytest.raises(ValueError, match="expected a finite compute_time >= 0, got nan"):
        timeline.timeline(made, compute_time=float("nan"))
    with pytest.raises(ValueError, match="all ranks of one ring in order, got ranks 0 of 3, 1 of 3"):
        timeline.timeline(made[:2])
    broken = [
        SimpleNamespace(rank=each.rank, ranks=3, steps=list(each.steps))
        for each in schedule.schedules(3, route="direct")
    ]
    steps = broken[1].steps
    first, second = (position for position, step in enumerate(steps) if step.action == "hop")
    steps[first], steps[second] = steps[second], steps[first]  # each waits for another rank than its neighbours do
    with pytest.raises(ValueError, match=r"got a deadlock: .*rank 1 at step 0"):
        timeline.timeline(broken)


@pytest.mark.parametrize("ranks", [1, 5])
def test_plot(ranks, tmp_path):
    path = tmp_path / "timeline.png"
    made = schedule.schedules(ranks, pass_="backward", in_place=True)
    timeline.plot(path, made, title="a title\nand more", hop_time=0.0)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=f"expected 0 <= rank < {ranks}, got 9"):
        timeline.plot(path, made, rank=9)


def test_plot_of_a_bundle(tmp_path):
    made = schedule.schedules(3, op="mlp", pass_="backward", in_place=True)
    captions = {}
    for time in (0.0, 0.1, 1.0):
        path = tmp_path / f"timeline {time}.svg"  # each text stands in a comment
        timeline.plot(path, made, copy_time=time)
        captions[time] = set(re.findall("<!-- (.*?) -->", path.read_text(), re.DOTALL))
        assert {"dgrad", "wgrad", "weight hop (what arrives)", "gradient hop (what arrives)"} <= captions[time]
        (summary,) = (caption for caption in captions[time] if caption.startswith("time ("))
        assert summary.endswith("in all, 6 without communication)")
    assert captions[1.0] - captions[0.1] >= {"+G0", "+G1", "+G2"}
    assert captions[0.1] >= {"add to home", "copy home"}  # boxes too narrow for a caption of their own
    assert not captions[0.0] & {"add to home", "copy home", "+G0"}


def captions_of(path, made, **times):
    timeline.plot(path, made, **times)
    return set(re.findall("<!-- (.*?) -->", path.read_text(), re.DOTALL))


def test_plot_of_halves_and_lanes(tmp_path):
    path = tmp_path / "timeline.svg"
    captions = captions_of(path, schedule.schedules(3, pass_="backward", halves=True, two_lanes=True), hop_time=1.0)
    assert {"side", "compute", "G0a", "G0b", "W2"} <= captions
    assert any(caption.endswith("in all, 3 without communication)") for caption in captions)
    assert "side" not in captions_of(path, schedule.schedules(3, pass_="backward", halves=True))


def test_plot_of_a_gathered_pass(tmp_path):
    path = tmp_path / "timeline.svg"
    captions = captions_of(path, schedule.schedules(3, pass_="backward", route="gather"), copy_time=1.0)
    assert {"W0+2", "+G0", "copy to slot and home", "add to slot and to home"} <= captions
    assert "copy to slot" in captions_of(path, schedule.schedules(3, route="gather"), copy_time=1.0)


def test_plot_without_matplotlib(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("matplotlib.backends")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'rtp-ext\[plot\]'"):
        timeline.plot(tmp_path / "timeline.png", schedule.schedules(2))
