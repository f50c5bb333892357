"""The bytes and the time of policies between replicas, by closed form."""

import pytest

from rtp_ext.outer import mixing_matrix
from rtp_ext.planner import Cluster, TimeConstants, outer_cost
from rtp_ext.planner.time.links import Group, all_reduce_s
from rtp_ext.planner.time.outer import TOPOLOGIES, neighbours

CONSTANTS = TimeConstants.default()
SHARD = 1e9


def group(replicas):
    """A replica on each node."""
    return Group(Cluster.preset("h100-80gb", gpus=8 * replicas), replicas, 8)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_neighbours_are_those_of_the_mixing_matrix(topology):
    for replicas in (1, 2, 4, 8, 16) if topology == "one-peer" else range(1, 17):
        matrix = mixing_matrix(topology, replicas, 0)
        sent_to = [sum(matrix[j, i] != 0 for j in range(replicas) if j != i) for i in range(replicas)]
        assert neighbours(topology, replicas) == max(sent_to), (topology, replicas)


def test_bytes_and_seconds():
    def cost(policy, **options):
        return outer_cost(policy, SHARD, group(4), CONSTANTS, **options)

    whole = cost("all-reduce")
    assert (whole.bytes, whole.burst_bytes) == (1.5 * SHARD, 1.5 * SHARD)
    assert whole.seconds == all_reduce_s(group(4), SHARD, CONSTANTS)
    assert cost("zero").bytes == whole.bytes
    seldom = cost("diloco", period=50)
    assert (seldom.bytes, seldom.burst_bytes) == (whole.bytes / 50, whole.bytes)
    assert seldom.seconds == pytest.approx(whole.seconds / 50) and cost("local-sgd", period=50) == seldom
    assert cost("gossip").bytes == SHARD and cost("gossip", topology="ring", period=2).bytes == SHARD
    assert cost("gossip", topology="complete") == whole
    global_ = cost("gossip", global_period=4)
    assert global_.bytes == pytest.approx((3 * SHARD + whole.bytes) / 4) and global_.burst_bytes == whole.bytes
    assert outer_cost("gossip", SHARD, group(1), CONSTANTS).bytes == 0


def test_latency_of_one_peer_does_not_grow_with_replicas():
    tiny = [[outer_cost(kind, 8, group(k), CONSTANTS).seconds for k in (4, 64)] for kind in ("gossip", "all-reduce")]
    assert tiny[0][1] == tiny[0][0] and tiny[1][1] > tiny[1][0]


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("sgd", {}, "policy"),
        ("all-reduce", {"period": 2}, "acts in every step: expected period 1, got 2"),
        ("diloco", {"period": 0}, "period"),
        ("diloco", {"global_period": 4}, "global period of gossip alone"),
        ("gossip", {"period": 2, "global_period": 3}, "a multiple of period 2, got 3"),
        ("gossip", {"topology": "star"}, "topology"),
    ],
)
def test_refused(policy, options, message):
    with pytest.raises(ValueError, match=message):
        outer_cost(policy, SHARD, group(4), CONSTANTS, **options)
