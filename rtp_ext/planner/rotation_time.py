"""How long rotated operations take: durations of their computes and hops, and the simulator on the executor's schedule.

Source: RTP, arXiv 2311.01635; csrc/schedule.cpp through rtp_ext.timeline.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from rtp_ext.planner.cluster import Cluster
from rtp_ext.planner.constants import TimeConstants
from rtp_ext.planner.gemm import Product, product_s, traffic_s
from rtp_ext.planner.links import Group, hop_bytes_per_s
from rtp_ext.planner.rotation import SLOT_CAP, Rotation, Weight, pieces_of
from rtp_ext.schedule import schedules
from rtp_ext.timeline import Lockstep

_OPERATIONS = {"linear": "linear", "embedding": "embedding", "bundle": "mlp", "head": "cross_entropy"}


@functools.cache
def lockstep(ranks: int, op: str, pass_: str, in_place: bool, halves: bool, dgrad: bool) -> Lockstep:
    """The simulator of the schedule that the executor runs (rtp_ext.schedule)."""
    wanted = {"dgrad": dgrad} if pass_ == "backward" else {}
    made = schedules(ranks, op=op, pass_=pass_, in_place=in_place, halves=halves and pass_ == "backward", **wanted)
    return Lockstep(made[0])


@dataclass(frozen=True)
class RotationTime:
    """One rotated operation, forward and backward. Seconds of one micro-batch on one rank.

    Attributes:
        unsplit_s: of the same products with the whole weight at hand.
        computes_s: of the R products with one shard each.
        makespan_s: of the schedule, hops included.
        durations: of every kind of step, as `Lockstep.makespan` takes them; of one of `pieces`.
        halves: whether gradients travel in two halves.
    """

    operation: str
    ranks: int
    pieces: int
    in_place: bool
    halves: bool
    dgrad: bool
    durations: Mapping[str, float]
    unsplit_s: tuple[float, float]
    computes_s: tuple[float, float]
    makespan_s: tuple[float, float]


def hop_s(group: Group, size_bytes: float, constants: TimeConstants) -> float:
    """One hop: the latency of a message, and its bytes over the slowest link of the ring.

    Source: nccl-tests, doc/PERFORMANCE.md (send and receive); latency: NVIDIA/nccl@5067397, src/graph/tuning.cc.
    """
    step = constants.nccl_intra_step_s if group.nodes == 1 else constants.nccl_inter_step_s
    return constants.nccl_base_s + step + size_bytes / hop_bytes_per_s(group, constants)


def rotation_seconds(
    rotation: Rotation,
    tokens: int,
    group: Group,
    constants: TimeConstants,
    *,
    compute_bytes: int = 2,
    product_bytes: int = 2,
    reduce_bytes: int = 4,
    in_place: bool = False,
    recompute: bool = False,
    experts_per_token: int = 0,
) -> RotationTime:
    """A rotation of `group.ranks` ranks with `tokens` tokens on each.

    compute_bytes, reduce_bytes: of a value of a weight and of a gradient that travels. product_bytes: of what GEMMs
    read. recompute: of a bundle, its first half is computed again in backward.

    Durations come from the largest shard. A linear layer's gradients travel in halves where their hop outlasts a
    dgrad, as rtp_ext.gate decides. Operations above the slot cap run piece by piece. Both kinds of hop share one link:
    a backward takes no less than the bytes of both. Source: rtp_ext.timeline, arXiv 2311.01635.
    """
    ranks, op = group.ranks, _OPERATIONS[rotation.kind]
    pieces = len(pieces_of(rotation, ranks, SLOT_CAP, max(compute_bytes, reduce_bytes)))
    cluster = group.cluster
    width = {"element_bytes": product_bytes, "experts_per_token": experts_per_token}
    whole = _computes(rotation, tokens, 1, 1, cluster, constants, recompute, **width)
    one = _computes(rotation, tokens, ranks, pieces, cluster, constants, recompute, **width)
    sent = {
        "weight": _shard_values(rotation.weights, ranks) / pieces * compute_bytes,
        "gradient": _shard_values(rotation.weights, ranks) / pieces * reduce_bytes,
    }
    back = _shard_values(rotation.backward_weights, ranks) / pieces * compute_bytes
    hops = {kind: hop_s(group, size, constants) for kind, size in sent.items()}
    copy = traffic_s(3 * sent["gradient"], cluster, constants)
    durations = {**one, **hops, "add": copy, "copy": traffic_s(2 * sent["weight"], cluster, constants)}
    backward_durations = {**durations, "weight": hop_s(group, back, constants)}
    dgrad = rotation.input_gradient and rotation.kind != "embedding"
    halves = op == "linear" and hops["gradient"] > one["dgrad"]
    moves = in_place and pieces == 1 and ranks > 1
    forward = lockstep(ranks, op, "forward", moves, False, dgrad).makespan(durations)
    backward = lockstep(ranks, op, "backward", moves, halves, dgrad).makespan(backward_durations)
    if ranks > 1:
        both = (back + sent["gradient"]) / hop_bytes_per_s(group, constants)
        backward = max(backward, (ranks - 1) * both)
    dgrad_s = one["dgrad"] if dgrad or rotation.bundle else 0.0
    return RotationTime(
        op,
        ranks,
        pieces,
        moves,
        halves,
        dgrad,
        backward_durations,
        (whole["forward"], (whole["dgrad"] if dgrad or rotation.bundle else 0.0) + whole["wgrad"]),
        (pieces * ranks * one["forward"], pieces * ranks * (dgrad_s + one["wgrad"])),
        (pieces * forward, pieces * backward),
    )


def _shard_values(weights: tuple[Weight, ...], ranks: int) -> float:
    return float(sum(weight.shard_elements(ranks)[0] for weight in weights))


def _computes(
    rotation: Rotation,
    tokens: int,
    ranks: int,
    pieces: int,
    cluster: Cluster,
    constants: TimeConstants,
    recompute: bool,
    *,
    element_bytes: int,
    experts_per_token: int,
) -> dict[str, float]:
    """Seconds of one step with one shard (or piece of one) of the largest size."""
    matrices = [weight for weight in rotation.weights if not weight.is_bias]
    if rotation.kind == "embedding":  # rows are copied out and added in
        values = sum(tokens * weight.shape[1] for weight in matrices) / (ranks * pieces)
        moved = traffic_s(4 * values, cluster, constants) + constants.kernel_s
        return {"forward": moved, "dgrad": 0.0, "wgrad": 2 * moved}
    seconds = {"forward": 0.0, "dgrad": 0.0, "wgrad": 0.0}
    for index, weight in enumerate(matrices):
        shape, experts = weight.shape, 1
        if len(shape) == 3:
            experts, shape = -(-shape[0] // ranks), shape[1:]
            rows, cut = -(-tokens * experts_per_token // (ranks * experts)), 1
        else:
            rows, cut = tokens, ranks * pieces
        outputs, inputs = (shape[0], -(-shape[1] // cut)) if weight.dim == 1 else (-(-shape[0] // cut), shape[1])
        product = Product("shard", rows, outputs, inputs, experts, element_bytes)
        dgrad, wgrad = product.backward()
        forward = product_s(product, cluster, constants)
        seconds["forward"] += forward
        seconds["dgrad"] += product_s(dgrad, cluster, constants)
        seconds["wgrad"] += product_s(wgrad, cluster, constants)
        again = rotation.kind == "head" or (rotation.kind == "bundle" and recompute and index < len(matrices) - 1)
        if again:  # logits or hidden slices are made once more before their gradients
            seconds["dgrad"] += forward
    return seconds
