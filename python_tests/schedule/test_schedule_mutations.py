"""Every check of a schedule against a schedule that is wrong."""

import pytest
import schedule_variant_mutations  # noqa: F401  those of gathered shards, halves and streams
from schedule_cases import case
from schedule_checks import violations
from schedule_mutations import MUTATIONS, mutation, swap
from schedule_races import computes, hops


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


# -- bundles ---------------------------------------------------------------------------------------------------------

BUNDLE = case(4, "backward", bundle=1)


@mutation(BUNDLE, "wgrad inputs", "order")
def a_wgrad_comes_before_its_dgrad(ring):
    swap(ring[2], computes(ring, 2, "dgrad")[2], computes(ring, 2, "wgrad")[1])


@mutation(BUNDLE, "wgrad inputs")
def a_wgrad_of_a_bundle_reads_no_weight(ring):
    ring[2][computes(ring, 2, "wgrad")[1]].weight = None


@mutation(case(4, "backward"), "wgrad inputs")
def a_wgrad_reads_a_weight_for_nothing(ring):
    ring[2][computes(ring, 2, "wgrad")[-1]].weight = "weight home"


@mutation(BUNDLE, "wgrad inputs", "contents")
def a_wgrad_reads_another_shard_than_its_dgrad(ring):
    ring[0][computes(ring, 0, "wgrad")[0]].weight = "weight slot 1"


@mutation(BUNDLE, "contents")
def a_dgrad_and_its_wgrad_read_the_wrong_buffer(ring):
    for kind, at in (("dgrad", 1), ("wgrad", 0)):
        ring[0][computes(ring, 0, kind)[at]].weight = "weight home"


@mutation(BUNDLE, "overwritten", "order")
def a_weight_lands_in_a_slot_that_a_wgrad_still_needs(ring):
    for rank, steps in enumerate(ring):
        hop, wgrad = hops(ring, rank, "weight")[2], computes(ring, rank, "wgrad")[0]
        steps.insert(wgrad, steps.pop(hop))


@mutation(BUNDLE, "overwritten", "order")
def a_gradient_lands_in_a_slot_that_has_not_left(ring):
    for rank, steps in enumerate(ring):
        swap(steps, *hops(ring, rank, "gradient")[:2])


@mutation(case(5, "backward", bundle=1, in_place=1), "overwritten", "order")
def the_last_wgrad_reads_home_before_its_shard_is_back(ring):
    for rank, steps in enumerate(ring):
        at = computes(ring, rank, "wgrad")[-1]
        assert steps[at - 1].action == "copy"
        swap(steps, at - 1, at)


@mutation(case(5, "backward", bundle=1, in_place=1), "homecoming", "overwritten", "order")
def the_copy_home_of_a_bundle_is_missing(ring):
    for rank, steps in enumerate(ring):
        assert steps.pop(computes(ring, rank, "wgrad")[-1] - 1).action == "copy"


@mutation(case(4, "backward", bundle=1, dgrad=0), "computed once", "order")
def a_bundle_leaves_out_a_dgrad_that_its_wgrad_needs(ring):
    del ring[1][computes(ring, 1, "dgrad")[0]]


@mutation(BUNDLE, "gradients", "order")
def the_addition_is_missing(ring):
    assert ring[3].pop().action == "add"


@mutation(BUNDLE, "gradients", "order")
def the_addition_is_made_twice(ring):
    ring[3].append(ring[3][-1])


@mutation(BUNDLE, "gradients", "order", "contents")
def the_addition_comes_before_what_it_adds_to(ring):
    for steps in ring:
        swap(steps, -2, -1)


@mutation(BUNDLE, "gradients", "contents")
def the_addition_takes_the_slot_that_has_left(ring):
    ring[1][-1].send = "gradient slot 0"


@mutation(BUNDLE, "gradients")
def the_addition_ends_in_the_slot(ring):
    for steps in ring:
        steps[-1].send, steps[-1].receive = steps[-1].receive, steps[-1].send


@mutation(BUNDLE, "gradients")
def the_last_wgrad_of_a_bundle_adds_what_the_addition_adds_again(ring):
    ring[1][computes(ring, 1, "wgrad")[-1]].gradient_in = ring[1][-1].send


@mutation(BUNDLE, "gradients", "order")
def a_copy_stands_for_the_addition(ring):
    ring[1][-1].action = "copy"


@mutation(BUNDLE, "pairing", "deadlock", "order")
def one_rank_of_a_bundle_enqueues_two_hops_the_other_way_round(ring):
    swap(ring[1], hops(ring, 1, "gradient")[0], hops(ring, 1, "weight")[2])


@mutation(BUNDLE, "hop count", "pairing", "deadlock", "order")
def one_rank_of_a_bundle_drops_a_gradient_hop(ring):
    del ring[2][hops(ring, 2, "gradient")[1]]


@mutation(BUNDLE, "slots")
def a_third_gradient_slot_is_used(ring):
    for rank, steps in enumerate(ring):
        steps[hops(ring, rank, "gradient")[-1]].receive = steps[-1].send = "gradient slot 2"


@pytest.mark.parametrize(
    ("name", "this", "change", "checks"), MUTATIONS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_broken_schedule_is_caught(name, this, change, checks):
    ring = this.ring()
    change(ring)
    assert checks <= {violation.check for violation in violations(this, ring)}


def test_every_check_is_shown_to_fail():
    assert {check for *_, checks in MUTATIONS for check in checks} == {
        *("computed once", "order", "lanes", "wgrad inputs", "hop count", "slots", "parts", "route", "pairing"),
        *("contents", "overwritten", "gradients", "homecoming", "race", "deadlock"),
    }
