"""Makes the tables of the three pages of the planner from published.py and the planner, and checks their numbers.

    python benchmarks/planner/planner_page.py          # prints every block of the pages
    python benchmarks/planner/planner_page.py --write  # rewrites the blocks in the pages
    python benchmarks/planner/planner_page.py --check  # exit status 1 where a page differs

A block is the text between `<!-- planner: NAME -->` and `<!-- end -->`. `claims` generates the phrases with numbers
that the prose must contain word for word; --write does not change prose, but reports missing phrases.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rtp_ext.gpu_rates import HOP_SECONDS, WIRES
from rtp_ext.planner import (
    Cluster,
    ModelSpec,
    Strategy,
    calibrate,
    errors_of,
    estimate_memory,
    estimate_time,
)
from rtp_ext.planner.constants import constants
from rtp_ext.planner.plans.against import STEPS, TO_COME, Match, matches, ring_text
from rtp_ext.planner.plans.differences import differences
from rtp_ext.planner.plans.forwards import forwards_table
from rtp_ext.planner.plans.when import Cell, cluster_of, grid, when_table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from gpu.expected import timed_products
from shared.card import RESULTS
from shared.table import Row, markdown, marker, read_lines, renew, wishes, with_blocks, wrapped

from planner import planner_runs as runs
from planner import published
from planner.capacity import searched_again
from planner.planned import planned_again
from planner.planner_hosts import hosts

# -- rotation beside other plans, with all other settings equal --------------------------------------------------------

GB = 1e9
_ALIKE = ((False, "none"), (True, "none"), (True, "selective"), (True, "full"))  # fused loss, recomputation
_HEADS = ("loss head", "recomputed", "`rtp=8`", "`zero=3`", "`rtp=8`", "`zero=3`", "memory, rtp / zero", "time")


@functools.cache
def cells() -> list[Cell]:
    return grid()


def when() -> str:
    return f"\n{when_table(cells())}\n\n"


_HIDES = (1024, 2048, 4096, 8192, 16384)
_BY_PIECE = ("the engine as it is", *(f"+ {piece}" for piece in TO_COME))


@functools.cache
def matched() -> list[Match]:
    return matches(STEPS)


def _slower(ratio: float) -> str:
    """Formats a ratio of times as words."""
    share = f"{100 * abs(ratio - 1):.1f}"
    return "as much time" if share == "0.0" else f"is {share} % {'slower' if ratio > 1 else 'faster'}"


def _ratio(value: float) -> str:
    return f"{value:.3f}" if value < float("inf") else "-"


def against() -> str:
    """Every cell of `--when` in which a ring and `fully_shard` both fit, before and after, with what binds."""
    heads = ("cell", "`fully_shard` s", "no SMs", "today", "binding", "to come", "binding", "plan", "GB")
    rows = []
    for one in matched():
        cell = f"{one.model} {one.link} {one.tokens}"
        model, cluster = ModelSpec.preset(one.model, seq=one.tokens), cluster_of(one.link, one.gpus)
        last = one.rings[STEPS[-1]]
        told, held = "-", "-"
        if last is not None:
            told = ring_text(model, cluster, last.strategy)
            held = f"{last.allocated_bytes / GB:.0f}/{one.peer.allocated_bytes / GB:.0f}"
        parts = [cell, f"{one.peer.seconds:.4g}", f"{one.free.seconds / one.peer.seconds:.3f}"]
        for pieces in (STEPS[0], STEPS[-1]):
            parts += [_ratio(one.ratio(pieces)), one.binding(pieces) or "-"]
        rows.append((*parts, told, held))
    table = [
        (
            name,
            f"{sum(one.ratio(step) <= 1.0 for one in matched())} of {len(matched())}",
            f"{sum(one.ratio(step, free=True) <= 1.0 for one in matched())} of {len(matched())}",
        )
        for name, step in zip(_BY_PIECE, STEPS, strict=True)
    ]
    return markdown(("with", "<= 1.00", "<= 1.00, no SMs"), table) + markdown(heads, rows).lstrip("\n")


def eight() -> str:
    """Llama 3 8B on 8 H100 by tokens, at equal settings."""
    heads = ("tokens", "`zero=3` s", "`symm_mem`", "`rtp=8`", *(f"+ {piece}" for piece in TO_COME))
    rows = []
    cluster = Cluster.preset("h100-80gb", gpus=8)
    for tokens in _HIDES:
        model, shared = ModelSpec.preset("llama-3-8b", seq=tokens), {"fused_loss": True}

        def told(plan: Strategy, model: ModelSpec = model) -> float:
            return estimate_time(model, cluster, plan, cluster.gpus).step_seconds

        peer = told(Strategy(dp=8, zero=3, **shared))
        free = told(Strategy(dp=8, zero=3, symm_mem=True, **shared))
        rings = [told(Strategy(rtp=8, to_come=step, **shared)) for step in STEPS]
        ratios = [f"{seconds / peer:.3f}" for seconds in (free, *rings)]
        rows.append((str(tokens), f"{peer:.4f}", *ratios))
    return markdown(heads, rows)


def products() -> str:
    """Products as an H100 took them, and as the time model has them."""
    rows, found = [], {name: (measured, predicted) for name, measured, predicted in timed_products()}
    for first, *others in _PRODUCTS:
        for case in sorted({name.rpartition(", ")[0] for name in found if name.endswith(first)}):
            told = [found[f"{case}, {name}"] for name in (first, *others)]
            rows.append((case, *(f"{mine:.0f} / {model:.0f}, {_percent(model / mine - 1)}" for mine, model in told)))
    errors = [abs(predicted / measured - 1) for measured, predicted in found.values()]
    note = (
        f"Measured / predicted us, error. Of all {len(errors)}: {100 * statistics.mean(errors):.1f} % on average, "
        f"{100 * max(errors):.1f} % at most. `k`: [8192, k] x [k, 4096] in bf16 with results of 16 bits and of "
        "float32, and float32 sums in place; others: whole layers, and products with 8 shards, casts, no hops."
    )
    table = [(*row, *[""] * (4 - len(row))) for row in rows]
    return markdown(("case", "whole, or 16 bits", "shards, or beta = 0", "beta = 1"), table) + wrapped(note) + "\n\n"


def forwards() -> str:
    return f"\n{forwards_table()}\n\n"


def _tie() -> float:
    return 1 + float(constants()["search"]["tie_fraction"]["value"])


def like() -> str:
    """Compares rotation with fully_shard at equal settings, and counts the cells of `--when` that rotation wins."""
    model, cluster = ModelSpec.preset("llama-3-8b", seq=8192), Cluster.preset("h100-80gb", gpus=8)

    def told(plan: Strategy) -> tuple[float, str, float]:
        memory = estimate_memory(model, cluster, plan, cluster.gpus)
        return (
            memory.peak_allocated_bytes / GB,
            memory.verdict,
            estimate_time(model, cluster, plan, cluster.gpus).step_seconds,
        )

    rows, found = [], {}
    for fused, recompute in _ALIKE:
        shared = {"fused_loss": fused, "recompute": recompute}
        plans = [Strategy(rtp=8, **shared), Strategy(dp=8, zero=3, **shared)]
        if unlike := differences(plans):
            raise ValueError(f"expected plans that differ in their layout only, got differences in {unlike}")
        ours, theirs = found[fused, recompute] = [told(plan) for plan in plans]
        sizes = [f"{size:.1f} GB, {verdict}" for size, verdict, _ in (ours, theirs)]
        times = [f"{seconds:.3f} s" for *_, seconds in (ours, theirs)]
        ratios = (f"{ours[0] / theirs[0]:.2f}", f"{ours[-1] / theirs[-1]:.2f}")
        rows.append((plans[0].effective_loss, recompute, *sizes, *times, *ratios))
    ours, theirs = found[True, "none"]
    unbundled, *_ = told(Strategy(rtp=8, fused_loss=True, bundle=False))
    won = sum(cell.advantage > _tie() for cell in cells())
    tied = sum(cell.winner == "tie" for cell in cells())
    first = (
        "**In these predictions, which no run on a GPU has confirmed, rotation takes less memory than `fully_shard`, "
        "and no more time.** Llama 3 8B on 8 H100 of 80 GB, one sample of 8192 tokens for each. The table compares a "
        "ring with `fully_shard` at the same loss head, recomputation, dtypes and kernels; [other "
        "sizes](predictions.md#rings-against-fully_shard), with what the engine is to have, are on the page of "
        "predictions:"
    )
    last = (
        f"With the fused loss on both, the ring takes {ours[0]:.1f} GB against {theirs[0]:.1f} and "
        f"{_slower(ours[-1] / theirs[-1])}. Most of the difference is two of the four hidden tensors "
        "of each SwiGLU, which bundles do not keep; a fused SwiGLU under `fully_shard` would not keep them either. "
        f"Without bundles (`bundle=no`) the ring takes {unbundled:.1f} GB. Rotation is the fastest in {won} of the "
        f"{len(cells())} cells of `--when` ([below](#when-rotation-wins)), and ties in {tied}."
    )
    return f"\n{wrapped(first)}\n{markdown(_HEADS, rows)}{wrapped(last)}\n\n"


_PRODUCTS = (("16_bits", "beta0", "beta1"), ("whole", "shards"))
DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("planner.md", "planner_model.md", "predictions.md")
BLOCK = marker("planner")


def _percent(value: float) -> str:
    return f"{100 * value:+.1f} %"


def _span(values: Iterable[float], digits: int = 2) -> str:
    """0.99-1.00; a single number where all are equal to the digit."""
    known = [f"{value:.{digits}f}" for value in sorted(values)]
    return known[0] if known[0] == known[-1] else f"{known[0]}-{known[-1]}"


# -- memory ------------------------------------------------------------------------------------------------------------


def _memory() -> str:
    stage = runs.megatron_7b().stages[-1]
    states = sum(stage.components[name] for name in ("parameters", "gradients", "optimizer"))
    measured = list(published.MEGATRON_7B.values())
    rows = []
    for what, column, estimates in (
        ("between steps, states alone", 0, states),
        ("between steps", 0, stage.between_steps_bytes),
        ("peak allocated", 1, stage.allocated_bytes),
    ):
        printed = [row[column] for row in measured]
        name = f"Megatron-LM 7B GPT, PP 4, 8 chunks, last rank, {len(printed)} machines: {what}"
        rows.append((name, f"{_span((size / GB for size in printed), 1)} GB", _span(estimates / x for x in printed)))
    for run in runs.torchtitan():
        if run.gib is not None:
            rows.append((f"torchtitan {run.name}: reserved", f"{run.gib:g} GiB", f"{run.memory_ratio:.2f}"))
    return markdown(("run", "measured", "ratio"), [*rows, *_mixtral()])


def _mixtral() -> list[tuple[str, str, str]]:
    """Megatron-LM's test, which does not print the number of GPUs."""
    between, peaks = published.MIXTRAL
    model = dataclasses.replace(ModelSpec.preset("mixtral-8x7b"), vocab=256000)
    plan = Strategy(dp=16, tp=2, pp=4, ep=4, zero=1, sequence_parallel=True)
    stage = estimate_memory(model, Cluster.preset("h100-80gb", gpus=128), plan, 1024).stages[-1]
    states = sum(stage.components[name] for name in ("parameters", "gradients", "optimizer"))
    sizes = [("between steps, states alone", between, states)]
    sizes += [("peak allocated", peak, stage.allocated_bytes) for peak in peaks]
    name = "Megatron-LM Mixtral 8x7B, TP 2, PP 4, EP 4, last rank, 128 GPUs assumed: "
    return [(name + what, f"{size / GB:.1f} GB", f"{estimate / size:.2f}") for what, size, estimate in sizes]


def _verdicts() -> str:
    """Returns the judgement of runs that worked, and the wrongly judged runs."""
    heads = ("runs that worked", "fits", "tight", "out of memory")
    rows, wrong = [], []
    for table, found in runs.every_run().items():
        ran = [run for run in found if run.ran]
        rows.append((table, *(str(sum(run.memory.verdict == verdict for run in ran)) for verdict in heads[1:])))
        wrong += [run for run in ran if run.memory.verdict == "out of memory"]
    told = markdown(heads, rows) + "Called out of memory although they worked:\n"
    false_alarms = (
        (run.name, f"{run.memory.peak_allocated_bytes / GB:.1f} GB", f"{run.cluster.memory_bytes / GB:.0f} GB")
        for run in wrong
    )
    sharded = [dataclasses.replace(run, strategy=dataclasses.replace(run.strategy, zero=2)) for run in runs.llama3()]
    fitting = sum(run.memory.verdict != "out of memory" for run in sharded)
    note = (
        "Llama 3's Table 4 prints neither recomputation nor the states that data parallelism shards: the estimate "
        f"assumes none and `zero=1`, and with `zero=2` {fitting} of the {len(sharded)} rows are not out of memory. "
        "NeMo's table prints neither recomputation nor offloading: the estimate assumes none."
    )
    return f"{told}{markdown(('run', 'estimate', 'memory'), false_alarms)}{wrapped(note)}\n\n"


# -- time --------------------------------------------------------------------------------------------------------------


def _calibration() -> str:
    """Constants fitted to one part of the runs, and their errors on the other."""
    measured, rows = runs.vtrain(), []
    for number, (name, (seen, kept)) in enumerate(runs.halves(measured).items()):
        shipped = number == 0
        found = None if shipped else calibrate(seen).constants
        on_seen, on_kept, regret = errors_of(seen, found), errors_of(kept, found), runs.regrets(kept, found)
        told = f"{100 * runs.mean(regret):.1f} %"
        if shipped:
            regrets = runs.regrets(measured)
            told += f"; all runs {100 * runs.mean(regrets):.1f} %, at most {100 * max(regrets):.1f} %"
        errors = (on_kept.mean_error, on_kept.median_error, on_kept.largest_error)
        rows.append(
            (
                f"{name}{' (as shipped)' * shipped}",
                f"{100 * on_seen.mean_error:.1f} % ({len(seen)})",
                ", ".join(f"{100 * error:.1f} %" for error in errors) + f" ({len(kept)})",
                told,
            )
        )
    heads = ("constants from", "on those", "on the others: mean, median, largest", "regret on the others")
    return markdown(heads, rows)


_SOURCES = {
    "SC'21": "Megatron SC'21, Table 1, best micro-batch and one or two chunks",
    "arXiv 2205.05198": "arXiv 2205.05198, Table 5, full recomputation and selective",
    "arXiv 2407.21783": "arXiv 2407.21783, Table 4, two chunks (not printed there)",
    "NeMo": "NeMo 25.11, FP8",
    "torchtitan": "torchtitan",
}


def _untouched() -> str:
    every = {name: runs.every_run()[table] for table, name in _SOURCES.items()}
    titan = runs.every_run()["torchtitan"]
    every["arXiv 2407.21783, Table 4, without interleaving"] = runs.llama3(chunks=1)
    every["torchtitan, with tensor parallelism"] = [run for run in titan if run.strategy.tp > 1]
    every["torchtitan, without"] = [run for run in titan if run.strategy.tp == 1]
    rows = [_summary(name, [run.error for run in own if run.measured is not None]) for name, own in every.items()]
    single = runs.one_node()
    rows.append(_summary("vTrain on one node, hidden 1024 and 2048", list(map(_error, single))))
    regrets = runs.regrets(single)
    note = f"On one node: regret {100 * runs.mean(regrets):.1f} % on average, {100 * max(regrets):.0f} % at most."
    return f"{markdown(('table', 'runs', 'mean, median of absolute errors', 'from, to'), rows)}{note}\n\n"


def _largest(count: int = 10) -> str:
    """The largest errors on vTrain's runs."""
    measured = sorted(runs.vtrain(), key=lambda run: -abs(_error(run)))
    rows = []
    for run in measured[:count]:
        plan = run.strategy
        sizes = (run.cluster.gpus, run.model.hidden, plan.tp, plan.dp, plan.pp, plan.micro_batch)
        times = (f"{run.step_seconds:.1f} s", f"{run.predicted_s():.1f} s", _percent(_error(run)))
        rows.append((*map(str, sizes), *times))
    heads = ("GPUs", "hidden", "TP", "DP", "PP", "micro-batch", "measured", "predicted", "error")
    rest = 100 * runs.mean(abs(_error(run)) for run in measured[3:])
    return f"{markdown(heads, rows)}Without the first three the mean of absolute errors is {rest:.1f} %.\n\n"


def _error(run: runs.Measurement) -> float:
    return run.predicted_s() / run.step_seconds - 1


def _summary(name: str, errors: Sequence[float]) -> tuple[str, ...]:
    sizes = [abs(error) for error in errors]
    middle = f"{100 * runs.mean(sizes):.1f} %, {100 * statistics.median(sizes):.1f} %"
    return name, str(len(errors)), middle, f"{_percent(min(errors))}, {_percent(max(errors))}"


def _runs() -> str:
    rows = []
    for table in _SOURCES:
        for run in runs.every_run()[table]:
            if run.measured is not None:
                predicted = f"{run.predicted:.4g} {run.unit}"
                rows.append((table, run.name, f"{run.measured:g} {run.unit}", predicted, _percent(run.error)))
    return markdown(("table", "run", "measured", "predicted", "error"), rows)


# -- our own runs ------------------------------------------------------------------------------------------------------


def recorded(name: str) -> list[Row]:
    return read_lines(RESULTS / "cpu-2core" / f"{name}.jsonl")


def ways() -> str:
    """Ways to search, of their last run."""
    last = {(row["problem"], row["way"]): row for row in recorded("search_ways")}
    rows = [
        (way, what, f"{row['value_s']:.5g} s", f"{row['evaluations']:,}", f"{row['processor_s']:.3g} s")
        for (what, way), row in last.items()
    ]
    return markdown(("way", "problem", "step found", "evaluations", "of a core"), rows)


def our_runs() -> str:
    """Counted and predicted bytes of our own runs, by strategy."""
    last = planned_again(recorded("planner_grid"))
    by_strategy: dict[str, list[Row]] = {}
    for row in last:
        by_strategy.setdefault(row["strategy"], []).append(row)
    rows = []
    for name, own in [*by_strategy.items(), ("all", last)]:
        cells_ = [name, str(len(own))]
        for what in ("kept", "slots", "peak"):
            ratios = [
                row[f"predicted_{what}_bytes"] / row[f"counted_{what}_bytes"]
                for row in own
                if row[f"counted_{what}_bytes"]
            ]
            cells_.append(f"{min(ratios):.3f}-{max(ratios):.3f}" if ratios else "-")
        errors = [abs(row["predicted_peak_bytes"] / row["counted_peak_bytes"] - 1) for row in own]
        rows.append((*cells_, f"{100 * runs.mean(errors):.1f} %"))
    heads = ("strategy", "runs", "kept: predicted / counted", "slots", "peak", "peak wrong by, on average")
    return markdown(heads, rows)


def capacity() -> str:
    """The largest models within a budget of every rank, found by running and predicted. On one rank all strategies are
    the same, but for recomputation."""
    rows = [
        (
            f"{row['budget_bytes'] / 2**20:g} MiB",
            row["grown"],
            row["strategy"],
            str(row["ranks"]),
            *(f"{row[size]} ({row[count] / 1e6:.2f}e6)" if row[size] else "none" for size, count in _FOUND),
            f"{row['peak_bytes'] / 2**20:.1f} MiB" if row["peak_bytes"] else "-",
            f"{row['next_peak_bytes'] / 2**20:.1f} MiB" if row["next_peak_bytes"] else "-",
        )
        for row in searched_again(recorded("capacity"))
        if row["ranks"] > 1 or row["strategy"].startswith("rtp")
    ]
    heads = (
        "budget",
        "grown",
        "strategy",
        "ranks",
        "largest that ran (parameters)",
        "predicted",
        "peak",
        "of the next",
    )
    return markdown(heads, rows)


_FOUND = (("largest", "parameters"), ("predicted_largest", "predicted_parameters"))


BLOCKS = {
    "like": like,
    "memory": _memory,
    "verdicts": _verdicts,
    "calibration": _calibration,
    "largest": _largest,
    "untouched": _untouched,
    "runs": _runs,
    "when": when,
    "products": products,
    "eight": eight,
    "against": against,
    "forwards": forwards,
    "ways": ways,
    "grid": our_runs,
    "capacity": capacity,
    "hosts": hosts,
}


# -- prose -------------------------------------------------------------------------------------------------------------


def claims() -> list[str]:
    """Returns the phrases with constants that the prose must contain, computed anew."""
    memory, time, logits = (constants()[name] for name in ("memory", "time", "logits"))
    peaks = {name: f"{entry['peak_bytes']:g}" for name, entry in logits.items()}
    safe = f"{100 * memory['safe_fraction']['value']:.0f} %"
    tie = f"{100 * constants()['search']['tie_fraction']['value']:.0f} %"
    h100 = Cluster.preset("h100-80gb")
    message = time["nccl_base_s"]["value"] + time["nccl_inter_step_s"]["value"]
    flash = time["flash_fraction_torch"]["value"] * h100.bf16_achievable_flops_per_s / h100.bf16_flops_per_s
    return [
        f"draws memory against the {safe} line",
        f"`fits` up to {safe}, below which",
        f"Reserved memory is about {memory['reserved_per_allocated']['value']:g} times as much",
        f"B = {peaks['eager']} eager, {peaks['loss-parallel']} DTensor loss-parallel, {peaks['megatron']} Megatron, "
        f"{peaks['compiled']} compiled, {peaks['fused']} fused",
        f"{memory['workspace_bytes']['value'] >> 20} MiB of the GEMM libraries",
        f"{memory['cuda_context_bytes']['value'] / GB:g} GB, "
        f"{memory['communicator_bytes']['value'] / GB:g} GB for each communicator",
        f"torch: {100 * flash:.0f} % of peak",
        f"{100 * time['nvlink_sm_share']['value']:.0f} % on NVLink, "
        f"{100 * time['network_sm_share']['value']:.0f} % on the network",
        f"Plans within {tie} of a rank's first",
        f"differences within {tie} count as ties",
        f"PCIe ({WIRES['pcie'] / GB:.0f} GB/s)",
        f"{1e6 * HOP_SECONDS:.0f} us over copy engines",
        f"{1e6 * message:.1f} us over NCCL between nodes",
    ]


# -- the page ----------------------------------------------------------------------------------------------------------


def rewrite(texts: list[str]) -> list[str]:
    """Returns the pages with their blocks generated anew. Raises ValueError for a missing or unknown block."""
    return with_blocks(texts, BLOCK, BLOCKS)


def prose(texts: list[str]) -> str:
    """Returns the pages without their blocks, with runs of whitespace collapsed."""
    return " ".join(BLOCK.sub("", "\n".join(texts)).split())


def missing(texts: list[str]) -> list[str]:
    """Returns the claims that the prose lacks."""
    told = prose(texts)
    return [claim for claim in claims() if claim not in told]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Tables and numbers of the pages of the planner.")
    wishes(parser).add_argument("--folder", type=Path, default=DOCS, help="of the pages; docs/ unless given")
    args = parser.parse_args(argv)
    source = "the planner: python benchmarks/planner/planner_page.py --write"
    after = renew(args, [args.folder / page for page in PAGES], rewrite, BLOCK, source)
    if (args.write or args.check) and (lost := missing(after)):
        sys.exit(f"{', '.join(PAGES)}: the prose does not say: " + "; ".join(lost))


if __name__ == "__main__":
    main()
