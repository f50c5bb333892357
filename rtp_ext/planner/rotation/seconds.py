"""Time of rotated operations: durations of their computes and hops, run through the simulator of the schedule.

Source: RTP, arXiv 2311.01635; csrc/schedule/schedule.cpp through rtp_ext.timeline.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rtp_ext.planner.constants import TimeConstants, host_constant
from rtp_ext.planner.native import engine, travel_bytes
from rtp_ext.planner.rotation.operations import RotatedOperation, Weight
from rtp_ext.planner.specs.cluster import Cluster
from rtp_ext.planner.time.links import Group, hop_bytes_per_s, hop_s, taken_s
from rtp_ext.planner.time.work import Product, product_s, traffic_s
from rtp_ext.recipe_planes import Plane, Recipe

if TYPE_CHECKING:
    from rtp_ext.observe.timeline import Lockstep

_OPERATIONS = {"linear": "linear", "embedding": "embedding", "bundle": "mlp", "head": "cross_entropy"}


@functools.cache
def lockstep(
    ranks: int,
    op: str,
    pass_: str,
    in_place: bool,
    halves: bool,
    dgrad: bool,
    two_lanes: bool,
    direct: bool = False,
    narrow: bool = False,
    route: str = "ring",
    hosts: int = 1,
    wgrad: bool = True,
) -> Lockstep:
    """Returns the simulator of the executor's schedule (rtp_ext.schedule)."""
    from rtp_ext.observe.schedule import schedule_of  # loads the extension and torch
    from rtp_ext.observe.timeline import Lockstep

    ways: dict[str, Any] = {"in_place": in_place, "two_lanes": two_lanes, "route": route, "hosts": hosts}
    if pass_ == "backward":
        ways |= {"dgrad": dgrad, "halves": halves, "wgrad": wgrad}
        if direct:
            ways |= {"gradient_route": "direct", "narrow": narrow}
    return Lockstep(schedule_of(ranks, 0, op=op, pass_=pass_, **ways))


@dataclass(frozen=True)
class RotationTime:
    """Time of one rotated operation, forward and backward. Seconds of one micro-batch on one rank.

    Attributes:
        unsplit_s: of the same products with the full weight.
        computes_s: of the R products with one shard each.
        timeline_s: of the simulator on the executor's schedule.
        makespan_s: the same, but at least the time of the products, or of two hops on one link.
        durations: of every kind of step, as `Lockstep.makespan` takes them; for one chunk.
        halves: whether gradients travel in two halves.
        two_lanes: whether two products run concurrently, which hides the traffic of their sums.
        hosts: number of hosts of a two-level ring; 1: a flat ring.
        hops_s: busy time of the links inside a host.
        taken_s: by how much computes take longer beside the hops over NCCL.
        casts_s: of local shards to the compute dtype, and of float32 sums of partial products to it.
        host_calls: calls of the CUDA driver by the host for the hops, and for the computes beyond those of an unsplit
            weight.
        host_s: time of these calls and computes.
        simulated: the simulator and the durations of forward and, where there is one, of backward, for one chunk.
    """

    operation: str
    ranks: int
    chunks: int
    in_place: bool
    halves: bool
    dgrad: bool
    two_lanes: tuple[bool, bool]
    durations: Mapping[str, float]
    unsplit_s: tuple[float, float]
    computes_s: tuple[float, float]
    timeline_s: tuple[float, float]
    makespan_s: tuple[float, float]
    hosts: int
    hops_s: tuple[float, float]
    taken_s: tuple[float, float]
    casts_s: tuple[float, float]
    host_calls: tuple[float, float]
    host_s: tuple[float, float]
    simulated: tuple[tuple[Lockstep, Mapping[str, float]], ...] = ()


@functools.lru_cache(maxsize=1 << 12)
def rotation_seconds(
    rotation: RotatedOperation,
    tokens: int,
    group: Group,
    constants: TimeConstants,
    *,
    compute_bytes: int = 2,
    reduce_bytes: int = 4,
    in_place: bool = False,
    recompute: bool = False,
    experts_per_token: int = 0,
    travel: str | None = None,
    gradient_route: str = "chain",
    gradient_travel: str | None = None,
    route: str = "ring",
    hosts: int = 1,
    kept: bool = False,
    joined: bool = False,
) -> RotationTime:
    """Predicts a rotation of `group.ranks` ranks with `tokens` tokens on each.

    travel, gradient_route, gradient_travel: as in `rtp_ext.Ring`. Quantized weights, and those in blocks, are
    dequantized before every product, and gradients quantized after it, at the rate of memory. Operations that do not
    train have no wgrad and no hops of gradients.
    compute_bytes, reduce_bytes: of a value of a travelling weight and gradient. recompute: backward computes the first
    half of a bundle again. route: `ring` or `direct`. hosts: number of hosts of a two-level ring, where gradient route
    direct is not available; 1: a flat ring. kept: backward finds all weights where forward left them. joined: layers
    with one input are one operand. Hops inside a host take `ce`, where its GPUs access each other's memory, and all
    others NCCL on blocking communicators.

    Durations are those of the largest shard. Products with a shard add to sums, which they read and write, but for the
    first, which writes: of outputs or of input gradients in float32 (csrc/compute/gemm), of weight gradients in the
    dtype in which they travel. The first launch of a pass takes `kernel_s`, the engine's own less. A linear layer's
    gradients travel in halves where their hop takes longer than a dgrad (rtp_ext/ring/routes/route_planner.py), and its
    products run on two streams where one leaves multiprocessors idle (csrc/ops/linear.cpp): `beside` each other, as
    `rtp_ext.cost.product_seconds` has it. Operations above the slot
    cap run chunk by chunk; durations are means over chunks. Both kinds of hop share one link: a backward takes at least
    the time of the bytes of both. Source: rtp_ext.timeline, arXiv 2311.01635.
    """
    ranks, op = group.ranks, _OPERATIONS[rotation.kind]
    direct = gradient_route == "direct"
    local_bytes = max(4, reduce_bytes) if direct else reduce_bytes
    parts_of_shard = rotation.chunks(ranks, max(compute_bytes, local_bytes))
    chunks = len(parts_of_shard)
    weight_bytes = travel_bytes(travel, compute_bytes)
    gradient_bytes = travel_bytes(gradient_travel, reduce_bytes)
    narrow = direct and gradient_bytes < local_bytes
    cluster = group.cluster
    width = (compute_bytes, experts_per_token)
    whole = step_seconds(rotation, tokens, 1, cluster, constants, None, *width)
    engine = dataclasses.replace(constants, kernel_s=constants.engine_launch_s)
    sums = None
    if ranks > 1:  # what is computed is added to a sum, but a contribution that is sent to its owner
        of_results = (2 - 1 / (ranks * chunks)) * max(4, compute_bytes)
        sums = (of_results, float(local_bytes) if direct else (2 - 1 / ranks) * reduce_bytes)

    def mean_seconds(beside: bool) -> dict[str, float]:
        ways: dict[str, Any] = {"joined": joined, "beside": beside}
        found = [
            step_seconds(rotation, tokens, ranks, cluster, engine, recompute, *width, sums, part=part, **ways)
            for part in parts_of_shard
        ]
        return {kind: sum(each[kind] for each in found) / chunks for kind in found[0]}

    one = mean_seconds(False)
    of_weights, back = (
        sum(weight.travelling_bytes(ranks, weight_bytes) for weight in weights) / chunks
        for weights in (rotation.weights, rotation.backward_weights)
    )
    values = shard_values(rotation.weights, ranks) / chunks
    trained = values if rotation.trains else 0.0
    sent = {"weight": of_weights, "gradient": trained * gradient_bytes}
    local = trained * local_bytes
    cast_s = dict.fromkeys(one, 0.0)  # seconds of quantizing and dequantizing
    if weight_bytes < compute_bytes or any(weight.frozen for weight in rotation.weights):
        cast_s["forward"] = cast_s["dgrad"] = traffic_s(sent["weight"] + values * compute_bytes, cluster, constants)
    if narrow:
        rounds = (ranks - 1) / ranks  # a rank's contribution to its own gradient is not quantized
        cast_s["wgrad"] = rounds * traffic_s(local + sent["gradient"], cluster, constants)
    one = {kind: time + cast_s[kind] for kind, time in one.items()}
    inside = dataclasses.replace(group, ranks=group.ranks // hosts) if hosts > 1 else group
    between = dataclasses.replace(group, ranks=hosts, stride=group.stride * inside.ranks)  # with hosts > 1
    hops = {kind: hop_s(inside, size, constants) for kind, size in sent.items()}
    if hosts > 1:
        hops |= {f"outer {kind}": hop_s(between, size, constants) for kind, size in sent.items()}
    copy = traffic_s(2 * local + sent["gradient"], cluster, constants)
    durations = {**one, **hops, "add": copy, "copy": traffic_s(2 * sent["weight"], cluster, constants)}
    back = 0.0 if kept else back
    backward_durations = {**durations, "weight": 0.0 if kept else hop_s(inside, back, constants)}
    if hosts > 1:
        backward_durations["outer weight"] = 0.0 if kept else hop_s(between, back, constants)
    if direct:  # the first contribution is copied to the owner's gradient
        backward_durations["copy"] = traffic_s(local + sent["gradient"], cluster, constants)
    dgrad = rotation.input_gradient and rotation.facts.kind.dgrad
    wgrad = rotation.trains
    halves = wgrad and op == "linear" and not direct and hosts == 1 and hops["gradient"] > one["dgrad"]
    moves = in_place and chunks == 1 and ranks > 1
    lanes = (False, False)
    if ranks > 1 and hosts == 1:
        lanes = two_lanes(rotation, tokens, ranks, cluster, parts_of_shard[0])
    beside = {kind: time + cast_s[kind] for kind, time in mean_seconds(True).items()}
    computed = {"dgrad": dgrad or rotation.bundle, "wgrad": wgrad}
    kinds = (("forward",), tuple(kind for kind, there in computed.items() if there))
    # concurrent products share the multiprocessors: at least the time of the work of their tiles
    both_kinds = lanes[1] and dgrad and wgrad
    work = [
        ranks * (beside if lanes[0] else one)["forward"],
        ranks * sum((beside if both_kinds else one)[kind] for kind in kinds[1]),
    ]
    way = ("two-level", hosts) if hosts > 1 else (route, 1)
    ways = (moves, halves, dgrad, lanes[1], direct, narrow, *way, wgrad)
    simulated = [(lockstep(ranks, op, "forward", moves, False, dgrad, lanes[0], False, False, *way), durations)]
    if kinds[1]:
        simulated.append((lockstep(ranks, op, "backward", *ways), backward_durations))
    forward, backward = (*(each.makespan(times) for each, times in simulated), 0.0)[:2]
    both = (ranks - hosts) * (back + sent["gradient"]) / hop_bytes_per_s(inside, constants) if ranks > 1 else 0.0
    if hosts > 1:
        both = max(both, (hosts - 1) * (back + sent["gradient"]) / hop_bytes_per_s(between, constants))
    spans = (max(forward, work[0]), max(backward, work[1], both))
    inner = chunks * (ranks - hosts)
    busy = (inner * hops["weight"], inner * (backward_durations["weight"] * bool(back) + hops["gradient"] * wgrad))
    outer = chunks * (hosts - 1)
    links = [] if inside.over_ce else [(inside, busy)]
    if hosts > 1:
        outward = backward_durations["outer weight"] * bool(back) + hops["outer gradient"] * wgrad
        links.append((between, (outer * hops["outer weight"], outer * outward)))
    taken = [
        sum(taken_s(link, min(times[index], chunks * work[index]), constants) for link, times in links)
        for index in (0, 1)
    ]
    parts = wgrad + halves  # of a gradient
    passes = (1, bool(back) + parts)  # of the ring
    of_hops, hops_host_s = hops_host(inner, outer, inside, constants)
    computes = chunks * ranks - 1
    of_computes = computes * host_constant("compute_calls")
    calls = [count * of_hops + n * of_computes for n, count in enumerate(passes, 1)]
    products = computes * sum(not weight.is_bias for weight in rotation.weights) * constants.engine_product_s
    first = max(0.0, constants.kernel_s - constants.engine_launch_s)
    return RotationTime(
        op,
        ranks,
        chunks,
        moves,
        halves,
        dgrad,
        lanes,
        backward_durations,
        (sum(whole[kind] for kind in kinds[0]), sum(whole[kind] for kind in kinds[1])),
        (first + chunks * work[0], first + chunks * work[1]),
        (chunks * forward, chunks * backward),
        (first + chunks * spans[0], first + chunks * spans[1]),
        hosts,
        busy,
        (taken[0], taken[1]),
        casts_s(
            rotation,
            tokens,
            ranks,
            compute_bytes,
            dgrad,
            cluster,
            constants,
            joined=joined,
            experts_per_token=experts_per_token,
        ),
        (calls[0], calls[1]),
        (
            passes[0] * hops_host_s + of_computes * constants.driver_call_s + products,
            passes[1] * hops_host_s + 2 * (of_computes * constants.driver_call_s + products),
        ),
        tuple(simulated),
    )


def casts_s(
    rotation: RotatedOperation,
    tokens: int,
    ranks: int,
    compute_bytes: int,
    dgrad: bool,
    cluster: Cluster,
    constants: TimeConstants,
    *,
    sums: bool = True,
    joined: bool = False,
    experts_per_token: int = 0,
) -> tuple[float, float]:
    """Returns the seconds of casts and copies in forward and backward: casts of the float32 local shards that are sent,
    and of the `sums` of products with several shards, if there are any (csrc/compute/gemm, ProductSum); copies of the
    results of `joined` layers, and of their gradients, from and to one matrix (csrc/compute/joined.h)."""
    if ranks == rotation.parts == 1:
        return 0.0, 0.0
    matrices = [weight for weight in rotation.weights if len(weight.shape) == 2]
    forward = backward = 0.0
    if joined and rotation.kind == "linear" and len(matrices) > 1:
        forward = backward = 2.0 * compute_bytes * tokens * sum(weight.shape[0] for weight in matrices)
    if rotation.recipe is not None:
        forward, backward = codes_traffic(rotation, tokens * max(1, experts_per_token * (not matrices)), compute_bytes)
        if matrices:
            backward += (4 + compute_bytes) * tokens * matrices[0].shape[1] * dgrad
    elif compute_bytes < 4:
        moved = 4 + compute_bytes

        def stored(weights: tuple[Weight, ...]) -> float:
            return moved * shard_values(tuple(weight for weight in weights if weight.has_gradient), ranks)

        forward += stored(rotation.weights)
        backward += stored(rotation.backward_weights)
        if sums and rotation.kind != "embedding" and matrices:
            forward += moved * tokens * matrices[-1].shape[0] * (matrices[-1].dim == 1)
            backward += moved * tokens * matrices[0].shape[1] * dgrad
    return traffic_s(forward, cluster, constants), traffic_s(backward, cluster, constants)


def codes_traffic(rotation: RotatedOperation, rows: int, compute_bytes: int) -> tuple[float, float]:
    """Returns the bytes that a rank moves in forward and backward to make codes of x and dy, and to transpose those of
    all shards where the recipe has one plane. A block that spans the matrix is read twice: its largest magnitude
    first. rows: the number of tokens; with experts, the number of rows of all experts."""
    recipe, weights = rotation.recipe, [weight for weight in rotation.weights if not weight.is_bias]
    assert recipe is not None

    def made(plane: Plane, features: int) -> float:
        return rows * features * ((2 if None in plane.block else 1) * compute_bytes + 1.0)

    def of(outputs: int, inputs: int, count: int = 1) -> tuple[float, float]:
        backward = made(recipe.gradients, outputs) + 2.0 * count * outputs * inputs * (recipe.backward is None)
        for plane, features in zip(recipe.weight_gradient or (), (outputs, inputs), strict=False):
            backward += made(plane, features)
        return made(recipe.tokens, inputs), backward

    if len(weights[0].shape) == 3:
        each = [of(outputs, inputs, count) for count, outputs, inputs in (weight.shape for weight in weights)]
        return sum(made[0] for made in each), sum(made[1] for made in each)
    outputs = sum(weight.shape[0] for weight in weights)
    forward, backward = of(outputs, weights[0].shape[1])
    for product in ("dgrad", "wgrad"):  # codes of dy of several layers come side by side
        backward += 2.0 * rows * outputs * (recipe.joins(product, gpu=weights[0].gpu) and len(weights) > 1)
    return forward, backward


def hops_host(inner: float, outer: float, group: Group, constants: TimeConstants) -> tuple[float, float]:
    """Returns the calls of the CUDA driver for hops, as `benchmarks/gpu/driver_calls.py` counts them, and the host
    seconds of these and of NCCL. inner: hops of `group`, over `ce` inside a node, else over NCCL; outer: over NCCL."""
    over_nccl = outer + inner * (not group.over_ce)
    calls = over_nccl * host_constant("nccl_hop_calls") + inner * group.over_ce * host_constant("ce_hop_calls")
    return calls, calls * constants.driver_call_s + over_nccl * constants.nccl_call_s


def two_lanes(
    rotation: RotatedOperation, tokens: int, ranks: int, cluster: Cluster, part: float = 1.0
) -> tuple[bool, bool]:
    """Returns, for forward and backward, whether products with this part of a shard run on two streams: those of linear
    layers, where one leaves much of its last wave idle (csrc/ops/linear.cpp)."""
    if rotation.kind != "linear" or rotation.recipe is not None:
        return False, False

    def wastes(rows: int, columns: int) -> bool:
        return engine().wastes_last_wave(rows, columns, cluster.streaming_multiprocessors)

    matrices = [weight for weight in rotation.weights if not weight.is_bias]
    outputs = sum(round(part * -(-weight.shape[0] // ranks)) for weight in matrices)
    inputs = matrices[0].shape[1]
    return wastes(tokens, outputs), wastes(tokens, inputs) or wastes(outputs, inputs)


def _scaled_expert_s(
    product: Product,
    kind: str,
    recipe: Recipe,
    element_bytes: int,
    of_weights: float | None,
    cluster: Cluster,
    constants: TimeConstants,
) -> float:
    """Returns the seconds of one expert's product in 8 bits, a call by itself: results of forward and dgrad, the latter
    in float32, are copied to their place."""
    dgrad, wgrad = product.backward()
    if kind == "wgrad":
        wide = recipe.weight_gradient is None
        wgrad = dataclasses.replace(wgrad, element_bytes=element_bytes) if wide else wgrad
        return product_s(wgrad, cluster, constants, result_bytes=of_weights)
    one, bytes_each = (product, element_bytes) if kind == "forward" else (dgrad, 4)
    return product_s(one, cluster, constants, result_bytes=3.0 * bytes_each) + constants.kernel_s


def products_of(rotation: RotatedOperation, joined: bool, product: str) -> list[Weight]:
    """Returns the weight of every product of a kind, as of `Recipe.joins`. Adjacent matrices that multiply one input,
    cut by outputs, are one operand where they are `joined`."""
    found: list[Weight] = []
    for weight in rotation.weights:
        last = found[-1] if found else None
        if weight.is_bias:
            continue
        same = joined and last is not None and len(weight.shape) == 2 and weight.shape[1:] == last.shape[1:]
        scaled = weight.recipe is not None and not weight.recipe.joins(product, gpu=weight.gpu)
        if last is not None and same and weight.dim == last.dim == 0 and not scaled:
            found[-1] = dataclasses.replace(last, shape=(last.shape[0] + weight.shape[0], weight.shape[1]), frozen=None)
        else:
            found.append(weight)
    return found


def shard_values(weights: tuple[Weight, ...], ranks: int) -> float:
    return float(sum(weight.shard_elements(ranks) for weight in weights))


def step_seconds(
    rotation: RotatedOperation,
    tokens: int,
    ranks: int,
    cluster: Cluster,
    constants: TimeConstants,
    recompute: bool | None,
    element_bytes: int,
    experts_per_token: int,
    sums: tuple[float | None, float] | None = None,
    *,
    part: float = 1.0,
    beside: bool = False,
    shards: int = 1,
    joined: bool = False,
) -> dict[str, float]:
    """Returns the seconds of one step with one shard of the largest size, or with a `part` of it. sums: bytes read and
    written for each number of a sum over shards, of activations and of weight gradients; None: a whole weight.
    recompute: whether a bundle computes its first half again; None: and a head does not compute its logits again.
    beside: as of `rtp_ext.cost.product_seconds`. shards: that a product has at once. joined: layers with one input are
    one operand."""
    of_inputs, of_weights = sums or (None, None)
    if rotation.kind == "embedding":  # rows are copied, or added
        values = part * sum(tokens * weight.shape[1] for weight in rotation.weights) / ranks
        moved = traffic_s(4 * values, cluster, constants) + constants.kernel_s
        return {"forward": moved, "dgrad": 0.0, "wgrad": 2 * moved}

    def of(weight: Weight, kind: str) -> float:
        shape, experts = weight.shape, 1
        if len(shape) == 3:
            each, shape = -(-shape[0] // ranks), shape[1:]
            rows, cut, experts = -(-tokens * experts_per_token // (ranks * each)), 1, shards * each
        else:
            rows, cut = tokens, ranks

        def held(size: int) -> int:
            return min(size, round(part * shards * -(-size // cut)))

        outputs, inputs = (shape[0], held(shape[1])) if weight.dim == 1 else (held(shape[0]), shape[1])
        recipe, plain = weight.recipe, len(weight.shape) == 2
        if recipe is not None and not plain:
            one = Product("shard", rows, outputs, inputs, element_bytes=1)
            return experts * _scaled_expert_s(one, kind, recipe, element_bytes, of_weights, cluster, constants)
        product = Product("shard", rows, outputs, inputs, experts, 1 if recipe else element_bytes)
        ways: dict[str, Any] = {"cluster": cluster, "constants": constants, "beside": beside}
        if kind == "forward" and recipe is not None:  # y is copied to its place
            return product_s(product, **ways, result_bytes=3.0 * element_bytes) + constants.kernel_s
        if kind == "forward":
            return product_s(product, **ways, result_bytes=of_inputs if plain and weight.dim == 1 else None)
        dgrad, wgrad = product.backward()
        if kind == "dgrad":
            return product_s(dgrad, **ways, result_bytes=of_inputs if plain and weight.dim == 0 else None)
        if recipe is not None and recipe.weight_gradient is None:
            wgrad = dataclasses.replace(wgrad, element_bytes=element_bytes)
        return product_s(wgrad, **ways, result_bytes=of_weights)

    seconds = {"forward": 0.0, "dgrad": 0.0, "wgrad": 0.0}
    for kind in seconds:
        matrices = products_of(rotation, joined, kind)
        for index, weight in enumerate(matrices):
            seconds[kind] += of(weight, kind)
            hidden = rotation.kind == "bundle" and recompute and index < len(matrices) - 1
            if kind == "dgrad" and (hidden or (rotation.kind == "head" and recompute is not None)):
                seconds[kind] += of(weight, "forward")  # of hidden slices or logits, before their gradients
    return seconds
