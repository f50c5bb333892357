"""Every schedule for R = 1..16, in `make test` for some of them, against the mathematics; its table.

The checks are in schedule_checks.py and schedule_races.py; test_schedule_mutations.py shows that each can fail.
"""

import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from grids import few
from schedule_cases import case
from schedule_checks import violations
from schedule_races import LANES, WAITS, deadlocks, races

from rtp_ext import schedule
from rtp_ext._native import make_schedule, shard_sizes

# 1 and 2 are special, 3 is the first general ring; even and odd, primes, powers of two, multiples, every rest by 4
RANKS = few((*range(1, 9), 13), range(1, 17))
NEEDS = [
    {"dgrad": dgrad, "wgrad": wgrad, "receive_in_slots": slots}
    for dgrad, wgrad, slots in product((0, 1), (0, 1), (0, 1))
    if wgrad or not slots
]
ROUTES = [{"route": route, "in_place": in_place} for route, in_place in product(("ring", "direct"), (0, 1))]
VARIANTS = [
    *({"pass_": "forward", **route, "two_lanes": lanes} for route, lanes in product(ROUTES, (0, 1))),
    *(
        {"pass_": "backward", "bundle": bundle, **route, **needs}
        for bundle, route, needs in product((0, 1), ROUTES, NEEDS)
    ),
    *({"pass_": "backward", **route, **needs, "two_lanes": 1} for route, needs in product(ROUTES, NEEDS)),
    *(
        {"pass_": "backward", **route, **needs, "halves": 1, "two_lanes": lanes}
        for lanes, routes in ((0, ROUTES[:1]), (1, ROUTES))
        for route, needs in product(routes, NEEDS)
        if needs["wgrad"]
    ),
    *(
        {"pass_": "backward", **route, **needs, "late": 1, **way}
        for route, needs, way in product(ROUTES, NEEDS, ({}, {"two_lanes": 1}, {"bundle": 1}))
        if needs["wgrad"]
    ),
    *({"pass_": "backward", "halves": 1, **way} for way in ({"late": 1}, {"bundle": 1}, {"bundle": 1, "late": 1})),
    {"pass_": "forward", "route": "gather"},
    *({"pass_": "backward", "bundle": bundle, "route": "gather", **needs} for bundle, needs in product((0, 1), NEEDS)),
]
GROUPED = [
    *({"pass_": "forward", "route": route} for route in ("ring", "direct")),
    *(
        {"pass_": "backward", "bundle": bundle, "route": route, "gradient_route": gradients, "dgrad": dgrad}
        for bundle, route, gradients, dgrad in product((0, 1), ("ring", "direct"), ("chain", "direct"), (0, 1))
    ),
    *({"pass_": "backward", "bundle": bundle, "wgrad": 0} for bundle in (0, 1)),
    *(
        {"pass_": "backward", "bundle": bundle, "late": late, **way}
        for bundle, late in product((0, 1), (0, 1))
        for way in ({"halves": 1}, *({"gradient_route": "direct", "apart": 1, "narrow": narrow} for narrow in (0, 1)))
    ),
    {"pass_": "backward", "late": 1},
    {"pass_": "backward", "late": 1, "gradient_route": "direct"},
]


def identity(variant):
    return "-".join(f"{key}={value}" if value in (0, 1) else value for key, value in variant.items())


@pytest.mark.parametrize("variant", VARIANTS, ids=identity)
def test_every_schedule_is_right(variant):
    for ranks in RANKS:
        check(case(ranks, **variant))


@pytest.mark.parametrize("variant", GROUPED, ids=identity)
def test_every_schedule_of_groups_is_right(variant):
    """Every size of a group; the hops of a group are those of its shards."""
    for ranks in few((2, 3, 5, 8), range(1, 17)):
        alone = case(ranks, **variant)
        for group in range(1, ranks + 1):
            this = replace(alone, group=group)
            check(this)
            made = this.schedules()[0]
            assert made.group == group and this.hops == alone.hops
            assert not made.late or ranks == 1 or made.steps[-1].label == "add G0 to home", "nothing waits for it"
            products = [step for step in made.steps if step.action == "compute"]
            halved = len(this.parts) > 1 and this.fused
            assert len(products) == (len(this.products) + halved) * -(-ranks // group)
            assert max(step.owners for step in products) == group


@pytest.mark.parametrize("ranks", few((1, 2, 3, 5, 8), range(1, 17)))
def test_every_schedule_of_collectives_is_right(ranks):
    """Of all shards in one group; smaller groups travel by hops."""
    ways = [{"pass_": "forward"}] + [
        {"pass_": "backward", "bundle": bundle, "dgrad": dgrad, "wgrad": wgrad, "late": late, "halves": halves}
        for bundle, dgrad, wgrad, late, halves in product((0, 1), repeat=5)
        if wgrad or not (late or halves)
    ]
    for way, group in product(ways, ({"route": "gather"}, {"group": ranks}, {"group": ranks, "route": "direct"})):
        this = case(ranks, **way, **group, collective=1)
        check(this)
        made = this.schedules()[0]
        assert made.collective == (ranks > 1)
        assert not made.late or ranks == 1 or made.steps[-1].label == "G0 to home", "nothing waits for it"
        if ranks > 2:
            smaller = replace(this, route="ring", group=ranks - 1)
            assert smaller.ring() == replace(smaller, collective=False).ring()
    with pytest.raises(ValueError, match="expected gradient route chain with collectives"):
        case(3, "backward", group=3, collective=1, gradient_route="direct").schedules()


def test_wrong_collectives_are_found():
    forward, backward = case(3, "forward", group=3, collective=1), case(3, "backward", group=3, collective=1)

    def found(this, change):
        ring = this.ring()
        for steps in ring[:2]:
            change(steps)
        return {violation.check for violation in violations(this, ring)}

    def swapped(first):
        def swap(steps):
            steps[first], steps[first + 1] = steps[first + 1], steps[first]

        return swap

    actions = [step.action for step in backward.ring()[0]]
    assert actions == ["copy", "gather", "compute", "scatter", "compute", "copy"]
    assert {"order", "pairing", "contents"} <= found(forward, swapped(0))  # the own shard comes after the gather
    assert {"order", "contents"} <= found(forward, swapped(1))  # a product before it
    assert {"order", "pairing"} <= found(backward, swapped(2))  # a scatter before its wgrad
    assert {"hop count", "gradients"} <= found(backward, lambda steps: steps.pop(3))
    assert {"gradients"} <= found(backward, lambda steps: steps.pop(5))
    for wait in (WAITS[1], WAITS[6]):  # a scatter waits for its wgrad, a product for the gather
        assert list(races(backward.ring(), [wait])), wait


def check(this):
    ranks, ring = this.ranks, this.ring()
    assert violations(this, ring) == [], this
    for made in this.schedules():
        steps = ring[made.rank]
        used = {name for step in steps for name in step.reads(ranks) + step.writes(ranks)}
        buffers = {" ".join(name.split(" ")[:3]) for name in used}
        assert made.ranks == ranks
        assert made.weight_slots == sum(buffer.startswith("weight slot") for buffer in buffers)
        assert made.gradient_slots == sum(buffer.startswith("gradient slot") for buffer in buffers)
        for step, own in zip(made.steps, steps, strict=True):
            assert (step.reads(ranks), step.writes(ranks)) == (own.reads(ranks), own.writes(ranks))


def test_bundles_take_no_second_lane():
    for pass_, ranks, needs in product(("forward", "backward"), (1, 2, 5), ({}, {"dgrad": 0}, {"wgrad": 0})):
        this, plain = (case(ranks, pass_, bundle=1, **needs, **way) for way in ({"two_lanes": 1}, {}))
        assert this.ring() == plain.ring()
        for made in this.schedules():
            assert (made.route, made.two_lanes) == (plain.schedules()[0].route, False)


def test_what_else_is_ignored():
    for ranks in (1, 2, 5):
        # no groups in place, no second stream with groups, no weights in halves
        for pass_ in ("forward", "backward"):
            assert case(ranks, pass_, route="gather", in_place=1).ring() == case(ranks, pass_, in_place=1).ring()
            ways = ({"two_lanes": 1}, {"receive_in_slots": 1})
            gathered = case(ranks, pass_, route="gather")
            for way in ways:
                assert ranks == 1 or case(ranks, pass_, route="gather", **way).ring() == gathered.ring()
            assert case(ranks, pass_, route="direct", group=ranks + 7).ring() == gathered.ring()
        assert case(ranks, halves=1).ring() == case(ranks).ring()
        assert not case(ranks, halves=1).schedules()[0].halves
        assert case(ranks, late=1).ring() == case(ranks).ring()
        assert not case(ranks, late=1).schedules()[0].late
        assert case(ranks, "backward", halves=1, wgrad=0).ring() == case(ranks, "backward", wgrad=0).ring()


def gradients_first(queue, steps):
    return sorted(queue, key=lambda at: steps[at].channel == "weight")


@pytest.mark.parametrize("bundle", [0, 1])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_gradients_first_deadlock_one_communicator(ranks, bundle):
    # The first gradient of a bundle needs the first weight that arrives; otherwise only the second gradient does.
    ring = case(ranks, "backward", bundle=bundle).ring()
    stuck = list(deadlocks(ring, LANES["one communicator"], gradients_first))
    assert bool(stuck) == (bundle or ranks >= 3)
    assert list(deadlocks(ring, LANES["two communicators"], gradients_first)) == []


# The executor's waits are sufficient (test_every_schedule_is_right). Without one of these waits they are not. Two
# others, for the writer of the target of a hop, are implied by the wait for its later reader. Waits of one compute for
# another are implied if both are on one stream, and if a hop lies between them.
IMPLIED = {"hop for arrival in its target", "hop for the compute that wrote its target"}
LANES_ONLY = {"compute for the compute that wrote what it uses", "compute for computes that read what it writes"}


@pytest.mark.parametrize(
    "variant", [{"in_place": 1}, {"bundle": 1, "in_place": 1}, {"halves": 1, "in_place": 1}], ids=identity
)
@pytest.mark.parametrize("wait", [wait for wait in WAITS if wait not in IMPLIED | LANES_ONLY])
def test_a_wait_that_is_forgotten_is_a_race(wait, variant):
    assert list(races(case(5, "backward", **variant).ring(), [wait]))


@pytest.mark.parametrize(
    ("wait", "send", "receive", "at", "text"),
    [
        ("compute for arrival in what it uses", "home", "slot 0", 7, "steps 4 and 6 use gradient slot 1"),
        ("compute for hops that leave what it writes", "home", "slot 0", 6, "steps 6 and 7 use gradient home"),
        ("hop for the compute that wrote its source", "home", "slot 0", 7, "steps 6 and 7 use gradient home"),
        ("hop for computes that read its target", "slot 0", "slot 1", 7, "steps 6 and 7 use gradient slot 1"),
    ],
)
def test_an_addition_takes_part_in_races(wait, send, receive, at, text):
    # Steps 4 to 6 of two ranks: a partial arrives in slot 1, wgrad writes home, the partial is added. One more hop, as
    # a neighbour of the addition, shows what keeps the two apart.
    ring = case(2, "backward", bundle=1).ring()
    for steps in ring:
        assert [step.action for step in steps[4:]] == ["hop", "compute", "add"]
        steps.insert(at, replace(steps[4], send=f"gradient {send}", receive=f"gradient {receive}"))
    assert list(races(ring)) == []
    assert any(text in found for found in races(ring, [wait]))


def test_lanes_that_meet_wait_for_each_other():
    """In all current schedules a hop separates conflicting computes of two streams; the executor waits in any case."""
    moved = case(2, "backward", route="gather").ring()  # what a wgrad wrote, the copy home reads
    copied = case(5, in_place=1, two_lanes=1).ring()  # what a forward read, the copy home writes
    for steps in moved:
        for step in steps:
            step.lane = int(step.compute == "wgrad")
    for steps in copied:
        for step in steps:
            step.lane = 1 - step.lane if step.action == "compute" else 0
    reads, writes = "compute for computes that read what it writes", "compute for the compute that wrote what it uses"
    assert list(races(moved)) == list(races(copied)) == []
    assert any("gradient slot 0" in race for race in races(moved, [writes]))
    assert any("weight home" in race for race in races(copied, [reads]))
    assert {reads, writes} == LANES_ONLY


# -- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0, "rank": 0, "pass_": "forward"}, "expected ranks >= 1, got 0"),
        ({"ranks": 4, "rank": 4, "pass_": "forward"}, "expected 0 <= rank < 4, got 4"),
        ({"ranks": 4, "rank": -1, "pass_": "forward"}, "expected 0 <= rank < 4, got -1"),
        ({"ranks": 4, "rank": 0, "pass_": "forward", "group": 0}, "expected a group of at least 1 shard, got 0"),
        ({"ranks": 4, "rank": 0, "pass_": "sideways"}, "expected a pass of forward or backward, got sideways"),
        (
            {"ranks": 4, "rank": 0, "pass_": "forward", "route": "scenic"},
            "route of ring, direct, gather or two-level, got scenic",
        ),
    ],
)
def test_errors_of_make_schedule(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(**arguments)


def test_errors_of_schedules():
    with pytest.raises(ValueError, match="linear, embedding, mlp, cross_entropy or experts, got conv"):
        schedule.schedules(2, op="conv")
    with pytest.raises(ValueError, match="expected dgrad=False for an embedding"):
        schedule.schedules(2, op="embedding", pass_="backward", dgrad=True)
    with pytest.raises(ValueError, match="expected ranks >= 1, got 0"):
        schedule.schedules(0)


def test_an_embedding_has_no_input_gradient():
    for made in schedule.schedules(4, op="embedding", pass_="backward"):
        assert [step.compute for step in made.steps if step.action == "compute"] == ["wgrad"] * 4
        assert {step.channel for step in made.steps if step.action == "hop"} == {"gradient"}


@pytest.mark.parametrize("op", schedule.BUNDLES)
def test_a_bundle_differs_in_its_backward_alone(op):
    def table(op, pass_, **options):
        return schedule.table(schedule.schedules(4, op=op, pass_=pass_, **options), rank=1)

    assert table(op, "forward") == table("linear", "forward")
    assert table(op, "backward") == table("mlp", "backward") != table("linear", "backward")
    assert table(op, "backward", dgrad=False) == table(op, "backward")
    assert table(op, "backward", receive_in_slots=True) == table(op, "backward")


def test_shard_sizes_are_those_of_chunk():
    for extent, ranks in product([*range(40), 1000, 1024, 50257], RANKS):
        chunks = [len(chunk) for chunk in torch.empty(extent).chunk(ranks)]
        assert shard_sizes(extent, ranks) == (chunks + [0] * ranks)[:ranks], (extent, ranks)
    with pytest.raises(ValueError, match="expected extent >= 0 and ranks >= 1, got -1 and 2"):
        shard_sizes(-1, 2)
    with pytest.raises(ValueError, match="expected extent >= 0 and ranks >= 1, got 3 and 0"):
        shard_sizes(3, 0)


# -- table -----------------------------------------------------------------------------------------------------------


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


def show(**options):
    """The lines of a table: its title, and its rows from the first step on, without their numbers."""
    form = {"op": "linear", "pass_": "backward", "route": "ring", "in_place": False, **options}
    every = schedule.schedules(3, **form)
    title, what, _, _, _, *rows = schedule.table(every, title=schedule.describe(every, **form), rank=1).splitlines()
    return title, what, [re.split("  +", row.strip())[1:] for row in rows]


def test_table_of_groups():
    title, what, rows = show(route="gather")
    assert title == "linear backward, 3 ranks, route direct, out of place, groups of 3"
    assert what == (
        "each rank: 1 wgrad, 1 dgrad, 2 weight hops, 2 gradient hops; "
        "1 weight slot (1 of 3 shards), 3 gradient slots (1 of 3 shards)"
    )
    everything = ", ".join(f"weight slot 0 place {owner}" for owner in (1, 2, 0))
    assert rows[0] == ["compute", "W1 to slot 0", "weight home", "weight slot 0 place 1"]
    assert rows[1] == ["weight", "W1 -> 0, W2 <- 2", "weight slot 0 place 1", "weight slot 0 place 2"]
    assert rows[6] == ["compute", "dgrad W1 and 2 more", everything]
    assert rows[-1] == ["compute", "add G1 to home", "gradient slot 2, gradient home", "gradient home"]
    title, what, rows = show(group=2, pass_="forward")
    assert title == "linear forward, 3 ranks, route ring, out of place, groups of 2"
    assert what == (
        "each rank: 2 forward, 2 weight hops, 0 gradient hops; 1 weight slot (1 of 2 shards), 0 gradient slots"
    )
    assert rows[2:] == [
        ["compute", "forward W1", "weight home"],
        ["compute", "forward W2 and 1 more", "weight slot 0 place 1, weight slot 0 place 0"],
    ]


def test_table_of_halves_and_lanes():
    title, what, rows = show(halves=True, two_lanes=True, route="direct")
    assert title == "linear backward, 3 ranks, route direct, out of place, gradients in halves, two lanes"
    assert what == "each rank: 3 dgrad, 6 wgrad, 2 weight hops, 4 gradient hops; 2 weight slots, 2 gradient slots"
    assert rows[2:6] == [
        ["side", "wgrad G2a =", "gradient slot 0 first"],
        ["gradient", "G2a -> 0, G0a <- 2", "gradient slot 0 first", "gradient slot 1 first"],
        ["side", "wgrad G2b =", "gradient slot 0 second"],
        ["gradient", "G2b -> 0, G0b <- 2", "gradient slot 0 second", "gradient slot 1 second"],
    ]
    assert rows[-1] == ["side", "wgrad G1b +=", "gradient home second", "gradient home second"]


@pytest.mark.parametrize(
    ("options", "title"),
    [
        ({"op": "mlp", "halves": 1, "two_lanes": 1}, "gradients in halves (two lanes do not apply to a bundle)"),
        ({"in_place": 1, "route": "gather"}, "route ring (gather does not apply in place), in place"),
        ({"group": 2, "two_lanes": 1}, "out of place, groups of 2 (two lanes do not apply in groups)"),
        ({"pass_": "forward", "halves": 1}, "out of place (halves do not apply to a forward)"),
        ({"op": "embedding", "two_lanes": 1}, "out of place, two lanes"),
    ],
)
def test_the_title_says_what_is_ignored(options, title):
    assert show(**options)[0].endswith(title)


def test_table_of_a_bundle():
    form = {"op": "mlp", "pass_": "backward", "route": "ring", "in_place": False}
    every = schedule.schedules(3, **form)
    text = schedule.table(every, title=schedule.describe(every, **form))
    assert text.startswith(
        "mlp backward, 3 ranks, route ring, out of place\n"
        "each rank: 3 dgrad, 3 wgrad, 2 weight hops, 2 gradient hops; 2 weight slots, 2 gradient slots\n"
    )
    assert [re.split("  +", line.strip())[1:4:2] for line in text.splitlines()[5:]] == [
        *(["weight", "W1 -> 0, W2 <- 2"], ["compute", "dgrad W1"]),
        *(["weight", "W2 -> 0, W0 <- 2"], ["compute", "dgrad W2"], ["compute", "wgrad G2 ="]),
        *(["gradient", "G2 -> 0, G0 <- 2"], ["compute", "dgrad W0"], ["compute", "wgrad G0 +="]),
        *(["gradient", "G0 -> 0, G1 <- 2"], ["compute", "wgrad G1 ="], ["compute", "add G1 to home"]),
    ]
    last = schedule.table(every, rank=1).splitlines()[-2:]
    assert re.split("  +", last[0])[2:] == ["compute", "wgrad G1 =", "weight home", "gradient home"]
    assert re.split("  +", last[1])[2:] == [
        *("compute", "add G1 to home", "gradient slot 0, gradient home", "gradient home")
    ]


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
