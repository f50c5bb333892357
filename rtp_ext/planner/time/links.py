"""Collectives and messages over the links of a cluster: latency, and bytes over bandwidth.

Steps and latencies follow NCCL's cost model (NVIDIA/nccl@5067397, src/graph/tuning.cc, Simple protocol); bytes on the
wire are those of rings (nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

import bisect
import functools
import math
from dataclasses import dataclass

from rtp_ext.gpu_rates import HOP_SECONDS, POST_SECONDS, WIRES
from rtp_ext.planner.constants import TimeConstants, constants
from rtp_ext.planner.specs.cluster import Cluster


@dataclass(frozen=True)
class Group:
    """`ranks` GPUs of one collective, `stride` ranks apart. nccl: hops take NCCL, also where copy engines could."""

    cluster: Cluster
    ranks: int
    stride: int = 1
    nccl: bool = False

    @property
    def local(self) -> int:
        """Number of members on one node."""
        return max(1, min(self.ranks, self.cluster.gpus_per_node // self.stride))

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.local)

    @property
    def over_ce(self) -> bool:
        """Whether hops take copy engines: inside a node whose GPUs access each other's memory."""
        return self.nodes == 1 and self.cluster.peer_access and not self.nccl

    @property
    def reaches_all(self) -> bool:
        """Whether every member reaches every other as cheaply as its neighbour: over NVLink inside a node, or through a
        port of its own. PCIe joins some pairs through others' links."""
        if self.nodes > 1:
            return self.local == 1
        return self.cluster.peer_access and self.cluster.nccl_ring_bytes_per_s > WIRES["pcie"]

    @property
    def keeps_recomputed(self) -> bool:
        """Whether a ring keeps weights for the backward by default: where hops cross a network or PCIe."""
        return self.nodes > 1 or not self.reaches_all


def ring_bytes_per_s(group: Group, constants: TimeConstants) -> float:
    """Returns the bus bandwidth of a ring: its slowest link. Across nodes every member uses its own network port.

    Source: NVIDIA/nccl@5067397, src/graph (a ring for each port; a node's rings add up).
    """
    inside = group.cluster.nccl_ring_bytes_per_s
    if group.nodes == 1:
        return inside
    across = group.local * group.cluster.nic_bytes_per_s * constants.network_fraction
    return min(inside, across) if group.local > 1 else across


def taken_s(group: Group, seconds: float, constants: TimeConstants) -> float:
    """Returns by how much computes of `seconds` take longer beside NCCL, which takes a share of the multiprocessors:
    that of NVLink where several members of the group share a node, also on several nodes, else that of the network."""
    share = constants.nvlink_sm_share if group.local > 1 else constants.network_sm_share
    return share / (1 - share) * seconds


def hop_bytes_per_s(group: Group, constants: TimeConstants) -> float:
    """Returns the bandwidth of messages from every member to the next at once, the slowest of them: between nodes, that
    of one network port, and inside nodes with several members that of their links."""
    inside, port = group.cluster.nccl_ring_bytes_per_s, group.cluster.nic_bytes_per_s * constants.network_fraction
    if group.nodes == 1:
        return inside
    return min(inside, port) if group.local > 1 else port


def hop_s(group: Group, size_bytes: float, constants: TimeConstants) -> float:
    """Returns the seconds of one hop to the neighbour, who passes it on: the latency of a message, and its bytes over
    the slowest link of the ring.

    Source: over copy engines `rtp_ext.gpu_rates`; else nccl-tests, doc/PERFORMANCE.md (send and receive), with the
    latency of NVIDIA/nccl@5067397, src/graph/tuning.cc.
    """
    latency = HOP_SECONDS if group.over_ce else message_latency_s(group, constants)
    return latency + size_bytes / hop_bytes_per_s(group, constants)


def message_latency_s(group: Group, constants: TimeConstants) -> float:
    """Returns the latency of the sends and receives of one group call of NCCL, which progress independently of each
    other (NCCL user guide, point-to-point communication)."""
    return constants.nccl_base_s + (constants.nccl_intra_step_s if group.nodes == 1 else constants.nccl_inter_step_s)


def posted_s(group: Group, size_bytes: float, constants: TimeConstants) -> tuple[float, float]:
    """Returns the latency that hops posted at once share, and the seconds of each, on route direct: what arrives from
    one member need not have arrived from another before.

    Copies of copy engines queue behind each other. NCCL has a call for each hop, with a latency of its own.
    """
    if group.over_ce:
        sent = size_bytes / hop_bytes_per_s(group, constants)
        return HOP_SECONDS - POST_SECONDS, max(POST_SECONDS, sent)
    return 0.0, hop_s(group, size_bytes, constants)


def ring_latency_s(group: Group, constants: TimeConstants, rounds: int) -> float:
    """Returns the latency of `rounds` trips around a ring (2 for an all-reduce). Source: tuning.cc, NCCL_ALGO_RING."""
    steps = rounds * (group.ranks - 1)
    across = rounds * (group.nodes - 1)
    return constants.nccl_base_s + (steps - across) * constants.nccl_intra_step_s + across * constants.nccl_inter_step_s


def tree_latency_s(group: Group, constants: TimeConstants) -> float:
    """Returns the latency of a tree all-reduce: chains inside nodes, a binary tree of nodes. Source: tuning.cc,
    NCCL_ALGO_TREE."""
    inside = (group.local - 1) * constants.nccl_intra_step_s
    across = math.ceil(math.log2(group.nodes)) * constants.nccl_inter_step_s if group.nodes > 1 else 0.0
    return constants.nccl_base_s + 2 * (inside + across)


def _measured_s(group: Group, size_bytes: float) -> float | None:
    """Returns the measured time of an all-reduce inside a node; None without one (constants.json, `all_reduce`).

    Time is linear in bytes between two sizes of the table and beyond its ends; between two numbers of ranks, the
    bandwidth of the smaller applies.
    """
    if not group.cluster.all_reduce or group.nodes > 1:
        return None
    sizes = _table(group.cluster.all_reduce, group.ranks)
    place = min(max(bisect.bisect_left(sizes, (size_bytes, 0.0)), 1), len(sizes) - 1)
    (below, first), (above, second) = sizes[place - 1], sizes[place]
    return max(first + (size_bytes - below) / (above - below) * (second - first), 0.0)


@functools.cache
def _table(name: str, ranks: int) -> list[tuple[float, float]]:
    """Returns pairs of bytes and seconds, ascending."""
    known = {int(count): rows for count, rows in constants()["all_reduce"][name]["mib_and_gb_per_s"].items()}
    nearest = max((count for count in known if count <= ranks), default=min(known))
    factor = 2 * (ranks - 1) / ranks
    return [(mib * 2.0**20, factor * mib * 2.0**20 / (rate * 1e9)) for mib, rate in known[nearest]]


def all_reduce_s(group: Group, size_bytes: float, constants: TimeConstants) -> float:
    """Returns the time of 2 (n - 1) / n bytes per rank, or of a tree if its latency is better (nccl-tests,
    PERFORMANCE.md)."""
    if group.ranks == 1 or not size_bytes:
        return 0.0
    measured = _measured_s(group, size_bytes)
    if measured is not None:
        return measured
    wire = 2 * (group.ranks - 1) / group.ranks * size_bytes / ring_bytes_per_s(group, constants)
    latency = ring_latency_s(group, constants, 2)
    if group.nodes > 1:
        latency = min(latency, tree_latency_s(group, constants))
    return latency + wire


def gather_s(group: Group, size_bytes: float, constants: TimeConstants) -> float:
    """Returns the time of an all-gather or reduce-scatter: (n - 1) / n of the full size, half the steps and bytes of an
    all-reduce (nccl-tests, PERFORMANCE.md)."""
    if group.ranks == 1 or not size_bytes:
        return 0.0
    measured = _measured_s(group, size_bytes)
    if measured is not None:
        return measured / 2
    wire = (group.ranks - 1) / group.ranks * size_bytes / ring_bytes_per_s(group, constants)
    return ring_latency_s(group, constants, 1) + wire


def exchange_s(group: Group, size_bytes: float, constants: TimeConstants) -> float:
    """Returns the time of an all-to-all of `size_bytes` of every rank, evenly spread: what leaves a node takes the
    rank's own network port, the rest the links inside the node meanwhile (nccl-tests, PERFORMANCE.md)."""
    if group.nodes == 1:
        return gather_s(group, size_bytes, constants)
    inside = (group.local - 1) / group.ranks * size_bytes / group.cluster.nccl_ring_bytes_per_s
    port = group.cluster.nic_bytes_per_s * constants.network_fraction
    across = (group.ranks - group.local) / group.ranks * size_bytes / port
    return message_latency_s(group, constants) + max(inside, across)


def send_s(cluster: Cluster, size_bytes: float, constants: TimeConstants, *, across_nodes: bool) -> float:
    """Returns the time of one message: latency, and bytes over one link (nccl-tests, PERFORMANCE.md)."""
    if across_nodes:
        rate, step = cluster.nic_bytes_per_s * constants.network_fraction, constants.nccl_inter_step_s
    else:
        rate, step = cluster.nccl_ring_bytes_per_s, constants.nccl_intra_step_s
    return constants.nccl_base_s + step + size_bytes / rate
