"""Text output: memory reports as tables, CSV and formulas with numbers; tables of times."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from rtp_ext.command_line import wrapped
from rtp_ext.planner.memory.estimate import estimate_memory
from rtp_ext.planner.memory.report import COMPONENTS, MemoryReport, Term, number_text
from rtp_ext.planner.plan_text import name_of
from rtp_ext.planner.plans.differences import differences_line
from rtp_ext.planner.plans.search import Plan, fastest_ring
from rtp_ext.planner.specs.cluster import Cluster
from rtp_ext.planner.specs.model import ModelSpec
from rtp_ext.planner.time.report import TIME_COMPONENTS, TimeReport

GB = 1e9
_ADAPTER_RANK = 16  # of adapters that are proposed where nothing else fits
_SHORT = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "logits_and_loss": "loss",
    "rotation_slots": "slots",
    "unsharded_buffers": "whole",
    "pipeline_buffers": "pipeline",
    "workspaces": "work",
    "context_and_communicators": "outside",
}


def gb(bytes_: float) -> str:
    return f"{bytes_ / GB:.2f}"


def table(names: Sequence[str], reports: Sequence[MemoryReport], parameters: int, times: Sequence[TimeReport]) -> str:
    """Formats one block per plan: a line per stage, the verdict, the time. Sizes in GB of 1e9 bytes."""
    plans = zip(names, reports, times, strict=True)
    return "\n\n".join(f"{_block(name, report, parameters)}\n{time_line(time)}" for name, report, time in plans)


def time_line(time: TimeReport) -> str:
    parts = [(name.replace("_", " "), seconds) for name, seconds in time.components.items()]
    shown = ", ".join(f"{name} {seconds:.4g} s" for name, seconds in parts if seconds >= 1e-4 * time.step_seconds)
    line = (
        f"step: {time.step_seconds:.4g} s predicted, {time.tflops_per_gpu:.0f} TFLOP/s and "
        f"{time.tokens_per_second_per_gpu:.0f} tokens/s per GPU: {shown}"
    )
    return "\n".join(wrapped(line) + (wrapped(ring_line(time)) if time.ring else []))


def ring_line(time: TimeReport) -> str:
    """Returns what the ring of a plan needs."""
    return f"its ring needs Ring({', '.join(f'{name}={value!r}' for name, value in time.ring.items())})"


def search_table(names: Sequence[str], plans: Sequence[Plan], title: str) -> str:
    """Formats a plan of a search in two lines or more; times in seconds, sizes in GB of 1e9 bytes."""
    groups = list(plans[0].time.groups)
    rows = [["rank", "step s", "TFLOP/s/GPU", *(f"{group} s" for group in groups), "memory GB", "% of line"]]
    for plan in plans:
        held = plan.memory
        rows.append(
            [
                f"{plan.rank}{'=' if plan.tied else ' '}",
                f"{plan.step_seconds:.4g}",
                f"{plan.time.tflops_per_gpu:.0f}",
                *(f"{seconds:.3g}" for seconds in plan.time.groups.values()),
                gb(held.peak_allocated_bytes) + (f" + {gb(held.host_bytes)}" if held.host_bytes else ""),
                f"{100 * held.peak_allocated_bytes / held.limit_bytes:.0f}",
            ]
        )
    ends = ["below each: the plan; what binds it"]
    for name, plan in zip(names, plans, strict=True):
        ends.append("; ".join([name, plan.binding, *([ring_line(plan.time)] if plan.time.ring else [])]))
    shown = []
    for line, end in zip(_aligned(rows), ends, strict=True):
        shown += [line, *wrapped(end, "        ", "          ")]
    if any(plan.memory.host_bytes for plan in plans):
        shown.append("memory GB: of each GPU + of the host's for each GPU")
    tie = ["= : within the error of the model from others of that rank"] if any(plan.tied for plan in plans) else []
    unlike = differences_line([plan.strategy for plan in plans])
    return "\n".join([*wrapped(title), *shown, *tie, *(wrapped(unlike) if unlike else [])])


def no_plan_fits(model: ModelSpec, cluster: Cluster, batch: int) -> str:
    """Returns what a search without a result has tried, and what training adapters around frozen 4-bit weights would
    take, where that fits."""
    tried = "also with states on the host and all layers recomputed" if cluster.offloads else "on the GPUs alone"
    found = fastest_ring(model, cluster, global_batch=batch, frozen="nf4", lora_rank=_ADAPTER_RANK)
    return (
        f"no plan for {model.name} with a global batch of {batch} fits below the memory limit of {cluster.gpus} x "
        f"{cluster.name}, {tried}; --min-gpus computes the number of GPUs needed"
        + (f". Training adapters alone fits: {found[0]:.4g} s a step with {name_of(found[1])}" if found else "")
    )


def why_no_ring(model: ModelSpec, cluster: Cluster, batch: int, first: Plan) -> str:
    """Returns why no plan of a search has a ring."""
    if cluster.gpus == 1:
        return "no ring among them: it takes at least 2 GPUs"
    found = fastest_ring(model, cluster, global_batch=batch, offload=first.strategy.offload)
    if found is None:
        return "no ring among them: none fits below the memory limit"
    seconds, plan = found
    memory = estimate_memory(model, cluster, plan, batch).peak_allocated_bytes
    return (
        f"no ring among them: the fastest takes {seconds:.4g} s, {seconds / first.step_seconds:.2f} times the first "
        f"plan, and {gb(memory)} GB, with {name_of(plan)}"
    )


def _block(name: str, report: MemoryReport, parameters: int) -> str:
    used = [component for component in COMPONENTS if any(stage.components[component] for stage in report.stages)]
    rows = [["stage", "layers", "in flight", *(_SHORT[c] for c in used), "allocated"]]
    for stage in report.stages:
        rows.append(
            [
                str(stage.stage),
                str(stage.layers),
                f"{stage.in_flight:g}",
                *(gb(stage.components[component]) for component in used),
                gb(stage.allocated_bytes),
            ]
        )
    title = (
        f"{report.model}, {parameters / GB:.2f}e9 parameters; {report.cluster}, "
        f"{gb(report.memory_bytes)} GB each; global batch {report.global_batch} samples in "
        f"{report.micro_batches} micro-batch{'es' if report.micro_batches > 1 else ''}; memory in GB"
    )
    return "\n".join([*wrapped(name), *wrapped(title), *_aligned(rows), verdict_line(report)])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.rjust, row, widths)) for row in rows]


def verdict_line(report: MemoryReport) -> str:
    side = "below" if report.margin_bytes >= 0 else "above"
    line = (
        f"{report.verdict}: {gb(report.peak_allocated_bytes)} GB allocated on stage {report.worst.stage}, "
        f"{gb(abs(report.margin_bytes))} GB {side} {report.safe_fraction:.0%} of {gb(report.memory_bytes)} GB; about "
        f"{gb(report.peak_reserved_bytes)} GB reserved, {gb(report.device_bytes)} GB of the device in all"
    )
    if report.host_bytes:
        line += f"; {gb(report.host_bytes)} GB of the host's memory for each GPU"
    return "\n".join(wrapped(line))


def csv_text(names: Sequence[str], reports: Sequence[MemoryReport], times: Sequence[TimeReport]) -> str:
    """Formats a line per stage of each plan; sizes in bytes, times of the whole step in seconds."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = [f"{component}_bytes" for component in COMPONENTS]
    seconds = ["step_seconds", *(f"{component}_seconds" for component in TIME_COMPONENTS), "tflops_per_gpu"]
    ends = ["allocated_bytes", "limit_bytes", "verdict"]
    writer.writerow(["plan", "stage", "layers", "in_flight", *columns, *ends, *seconds])
    for name, report, time in zip(names, reports, times, strict=True):
        timed = [f"{value:.6g}" for value in (time.step_seconds, *time.components.values(), time.tflops_per_gpu)]
        for stage in report.stages:
            sizes = [number_text(round(stage.components[component])) for component in COMPONENTS]
            sums = [round(stage.allocated_bytes), round(report.limit_bytes), report.verdict]
            writer.writerow([name, stage.stage, stage.layers, f"{stage.in_flight:g}", *sizes, *sums, *timed])
    return out.getvalue()


def explain(name: str, report: MemoryReport) -> str:
    """Formats every number of the largest stage as a formula in words, then in numbers, with its source."""
    stage = report.worst
    lines = [
        f"{name}: stage {stage.stage} of {len(report.stages)}, {stage.layers} layers, {stage.in_flight:g} forwards in "
        f"flight",
        "",
        f"parameters of this GPU: {number_text(stage.parameters)}",
    ]
    for count in stage.counts:
        lines += [f"  {count.what}", f"    {count.formula}", f"    = {count.filled} = {number_text(count.value)}"]
    for component in COMPONENTS:
        lines += _terms(component, [term for term in stage.terms if term.component == component and term.value])
    lines += _terms("memory of the host", stage.host)
    capacity, share = number_text(report.memory_bytes), report.safe_fraction
    lines += [
        "",
        f"allocated: all but context_and_communicators = {gb(stage.allocated_bytes)} GB",
        f"reserved: allocated * {report.reserved_per_allocated} = {gb(report.peak_reserved_bytes)} GB",
        f"limit: {share} * {capacity} bytes = {gb(report.limit_bytes)} GB",
        verdict_line(report),
    ]
    return "\n".join(lines)


def _terms(name: str, terms: Sequence[Term]) -> list[str]:
    if not terms:
        return []
    lines = ["", f"{name}: {gb(sum(term.value for term in terms))} GB"]
    for term in terms:
        lines += [
            f"  {term.what}   [{term.source}]",
            f"    {term.formula}",
            f"    = {term.filled} = {gb(term.value)} GB",
        ]
    return lines
