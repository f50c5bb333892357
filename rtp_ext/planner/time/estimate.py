"""Time of one training step of a plan."""

from __future__ import annotations

from rtp_ext.planner.constants import TimeConstants
from rtp_ext.planner.memory.states import padded_vocab, trained_count
from rtp_ext.planner.specs.cluster import Cluster
from rtp_ext.planner.specs.model import ModelSpec
from rtp_ext.planner.specs.strategy import OPTIMIZER_MOMENTS, Strategy
from rtp_ext.planner.time.links import all_reduce_s, gather_s
from rtp_ext.planner.time.outer import outer_cost
from rtp_ext.planner.time.report import TIME_COMPONENTS, TimeReport
from rtp_ext.planner.time.stage import StageClock, host_rate
from rtp_ext.planner.time.work import traffic_s


def estimate_time(
    model: ModelSpec,
    cluster: Cluster,
    strategy: Strategy,
    global_batch: int | None = None,
    *,
    constants: TimeConstants | None = None,
) -> TimeReport:
    """Predicts the time of one step.

    A pipeline of stages that take t_i per micro-batch takes (m - 1) max t_i + sum t_i. The bubble is
    (sum t_i - max t_i) divided by the chunks of a stage (arXiv 1811.06965, 2104.04473).

    Args:
        global_batch: samples of a step; default: one micro-batch per pipeline stage of every replica.
        constants: default: those of constants.json.

    >>> model, cluster = ModelSpec.preset("llama-3-8b", seq=8192), Cluster.preset("h100-80gb", gpus=8)
    >>> report = estimate_time(model, cluster, Strategy(rtp=8, fused_loss=True), global_batch=8)
    >>> f"{report.step_seconds:.2f} s"
    '0.96 s'

    Raises:
        ValueError: a plan that this model or cluster cannot run.
    """
    strategy.check(model, cluster, global_batch)
    constants = TimeConstants.default() if constants is None else constants
    micro_batches = strategy.micro_batches(global_batch)
    clock = StageClock(model, cluster, strategy, constants)
    stages = [clock.stage(index) for index in range(strategy.pp)]
    slowest = max(stages, key=lambda stage: stage.total)
    components = dict.fromkeys(TIME_COMPONENTS, 0.0)
    for name, seconds in slowest.components.items():
        components[name] += micro_batches * seconds
    components["bubble"] = (sum(stage.total for stage in stages) - slowest.total) / strategy.interleave
    values = max(
        trained_count(model, strategy, index)
        for index in (range(strategy.pp) if strategy.stage_layers else {0, strategy.pp - 1})
    )
    seen, lost = _gradients_s(clock, values, slowest.forward, slowest.backward, slowest.total)
    components["gradients"] += seen
    if strategy.zero == 3 and strategy.pp > 1:  # gathered and scattered once a step
        components["copies"] += clock.copies_s(values, 1)
    components["interference"] += lost
    components["optimizer"] = _optimizer_s(cluster, strategy, constants, values)
    samples = micro_batches * strategy.micro_batch * strategy.replicas
    flops = step_flops(model, strategy, samples)
    again = step_flops(model, strategy, samples, recomputed=True)
    return TimeReport(
        model.name,
        cluster.name,
        strategy.to_dict(),
        strategy.gpus,
        samples,
        micro_batches,
        samples * model.seq,
        flops + again,
        flops,
        components,
        clock.ring_options,
    )


def _gradients_s(
    clock: StageClock, values: float, forward: float, backward: float, total: float
) -> tuple[float, float]:
    """Returns the exposed time of summing gradients over replicas in a step, and the slowdown of concurrent computes.

    Plain data parallelism of Megatron-LM (zero=0) waits for one all-reduce (arXiv 2104.04473). DistributedDataParallel,
    the distributed optimizer, `fully_shard` under a pipeline and rings with replicas reduce during the last backward,
    and gather during the first forward.
    """
    strategy, constants, group = clock.strategy, clock.constants, clock.groups.dp
    if strategy.rtp > 1:
        return _outer_s(clock, values / strategy.rtp, forward, backward)
    summed, gathered = values * strategy.reduce_bytes, values * strategy.param_bytes
    seen_apart, lost_apart = 0.0, 0.0
    if strategy.replicate > 1:  # the groups that hold the same shards sum them
        apart = all_reduce_s(clock.groups.outer, summed / strategy.shards, constants)
        seen_apart, lost_apart = clock.overlapped(clock.groups.outer, apart, backward)
    if group.ranks == 1 or (strategy.zero == 3 and strategy.pp == 1):
        return seen_apart, lost_apart
    if strategy.zero == 0:
        seconds = all_reduce_s(group, summed, constants)
        return (seconds, 0.0) if strategy.effective_stack == "megatron" else clock.overlapped(group, seconds, backward)
    seen, lost = clock.overlapped(group, gather_s(group, summed, constants), backward)
    seen_first, lost_first = clock.overlapped(group, gather_s(group, gathered, constants), forward)
    return seen + seen_first + seen_apart, lost + lost_first + lost_apart


def _outer_s(clock: StageClock, shard: float, forward: float, backward: float) -> tuple[float, float]:
    """Returns exposed time and slowdown of the outer policy between replicas of a ring (rtp_ext.outer). An all-reduce
    or reduce-scatter runs during the last backward, a gather of float32 weights during the next forward; policies that
    act between steps are fully exposed."""
    strategy, constants, group = clock.strategy, clock.constants, clock.groups.outer
    if group.ranks == 1:
        return 0.0, 0.0
    reduced = shard * strategy.reduce_bytes
    if strategy.outer == "allreduce":
        return clock.overlapped(group, all_reduce_s(group, reduced, constants), backward)
    if strategy.outer == "zero":
        scattered = clock.overlapped(group, gather_s(group, reduced, constants), backward)
        gathered = clock.overlapped(group, gather_s(group, 4 * shard, constants), forward)
        return scattered[0] + gathered[0], scattered[1] + gathered[1]
    policy = strategy.outer.replace("_", "-")
    cost = outer_cost(policy, 4 * shard, group, constants, period=strategy.period, topology=strategy.topology)
    return cost.seconds, 0.0


def _optimizer_s(cluster: Cluster, strategy: Strategy, constants: TimeConstants, values: float) -> float:
    """Returns the time to read the gradient, to read and write master weight and moments, and to write the weight:
    bytes over the bandwidth of HBM, or of the host if the optimizer runs there. DiLoCo's outer step does the same once
    a period, with momentum.

    Source: the states of arXiv 1910.02054, section 3.1.
    """
    degree = strategy.rtp if strategy.rtp > 1 else strategy.shards if strategy.zero else 1
    if strategy.outer == "zero":
        degree *= strategy.dp
    tensors = OPTIMIZER_MOMENTS[strategy.optimizer] + 1
    moved = values / degree * (4 + 8 * tensors + strategy.param_bytes)
    if planes := strategy.planes:  # its owner casts the shard to 16 bits, finds magnitudes, and makes codes
        moved += values / degree * len(planes.planes) * (4 + 3 * strategy.param_bytes + 1)
    if strategy.outer == "diloco":
        moved += values / degree * (4 + 8 * 2 + 4) / strategy.period
    if strategy.offload:
        return moved / host_rate(cluster, "host_bytes_per_s")
    return traffic_s(moved, cluster, constants)


def step_flops(model: ModelSpec, strategy: Strategy, samples: int, *, recomputed: bool = False) -> float:
    """Returns the FLOPs of all GPUs for `samples` samples; `recomputed`: those of their recomputation only.

    A forward takes 2 FLOPs per weight of a product and token, and 4 s features for attention, half of that where
    attention is fused; a backward takes twice as many (arXiv 2104.04473, appendix; 2205.05198), for frozen weights as
    many as a forward.
    """
    tokens = samples * model.seq
    per_token = model.hidden * (model.query_features + 2 * model.kv_features) + model.query_features * model.hidden
    per_token += (3 if model.gated else 2) * model.hidden * model.ffn * max(1, model.experts_per_token)
    attention = 4 * model.seq * model.query_features / (2 if strategy.flash_attention else 1)
    forward = model.layers * tokens * (2 * per_token + attention)
    if recomputed:
        torch = strategy.effective_stack == "torch"
        selective = 2 * per_token / 2 if torch else 0.0 if strategy.flash_attention else attention
        share = {"none": 0.0, "full": forward, "selective": model.layers * tokens * selective}
        return share[strategy.recompute]
    head = 2 * tokens * model.hidden * padded_vocab(model, strategy)
    if strategy.freezes:
        adapters = 2 * tokens * model.layers * model.adapter_parameters(strategy.lora_rank)
        frozen = 2 * tokens * model.layers * per_token + head
        return 2 * frozen + 3 * (adapters + forward + head - frozen)
    return 3 * (forward + head)
