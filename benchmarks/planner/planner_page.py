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

from rtp_ext.gpu_rates import WIRES
from rtp_ext.planner import (
    Cluster,
    ModelSpec,
    Strategy,
    calibrate,
    errors_of,
    estimate_memory,
    estimate_time,
    goodput,
    lecture,
)
from rtp_ext.planner.constants import constants
from rtp_ext.planner.memory.activations import layer_tensors
from rtp_ext.planner.plans.differences import differences
from rtp_ext.planner.plans.forwards import forwards_table
from rtp_ext.planner.plans.when import Cell, grid, when_table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.card import RESULTS
from shared.table import Row, markdown, marker, read_lines, renew, wishes, with_blocks, wrapped

from planner import planner_runs as runs
from planner import published
from planner.capacity import searched_again
from planner.planned import planned_again
from planner.planner_hosts import hosts
from planner.planner_runs import title

# -- rotation beside other plans, with all other settings equal --------------------------------------------------------

GB = 1e9
_ALIKE = ((False, "none"), (True, "none"), (True, "selective"), (True, "full"))  # fused loss, recomputation
_HEADS = ("loss head", "recomputed", "`rtp=8`", "`zero=3`", "`rtp=8`", "`zero=3`", "memory, rtp / zero", "time")


@functools.cache
def cells() -> list[Cell]:
    return grid()


def when() -> str:
    return f"\n{when_table(cells())}\n\n"


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
        "**In these predictions rotation saves memory, and seldom time.** Llama 3 8B on 8 H100 of 80 GB, one sample of "
        "8192 tokens for each. The table compares a ring with `fully_shard` at the same loss head, recomputation, "
        "dtypes and kernels:"
    )
    last = (
        f"With the fused loss on both, the ring takes {ours[0]:.1f} GB against {theirs[0]:.1f} and is "
        f"{100 * (ours[-1] / theirs[-1] - 1):.0f} % slower. Most of the difference is two of the four hidden tensors "
        "of each SwiGLU, which bundles do not keep; a fused SwiGLU under `fully_shard` would not keep them either. "
        f"Without bundles (`bundle=no`) the ring takes {unbundled:.1f} GB. Rotation is the fastest in {won} of the "
        f"{len(cells())} cells of `--when` ([below](#when-rotation-wins)), and ties in {tied}."
    )
    return f"\n{wrapped(first)}\n{markdown(_HEADS, rows)}{wrapped(last)}\n\n"


def claims_of_when() -> list[str]:
    tie = constants()["search"]["tie_fraction"]["value"]
    known = {(cell.model, cell.link, cell.tokens): cell for cell in cells()}
    node = [cell for cell in cells() if cell.gpus == 8 and cell.link == "NVLink" and cell.tokens >= 4096]
    near = [cell.advantage for cell in node]
    long = known["llama-3-8b", "NVLink", 8192].plans
    rtp, fsdp = long["rtp"], long["fsdp"]
    won = [cell for cell in cells() if cell.advantage > 1 + tie]
    ties = [cell for cell in cells() if cell.winner == "tie" and cell.link == "PCIe" and cell.tokens == 8192]
    assert rtp and fsdp and won and {cell.link for cell in won} == {"PCIe"}, [dataclasses.astuple(cell) for cell in won]
    return [
        f"differences within {100 * tie:.0f} % count as ties",
        f"a tie, or nearly, with `fully_shard` and the hybrids ({min(near):.2f} to {max(near):.2f})",
        f"Llama 3 8B at 8k tokens, {rtp.step_seconds:.2f} s against {fsdp.step_seconds:.2f} s of `fully_shard`",
        f"PCIe ({WIRES['pcie'] / GB:.0f} GB/s)",
        f"RTP wins {len(won)} of the {len(cells())} cells by more than the model's error",
        *(
            f"{_title(cell)}{' in rings under a pipeline' * (cell.winner == 'rtp hybrid')}, {cell.tokens // 1024}k "
            f"tokens: {cell.advantage:.2f}"
            for cell in won
        ),
        f"{' and '.join(_title(cell).removeprefix('Llama 3 ') for cell in reversed(ties))} "
        f"{'tie' if len(ties) > 1 else 'ties'} at 8k",
    ]


def _title(cell: Cell) -> str:
    return title(cell.model)


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
    return markdown(("run", "measured", "ratio"), rows)


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
    return told + markdown(("run", "estimate", "memory"), false_alarms)


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
    rows = []
    for table, name in _SOURCES.items():
        errors = [run.error for run in runs.every_run()[table] if run.measured is not None]
        rows.append(_summary(name, errors))
    single = runs.one_node()
    errors = [run.predicted_s() / run.step_seconds - 1 for run in single]
    rows.append(_summary("vTrain on one node, hidden 1024 and 2048", errors))
    return markdown(("table", "runs", "mean, median of absolute errors", "from, to"), rows)


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
    "untouched": _untouched,
    "runs": _runs,
    "when": when,
    "forwards": forwards,
    "ways": ways,
    "grid": our_runs,
    "capacity": capacity,
    "hosts": hosts,
}


# -- prose -------------------------------------------------------------------------------------------------------------


def claims() -> list[str]:
    """Returns the sentences with numbers that the page must contain, computed anew."""
    before_when = [*_claims_of_memory(), *_claims_of_the_lecture(), *_claims_of_time(), *_claims_of_failures()]
    return [*before_when, *claims_of_when()]


def _claims_of_memory() -> list[str]:
    known, logits = constants()["memory"], constants()["logits"]
    peaks = {name: f"{entry['peak_bytes']:g}" for name, entry in logits.items()}
    llama = ModelSpec.preset("llama-3-8b")
    selective = {"zero": 3, "recompute": "selective"}
    units = {
        name: f"{_layer_units(llama, Strategy(**plan)):g}"
        for name, plan in {
            "megatron": {},
            "torch": {"stack": "torch"},
            "selective": selective,
            "full": {"recompute": "full"},
        }.items()
    }
    safe = f"{100 * known['safe_fraction']['value']:.0f} %"
    mixture, ratios = _mixtral()
    sharded = [dataclasses.replace(run, strategy=dataclasses.replace(run.strategy, zero=2)) for run in runs.llama3()]
    fitting = sum(run.memory.verdict != "out of memory" for run in sharded)
    reserved = [1 / run.memory_ratio - 1 for run in runs.torchtitan() if run.gib is not None]
    return [
        f"draws memory against the {safe} line",
        f"`fits` up to {safe}, below which",
        f"Reserved memory is about {known['reserved_per_allocated']['value']:g} times as much",
        f"B = {peaks['eager']} eager, {peaks['loss-parallel']} DTensor loss-parallel, {peaks['megatron']} Megatron, "
        f"{peaks['compiled']} compiled, {peaks['fused']} fused",
        f"{known['workspace_bytes']['value'] >> 20} MiB of the GEMM libraries",
        f"{known['cuda_context_bytes']['value'] / GB:g} GB, {known['communicator_bytes']['value'] / GB:g} GB for each "
        "communicator",
        f"{units['megatron']} bytes for a Llama on Megatron",
        f"{units['torch']} on plain torch",
        f"{units['selective']} with torchtitan's selective recomputation",
        f"{units['full']} with full",
        f"with `zero=2` {fitting} of the {len(sharded)} rows are not out of memory",
        f"reserved memory of torchtitan is {100 * min(reserved):.0f} to {100 * max(reserved):.0f} % above the estimate",
        f"last rank: {mixture}) does not say",
        f"the states are {ratios[0]:.2f} of the measured ones, and the peak is {ratios[1]:.2f} and {ratios[2]:.2f}",
    ]


def _layer_units(model: ModelSpec, strategy: Strategy) -> float:
    """Returns bytes that a layer saves per token and hidden feature, without the float32 log-sum-exp."""
    tensors = [saved for saved in layer_tensors(model, strategy) if "log-sum-exp" not in saved.tensor]
    return sum(saved.bytes_per_token(strategy) for saved in tensors) / model.hidden


def _mixtral() -> tuple[str, list[float]]:
    between, peaks = published.MIXTRAL
    model = dataclasses.replace(ModelSpec.preset("mixtral-8x7b"), vocab=256000)
    plan = Strategy(dp=16, tp=2, pp=4, ep=4, zero=1, sequence_parallel=True)
    stage = estimate_memory(model, Cluster.preset("h100-80gb", gpus=128), plan, 1024).stages[-1]
    states = sum(stage.components[name] for name in ("parameters", "gradients", "optimizer"))
    printed = f"{between / GB:.1f} GB between steps, peaks of {peaks[0] / GB:.1f} and {peaks[1] / GB:.1f} GB"
    return printed, [states / between, *(stage.allocated_bytes / peak for peak in peaks)]


def _claims_of_the_lecture() -> list[str]:
    gpt3 = {"layers": 96, "hidden": 12288, "heads": 96, "seq": 2048}
    one, many = (lecture.memory_bytes(**gpt3, batch=batch)["activations"] for batch in (1, 128))
    day, a100 = 86400, 312e12
    reached = lecture.utilization(300e9, 175e9, 1024, a100, 35 * day)
    llama = lecture.utilization(1.4e12, 65e9, 2048, a100, 21 * day)
    return [
        f"its {int(one / GB)} GB of activations for GPT-3 ({int(100 * one / 700e9)} % of 700 GB; {many / 700e9:.0f} "
        f"times at batch 128), and {reached:.4f} for GPT-3",
        f"which gives {llama:.2f} for 1.4e12 tokens",
    ]


def _claims_of_failures() -> list[str]:
    whole = goodput(100_000, 1.8 * 16384, 30, 600).effective
    parted = goodput(100_000, 1.8 * 16384, 30, 600, 100, stall_seconds=180).effective
    return [
        f"at 100,000 GPUs {100 * whole:.0f} % where each failure costs ten minutes, and {100 * parted:.0f} % with 100 "
        "replicas",
    ]


def _claims_of_time() -> list[str]:
    time, tie = constants()["time"], constants()["search"]["tie_fraction"]["value"]
    h100 = Cluster.preset("h100-80gb")
    flash = time["flash_fraction_torch"]["value"] * h100.bf16_achievable_flops_per_s / h100.bf16_flops_per_s
    measured = runs.vtrain()
    fused = [
        dataclasses.replace(run, strategy=dataclasses.replace(run.strategy, flash_attention=True)) for run in measured
    ]
    odd = [run for run in measured if (run.cluster.gpus, run.strategy.tp, run.strategy.pp) == (512, 2, 16)]
    even = [
        run.step_seconds
        for run in measured
        if (run.cluster.gpus, run.model.hidden, run.strategy.tp, run.strategy.pp) == (512, odd[0].model.hidden, 4, 16)
    ]
    (small,) = (
        run for run in measured if (run.model.hidden, run.strategy.tp, run.strategy.micro_batch) == (3072, 8, 2)
    )
    single = runs.regrets(runs.one_node())
    serial = [run.error for run in runs.llama3(chunks=1)]
    titan = {run.name: run for run in runs.torchtitan() if run.measured is not None}
    context = [_percent(run.error) for run in titan.values() if run.strategy.cp > 1]
    eager = [run.error for name, run in titan.items() if name.endswith("H100, 8192 tokens, eager")]
    others = [abs(run.predicted_s() / run.step_seconds - 1) for run in measured if run not in (*odd, small)]
    apart = [
        runs.mean(abs(run.error) for run in titan.values() if (run.strategy.tp > 1) == parallel)
        for parallel in (True, False)
    ]
    rowwise = [_percent(run.error) for name, run in titan.items() if name.endswith("rowwise")]
    return [
        f"torch: {100 * flash:.0f} % of peak",
        f"{100 * time['nvlink_sm_share']['value']:.0f} % on NVLink, "
        f"{100 * time['network_sm_share']['value']:.0f} % on the network",
        f"Plans within {100 * tie:.0f} % of a rank's first",
        f"on {len(measured)} of vTrain's runs on 64 to 512 A100",
        f"regret {100 * runs.mean(single):.1f} % on average, {100 * max(single):.0f} % at most",
        f"Without it the {len(measured)} runs come out {100 * errors_of(fused).mean_error:.0f} % wrong on average",
        "vTrain, TP 2, PP 16 on 512 GPUs: " + " and ".join(_error(run) for run in odd),
        f"Measured {' and '.join(f'{run.step_seconds:.0f}' for run in odd)} s where TP 4, PP 16 takes "
        f"{min(even):.0f} to {max(even):.0f} s",
        f"TP 8 with a micro-batch of 2 at hidden 3072: {_error(small)}",
        f"at a micro-batch of 2 (below), the mean is {100 * runs.mean(others):.1f} %",
        f"Runs with tensor parallelism are off by {100 * apart[0]:.1f} % on average, those without by "
        f"{100 * apart[1]:.1f} %",
        "Llama 3 405B without interleaving: " + ", ".join(_percent(error) for error in serial),
        f"torchtitan of 2024 without compilation: {', '.join(map(_percent, eager))}",
        f"context parallelism over 4 ranks: {', '.join(context)}",
        f"Float8 with a scale for each row: {', '.join(rowwise)}",
    ]


def _error(run: runs.Measurement) -> str:
    return _percent(run.predicted_s() / run.step_seconds - 1)


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
