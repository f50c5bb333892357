"""Wrong schedules of groups, of gradients in halves and of two streams."""

from schedule_cases import case
from schedule_mutations import mutation, swap
from schedule_races import computes, hops

# -- groups -------------------------------------------------------------------------------------------------

GATHER = case(4, "backward", route="gather")


def local_steps(ring, rank, action, channel):
    """Positions of the copies or additions of a channel."""
    return [at for at, step in enumerate(ring[rank]) if (step.action, step.channel) == (action, channel)]


@mutation(case(4, route="gather"), "contents", "order")
def the_own_shard_is_not_copied_to_its_group(ring):
    for steps in ring:
        del steps[0]


@mutation(case(4, route="gather"), "contents", "order")
def the_product_comes_before_the_last_shard(ring):
    for steps in ring:
        swap(steps, -2, -1)


@mutation(case(4, route="gather"), "contents")
def a_shard_lands_in_the_place_of_another(ring):
    for rank, steps in enumerate(ring):
        steps[hops(ring, rank, "weight")[0]].receive_owner = rank


@mutation(case(4, route="gather"), "computed once", "order")
def the_product_takes_one_shard(ring):
    ring[2][-1].owner, ring[2][-1].owners = 2, 1


@mutation(case(5, route="gather"), "pairing", "deadlock")
def a_gathered_shard_goes_to_the_wrong_peer(ring):
    ring[0][hops(ring, 0, "weight")[1]].to = 3


@mutation(case(4, route="gather"), "slots", "contents")
def a_gathered_shard_lands_in_another_slot(ring):
    ring[1][hops(ring, 1, "weight")[0]].receive = "weight slot 1"


@mutation(case(5, group=2), "overwritten", "contents")
def a_group_lands_in_the_slot_of_the_one_before(ring):
    for rank, steps in enumerate(ring):
        hop, product = steps[hops(ring, rank, "weight")[-1]], steps[computes(ring, rank, "forward")[-1]]
        hop.receive = hop.receive.replace("slot 1", "slot 0")
        product.weight = product.weight.replace("slot 1", "slot 0")


@mutation(case(4, route="gather"), "route")
def a_gathered_shard_leaves_from_home(ring):
    for rank, steps in enumerate(ring):
        steps[hops(ring, rank, "weight")[0]].send = "weight home"


@mutation(GATHER, "contents", "gradients", "order")
def a_gradient_of_the_whole_leaves_before_the_wgrad(ring):
    for rank in range(4):
        swap(ring[rank], hops(ring, rank, "gradient")[0], computes(ring, rank, "wgrad")[0])


@mutation(GATHER, "gradients", "order")
def an_addition_to_the_whole_is_missing(ring):
    for rank, steps in enumerate(ring):
        del steps[local_steps(ring, rank, "add", "gradient")[1]]


@mutation(GATHER, "gradients", "order", "contents")
def an_addition_is_for_the_wrong_owner(ring):
    step = ring[1][local_steps(ring, 1, "add", "gradient")[0]]
    step.send_owner = step.receive_owner = 1


@mutation(GATHER, "gradients")
def a_sum_is_added_to_the_gradient_of_another_owner(ring):
    ring[1][local_steps(ring, 1, "add", "gradient")[0]].receive_owner = 2


@mutation(GATHER, "gradients", "order")
def a_sum_leaves_before_its_addition(ring):
    for rank in range(4):
        swap(ring[rank], local_steps(ring, rank, "add", "gradient")[0], hops(ring, rank, "gradient")[1])


@mutation(GATHER, "overwritten", "order", "gradients")
def a_sum_lands_in_a_slot_that_is_still_to_be_added(ring):
    for rank in range(4):
        swap(ring[rank], local_steps(ring, rank, "add", "gradient")[0], hops(ring, rank, "gradient")[1])
        ring[rank][local_steps(ring, rank, "add", "gradient")[0] - 1].receive = "gradient slot 1"


@mutation(GATHER, "gradients", "order")
def the_last_sum_does_not_come_home(ring):
    for steps in ring:
        assert steps.pop().action == "add"


@mutation(GATHER, "order", "contents")
def the_gradient_of_another_owner_comes_home(ring):
    ring[1][-1].send_owner = 2


@mutation(GATHER, "gradients", "order", "contents")
def the_own_contribution_does_not_come_home(ring):
    for rank, steps in enumerate(ring):
        del steps[local_steps(ring, rank, "copy", "gradient")[0]]


@mutation(GATHER, "hop count", "order", "gradients")
def all_ranks_drop_a_hop_of_the_whole(ring):
    for rank, steps in enumerate(ring):
        del steps[hops(ring, rank, "gradient")[-1]]


# -- halves ----------------------------------------------------------------------------------------------------------

HALVES = case(4, "backward", halves=1)


def of_half(ring, rank, half, kind):
    """Positions of the gradient hops (kind "hop") or wgrads of one half."""
    found = hops(ring, rank, "gradient") if kind == "hop" else computes(ring, rank, kind)
    return [at for at in found if ring[rank][at].half == half]


@mutation(HALVES, "parts", "contents")
def a_half_lands_where_the_whole_belongs(ring):
    for rank, steps in enumerate(ring):
        steps[of_half(ring, rank, 1, "hop")[0]].receive = "gradient slot 1"


@mutation(HALVES, "parts", "contents")
def a_wgrad_of_a_half_adds_to_the_whole(ring):
    step = ring[2][of_half(ring, 2, 1, "wgrad")[1]]
    step.gradient_in = step.gradient_out = "gradient slot 1"


@mutation(HALVES, "contents")
def one_rank_sends_a_half_that_has_not_been_computed(ring):
    ring[1][of_half(ring, 1, 1, "hop")[1]].send = "gradient home in halves"


@mutation(HALVES, "pairing", "order")
def one_rank_sends_the_halves_the_other_way_round(ring):
    swap(ring[1], of_half(ring, 1, 1, "hop")[0], of_half(ring, 1, 2, "hop")[0])


@mutation(HALVES, "computed once", "gradients", "order")
def the_second_half_lacks_a_wgrad(ring):
    del ring[3][of_half(ring, 3, 2, "wgrad")[1]]


@mutation(HALVES, "computed once", "order")
def the_first_half_is_computed_twice(ring):
    ring[0][of_half(ring, 0, 2, "wgrad")[0]] = ring[0][of_half(ring, 0, 1, "wgrad")[0]]


@mutation(HALVES, "gradients")
def the_second_half_starts_from_zero_on_the_way(ring):
    ring[2][of_half(ring, 2, 2, "wgrad")[2]].gradient_in = None


@mutation(HALVES, "computed once", "gradients")
def a_half_ends_where_the_whole_belongs(ring):
    for rank, steps in enumerate(ring):
        steps[of_half(ring, rank, 2, "wgrad")[-1]].half = 0


@mutation(HALVES, "hop count", "order", "gradients")
def all_ranks_drop_a_hop_of_a_half(ring):
    for rank, steps in enumerate(ring):
        del steps[of_half(ring, rank, 2, "hop")[-1]]


@mutation(HALVES, "hop count", "order")
def a_whole_gradient_travels_among_halves(ring):
    for rank, steps in enumerate(ring):
        steps[of_half(ring, rank, 1, "hop")[0]].half = 0


@mutation(case(4, "backward", halves=1, receive_in_slots=1), "slots")
def a_third_slot_of_halves_is_used(ring):
    for rank, steps in enumerate(ring):
        last, hop = of_half(ring, rank, 2, "wgrad")[-1], of_half(ring, rank, 2, "hop")[-1]
        steps[hop].receive = steps[last].gradient_in = "gradient slot 2 in halves"


@mutation(case(5, "backward", halves=1, receive_in_slots=1), "overwritten", "order")
def a_half_lands_in_a_slot_that_has_not_left(ring):
    for rank, steps in enumerate(ring):
        swap(steps, *of_half(ring, rank, 1, "hop")[:2])


# -- streams ---------------------------------------------------------------------------------------------------------


@mutation(case(4, two_lanes=1), "lanes")
def two_forwards_in_a_row_share_a_lane(ring):
    for rank, steps in enumerate(ring):
        steps[computes(ring, rank, "forward")[1]].lane = 0


@mutation(case(4, "backward", two_lanes=1), "lanes")
def a_wgrad_shares_the_lane_of_the_dgrads(ring):
    ring[2][computes(ring, 2, "wgrad")[1]].lane = 0


@mutation(case(4), "lanes")
def a_forward_leaves_the_only_lane(ring):
    ring[2][computes(ring, 2, "forward")[1]].lane = 1


@mutation(case(5, in_place=1, two_lanes=1), "lanes")
def the_copy_home_is_made_on_the_side(ring):
    for steps in ring:
        steps[-1].lane = 1
