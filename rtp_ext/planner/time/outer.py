"""Bytes and exposed seconds per step of the policies between replicas."""

from __future__ import annotations

from dataclasses import dataclass

from rtp_ext.planner.constants import TimeConstants, check_at_least, check_known
from rtp_ext.planner.specs.strategy import TOPOLOGIES
from rtp_ext.planner.time.links import Group, all_reduce_s, gather_s, hop_bytes_per_s

POLICIES = ("all-reduce", "zero", "local-sgd", "diloco", "gossip")


@dataclass(frozen=True)
class OuterCost:
    """Cost of one rank. `bytes` and `seconds`: per step, averaged over a period; `burst_bytes`: most at once."""

    bytes: float
    seconds: float
    burst_bytes: float


def neighbours(topology: str, replicas: int) -> int:
    """Returns the largest number of replicas to which one sends at a time. Raises ValueError for an unknown
    topology."""
    check_known("topology", topology, TOPOLOGIES)
    if replicas == 1:
        return 0
    if topology == "complete":
        return replicas - 1
    if topology == "exponential":
        return (replicas - 1).bit_length()
    if topology == "ring":
        return min(2, replicas - 1)
    if topology == "one-peer":
        return 1
    rows = max(count for count in range(1, replicas + 1) if replicas % count == 0 and count * count <= replicas)
    return min(2, rows - 1) + min(2, replicas // rows - 1)


def outer_cost(
    policy: str,
    shard_bytes: float,
    group: Group,
    constants: TimeConstants,
    *,
    period: int = 1,
    topology: str = "one-peer",
    global_period: int | None = None,
) -> OuterCost:
    """Returns bytes and seconds of a policy of rtp_ext.outer.

    A mean over K replicas takes 2 (K - 1) / K of a shard and 2 (K - 1) latencies; a neighbour takes a full shard and
    one latency for any K: the lecture's comparison of all-reduce and gossip (Kun Yuan, part 04).

    Args:
        policy: `all-reduce` and `zero` act in every step, `local-sgd`, `diloco` and `gossip` every `period` steps.
        shard_bytes: of a rank: of gradients in their reduce dtype for the first two, of weights in float32 for local
            SGD and DiLoCo, of weights in their own dtype for gossip.
        group: the ranks that hold the same shards.
        topology, global_period: of gossip; a mean replaces a mixing every `global_period` steps.

    Raises:
        ValueError: an unknown policy or topology; a period other than 1 for a policy without one, or below 1; a global
            period that is no multiple of it.
    """
    check_known("policy", policy, POLICIES)
    check_at_least("outer_cost", 1, period=period)
    if policy in ("all-reduce", "zero") and period != 1:
        raise ValueError(f"outer_cost: {policy} acts in every step: expected period 1, got {period}")
    if global_period is not None and (policy != "gossip" or global_period < 1 or global_period % period):
        raise ValueError(
            f"outer_cost: expected a global period of gossip alone, a multiple of period {period}, got {global_period} "
            f"for {policy}"
        )
    many = group.ranks
    mean_bytes, mean_s = 2 * (many - 1) / many * shard_bytes, all_reduce_s(group, shard_bytes, constants)
    if policy == "zero":
        mean_s = 2 * gather_s(group, shard_bytes, constants)
    if policy != "gossip" or topology == "complete":
        return OuterCost(mean_bytes / period, mean_s / period, mean_bytes)
    targets = neighbours(topology, many)
    sent = targets * shard_bytes
    step = constants.nccl_inter_step_s if group.nodes > 1 else constants.nccl_intra_step_s
    one_s = constants.nccl_base_s + step + sent / hop_bytes_per_s(group, constants) if targets else 0.0
    if global_period is None:
        return OuterCost(sent / period, one_s / period, sent)
    mixed = 1 / period - 1 / global_period
    return OuterCost(
        sent * mixed + mean_bytes / global_period, one_s * mixed + mean_s / global_period, max(sent, mean_bytes)
    )
