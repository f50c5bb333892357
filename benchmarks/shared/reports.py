"""Tables of compare.py, overlap.py, memory_per_rank.py, travel_curves.py; which lines the words of a block choose."""

import math
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from shared.table import (
    Cell,
    Columns,
    Row,
    Table,
    beside,
    last_command,
    mebibytes,
    median,
    named,
    number,
    quotient,
    ranks_of,
    told,
    ways_of,
    with_range,
)

# -- the claims of the paper -------------------------------------------------------------------------------------------

Runs = dict[tuple[str, int, int], Row]  # by strategy, ranks, tokens

PEAK = "peak_bytes"
FINAL = 20  # steps of a final loss


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


def _over(mine: float, theirs: float) -> float:
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
        lambda runs: _each(runs, _beside("ddp", "tokens_per_s", _over)),
    ),
    (
        '"comparable performance with DP and FSDP in terms of scaling and efficiency"',
        "repository, README",
        "tokens per second of rtp / `fully_shard`",
        lambda runs: _each(runs, _beside("fsdp2", "tokens_per_s", _over)),
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
        lambda runs: _each(runs, _beside("rtp-inplace", PEAK, _over)),
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
        lambda runs: _each(runs, _beside("upstream", "tokens_per_s", _over)),
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


IMPOSSIBLE = 105  # % of the ceiling
LINKS = ("hosts", "ranks_per_host", "rate", "delay")  # the keys that distinguish results between made hosts
ANY, SOME, ONE = range(99), range(1, 99), range(1, 2)  # words of a block

# -- which lines -------------------------------------------------------------------------------------------------------


def of_model(lines: list[Row], model: str) -> list[Row]:
    return [line for line in lines if line["case"].startswith(f"{model}/")]


def last_of_keys(lines: list[Row], *keys: str) -> list[Row]:
    """The lines of the last command for each combination of values of the keys, in the order of these."""
    runs: dict[tuple[Any, ...], list[Row]] = {}
    for line in lines:
        runs.setdefault(tuple(line.get(key) for key in keys), []).append(line)
    order = sorted(runs.items(), key=lambda item: [(type(value).__name__, value) for value in item[0]])
    return [line for _, run in order for line in last_command(run)]


def last_runs(lines: list[Row], model: str) -> list[Row]:
    """The lines of the last run of `model` for every number of ranks. Raises ValueError where there is none."""
    if not (mine := of_model(lines, model)):
        raise ValueError(f"expected results of {model}, found none")
    return last_of_keys(mine, "ranks")


def words_of(row: Row) -> set[Any]:
    words = {row["shape"], row["direction"], row["link"], row["transport"], f"R{row['ranks']}", f"T{row['tokens']}"}
    words |= {row.get("asked_travel") or "exact", *re.findall(r"\w+", row["device"])}
    return words | ({row["rate"], f"H{row['hosts']}", f"G{row['ranks_per_host']}"} if "hosts" in row else {"one-host"})


def last_cases(lines: list[Row], words: list[str]) -> list[Row]:
    """Returns the last line of each case that matches all `words`. Raises ValueError if there is none."""
    keys = ("case", "link", "transport", "route", "dtype", "graph", "max_ctas", "tokens", "slot_cap", "checkpoint")
    keys += ("parameter_dtype", "device", "cores", "threads", "cores_per_rank", *LINKS)
    same = [((*(line.get(key) for key in keys), ways_of(line)), line) for line in lines if set(words) <= words_of(line)]
    found = dict(same)
    if not found:
        raise ValueError(f"expected results with {' '.join(words) or 'any words'}, found none")
    for case, row in found.items():
        row["e_hides"] = [line["e_hide"] for key, line in same if key == case and line.get("e_hide") is not None]
    return list(found.values())


def _with_ratios(rows: list[Row], lines: list[Row]) -> list[Row]:
    """The rows with the ratios of all comparable lines."""
    keys = ("case", "ranks", "tokens", "dtype", "device", "cores", "threads", *LINKS)
    known: dict[Any, list[float]] = {}
    for line in lines:
        if line.get("rtp_ratio") is not None:
            known.setdefault((ways_of(line), *map(line.get, keys)), []).append(line["rtp_ratio"])
    return [row | {"rtp_ratios": known.get((ways_of(row), *map(row.get, keys)), [])} for row in rows]


def _compared(lines: list[Row], words: list[str]) -> list[Row]:
    rows = last_runs([line for line in lines if "beside" not in line], words[0])
    return _with_ratios(last_cases(rows, words[1:]) if words[1:] else rows, lines)


def _between_hosts(lines: list[Row], words: list[str]) -> list[Row]:
    model, *words = words
    mine = [line for line in of_model(lines, model) if set(words) <= words_of(line)]
    return _with_ratios(last_cases(mine, words), mine) if mine else []


def last_where(lines: list[Row], words: list[str]) -> list[Row]:
    """Returns the lines of the last run. `words`: the model, and --travel of the run or `exact`."""
    model, travel = words
    return last_command([row for row in of_model(lines, model) if (row.get("asked_travel") or "exact") == travel])


def last_muon_runs(lines: list[Row], words: list[str]) -> list[Row]:
    """The lines of the last run for each number of ranks and rate, with the optimizer's time of rtp relative to each.
    `words`: `hosts` for those between hosts, otherwise those of one host."""
    rows = last_of_keys([line for line in lines if ("hosts" in line) == ("hosts" in words)], "ranks", "rate")
    rtp = {(row["ranks"], row.get("rate")): row["optimizer_ms"] for row in rows if row["strategy"] == "rtp"}
    return [{**row, "rtp_optimizer_ms": rtp.get((row["ranks"], row.get("rate")))} for row in rows]


def _over_seeds(lines: list[Row], _: list[str]) -> list[Row]:
    """Means over the seeds of each run, with the held-out loss relative to float32's from the same seed."""
    run = last_command(lines)
    whole = {row["seed"]: row["eval_loss"] for row in run if row["strategy"] == "float32"}
    merged = []
    for name in dict.fromkeys(row["strategy"] for row in run):
        mine = [row for row in run if row["strategy"] == name]
        off = [row["eval_loss"] / whole[row["seed"]] - 1 for row in mine]
        means = {key: statistics.fmean(row[key] for row in mine) for key in ("eval_loss", "seconds")}
        apart = f"{statistics.fmean(off):+.2%} ± {statistics.stdev(off) / math.sqrt(len(off)):.2%}"
        merged.append({**mine[0], **means, "apart": apart, "seeds": len(mine)})
    return merged


def _by_recipe(lines: list[Row], _: list[str]) -> list[Row]:
    """The last run of each recipe, with its final loss relative to that without one."""
    runs = {line["recipe"]: {**line, "loss": statistics.fmean(line["losses"][-FINAL:])} for line in lines}
    for row in runs.values():
        row["apart"] = f"{row['loss'] / runs[None]['loss'] - 1:+.2%}"
    return list(runs.values())


# -- notes -------------------------------------------------------------------------------------------------------------


def _of_one_host(rows: list[Row]) -> str:
    first, shared = rows[0], any(row.get("cores_shared") for row in rows)
    timed = [row for row in rows if "error" not in row]
    ranks = sorted({row["ranks"] for row in rows})
    note = f" {', '.join(map(str, ranks))} rank{'s' * (ranks != [1])}."
    note += f" **Ranks take turns on {first['cores']} cores where there are more.**" if shared else ""
    note += f" Largest relative difference of losses: {max(row['loss_spread'] for row in timed):.0e}"
    gradients = [row.get("gradient_spread") for row in timed]
    return note + ("." if None in gradients else f", of a parameter's gradient: {max(gradients):.0e}.")


def _links(rows: list[Row]) -> str:
    kinds = {(row["hosts"], row["ranks_per_host"], row["cores_per_host"], row["delay"]) for row in rows}
    if len(kinds) > 1:
        raise ValueError(f"expected rows of one kind of hosts in a table, got {sorted(kinds, key=str)}")
    hosts, ranks, cores, delay = kinds.pop()
    has = "which share all cores" if cores is None else f"of {cores} core{'s' * (cores > 1)} each"
    rates = ", ".join(dict.fromkeys(row["rate"] for row in rows))
    late = f", every packet {delay} late" if delay else ""
    return f" {hosts} hosts made on this machine, {has}, {ranks} rank{'s' * (ranks > 1)} on each; links: {rates}{late}."


def _of_hosts(rows: list[Row]) -> str:
    timed = [row for row in rows if "error" not in row]
    losses, gradients = (max(row[key] for row in timed) for key in ("loss_spread", "gradient_spread"))
    ranks = ", ".join(dict.fromkeys(map(ranks_of, rows)))
    note = _links(rows) if "hosts" in rows[0] else f" {ranks} ranks on one host."
    return f"{note} Largest relative difference of losses: {losses:.0e}, of a parameter's gradient: {gradients:.0e}."


def _of_muon(rows: list[Row]) -> str:
    first = rows[0]
    kinds = {key: {row.get(key) for row in rows} for key in ("shape", "tokens", "matrix_bytes", "hosts")}
    if mixed := [key for key, values in kinds.items() if len(values) > 1]:
        raise ValueError(f"expected rows of one {', '.join(mixed)} in a table")
    note = f" {first['shape']}, {first['tokens']} tokens per rank; {first['matrix_bytes'] / 2**20:.1f} MiB of matrices."
    if "hosts" in first:
        note += f" {first['hosts']} hosts made on this machine."
    note += " **Ranks take turns on fewer cores.**" if any(row["cores_shared"] for row in rows) else ""
    return f"{note} Largest relative difference of losses: {max(row['loss_spread'] for row in rows):.0e}."


def _of_where(rows: list[Row]) -> str:
    first = rows[0]
    return (
        f" {first['hosts']} hosts made on this machine, links of {first['rate']}. Means over the ranks, and over "
        f"{first['recorded']} recorded steps."
    )


def _of_travel(rows: list[Row]) -> str:
    first = rows[0]
    steps = f"{first['steps']} steps of {first['tokens']} tokens per rank, means over {first['seeds']} seeds"
    return f" {first['shape']}, {first['ranks']} ranks, {steps}."


def _of_recipes(rows: list[Row]) -> str:
    first = rows[0]
    return f" {first['shape']}, {first['ranks']} ranks, {first['steps']} steps of {first['tokens']} tokens per rank."


# -- columns of compare.py ---------------------------------------------------------------------------------------------


def _step(row: Row) -> str | None:
    """A strategy that was not timed has the reason instead."""
    return f"not timed: {row['error']}" if "error" in row else median()(row)


def _passes(row: Row) -> str | None:
    """Without the optimizer, whose work the strategies do not share: a rank that shards updates 1/R of the model."""
    if row.get("exposed_ms") is None:
        return None
    return beside(number("forward_backward_ms"), quotient("forward_backward_ms", "reference_forward_backward_ms"))(row)


def _milliseconds(*keys: str) -> Cell:
    def cell(row: Row) -> str | None:
        times = [row.get(f"{key}_ms") for key in keys]
        return None if None in times else f"{sum(times):.0f}"

    return cell


def _thread(kind: str) -> Cell:
    """The milliseconds on a core, and those ready to run while another thread had it."""

    def cell(row: Row) -> str | None:
        times = row["threads_ms"].get(kind)
        return None if times is None or times[0] < 0.5 else f"{times[0]:.0f} + {times[1]:.0f}"

    return cell


_ratio = with_range(number("rtp_ratio", 2), "rtp_ratios")
_STEP, _RATIO, _PASSES = (
    "step, ms (median, p20-p80)",
    "rtp / this (all runs)",
    "forward + backward, ms (/ no communication)",
)
_KEPT = "parameters, gradients, optimizer, MiB per rank"
COMPARE: Columns = {
    "tokens per rank": told("tokens"),
    "strategy": named,
    "travels": ways_of,
    _STEP: _step,
    _RATIO: lambda row: None if row["strategy"] == "rtp" else _ratio(row),
    _PASSES: _passes,
    "processor, ms": number("processor_ms"),
    _KEPT: mebibytes("parameter_bytes", "gradient_bytes", "optimizer_bytes"),
    "transient, MiB": mebibytes("transient_bytes"),
    "largest PSS, MiB": mebibytes("pss_bytes"),
    "buffers, MiB": mebibytes("buffer_bytes"),
    "memory efficiency, kept": number("kept_efficiency", 2),
    "peak": number("peak_efficiency", 2),
}


def _some(columns: Columns, *headings: str) -> Columns:
    return {heading: columns[heading] for heading in headings}


BRIEF: Columns = {
    **_some(COMPARE, "strategy", _STEP, _RATIO),
    "kept, MiB per rank": mebibytes("kept_bytes"),
    "transient, MiB": COMPARE["transient, MiB"],
}
SCALING: Columns = {
    "ranks": ranks_of,
    **_some(COMPARE, "tokens per rank", "strategy", _STEP),
    "tokens/s": number("tokens_per_s"),
    "tokens/s per rank, R = 1 of the strategy = 1": number("scaling_efficiency", 2),
    **_some(COMPARE, _KEPT, "memory efficiency, kept", "peak"),
}
HOSTS: Columns = {
    "rate": told("rate"),
    **_some(COMPARE, "tokens per rank", "strategy", "travels", _STEP, _RATIO),
    "roof, ms (step / roof)": beside(number("roof_ms"), quotient("step_ms", "roof_ms")),
    **_some(COMPARE, _PASSES, "processor, ms"),
    "hidden": number("hidden_share", 2),
    "MiB that leave a host (closed form)": beside(mebibytes("sent_bytes"), mebibytes("closed_form_bytes")),
    "kept, MiB per rank": mebibytes("kept_bytes"),
    "largest PSS, MiB": COMPARE["largest PSS, MiB"],
}
_DETAILS = (_PASSES, "processor, ms", "hidden", "largest PSS, MiB")
WHERE: Columns = {
    **_some(COMPARE, "tokens per rank", "strategy", "travels"),
    "step, ms (median)": number("step_ms"),
    "of the roof": quotient("step_ms", "roof_ms"),
    "forward and backward, ms": _milliseconds("forward_backward"),
    "GEMMs": _milliseconds("products"),
    "conversions": _milliseconds("conversions"),
    "waits for weights": _milliseconds("weights"),
    "for gradients": _milliseconds("gradients", "ends"),
    "for slots": _milliseconds("slots"),
    "posting": _milliseconds("posting"),
    "collectives": _milliseconds("collectives"),
    "the rest": _milliseconds("outside"),
    "optimizer, ms": _milliseconds("optimizer"),
    "main thread, ms on a core + ready": _thread("main"),
    "threads of rtp": _thread("transport"),
    "threads of Gloo": _thread("gloo"),
    "packets, ms of all cores": _milliseconds("interrupts"),
}
_MUONS = {
    "auto": "`rtp_ext.optim`",
    "gram": '`rtp_ext.optim`, `exchange="gram"`',
    "whole": '`rtp_ext.optim`, `exchange="whole"`',
    "stock": "`torch.optim`",
    "gathered": "`torch.optim`, matrices gathered",
}
MUON: Columns = {
    "ranks": told("ranks"),
    "rate": told("rate"),
    "strategy": lambda row: named({"strategy": row["strategy"].partition("-")[0]}),
    "Muon": lambda row: _MUONS[row["muon"]],
    _STEP: median(),
    "optimizer, ms": median("optimizer_"),
    "optimizer, rtp / this": quotient("rtp_optimizer_ms", "optimizer_ms"),
    "MiB that updates send, own count": mebibytes("exchange_bytes", digits=2),
    "counted by the kernel": mebibytes("optimizer_sent_bytes", digits=2),
    "state of the optimizer, MiB": mebibytes("optimizer_bytes", digits=2),
    "peak, MiB": mebibytes("peak_bytes", digits=2),
}

# -- columns of overlap.py and memory_per_rank.py ----------------------------------------------------------------------


def e_hide(row: Row) -> str | None:
    """With the range of all runs; of one run, with the standard error of the medians that it is made of.

    A dash where the operation took clearly less than its hops alone: times varied more than they differ.
    """
    if (row.get("ceiling_percent") or 0) > IMPOSSIBLE:
        return "-"
    if len(row.get("e_hides", ())) > 1 or any(row.get(f"t_{name}_p80_us") is None for name in ("gr", "c", "ov")):
        return with_range(number("e_hide", 2), "e_hides")(row)
    if row.get("e_hide") is None:
        return None
    # of normal times: p80 - p20 of a normal variable is 1.68 sigma, the standard error of a median 1.25 sigma / sqrt(n)
    spreads = [(row[f"t_{name}_p80_us"] - row[f"t_{name}_p20_us"]) / 1.68 for name in ("gr", "c", "ov")]
    error = 1.25 * math.hypot(*spreads) / math.sqrt(row["iterations"]) / min(row["t_gr_us"], row["t_c_us"])
    digits = 1 if error >= 0.05 else 2
    return f"{row['e_hide']:.{digits}f} ± {error:.{digits}f}"


def _losses(row: Row) -> str | None:
    values = [row.get(f"loss_{name}_us") for name in ("split", "interference", "exposed")]
    return None if values[0] is None else ", ".join("-" if value is None else f"{value:.0f}" for value in values)


OVERLAP: Columns = {
    "shape": told("shape"),
    "tokens": told("tokens"),
    "R": ranks_of,
    "pass": told("direction"),
    "link": lambda row: row["link"] or row["transport"],
    "CTAs": number("max_ctas"),
    "one GEMM": number("t_g1_us"),
    "shard GEMMs": number("t_gr_us"),
    "hops": number("t_c_us"),
    "rotated, us (median, p20-p80)": median("t_ov_", "t_ov_us", "us"),
    "fetch first (how)": beside(number("t_base_us"), told("base")),
    "E_hide": e_hide,
    "roofline": number("roofline", 2),
    "% of ceiling": number("ceiling_percent"),
    "E_ect": number("e_ect", 2),
    "lost to split, interference, exposed, us": _losses,
    "largest p80 / p20": number("spread", 1),
}
HOSTS_OVERLAP: Columns = {
    "rate": told("rate"),
    **OVERLAP,
    "bytes that leave a host (closed form)": beside(number("sent_bytes"), told("closed_form_bytes")),
}
MEMORY: Columns = {
    "strategy": named,
    "layers": lambda row: f"{row['layers']} of {row['full_layers']}",
    "tokens computed with": told("computed_tokens"),
    **_some(COMPARE, _KEPT, "transient, MiB"),
    "peak, MiB": mebibytes("peak_bytes"),
    "reserved, MiB": mebibytes("reserved_bytes"),
}
TRAVEL: Columns = {
    "run": lambda row: row["strategy"] + (" (control, simulated)" if row["control"] else ""),
    "loss, held out": number("eval_loss", 4),
    "of float32's": told("apart"),
    "MiB a rank sends in a step": mebibytes("ring_bytes", digits=2),
    "seconds": number("seconds"),
}
RECIPES: Columns = {
    "recipe": lambda row: row["recipe"] or "none",
    f"loss, mean of the last {FINAL} steps": number("loss", 4),
    "of that without a recipe": told("apart"),
}
PAPER: Columns = {key: told(key) for key in ("claim", "where", "measured here", "result")}

TIMELINE: Columns = {
    "ranks": number("ranks"),
    "shards a product": number("group"),
    "gradients": told("gradients"),
    "product / hop": number("ratio", "g"),
    "closed form, ms": number("predicted_ms", 1),
    "measured, ms": number("measured_ms", 1),
    "measured / closed form": quotient("measured_ms", "predicted_ms"),
    "without the wire, ms": number("free_ms", 1),
    "hops of a direction, ms": number("wire_ms", 1),
}


def _hosts(file: str, columns: Columns) -> Table:
    return Table(file, columns, _between_hosts, _of_hosts, SOME)


TABLES: dict[str, Table] = {
    "brief": Table("compare", BRIEF, _compared, _of_one_host, SOME, empty=None, beside="scaling"),
    "compare": Table("compare", COMPARE, _compared, _of_one_host, ONE, by="ranks", empty=None, beside="scaling"),
    "scaling": Table(
        "scaling", SCALING, lambda lines, words: last_runs(lines, words[0]), _of_one_host, ONE, empty=None
    ),
    "overlap": Table("overlap", OVERLAP, last_cases, words=ANY, empty=None),
    "memory": Table("memory_per_rank", MEMORY, last_cases, words=ANY, empty=None),
    "hosts": _hosts("hosts", HOSTS),
    "hosts-brief": _hosts("hosts", {key: cell for key, cell in HOSTS.items() if key not in ("rate", *_DETAILS)}),
    "hosts-lora": _hosts(
        "lora",
        {key: cell for key, cell in HOSTS.items() if key not in (_RATIO, *_DETAILS)}
        | {"step / no communication": quotient("step_ms", "reference_forward_backward_ms", "optimizer_ms")},
    ),
    "hosts-narrow": _hosts("narrow", {key: cell for key, cell in HOSTS.items() if key != "largest PSS, MiB"}),
    "hosts-overlap": Table("hosts_overlap", HOSTS_OVERLAP, last_cases, _links, ANY),
    "peers": _hosts("peers", {**HOSTS, **_some(COMPARE, "transient, MiB", "memory efficiency, kept", "peak")}),
    "paper": Table(
        "peers",
        PAPER,
        lambda lines, words: list(runs_of(lines, words[0]).values()),
        lambda rows: f", on {rows[0]['device']}; {rows[0]['shape']}",
        ONE,
        machine=False,
        shown=claims,
    ),
    "timeline": Table("timeline", TIMELINE, lambda lines, _: last_command(lines)),
    "travel": Table("travel_curves", TRAVEL, _over_seeds, _of_travel),
    "recipes": Table("recipes", RECIPES, _by_recipe, _of_recipes),
    "muon": Table("muon", MUON, last_muon_runs, _of_muon, ANY),
    "where": Table("where", WHERE, last_where, _of_where, range(2, 3)),
}
