"""Schedules with gradients on the direct route, for R = 1..16 (in `make test` for some of them): against the
mathematics, for races, slots, footprint."""

from itertools import product

import pytest
from grids import few
from schedule_cases import case
from schedule_checks import violations
from schedule_races import WAITS, races
from test_footprint import footprint, operation

from rtp_ext import schedule, timeline
from rtp_ext._native import make_schedule

RANKS = few((*range(1, 9), 13), range(1, 17))  # as in test_schedule.py
FORMS = [
    {"route": route, "in_place": in_place, **way}
    for (route, in_place), way in product(
        (("ring", 0), ("ring", 1), ("direct", 0)),
        ({}, {"bundle": 1}, {"dgrad": 0}, {"two_lanes": 1}, {"late": 1}, {"late": 1, "bundle": 1}),
    )
]


def straight(ranks, **variant):
    return case(ranks, "backward", gradient_route="direct", **variant)


def name_of(form):
    return "-".join(f"{key}={value}" for key, value in form.items())


@pytest.mark.parametrize("form", FORMS, ids=name_of)
@pytest.mark.parametrize("narrow", [0, 1])
@pytest.mark.parametrize("apart", [0, 1])
def test_every_schedule_is_right(form, narrow, apart):
    for ranks in RANKS:
        this = straight(ranks, narrow=narrow, apart=apart, **form)
        ring = this.ring()
        assert violations(this, ring) == [], this
        for made in this.schedules():
            assert made.gradient_route == ("direct" if this.direct else "chain")
            assert made.narrow == (this.direct and bool(narrow))
            assert made.gradient_slots == (min(ranks, 3) if this.direct else len(_gradient_slots(made, ranks)))
            assert not this.added_once or made.slot_shards[1] == [1, 1, ranks - 1]
            if this.late and ranks > 1:
                last = made.steps[-1]
                assert (last.action, last.channel, last.receive) == ("add", "gradient", "gradient home")


def _gradient_slots(made, ranks):
    names = {name for step in made.steps for name in step.reads(ranks) + step.writes(ranks)}
    return {name.partition(" place ")[0] for name in names if name.startswith("gradient slot")}


@pytest.mark.parametrize("bundle", [0, 1])
def test_contributions_are_added_in_one_order(bundle):
    """Adds those of ranks r - 1, r - 2, ..., r - R + 2, then this rank's own, and last that of rank r + 1, in any order
    of arrival: sums are bitwise the same in every run."""
    for ranks in range(3, 9):
        for rank, steps in enumerate(straight(ranks, bundle=bundle).ring()):
            landed, arrived = [], None
            for step in steps:
                if step.action == "hop" and step.channel == "gradient":
                    arrived = step.from_
                elif "gradient home" in (step.receive, step.gradient_out):
                    landed.append(rank if step.action == "compute" else arrived)
            assert landed == [(rank - s) % ranks for s in range(1, ranks - 1)] + [rank, (rank + 1) % ranks]


def test_two_ranks_take_the_chain_unless_contributions_are_narrowed():
    for form in ({}, {"bundle": 1}, {"late": 1}, {"in_place": 1}):
        for ranks in (1, 2):
            assert straight(ranks, **form).ring() == case(ranks, "backward", **form).ring()
    assert straight(1, narrow=1).ring() == case(1, "backward").ring()
    assert straight(2, narrow=1).ring() != case(2, "backward").ring()
    assert straight(5, narrow=1).ring() == straight(5).ring(), "the same steps"


def test_what_it_does_not_apply_to():
    """On two levels, without a weight gradient, in a forward; and it takes no halves."""
    for narrow in (0, 1):
        for ranks in (2, 5):
            this = straight(ranks, narrow=narrow, wgrad=0)
            assert this.ring() == case(ranks, "backward", wgrad=0).ring()
            assert (this.schedules()[0].gradient_route, this.schedules()[0].narrow) == ("chain", False)
        levels = {"route": "two-level", "hosts": 2}
        assert straight(6, narrow=narrow, **levels).ring() == case(6, "backward", **levels).ring()
        assert case(4, gradient_route="direct", narrow=narrow).ring() == case(4).ring()
    assert straight(4, halves=1).ring() == straight(4).ring()
    assert not straight(4, halves=1).schedules()[0].halves
    with pytest.raises(ValueError, match="gradient route of chain or direct, got scenic"):
        make_schedule(4, 0, pass_="backward", gradient_route="scenic")


def _gradient_steps(steps, action):
    return [at for at, step in enumerate(steps) if step.action == action and step.channel == "gradient"]


def _add_before_it_arrives(ring):
    for steps in ring:
        steps[_gradient_steps(steps, "add")[-1]].send = "gradient slot 1"


def _copy_twice(ring):
    for steps in ring:
        steps[_gradient_steps(steps, "add")[0]].action = "copy"


def _send_to_the_neighbour(ring):
    for rank, steps in enumerate(ring):
        step = steps[_gradient_steps(steps, "hop")[1]]
        step.to, step.from_ = (rank - 1) % len(ring), (rank + 1) % len(ring)


def _one_slot_to_send(ring):
    for steps in ring:
        for step in steps:
            for name in ("send", "gradient_out"):
                if getattr(step, name) == "gradient slot 1":
                    setattr(step, name, "gradient slot 0")


def _own_from_zero(ring):
    for steps in ring:
        for step in steps:
            if step.gradient_in == "gradient home":
                step.gradient_in = None


MUTANTS = [
    (_add_before_it_arrives, {"contents", "overwritten"}),
    (_copy_twice, {"gradients"}),
    (_send_to_the_neighbour, {"route", "pairing"}),
    (_own_from_zero, {"gradients"}),
]


@pytest.mark.parametrize(("change", "checks"), MUTANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_schedule_is_found(change, checks):
    this = straight(5)
    ring = this.ring()
    change(ring)
    assert checks & {violation.check for violation in violations(this, ring)}


def _leave_one_out(ring):
    for steps in ring:
        steps[-1].count -= 1


def _one_slot_to_arrive(ring):
    for steps in ring:
        for at in _gradient_steps(steps, "hop"):
            steps[at].receive = "gradient slot 2 at 0"


@pytest.mark.parametrize("change", [_leave_one_out, _one_slot_to_arrive])
def test_contributions_that_arrive_apart_are_all_added(change):
    this = straight(5, apart=1)
    ring = this.ring()
    assert [step.count for step in ring[0] if step.action == "add"] == [4]
    change(ring)
    assert {"gradients", "contents", "overwritten"} & {violation.check for violation in violations(this, ring)}


def test_waits_are_needed():
    """One slot to send is right, but slow; without any one kind of wait there are races."""
    ring = straight(5).ring()
    _one_slot_to_send(ring)
    assert list(races(ring)) == []
    needed = {wait for wait in WAITS if list(races(straight(5, in_place=1).ring(), [wait]))}
    assert {"compute for arrival in what it uses", "hop for computes that read its target"} <= needed


def test_hops_hide_under_a_wgrad_and_a_dgrad():
    """The chain of the ring route stalls if a hop takes longer than a dgrad; a direct hop may take a wgrad more."""
    ranks, hop = 4, 1.8

    def end(route):
        every = schedule.schedules(ranks, pass_="backward", gradient_route=route)
        times = {"compute_time": 1.0, "hop_time": lambda _, step: hop if step.channel == "gradient" else 0.1}
        return max(event.end for event in timeline.timeline(every, **times, copy_time=0.0))

    assert end("direct") == pytest.approx(2 * ranks)
    assert end("chain") > 2 * ranks + 1


def test_what_is_printed():
    form = {"op": "linear", "pass_": "backward", "route": "ring", "in_place": False, "gradient_route": "direct"}
    every = schedule.schedules(4, **form)
    title = schedule.describe(every, **form)
    assert title.splitlines() == [
        "linear backward, 4 ranks, route ring, out of place, gradients straight home",
        "each rank: 4 dgrad, 4 wgrad, 3 weight hops, 3 gradient hops; 2 weight slots, 3 gradient slots",
    ]
    text = schedule.table(every, rank=1)
    assert "G2 -> 2, G1 <- 0" in text and "G1 to home" in text and "add G1 to home" in text
    for ranks, other, why in (
        (2, {}, "to two ranks"),
        (4, {"pass_": "forward"}, "to a forward"),
    ):
        asked = form | other
        first = schedule.describe(schedule.schedules(ranks, **asked), **asked).splitlines()[0]
        assert first.endswith(f"out of place (gradient route direct does not apply {why})")
    halved = form | {"halves": True}
    first = schedule.describe(schedule.schedules(4, **halved), **halved).splitlines()[0]
    assert first.endswith("gradients straight home (halves do not apply where gradients go straight home)")


def test_footprint():
    """Three slots, and where contributions are narrowed one more, in which they are summed: see test_footprint.py for
    the numbers of this layer. 33 + 3 numbers: 132 and 12 bytes take 192 and 64, as bfloat16 66 and 6 take 128 and 64,
    in int8 36 + 4 and 4 + 4 take 64 and 64."""
    layer = [operation((3, 11), (3,))]
    direct = {"gradient_route": "direct"}

    def gradients(**changed):
        _, free, _, most = footprint(layer, **direct, **changed)
        return free, most

    assert gradients() == ([256] * 3, 768)
    for ranks in (3, 4, 7):  # and a place for every contribution that arrives apart

        def places(*tensors, ranks=ranks):
            return sum(-(-(ranks - 1) * size // 64) * 64 for size in tensors)

        assert gradients(ranks=ranks, gradients_apart=True)[0] == [256, 256, places(132, 12)]
        apart = gradients(ranks=ranks, gradients_apart=True, reduce_bytes=2)[0]
        assert apart == sorted([192, 192, 256, places(66, 6)])
    assert gradients(group=3, gradients_apart=True) == gradients(group=3), "all arrive in one group"
    assert gradients(ranks=2, gradients_apart=True) == gradients(ranks=2)
    assert gradients(ranks=2) == footprint(layer, ranks=2)[1::2], "the chain"
    assert gradients(reduce_bytes=2) == ([192] * 3 + [256], 832)
    assert gradients(ranks=2, reduce_bytes=2) == ([192] * 2 + [256], 640)
    assert gradients(gradients_quantized=True) == ([128] * 3 + [256], 640)
    assert gradients(reduce_bytes=8, sum_bytes=8) == gradients(reduce_bytes=8, sum_bytes=4), "nothing is narrowed"
    assert gradients(ranks=1, reduce_bytes=2) == ([], 0)
    # in one group of three shards: two that arrive, the contributions (396 and 36 bytes), and their sums
    assert gradients(group=3) == ([384, 512], 896)
    assert gradients(group=3, reduce_bytes=2) == ([256, 320, 512], 1088)
    # pieces are cut by the widest of what a slot holds
    assert gradients(reduce_bytes=2, slot_cap=2 * 12 * 4) == ([128] * 3 + [192], 576)


def test_a_late_gradient_keeps_its_three_slots():
    layers = [operation((1, 32))] * 3
    _, free, _, most = footprint(layers, late=1, gradient_route="direct", reduce_bytes=2)
    assert (sorted(free), most) == ([64] * 6 + [128], 6 * 64 + 128)
