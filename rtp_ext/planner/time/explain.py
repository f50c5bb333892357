"""Explanation of a predicted time: formulas with their numbers, for checking by hand."""

from __future__ import annotations

import math

from rtp_ext.planner.constants import TimeConstants, driver_call_range
from rtp_ext.planner.memory.report import number_text
from rtp_ext.planner.memory.states import stage_layers
from rtp_ext.planner.native import engine
from rtp_ext.planner.rotation.family import BlockTime
from rtp_ext.planner.rotation.seconds import RotationTime
from rtp_ext.planner.specs.cluster import Cluster
from rtp_ext.planner.specs.model import ModelSpec
from rtp_ext.planner.specs.strategy import Strategy
from rtp_ext.planner.time.links import Group, ring_bytes_per_s
from rtp_ext.planner.time.report import TIME_COMPONENTS, TimeReport
from rtp_ext.planner.time.stage import StageClock
from rtp_ext.planner.time.work import (
    Product,
    elementwise_bytes,
    flops_per_s,
    head_product,
    product_s,
    products,
    wgrad_bytes,
)


def seconds_text(seconds: float) -> str:
    return f"{seconds:.6g}"


def explain_time(
    model: ModelSpec,
    cluster: Cluster,
    strategy: Strategy,
    report: TimeReport,
    constants: TimeConstants | None = None,
) -> str:
    """Formats durations of one layer and one micro-batch, then the sum of the step. `report`: of the same plan."""
    constants = TimeConstants.default() if constants is None else constants
    clock = StageClock(model, cluster, strategy, constants)
    stages = [clock.stage(index) for index in range(strategy.pp)]
    slowest = max(range(strategy.pp), key=lambda index: stages[index].total)
    lines = [
        f"time of a step: {report.step_seconds:.4g} s; stage {slowest} of {strategy.pp} is the slowest, "
        f"{stage_layers(model, strategy, slowest)} layers, {report.micro_batches} micro-batch"
        f"{'es' if report.micro_batches > 1 else ''} of {clock.tokens} tokens on a GPU",
        "",
        "one layer, one micro-batch   [constants.json, time; planner/gemm.py, planner/links.py]",
    ]
    for product in [*products(model, strategy, clock.tokens), head_product(model, strategy, clock.tokens)]:
        for part, result_bytes in zip((product, *product.backward()), (None, None, wgrad_bytes(strategy)), strict=True):
            lines += _product(part, cluster, constants, result_bytes)
    moved = elementwise_bytes(model, strategy, clock.tokens, constants)
    filled = f"{number_text(moved)} / ({number_text(cluster.hbm_bytes_per_s)} * {constants.hbm_fraction})"
    value = moved / (cluster.hbm_bytes_per_s * constants.hbm_fraction)
    lines += ["  elementwise, forward, without launches   bytes / (HBM bytes per s * fraction)", _filled(filled, value)]
    hidden = clock.tokens * model.hidden * strategy.param_bytes
    for name, group, size in (
        ("ring among tensor-parallel ranks, hidden states", clock.groups.tp, hidden),
        ("ring among data-parallel ranks, 1 GB", clock.groups.dp, 1e9),
    ):
        lines += _wire(name, group, size, constants)
    for time in clock.rotated:
        lines += _rotation(time)
    if clock.block is not None:
        lines += _block(clock.block, report)
    lines += ["", "the step: micro-batches * seconds of the slowest stage, by component"]
    parts = stages[slowest].components
    for name in TIME_COMPONENTS:
        seconds = report.components[name]
        if not seconds:
            continue
        lines.append(f"  {name}")
        of_stage = report.micro_batches * parts.get(name, 0.0)
        if name == "bubble":
            total = math.fsum(stage.total for stage in stages)
            lines[-1] += "   (all stages - slowest) / chunks   [arXiv 1811.06965, 2104.04473]"
            filled = f"({total!r} - {stages[slowest].total!r}) / {strategy.interleave}"
        else:
            filled = f"{report.micro_batches} * {parts.get(name, 0.0)!r}"
            if seconds - of_stage > 1e-12:
                lines[-1] += "   and once a step"
                filled += f" + {seconds - of_stage!r}"
        lines.append(_filled(filled, seconds))
    lines.append("  all of them")
    lines.append(_filled(" + ".join(repr(s) for s in report.components.values() if s), report.step_seconds))
    lines.append("  FLOPs / (seconds * GPUs * 1e12) = TFLOP/s per GPU")
    filled = f"{number_text(report.flops)} / ({report.step_seconds!r} * {report.gpus} * 1e12)"
    lines.append(f"    = {filled} = {report.tflops_per_gpu:.6g} TFLOP/s")
    return "\n".join(lines)


def _filled(filled: str, seconds: float) -> str:
    return f"    = {filled} = {seconds_text(seconds)} s"


def _product(
    product: Product, cluster: Cluster, constants: TimeConstants, result_bytes: float | None = None
) -> list[str]:
    """result_bytes: as of `product_s`."""
    m, n, k, batch = product.rows, product.columns, product.depth, product.batch
    sms = cluster.streaming_multiprocessors
    whole = {tile: math.ceil(engine().waves(m, n, sms, index, batch)) for index, tile in enumerate(engine().GEMM_TILES)}
    tile = min(whole, key=lambda tile: whole[tile] * tile[0] * tile[1])
    waves = whole[tile]
    rate = number_text(flops_per_s(cluster, product.element_bytes))
    seconds = product_s(product, cluster, constants, result_bytes=result_bytes)
    plain = max(2, product.element_bytes)
    sums = batch * ((result_bytes or plain) - plain) * m * n
    bandwidth = f"({number_text(cluster.hbm_bytes_per_s)} * {constants.hbm_fraction})"
    by_tiles = (
        f"{waves} * {sms} * 2 * {tile[0]} * {tile[1]} * ({k} + {constants.gemm_ramp_depth:g}) / "
        f"({rate} * {constants.gemm_fraction}) + {constants.kernel_s!r}"
    )
    head = f"  {product.what}: [{m}, {k}] x [{k}, {n}]" + (f", {batch} of them" if batch > 1 else "")
    if product.element_bytes == 1 and seconds == constants.scaled_product_s:
        return [f"{head}   least time in eight bits", _filled(repr(constants.scaled_product_s), seconds)]
    shown = sums / (cluster.hbm_bytes_per_s * constants.hbm_fraction)
    if abs(_by_tiles(waves, sms, tile, k, rate, constants) + shown - seconds) < 1e-9:
        what = "waves * multiprocessors * 2 * tile * (depth + ramp) / (FLOP/s * fraction) + launch"
        if sums:
            what += " + bytes of the sum / (HBM bytes per s * fraction)"
            by_tiles += f" + {sums} / {bandwidth}"
        return [f"{head}   {what}", _filled(by_tiles, seconds)]
    moved = batch * product.element_bytes * (m * k + k * n) + plain * batch * m * n + sums
    filled = f"{moved} / {bandwidth} + {constants.kernel_s!r}"
    return [f"{head}   bytes / (HBM bytes per s * fraction) + launch", _filled(filled, seconds)]


def _by_tiles(waves: int, sms: int, tile: tuple[int, int], depth: int, rate: str, constants: TimeConstants) -> float:
    """Returns the seconds of a product that is bound by its tiles."""
    busy = waves * sms * 2.0 * tile[0] * tile[1] * (depth + constants.gemm_ramp_depth)
    return busy / (float(rate) * constants.gemm_fraction) + constants.kernel_s


def _wire(name: str, group: Group, size: float, constants: TimeConstants) -> list[str]:
    if group.ranks == 1:
        return []
    rate = ring_bytes_per_s(group, constants)
    seconds = (group.ranks - 1) / group.ranks * size / rate
    filled = f"({group.ranks} - 1) / {group.ranks} * {number_text(size)} / {number_text(rate)}"
    what = f"  {name}, on {group.nodes} node{'s' if group.nodes > 1 else ''}   (n - 1) / n * bytes / bytes per s"
    return [what, _filled(filled, seconds)]


def _rotation(time: RotationTime) -> list[str]:
    kinds = ", ".join(f"{name} {seconds_text(seconds)} s" for name, seconds in time.durations.items())
    variant = [f"{time.chunks} chunks"] if time.chunks > 1 else []
    variant += ["gradients in halves"] if time.halves else []
    variant += ["in place"] if time.in_place else []
    variant += [f"two levels, {time.hosts} nodes"] if time.hosts > 1 else []
    lines = [
        f"  rotation of {time.ranks} ranks, {time.operation}{', ' if variant else ''}{', '.join(variant)}: {kinds}"
    ]
    for index, name in enumerate(("forward", "backward")):
        lines.append(
            f"    {name}: whole {seconds_text(time.unsplit_s[index])} s, in {time.ranks} shards "
            f"{seconds_text(time.computes_s[index])} s, timeline {seconds_text(time.makespan_s[index])} s"
        )
    lines.append(_host(sum(time.host_s), sum(time.host_calls)))
    return lines


def _block(time: BlockTime, report: TimeReport) -> list[str]:
    plan, groups = time.plan, "/".join(map(str, time.plan.groups))
    ahead = "one collective an operation, one operation ahead" if plan.collective else f"{plan.ahead} blocks ahead"
    options = [f"    Ring options: {', '.join(f'{name}={value!r}' for name, value in report.ring.items())}"]
    return [
        f"  rotation of a block, {groups} shards a product, gradients {plan.gradients}, {ahead}",
        *(options if report.ring else []),
        f"    products {seconds_text(time.computes_s)} s, exposed hops {seconds_text(time.exposed_s)} s, casts "
        f"{seconds_text(time.casts_s)} s, beside NCCL {seconds_text(time.lost_s)} s, buffers {time.buffers_bytes:.0f} "
        "bytes",
        _host(time.host_s, time.host_calls),
    ]


def _host(seconds: float, calls: float) -> str:
    least, most = driver_call_range()
    return (
        f"    host: {seconds_text(seconds)} s, with {calls:.0f} driver calls of {most} s, as hops within an H100 took: "
        f"{seconds_text(seconds - calls * (most - least))} s at {least} s"
    )
