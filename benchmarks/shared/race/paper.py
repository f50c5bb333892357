"""The claims of the RTP paper (arXiv 2311.01635) and its repository beside what compare.py measured.

Only the abstract of the paper was at hand, not its body; the other claims are those of the authors' repository
(github.com/wdlctc/rtp at commit b92e77c). `None` for what nothing here measures.
"""

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
Runs = dict[tuple[str, int, int], Row]  # by strategy, ranks, tokens

PEAK = "peak_bytes"


def runs_of(lines: Sequence[Row], model: str) -> Runs:
    """Returns the last row of each strategy, number of ranks and of tokens, on one host."""
    mine = [line for line in lines if line["case"].startswith(f"{model}/") and "hosts" not in line]
    return {(line["strategy"], line["ranks"], line["tokens"]): line for line in mine if "error" not in line}


def _each(runs: Runs, value: Callable[[Row, Runs], float | None], unit: str = "{:.2f}") -> str | None:
    """Returns the range of a value of rtp over the numbers of tokens, for each number of ranks."""
    found: dict[int, list[float]] = {}
    for (strategy, ranks, _), row in runs.items():
        measured = value(row, runs) if strategy == "rtp" else None
        if measured is not None:
            found.setdefault(ranks, []).append(measured)
    told = [
        f"R = {ranks}: {' to '.join(dict.fromkeys(map(unit.format, (min(values), max(values)))))}"
        for ranks, values in sorted(found.items())
    ]
    return "; ".join(told) or None


def _beside(other: str, key: str, how: Callable[[float, float], float]) -> Callable[[Row, Runs], float | None]:
    def value(row: Row, runs: Runs) -> float | None:
        beside = runs.get((other, row["ranks"], row["tokens"]))
        return None if beside is None else how(row[key], beside[key])

    return value


def _saved(mine: float, theirs: float) -> float:
    return 100 * (1 - mine / theirs)


def _ratio(mine: float, theirs: float) -> float:
    return mine / theirs


# The claim, its place, what is measured for it (a phrase and a function of the runs).
CLAIMS: tuple[tuple[str, str, str, Callable[[Runs], str | None]], ...] = (
    (
        'memory is "remarkably close to the optimal - distributing the memory overhead of a single machine equitably'
        ' among multiple machines"',
        "paper, abstract",
        "(peak of one process with all batches / R) / peak of a rank; 1 is the optimum",
        lambda runs: _each(runs, lambda row, _: row["peak_efficiency"]),
    ),
    (
        '"99% memory scaling efficiency"; in the figure 46.3 GB of data parallelism and 5.9 GB of RTP at 340M, 8 ranks',
        "repository, README; docs/img/model_capacity.svg",
        "the same of parameters, gradients and optimizer state",
        lambda runs: _each(runs, lambda row, _: row["kept_efficiency"]),
    ),
    (
        '"85% memory save compared with DP" (8 ranks)',
        "repository, README",
        "% of DDP's peak that rtp saves, with the same batch on every rank",
        lambda runs: _each(runs, _beside("ddp", PEAK, _saved), "{:.0f} %"),
    ),
    (
        '"75% memory save compared with FSDP" (8 ranks; its baseline is one FSDP unit for the whole model)',
        "repository, README; benchmarks/fsdp_benchmark.py",
        "% of `fully_shard`'s peak that rtp saves, a unit for each block, the same batch on every rank",
        lambda runs: _each(runs, _beside("fsdp2", PEAK, _saved), "{:.0f} %"),
    ),
    (
        '"comparable performance to Distributed Data Parallel"',
        "paper, abstract",
        "tokens per second of rtp / DDP",
        lambda runs: _each(runs, _beside("ddp", "tokens_per_s", _ratio)),
    ),
    (
        '"comparable performance with DP and FSDP in terms of scaling and efficiency"',
        "repository, README",
        "tokens per second of rtp / `fully_shard`",
        lambda runs: _each(runs, _beside("fsdp2", "tokens_per_s", _ratio)),
    ),
    (
        '"memory deduplication", of what tensor parallelism keeps on every rank',
        "paper, title",
        "% of the peak of tensor parallelism that rtp saves, with as many tokens in a step",
        lambda runs: _each(runs, _beside("tp", PEAK, _saved), "{:.0f} %"),
    ),
    (
        "the in-place variant needs less than the other: 5.8 and 5.9 GB at 340M, 53.0 and 53.4 GB at 2.7B",
        "repository, docs/img/model_capacity.svg",
        "peak of rtp / that with `in_place=True`",
        lambda runs: _each(runs, _beside("rtp-inplace", PEAK, _ratio)),
    ),
    (
        '"seamless overlap between partition computation and partition weight communication"',
        "paper, abstract",
        "time of forward and backward of rtp / no communication",
        lambda runs: _each(runs, lambda row, _: row["forward_backward_ms"] / row["reference_forward_backward_ms"]),
    ),
    (
        "the code itself",
        "repository",
        "tokens per second of rtp / the authors' code, which has the same batches",
        lambda runs: _each(runs, _beside("upstream", "tokens_per_s", _ratio)),
    ),
    (
        "MNIST on 4 V100: 163.0 s, DDP 113.8 s, FSDP 116.2 s",
        "repository, tutorials/RTP_tutorial.rst",
        "not measured: no GPU",
        lambda _: None,
    ),
    (
        '"significantly larger models": 1.5B and 2.7B on 80 GB, where data parallelism and FSDP run out of memory',
        "paper, abstract; repository, docs/img/model_capacity.svg",
        "not measured at that size: no GPU; a smaller budget is in planner.md",
        lambda _: None,
    ),
)


def claims(rows: Sequence[Row]) -> list[Row]:
    """Returns the lines of the table."""
    runs = {(row["strategy"], row["ranks"], row["tokens"]): row for row in rows}
    return [
        {"claim": claim, "where": place, "measured here": what, "result": measure(runs) or "not measured"}
        for claim, place, what, measure in CLAIMS
    ]
