"""Schedules of route two-level for K, G <= 6: against the mathematics, for races, slots, timeline and footprint."""

from dataclasses import replace
from itertools import product

import pytest
from grids import few
from schedule_cases import case
from schedule_checks import violations
from schedule_races import WAITS, deadlocks, races
from test_footprint import footprint, operation

from rtp_ext import schedule, timeline
from rtp_ext._native import make_schedule

ALL_SIZES = list(product(range(2, 7), repeat=2))  # hosts, ranks of each
SIZES = few([*product((2, 3, 4), repeat=2), (2, 5), (5, 2), (3, 6), (6, 3)], ALL_SIZES)
FORMS = [
    {"pass_": "forward"},
    {"pass_": "backward"},
    {"pass_": "backward", "receive_in_slots": 1},
    {"pass_": "backward", "bundle": 1},
    {"pass_": "backward", "late": 1},
]
PARTS = [
    {"pass_": "forward", "two_lanes": 1},
    {"pass_": "backward", "two_lanes": 1},
    {"pass_": "backward", "two_lanes": 1, "receive_in_slots": 1},
    {"pass_": "backward", "dgrad": 0},
    {"pass_": "backward", "dgrad": 0, "receive_in_slots": 1},
    {"pass_": "backward", "wgrad": 0},
    {"pass_": "backward", "dgrad": 0, "wgrad": 0},
    {"pass_": "backward", "bundle": 1, "wgrad": 0},
    {"pass_": "backward", "bundle": 1, "dgrad": 0},
]


def identity(variant):
    return "-".join(str(value) if key == "pass_" else f"{key}={value}" for key, value in variant.items())


def two_level(hosts, places, **variant):
    return case(hosts * places, route="two-level", hosts=hosts, **variant)


@pytest.mark.parametrize("variant", [*FORMS, *PARTS], ids=identity)
def test_every_schedule_is_right(variant):
    for hosts, places in SIZES:
        if variant in PARTS and hosts * places > 12:
            continue
        this = two_level(hosts, places, **variant)
        assert this.taken == "two-level"
        assert violations(this, this.ring()) == [], this
        first = this.schedules()[0]
        buffers = {name for step in first.steps for name in step.reads(first.ranks) + step.writes(first.ranks)}
        slots = {kind: sum(name.startswith(f"{kind} slot") for name in buffers) for kind in ("weight", "gradient")}
        assert slots == {"weight": first.weight_slots, "gradient": first.gradient_slots}
        assert not this.late or first.steps[-1].label == "add G0 to home", "nothing waits for it"
        landing = [step.receive for step in first.steps if step.action == "hop" and step.channel == "weight"]
        assert landing[:1] in ([], ["weight slot 0"]), "where a hop that is sent ahead lands"


@pytest.mark.parametrize("variant", [*FORMS, *PARTS], ids=identity)
def test_one_host_and_hosts_of_one_rank_have_one_level(variant):
    for ranks in range(1, 7):
        for hosts in {1, ranks}:
            this = case(ranks, route="two-level", hosts=hosts, **variant)
            assert this.ring() == case(ranks, **variant).ring()
            assert this.schedules()[0].route == "ring"


def test_slots():
    """Two of each kind more than a ring has; a forward of two hosts, or of hosts of two ranks, needs one less."""
    for hosts, places in SIZES:
        forward, backward = (two_level(hosts, places, pass_=way).schedules()[0] for way in ("forward", "backward"))
        flat = case(hosts * places, "backward").schedules()[0]
        assert (flat.weight_slots, flat.gradient_slots) == (2, 2)
        assert forward.weight_slots == backward.weight_slots == 4 - (hosts == 2) - (places == 2)
        assert backward.gradient_slots == 4 - (hosts == places == 2), "the only sum inside comes home"


def test_halves_are_ignored_and_in_place_is_refused():
    this = two_level(2, 3, pass_="backward", halves=1)
    assert this.ring() == two_level(2, 3, pass_="backward").ring() and not this.schedules()[0].halves
    with pytest.raises(ValueError, match="travel out of place on route two-level, got in_place"):
        two_level(2, 3, in_place=1).schedules()
    for hosts in (0, 4, 7):
        with pytest.raises(ValueError, match=f"hosts of equally many of the 6 ranks, got {hosts} hosts"):
            make_schedule(6, 0, pass_="forward", route="two-level", hosts=hosts)


# -- the checks can fail --------------------------------------------------------------------------------------------


def outer_hops(ring, rank, channel):
    return [at for at, step in enumerate(ring[rank]) if step.outer and step.channel == channel]


def an_outer_hop_goes_to_the_next_place(ring):
    for rank, steps in enumerate(ring):
        steps[outer_hops(ring, rank, "weight")[0]].to = (rank - 4) % 9


def hops_between_hosts_go_inside(ring):
    for steps in ring:
        for step in steps:
            step.outer = False


def a_phase_starts_from_the_sum_of_the_last(ring):
    for rank, steps in enumerate(ring):
        at = outer_hops(ring, rank, "gradient")[0]
        wgrad = next(step for step in steps[at:] if step.compute == "wgrad")
        wgrad.gradient_in = steps[at].send


def what_arrives_from_the_other_host_is_dropped(ring):
    for steps in ring:
        del steps[next(at for at, step in enumerate(steps) if step.action == "add")]


def a_sum_arrives_where_one_leaves(ring):
    for rank, steps in enumerate(ring):
        hop = steps[outer_hops(ring, rank, "gradient")[0]]
        hop.receive = hop.send


def the_next_phase_arrives_over_this_one(ring):
    for rank, steps in enumerate(ring):
        first, second = outer_hops(ring, rank, "weight")
        steps[second].receive = steps[first].receive


@pytest.mark.parametrize(
    ("change", "checks"),
    [
        (an_outer_hop_goes_to_the_next_place, {"route", "pairing", "deadlock"}),
        (hops_between_hosts_go_inside, {"hop count", "route", "order"}),
        (a_phase_starts_from_the_sum_of_the_last, {"gradients"}),
        (what_arrives_from_the_other_host_is_dropped, {"gradients", "order"}),
        (a_sum_arrives_where_one_leaves, {"race"}),
        (the_next_phase_arrives_over_this_one, {"race"}),
    ],
)
@pytest.mark.parametrize("bundle", [0, 1])
def test_a_broken_schedule_is_caught(change, checks, bundle):
    this = two_level(3, 3, pass_="backward", bundle=bundle)
    ring = this.ring()
    change(ring)
    assert checks <= {violation.check for violation in violations(this, ring)}


NEEDED = [wait for wait in WAITS if wait.startswith(("compute for arrival", "compute for hops", "end", "hop for comp"))]


@pytest.mark.parametrize("wait", [wait for wait in NEEDED if "wrote its target" not in wait])
def test_a_wait_that_is_forgotten_is_a_race(wait):
    found = [list(races(two_level(3, 3, pass_="backward", bundle=bundle).ring(), [wait])) for bundle in (0, 1)]
    assert any(found)


def test_levels_may_share_a_channel():
    """Over a transport of one kind, hops of both levels are posted to the same communicators."""
    for bundle in (0, 1):
        ring = two_level(3, 3, pass_="backward", bundle=bundle).ring()
        shared = [[replace(step, outer=False) for step in steps] for steps in ring]
        by_channel = (lambda step: str(step.channel) if step.action == "hop" else "compute", True)
        assert list(deadlocks(shared, by_channel)) == [] == list(races(shared))


# -- time -------------------------------------------------------------------------------------------------------------


def spent(made, weight, gradient, outer_weight, outer_gradient, copy=0.0):
    """By the simulator of one rank; products take 1."""
    times = dict.fromkeys(("forward", "dgrad", "wgrad"), 1.0) | {"weight": weight, "gradient": gradient}
    times |= {"outer weight": outer_weight, "outer gradient": outer_gradient, "add": copy}
    return timeline.Lockstep(made).makespan(times)


def test_the_timeline_is_the_closed_form():
    for hosts, places in SIZES:
        form = {"route": "two-level", "hosts": hosts}
        forward, backward, slots, bundle = (
            schedule.schedule_of(hosts * places, 0, **form, **variant)
            for variant in (
                {},
                {"pass_": "backward"},
                {"pass_": "backward", "receive_in_slots": True},
                {"pass_": "backward", "op": "mlp"},
            )
        )
        phases = hosts - 1
        for inner, outer in product((0.0, 0.5, 1.0, 1.7, 3.0), (0.0, 2.0, 4.5, 9.0, 40.0)):
            phase = 1 + (places - 1) * max(1, inner)
            assert spent(forward, inner, 0, outer, 0) == pytest.approx(phase + phases * max(phase, outer))
        inner, outer = product((0.0, 1.0, 2.0), (0.0, 0.8, 1.7)), product((0.0, 5.0, 30.0), (0.0, 7.0, 33.0))
        for (weight, gradient), (far_weight, far_gradient) in product(inner, outer):
            hops = (weight, gradient, far_weight, far_gradient)
            phase = 2 * places + (places - 1) * max(0.0, gradient - 1)
            for made in (backward, slots):
                expected = phase + phases * max(phase, far_weight, far_gradient)
                assert spent(made, *hops) == pytest.approx(expected), hops
            if max(weight, gradient) > 1:
                continue
            for copy in (0.0, 0.25):
                phase = 2 * places + copy
                expected = phase + max(phase, far_weight) + far_gradient + copy
                expected += (hosts - 2) * max(phase, far_weight, far_gradient + 1 + copy)
                assert spent(bundle, *hops, copy) == pytest.approx(expected), hops


def test_hops_that_nothing_hides():
    """Where hops inside outlast what hides them, a backward takes no longer than its phases one after the other."""
    for hosts, places in SIZES:
        made = schedule.schedule_of(hosts * places, 0, pass_="backward", route="two-level", hosts=hosts)
        for weight, gradient, outer in product((2.5, 4.0), (0.5, 3.0), (0.0, 30.0)):
            phase = 2 * places + (places - 1) * max(gradient - 1, weight - 2)
            assert spent(made, weight, gradient, outer, outer) <= phase + (hosts - 1) * max(phase, outer) + 1e-9


@pytest.mark.parametrize(("hosts", "places"), [(2, 2), (3, 3), (3, 4)])
def test_all_ranks_together_take_as_long_as_one(hosts, places):
    for options in ({}, {"pass_": "backward"}, {"pass_": "backward", "op": "mlp"}):
        every = schedule.schedules(hosts * places, route="two-level", hosts=hosts, **options)
        events = timeline.timeline(every, hop_time=0.5, outer_time=7.0, copy_time=0.25)
        ends = {rank: max(event.end for event in events if event.rank == rank) for rank in range(len(every))}
        assert [*ends.values()] == pytest.approx([spent(every[0], 0.5, 0.5, 7.0, 7.0, 0.25)] * len(every))
        lanes = {event.lane for event in events}
        assert {"compute", "weight", "outer weight"} <= lanes
        assert ("outer gradient" in lanes) == bool(options)
    # by default hops between hosts take as long as others
    assert max(e.end for e in timeline.timeline(every)) == pytest.approx(spent(every[0], 0.5, 0.5, 0.5, 0.5))


def test_what_it_saves():
    """A link between hosts that takes six products: flat, every hop waits for it; on two levels there is one."""
    flat = timeline.Lockstep(schedule.schedule_of(4, 0)).makespan({"forward": 1.0, "weight": 6.0})
    assert flat == 1 + 3 * 6
    assert spent(schedule.schedule_of(4, 0, route="two-level", hosts=2), 0.5, 0.0, 6.0, 0.0) == 2 + 6


# -- memory ---------------------------------------------------------------------------------------------------------


def held_at_once(schedule):
    """Returns the most slots of weights between the hop that fills one and the last step that reads it."""
    lives = {}  # of the content of a slot, by the hop that brings it
    content = {}
    for position, step in enumerate(schedule.steps):
        for name in (step.send, step.weight):
            if name in content:
                lives[content[name]] = position
        if step.action == "hop" and step.channel == "weight" and "slot" in step.receive:
            content[step.receive] = position
            lives[position] = position
    return max(sum(begin <= at <= end for begin, end in lives.items()) for at in range(len(schedule.steps)))


def test_footprint():
    """Slots of one layer of 33 numbers: 66 bytes of weights take 128, 132 of gradients take 192. A slot of weights is
    given back with its last product."""
    layer = [operation((3, 11))]
    for hosts, places in SIZES:
        weights, gradients, *_ = footprint(layer, ranks=hosts * places, route="two-level", hosts=hosts)
        made = two_level(hosts, places, pass_="backward").schedules()[0]
        assert (weights, gradients) == ([128] * held_at_once(made), [192] * made.gradient_slots)
    flat = footprint(layer, ranks=6)
    assert footprint(layer, ranks=6, route="two-level", hosts=1) == flat
    assert footprint(layer, ranks=6, route="two-level", hosts=6) == flat
