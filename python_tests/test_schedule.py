"""Every schedule for R = 1..16 against the mathematics, and every check against a schedule that is wrong.

The checks are in schedule_checks.py and schedule_races.py.
"""

import re
import sys
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from schedule_checks import Case, violations
from schedule_races import LANES, WAITS, Ring, deadlocks, races

from rtp_ext import schedule, timeline
from rtp_ext._native import make_schedule, shard_sizes

RANKS = range(1, 17)
FORWARD = [
    {"pass_": "forward", "route": route, "in_place": in_place} for route in ("ring", "direct") for in_place in (0, 1)
]
BACKWARD = [
    {"pass_": "backward", "route": route, "in_place": in_place, "dgrad": d, "wgrad": w, "receive_in_slots": slots}
    for route, in_place, (d, w), slots in product(("ring", "direct"), (0, 1), ((1, 1), (1, 0), (0, 1), (0, 0)), (0, 1))
    if w or not slots
]


def case(ranks: int, pass_: str = "forward", **options) -> Case:
    return Case(ranks, pass_, **{key: bool(value) if value in (0, 1) else value for key, value in options.items()})


def hops(ring: Ring, rank: int, channel: str) -> list[int]:
    """Positions of the hops of a channel."""
    return [at for at, step in enumerate(ring[rank]) if step.action == "hop" and step.channel == channel]


def computes(ring: Ring, rank: int, kind: str) -> list[int]:
    return [at for at, step in enumerate(ring[rank]) if step.compute == kind]


@pytest.mark.parametrize("variant", FORWARD + BACKWARD, ids=lambda variant: "-".join(map(str, variant.values())))
def test_every_schedule_is_right(variant):
    for ranks in RANKS:
        this = case(ranks, **variant)
        assert violations(this, this.ring()) == [], this
        for made in this.schedules():
            buffers = {buffer for step in this.ring()[made.rank] for buffer in step.reads + step.writes}
            assert made.ranks == ranks
            assert made.weight_slots == sum(buffer.startswith("weight slot") for buffer in buffers)
            assert made.gradient_slots == sum(buffer.startswith("gradient slot") for buffer in buffers)


# -- each check catches what it is for -------------------------------------------------------------------------------

MUTATIONS: list[tuple[str, Case, Callable[[Ring], None], set[str]]] = []


def mutation(this: Case, *checks: str):
    def register(change: Callable[[Ring], None]) -> Callable[[Ring], None]:
        MUTATIONS.append((change.__name__, this, change, set(checks)))
        return change

    return register


@mutation(case(4), "hop count", "pairing", "deadlock", "order")
def one_rank_drops_a_hop(ring):
    del ring[2][hops(ring, 2, "weight")[1]]


@mutation(case(4), "hop count", "contents", "order")
def all_ranks_drop_a_hop(ring):
    for steps in ring:
        del steps[4]


@mutation(case(4, "backward", dgrad=0), "hop count", "order")
def weights_travel_for_nobody(ring):
    donor = case(4, "backward").ring()
    for rank, steps in enumerate(ring):
        steps.insert(0, donor[rank][0])


@mutation(case(4), "order")
def two_computes_change_places(ring):
    steps = ring[1]
    first, second, *_ = computes(ring, 1, "forward")
    steps[first], steps[second] = steps[second], steps[first]


@mutation(case(4), "computed once", "order")
def a_shard_is_computed_twice(ring):
    steps = ring[3]
    first, second, *_ = computes(ring, 3, "forward")
    steps[second] = steps[first]


@mutation(case(5), "pairing", "route", "deadlock")
def a_hop_goes_to_the_wrong_peer(ring):
    ring[0][hops(ring, 0, "weight")[1]].to = 3


@mutation(case(5, route="direct"), "pairing", "deadlock")
def a_direct_hop_goes_to_the_wrong_peer(ring):
    ring[0][hops(ring, 0, "weight")[1]].to = 3


@mutation(case(5, route="direct"), "route")
def a_direct_hop_forwards_a_slot(ring):
    donor = case(5).ring()
    for rank, steps in enumerate(ring):
        steps[2] = donor[rank][2]


@mutation(case(4), "pairing")
def the_ends_name_different_shards(ring):
    ring[1][hops(ring, 1, "weight")[0]].send_owner = 2


@mutation(case(4), "overwritten")
def a_hop_lands_in_a_slot_still_needed(ring):
    for steps in ring:
        steps[2].receive = "weight slot 0"


@mutation(case(4, "backward"), "overwritten")
def a_hop_of_a_backward_lands_in_a_slot_still_needed(ring):
    for rank, steps in enumerate(ring):
        steps[hops(ring, rank, "weight")[1]].receive = "weight slot 0"


@mutation(case(4), "slots")
def a_third_slot_is_used(ring):
    for steps in ring:
        steps[4].receive = "weight slot 2"
        steps[6].weight = "weight slot 2"


@mutation(case(4, in_place=1), "slots")
def a_second_slot_is_used_in_place(ring):
    for steps in ring:
        for step in steps[4:]:
            step.send = step.send and step.send.replace("slot 0", "slot 1")
            step.receive = step.receive and step.receive.replace("slot 0", "slot 1")
            step.weight = step.weight and step.weight.replace("slot 0", "slot 1")


@mutation(case(4), "contents")
def a_compute_reads_the_wrong_buffer(ring):
    ring[2][computes(ring, 2, "forward")[1]].weight = "weight home"


@mutation(case(3, "backward"), "contents")
def a_compute_reads_nothing(ring):
    ring[2][computes(ring, 2, "dgrad")[1]].weight = None


@mutation(case(4, "backward"), "contents", "gradients", "order")
def a_gradient_leaves_before_its_wgrad(ring):
    for rank, steps in enumerate(ring):
        first = hops(ring, rank, "gradient")[0]
        steps[first - 1], steps[first] = steps[first], steps[first - 1]


@mutation(case(4, "backward"), "computed once", "gradients", "order")
def a_wgrad_is_added_twice(ring):
    at = computes(ring, 1, "wgrad")[1]
    ring[1].insert(at, ring[1][at])


@mutation(case(4, "backward"), "gradients")
def a_wgrad_starts_from_zero_instead_of_adding(ring):
    ring[1][computes(ring, 1, "wgrad")[2]].gradient_in = None


@mutation(case(4, "backward", receive_in_slots=1), "gradients")
def a_gradient_ends_in_a_slot(ring):
    for rank, steps in enumerate(ring):
        last = steps[computes(ring, rank, "wgrad")[-1]]
        last.gradient_out = last.gradient_in


@mutation(case(5, in_place=1), "homecoming", "order")
def the_copy_home_is_missing(ring):
    for steps in ring:
        assert steps.pop().action == "copy"


@mutation(case(4, in_place=1), "homecoming", "hop count", "order")
def the_hop_home_is_missing(ring):
    for rank, steps in enumerate(ring):
        del steps[hops(ring, rank, "weight")[-1]]


@mutation(case(4), "homecoming")
def home_is_written_out_of_place(ring):
    for steps in ring:
        steps[2].receive = steps[4].send = steps[5].weight = "weight home"


@mutation(case(3), "race", "contents")
def a_hop_sends_from_where_it_receives(ring):
    for steps in ring:
        steps[2].receive = steps[2].send


@mutation(case(4, "backward"), "pairing", "deadlock", "order")
def one_rank_enqueues_two_hops_the_other_way_round(ring):
    gradient, weight = hops(ring, 1, "gradient")[0], hops(ring, 1, "weight")[1]
    ring[1][gradient], ring[1][weight] = ring[1][weight], ring[1][gradient]


@pytest.mark.parametrize(
    ("name", "this", "change", "checks"), MUTATIONS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_broken_schedule_is_caught(name, this, change, checks):
    ring = this.ring()
    change(ring)
    assert checks <= {violation.check for violation in violations(this, ring)}


def test_every_check_is_shown_to_fail():
    assert {check for *_, checks in MUTATIONS for check in checks} == {
        *("computed once", "order", "hop count", "slots", "route", "pairing", "contents", "overwritten"),
        *("gradients", "homecoming", "race", "deadlock"),
    }


def gradients_first(queue, steps):
    return sorted(queue, key=lambda at: steps[at].channel == "weight")


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_gradients_first_deadlock_one_communicator_from_three_ranks(ranks):
    ring = case(ranks, "backward").ring()
    stuck = list(deadlocks(ring, LANES["one communicator"], gradients_first))
    assert bool(stuck) == (ranks >= 3)
    assert list(deadlocks(ring, LANES["two communicators"], gradients_first)) == []


# What the executor waits for is enough (test_every_schedule_is_right). Without one of these waits it is not; the two
# others, for who wrote the target of a hop, are implied by the wait for who read it since.
IMPLIED = {"hop for arrival in its target", "hop for the compute that wrote its target"}


@pytest.mark.parametrize("wait", [wait for wait in WAITS if wait not in IMPLIED])
def test_a_wait_that_is_forgotten_is_a_race(wait):
    this = case(5, "backward", in_place=1)
    assert list(races(this.ring(), [wait]))


# -- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0, "rank": 0, "pass_": "forward"}, "expected ranks >= 1, got 0"),
        ({"ranks": 4, "rank": 4, "pass_": "forward"}, "expected 0 <= rank < 4, got 4"),
        ({"ranks": 4, "rank": -1, "pass_": "forward"}, "expected 0 <= rank < 4, got -1"),
        ({"ranks": 4, "rank": 0, "pass_": "sideways"}, "expected a pass of forward or backward, got sideways"),
        ({"ranks": 4, "rank": 0, "pass_": "forward", "route": "scenic"}, "route of ring or direct, got scenic"),
    ],
)
def test_errors_of_make_schedule(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(**arguments)


def test_errors_of_schedules():
    with pytest.raises(ValueError, match="linear or embedding, got conv"):
        schedule.schedules(2, op="conv")
    with pytest.raises(ValueError, match="expected dgrad=False for an embedding"):
        schedule.schedules(2, op="embedding", pass_="backward", dgrad=True)
    with pytest.raises(ValueError, match="expected ranks >= 1, got 0"):
        schedule.schedules(0)


def test_an_embedding_has_no_input_gradient():
    for made in schedule.schedules(4, op="embedding", pass_="backward"):
        assert [step.compute for step in made.steps if step.action == "compute"] == ["wgrad"] * 4
        assert {step.channel for step in made.steps if step.action == "hop"} == {"gradient"}


def test_shard_sizes_are_those_of_chunk():
    for extent, ranks in product([*range(40), 1000, 1024, 50257], RANKS):
        chunks = [len(chunk) for chunk in torch.empty(extent).chunk(ranks)]
        assert shard_sizes(extent, ranks) == (chunks + [0] * ranks)[:ranks], (extent, ranks)
    with pytest.raises(ValueError, match="expected extent >= 0 and ranks >= 1, got -1 and 2"):
        shard_sizes(-1, 2)
    with pytest.raises(ValueError, match="expected extent >= 0 and ranks >= 1, got 3 and 0"):
        shard_sizes(3, 0)


# -- table, timeline, plot -------------------------------------------------------------------------------------------


def test_table():
    form = {"op": "linear", "pass_": "backward", "route": "ring", "in_place": False}
    every = schedule.schedules(4, **form)
    lines = schedule.table(every, title=schedule.describe(every, **form)).splitlines()
    assert lines[0] == "linear backward, 4 ranks, route ring, out of place"
    assert lines[1] == ("each rank: 4 dgrad, 4 wgrad, 3 weight hops, 3 gradient hops; 2 weight slots, 2 gradient slots")
    rows = [[cell.strip() for cell in line.split("   ") if cell.strip()] for line in lines[3:]]
    assert rows[0] == ["step", "lane", "rank 0", "rank 1", "rank 2", "rank 3"]
    assert rows[2] == ["0", "weight", "W0 -> 3, W1 <- 1", "W1 -> 0, W2 <- 2", "W2 -> 1, W3 <- 3", "W3 -> 2, W0 <- 0"]
    assert rows[3] == ["1", "compute", "dgrad W0", "dgrad W1", "dgrad W2", "dgrad W3"]
    assert rows[4][2:4] == ["wgrad G1 =", "wgrad G2 ="]
    assert rows[5][:3] == ["3", "gradient", "G1 -> 3, G2 <- 1"]
    assert rows[-1][2:] == ["wgrad G0 +=", "wgrad G1 +=", "wgrad G2 +=", "wgrad G3 +="]
    assert len(rows) == 2 + len(every[0].steps)


def test_table_of_one_rank_names_buffers():
    every = schedule.schedules(3, in_place=True, route="direct")
    text = schedule.table(every, rank=1)
    assert "rank 1" in text and "rank 0" not in text
    assert re.split("  +", text.splitlines()[2])[2:] == ["weight", "W1 -> 2, W0 <- 0", "weight home", "weight slot 0"]
    assert "W1 to home" in text
    form = {"op": "linear", "pass_": "forward", "route": "direct", "in_place": True}
    assert "route ring (direct does not apply in place), in place" in schedule.describe(every, **form)
    with pytest.raises(ValueError, match="expected 0 <= rank < 3, got 3"):
        schedule.table(every, rank=3)


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


def test_timeline_hides_hops_that_are_no_longer_than_a_compute():
    for ranks, hop in product(RANKS, (0.0, 0.5, 1.0)):
        assert duration(schedule.schedules(ranks), hop_time=hop) == pytest.approx(ranks)
        assert duration(schedule.schedules(ranks, pass_="backward"), hop_time=hop) == pytest.approx(2 * ranks)


def test_timeline_lanes_run_in_order_and_steps_appear_once():
    made = schedule.schedules(5, pass_="backward", in_place=True)
    events = timeline.timeline(made, hop_time=1.7, copy_time=0.1)
    assert sorted((event.rank, event.step) for event in events) == [
        (rank, step) for rank in range(5) for step in range(len(made[rank].steps))
    ]
    free: dict = {}
    for event in sorted(events, key=lambda event: (event.rank, event.step)):
        assert event.lane == schedule.lane(made[event.rank].steps[event.step])
        assert event.label == schedule.label(made[event.rank].steps[event.step])
        assert event.start >= free.get((event.rank, event.lane), 0.0)
        free[event.rank, event.lane] = event.end
    assert [event.start for event in events] == sorted(event.start for event in events)


def test_timeline_waits_for_a_slow_rank():
    slow = {"compute_time": lambda rank, step: 3.0 if rank == 0 else 1.0, "hop_time": 0.5}
    last = {event.rank: event.end for event in timeline.timeline(schedule.schedules(2), **slow)}
    assert last == {0: 6.0, 1: 2.0}  # the only hop is over before either rank has computed once
    in_place = timeline.timeline(schedule.schedules(2, in_place=True), **slow)
    home = [(event.start, event.end) for event in in_place if event.lane == "weight"][2:]
    assert home == [(3.0, 3.5)] * 2  # home of rank 0 is free when rank 0 has computed with it


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
    ring = case(3).ring()
    ring[1][hops(ring, 1, "weight")[1]].to = 0
    broken = [SimpleNamespace(rank=rank, ranks=3, steps=steps) for rank, steps in enumerate(ring)]
    with pytest.raises(ValueError, match=r"got a deadlock: .*rank 1 at step 2"):
        timeline.timeline(broken)


@pytest.mark.parametrize("ranks", [1, 5])
def test_plot(ranks, tmp_path):
    path = tmp_path / "timeline.png"
    made = schedule.schedules(ranks, pass_="backward", in_place=True)
    timeline.plot(path, made, title="a title\nand more", hop_time=0.0)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=f"expected 0 <= rank < {ranks}, got 9"):
        timeline.plot(path, made, rank=9)


def test_plot_without_matplotlib(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("matplotlib.backends")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'rtp-ext\[plot\]'"):
        timeline.plot(tmp_path / "timeline.png", schedule.schedules(2))
