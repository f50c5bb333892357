"""Prints the tables of the pages from the committed results, or updates these.

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
    recipes         final losses of train_lm.py --recipe, by recipe
    travel          losses by the formats of weights and gradients on the ring, of a script that is gone
    muon            strategies with Muon, of the last run for each number of ranks, on one host; `muon hosts`: between
                    made hosts, for each rate
    forwards equal, forwards unequal   forwards alone, of the last command of forwards.py
    experts         the last line of each way of experts.py
    growth SWEEP    the last run of a sweep of growth/growth.py
    where MODEL TRAVEL   where the time of a step goes: the last run of compare.py --where with this --travel or `exact`
    calls           calls of the driver as gpu/driver_calls.py counted them last
    overheads       the fixed cost of a call, of the last command of overheads/calls.py
    compiled, frameworks, third_party_optimizers, versions   the last lines of these scripts of compatibility/
    faults, sanitize, soak, recovery                         the same of reliability/

A block contains the commands that made the results, the versions or the machine of the measurement, and the table.
Columns without values are left out. A block of most tables is empty as long as there is no such result.
"""

import argparse
from pathlib import Path

import experts
import forwards
import outer
from compatibility import compiled, frameworks, third_party_optimizers, versions
from gpu import driver_calls
from gpu import tables as gpu_tables
from growth import growth
from overheads import calls
from reliability import faults
from shared import reports
from shared.card import RESULTS, ROOT
from shared.table import Table, marker, renew, wishes

PAGES = [
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("results", "gpu_results", "gpu_calls", "compile", "frameworks", "optimizers", "limits")
    ),
    ROOT / "docs" / "reliability.md",
]
BLOCK = marker("report")
TABLES: dict[str, Table] = {
    **reports.TABLES,
    "outer": outer.TABLE,
    "forwards": forwards.TABLE,
    "experts": experts.TABLE,
    "growth": growth.TABLE,
    "calls": driver_calls.TABLE,
    "overheads": calls.TABLE,
    **{each.TABLE.file: each.TABLE for each in (compiled, frameworks, third_party_optimizers, versions)},
    **faults.TABLES,
    **gpu_tables.TABLES,
}


def block(wish: str, results: Path) -> str:
    """Returns the text of a page between a marker and its end. `wish`: the words of the marker."""
    machine, kind, *words = wish.split() if " " in wish else (wish, "")
    if kind not in TABLES or len(words) not in TABLES[kind].words:
        kinds = ", ".join(TABLES)
        raise ValueError(f"expected <!-- report: MACHINE KIND WORDS -->, a kind of {kinds} and its words, got {wish!r}")
    return TABLES[kind].block(results / machine, words)


def rewrite(text: str, results: Path) -> str:
    """Returns the page with new blocks. Raises ValueError if it has none, or if results are missing."""
    if not BLOCK.search(text):
        raise ValueError("expected a block <!-- report: MACHINE TABLE --> ... <!-- end -->, found none")
    return BLOCK.sub(lambda found: found[1] + block(found[2], results) + found[4], text)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Tables of the pages, from the results. See the top of the file.")
    wishes(parser).add_argument("--page", type=Path, action="append", help="default: those that have tables")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the machines")
    args = parser.parse_args(argv)
    for page in args.page or PAGES:
        renew(
            args,
            [page],
            lambda texts: [rewrite(text, args.results) for text in texts],
            BLOCK,
            "the results; run python benchmarks/report.py --write",
        )


if __name__ == "__main__":
    main()
