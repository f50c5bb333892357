"""Prints the tables of README.md, docs/results.md and docs/gpu_calls.md from the committed results, or updates these.

    python benchmarks/report.py                  # prints every block of these pages
    python benchmarks/report.py --write          # rewrites the blocks
    python benchmarks/report.py --check          # exit status 1 if a page differs

A block stands between `<!-- report: MACHINE TABLE WORDS -->` and `<!-- end -->`, where MACHINE is a folder under
results/ and TABLE one of:

    brief MODEL     a few columns of `compare`; WORDS choose rows as for `overlap`: R2, T1024
    compare MODEL   strategies, for every number of ranks; the last run, since only ratios within one run are
                    comparable, and the spread of the ratios over all recorded runs of a case
    scaling MODEL   the same over numbers of ranks, of scaling.jsonl
    overlap         the last line of each case of overlap.py; WORDS choose cases: a shape, a direction, a link, R8,
                    T4096
    memory          the last line of each strategy of memory_per_rank.py
    hosts MODEL     the last line of each strategy between made hosts; WORDS choose rows: a rate (2gbit, none),
                    T1024, H2, G1 (ranks on a host), int8 (--travel of the run, `exact` if there was none), AMD (of
                    the processor's name)
    hosts-brief MODEL   a few columns of it; WORDS as for `hosts`
    hosts-lora MODEL    the same of compare.py --lora
    peers MODEL         the same beside other packages, and on one host (one-host instead of a rate)
    paper MODEL         the claims of the paper beside those rows
    hosts-overlap   cases of overlap.py between made hosts
    outer           policies between replicas, from the last run of outer.py; WORDS choose the run: a rate, R2 (ranks of
                    a ring), S150 (steps), AdamW, SGD
    muon            strategies with Muon, of the last run for each number of ranks, on one host; `muon hosts`: between
                    made hosts, for each rate
    forwards equal, forwards unequal   forwards alone, of the last command of forwards.py
    growth SWEEP    the last run of a sweep of growth/growth.py
    where MODEL TRAVEL   where the time of a step goes: the last run of compare.py --where with this --travel or `exact`
    calls           calls of the driver as gpu/driver_calls.py counted them last
    overheads       the fixed cost of a call, of the last command of overheads/calls.py

A block contains the commands that made the results, the machine of the measurement, and the table. Columns without
values are left out. A block of `hosts`, `outer`, `muon` or `forwards` is empty as long as there is no such
result.
"""

import argparse
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.card import RESULTS
from shared.race.paper import claims
from shared.reports.commands import today
from shared.reports.compare_columns import (
    BRIEF,
    COMPARE,
    HOSTS,
    KEPT,
    OF_HOSTS,
    SCALING,
    Columns,
    mebibytes,
    number,
    ranks_of,
    with_range,
)
from shared.reports.names import NAMES, ways_of
from shared.reports.own_pages import deliver, measured
from shared.reports.run_reports import OF_A_RUN

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md", ROOT / "docs" / "gpu_calls.md")
BLOCK = re.compile(r"(<!-- report: ([^\n]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
FILES = {
    "brief": "compare.jsonl",
    "compare": "compare.jsonl",
    "scaling": "scaling.jsonl",
    "overlap": "overlap.jsonl",
    "memory": "memory_per_rank.jsonl",
    "hosts": "hosts.jsonl",
    "hosts-brief": "hosts.jsonl",
    "hosts-lora": "lora.jsonl",
    "hosts-overlap": "hosts_overlap.jsonl",
    "outer": "outer.jsonl",
    "muon": "muon.jsonl",
    "forwards": "forwards.jsonl",
    "peers": "peers.jsonl",
    "paper": "peers.jsonl",
    "growth": "growth.jsonl",
    "where": "where.jsonl",
    "calls": "driver_calls.jsonl",
    "overheads": "calls.jsonl",
}

IMPOSSIBLE = 105  # % of the ceiling
LINKS = ("hosts", "ranks_per_host", "rate", "delay")  # the keys that distinguish results between made hosts

Row = dict[str, Any]


def read_lines(path: Path) -> list[Row]:
    """The lines of a results file. Raises ValueError where there are none."""
    lines = [json.loads(text) for text in path.read_text().splitlines() if text.strip()] if path.exists() else []
    if not lines:
        raise ValueError(f"expected results in {path}, found none")
    return lines


def last_runs(lines: list[Row], model: str) -> list[list[Row]]:
    """The lines of the last run of `model` for every number of ranks. Raises ValueError where there is none."""
    found: dict[int, list[Row]] = {}
    for line in lines:
        if line["case"].startswith(f"{model}/"):
            run = found.setdefault(line["ranks"], [])
            if run and (run[0]["date"], run[0]["command"]) != (line["date"], line["command"]):
                run.clear()
            run.append(line)
    if not found:
        raise ValueError(f"expected results of {model}, found none")
    return [found[ranks] for ranks in sorted(found)]


_TIMES = {
    "one GEMM": "g1",
    "shard GEMMs": "gr",
    "hops": "c",
    "rotated, us (median, p20-p80)": "ov",
    "fetch first (how)": "base",
}


def e_hide(row: Row) -> str | None:
    """With the range of all runs; of one run, with the standard error of the medians that it is made of.

    A dash where the operation took clearly less than its hops alone: times varied more than they differ.
    """
    runs = row.get("e_hides", ())
    if (row.get("ceiling_percent") or 0) > IMPOSSIBLE:
        return "-"
    if len(runs) > 1 or any(row.get(f"t_{name}_p80_us") is None for name in ("gr", "c", "ov")):
        return with_range(number(row, "e_hide", 2), runs, 2)
    if row.get("e_hide") is None:
        return None
    # of normal times: p80 - p20 of a normal variable is 1.68 sigma, the standard error of a median 1.25 sigma / sqrt(n)
    spreads = [(row[f"t_{name}_p80_us"] - row[f"t_{name}_p20_us"]) / 1.68 for name in ("gr", "c", "ov")]
    error = 1.25 * math.hypot(*spreads) / math.sqrt(row["iterations"]) / min(row["t_gr_us"], row["t_c_us"])
    digits = 1 if error >= 0.05 else 2
    return f"{row['e_hide']:.{digits}f} ± {error:.{digits}f}"


def _microseconds(name: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        note = {"ov": f" ({row['t_ov_p20_us']:.0f}-{row['t_ov_p80_us']:.0f})", "base": f" ({row.get('base')})"}
        return f"{row[f't_{name}_us']:.0f}{note.get(name, '')}"

    return cell


def _losses(row: Row) -> str | None:
    values = [row.get(f"loss_{name}_us") for name in ("split", "interference", "exposed")]
    return None if values[0] is None else ", ".join("-" if value is None else f"{value:.0f}" for value in values)


OVERLAP: Columns = {
    "shape": lambda row: row["shape"],
    "tokens": lambda row: str(row["tokens"]),
    "R": ranks_of,
    "pass": lambda row: row["direction"],
    "link": lambda row: row["link"] or row["transport"],
    "CTAs": lambda row: number(row, "max_ctas", 0),
    **{heading: _microseconds(name) for heading, name in _TIMES.items()},
    "E_hide": e_hide,
    "roofline": lambda row: number(row, "roofline", 2),
    "% of ceiling": lambda row: number(row, "ceiling_percent", 0),
    "E_ect": lambda row: number(row, "e_ect", 2),
    "lost to split, interference, exposed, us": _losses,
    "largest p80 / p20": lambda row: number(row, "spread", 1),
}


HOSTS_OVERLAP: Columns = {
    "rate": HOSTS["rate"],
    **OVERLAP,
    "bytes that leave a host (closed form)": lambda row: f"{row['sent_bytes']:.0f} ({row['closed_form_bytes']})",
}
MEMORY: Columns = {
    "strategy": lambda row: NAMES.get(row["strategy"], row["strategy"]),
    "layers": lambda row: f"{row['layers']} of {row['full_layers']}",
    "tokens computed with": lambda row: str(row["computed_tokens"]),
    **KEPT,
    "peak, MiB": lambda row: mebibytes(row, "peak_bytes"),
    "reserved, MiB": lambda row: mebibytes(row, "reserved_bytes"),
}


def table(rows: list[Row], columns: Columns, note: str = "") -> str:
    """Commands, machine and a Markdown table of `rows`. Raises ValueError where they are not of one kind."""
    first = rows[0]
    for key in ("device", "cores", "torch", "dtype"):
        if len(kinds := {row.get(key) for row in rows}) > 1:
            raise ValueError(f"expected rows of one {key} in a table, got {sorted(map(str, kinds))}")
    dates = sorted({row["date"][:10] for row in rows})
    commits = ", ".join(dict.fromkeys(str(row["commit"]) for row in rows))
    about = f"Measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))} at commit {commits} on {first['device']}, "
    about += f"{first['cores']} cores, torch {first['torch']}, {first['dtype']}.{note}"
    cells = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    cells = {name: column for name, column in cells.items() if any(text is not None for text in column)}
    lines = [list(cells), ["---"] * len(cells), *zip(*cells.values(), strict=True)]
    text = "\n".join("| " + " | ".join(text or "" for text in line) + " |" for line in lines).replace("|  |", "| |")
    commands = "\n".join(_wrapped(command) for command in dict.fromkeys(today(row["command"]) for row in rows))
    return f"\n{commands}\n\n{textwrap.fill(about, 120, break_on_hyphens=False)}\n\n{text}\n\n"


def _wrapped(command: str) -> str:
    return "    " + " \\\n        ".join(textwrap.wrap(command, 108, break_on_hyphens=False, break_long_words=False))


def compare_table(rows: list[Row], columns: Columns = COMPARE) -> str:
    """Returns the table of one run of compare.py."""
    first, shared = rows[0], any(row.get("cores_shared") for row in rows)
    timed = [row for row in rows if "error" not in row]
    ranks = sorted({row["ranks"] for row in rows})
    note = f" {', '.join(map(str, ranks))} rank{'s' * (ranks != [1])}."
    note += f" **Ranks take turns on {first['cores']} cores where there are more.**" if shared else ""
    note += f" Largest relative difference of losses: {max(row['loss_spread'] for row in timed):.0e}"
    gradients = [row.get("gradient_spread") for row in timed]
    note += "." if None in gradients else f", of a parameter's gradient: {max(gradients):.0e}."
    return table(rows, columns, note)


def words_of(row: Row) -> set[Any]:
    words = {row["shape"], row["direction"], row["link"], row["transport"], f"R{row['ranks']}", f"T{row['tokens']}"}
    words |= {row.get("asked_travel") or "exact", *re.findall(r"\w+", row["device"])}
    return words | ({row["rate"], f"H{row['hosts']}", f"G{row['ranks_per_host']}"} if "hosts" in row else {"one-host"})


def _comparable(line: Row, row: Row) -> bool:
    keys = ("case", "ranks", "tokens", "dtype", "device", "cores", "threads", *LINKS)
    same = ways_of(line) == ways_of(row) and all(line.get(key) == row.get(key) for key in keys)
    return line.get("rtp_ratio") is not None and same


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


def _between(rows: list[Row]) -> str:
    """The hosts and links of `rows`, for below a command."""
    kinds = {(row["hosts"], row["ranks_per_host"], row["cores_per_host"], row["delay"]) for row in rows}
    if len(kinds) > 1:
        raise ValueError(f"expected rows of one kind of hosts in a table, got {sorted(kinds, key=str)}")
    hosts, ranks, cores, delay = kinds.pop()
    has = "which share all cores" if cores is None else f"of {cores} core{'s' * (cores > 1)} each"
    rates = ", ".join(dict.fromkeys(row["rate"] for row in rows))
    late = f", every packet {delay} late" if delay else ""
    return f" {hosts} hosts made on this machine, {has}, {ranks} rank{'s' * (ranks > 1)} on each; links: {rates}{late}."


def hosts_table(lines: list[Row], words: list[str], columns: Columns) -> str:
    """Returns the table of compare.py between hosts, empty without rows. `words`: the model, then filters of rows."""
    model, *words = words
    mine = [line for line in lines if line["case"].startswith(f"{model}/") and set(words) <= words_of(line)]
    if not mine:
        return "\n"
    rows = last_cases(mine, words)
    for row in rows:
        row["rtp_ratios"] = [line["rtp_ratio"] for line in mine if _comparable(line, row)]
    spreads = ("loss_spread", "gradient_spread")
    losses, gradients = (max(row[key] for row in rows if "error" not in row) for key in spreads)
    told = ", ".join(dict.fromkeys(map(ranks_of, rows)))
    note = _between(rows) if "hosts" in rows[0] else f" {told} ranks on one host."
    note = f"{note} Largest relative difference of losses: {losses:.0e}, of a parameter's gradient: "
    return table(rows, columns, f"{note}{gradients:.0e}.")


def block(wish: str, results: Path) -> str:
    """Returns the text of a page between a marker and its end. `wish`: the words of the marker."""
    machine, kind, *words = wish.split() if " " in wish else (wish, "")
    needed = {"compare": 1, "scaling": 1, "paper": 1, "where": 2}.get(kind)
    wrong = len(words) != needed if needed else kind in ("brief", *OF_HOSTS) and not words
    if kind not in FILES or wrong:
        kinds = ", ".join(FILES)
        raise ValueError(f"expected <!-- report: MACHINE KIND WORDS -->, a kind of {kinds} and its words, got {wish!r}")
    late = ("hosts", "outer", "overheads", "muon", "forwards", "growth", "peers", "paper", "where")
    made_later = kind.startswith(late)
    if made_later and not (results / machine / FILES[kind]).exists():
        return "\n"
    lines = read_lines(results / machine / FILES[kind])
    if kind == "paper":
        used, text = claims(lines, words[0])
        return measured(used, f", on {used[0]['device']}; {used[0]['shape']}", text) if used else "\n"
    if kind in OF_HOSTS:
        return hosts_table(lines, words, OF_HOSTS[kind])
    if kind in OF_A_RUN:
        choose, columns, note = OF_A_RUN[kind]
        rows = choose(lines, words)
        return table(rows, columns, note(rows)) if rows else "\n"
    if kind == "hosts-overlap":
        return table(last_cases(lines, words), HOSTS_OVERLAP, _between(lines))
    if kind == "scaling":
        return compare_table([row for run in last_runs(lines, words[0]) for row in run], SCALING)
    if kind in ("brief", "compare"):
        runs = last_runs(lines, words[0])
        everything = lines
        if (scaling := results / machine / FILES["scaling"]).exists():
            everything = lines + read_lines(scaling)
        for row in (row for run in runs for row in run):
            row["rtp_ratios"] = [line["rtp_ratio"] for line in everything if _comparable(line, row)]
        if kind == "brief":
            return compare_table(last_cases([row for run in runs for row in run], words[1:]), BRIEF)
        return "".join(map(compare_table, runs))
    return table(last_cases(lines, words), OVERLAP if kind == "overlap" else MEMORY)


def rewrite(text: str, results: Path) -> str:
    """Returns the page with new blocks. Raises ValueError if it has none, or if results are missing."""
    if not BLOCK.search(text):
        raise ValueError("expected a block <!-- report: MACHINE TABLE --> ... <!-- end -->, found none")
    return BLOCK.sub(lambda found: found[1] + block(found[2], results) + found[4], text)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Tables of the pages, from the results. See the top of the file.")
    wish = parser.add_mutually_exclusive_group()
    wish.add_argument("--write", action="store_true", help="rewrite the blocks in the pages")
    wish.add_argument("--check", action="store_true", help="fail where a page differs")
    parser.add_argument("--page", type=Path, action="append", help="default: those that have tables")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the machines")
    args = parser.parse_args(argv)
    for page in args.page or PAGES:
        before = page.read_text()
        try:
            after = rewrite(before, args.results)
        except ValueError as problem:
            sys.exit(f"{page.name}: {problem}")
        deliver(args, page, before, after, BLOCK, "the results; run python benchmarks/report.py --write")


if __name__ == "__main__":
    main()
