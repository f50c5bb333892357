"""Prints the tables of README from the committed results, or writes them into it.

    python benchmarks/report.py                  # prints every block of README
    python benchmarks/report.py --write          # rewrites the blocks in README.md
    python benchmarks/report.py --check          # exit status 1 where README says anything else

A block of README stands between `<!-- report: compare MODEL -->` and `<!-- end -->`: for every number of ranks the
command that made the results, what it was measured on, and a table. It shows the last run, since only ratios within one
run mean anything. Columns of which a run knows nothing are left out.
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from card import RESULTS

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"(<!-- report: compare (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
NAMES = {
    "rtp-inplace": "rtp, `in_place=True`",
    "rtp-unbundled": "rtp, `bundle=False`",
    "rtp-recompute": "rtp, recomputing",
    "rtp-fused": "rtp, recomputing, fused loss",
    "fsdp2": "`fully_shard` per block",
    "fsdp2-noreshard": "`fully_shard` per block, `reshard_after_forward=False`",
    "ddp": "DDP",
    "tp": "tensor parallelism (DTensor)",
    "single": "one process, all batches",
}

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


def _mebibytes(row: Row, *keys: str) -> str | None:
    if any(row.get(key) is None for key in keys):
        return None
    return ", ".join(f"{row[key] / 2**20:.0f}" for key in keys)


def _number(row: Row, key: str, digits: int) -> str | None:
    return None if row.get(key) is None else f"{row[key]:.{digits}f}"


COLUMNS: dict[str, Callable[[Row], str | None]] = {
    "tokens per rank": lambda row: str(row["tokens"]),
    "strategy": lambda row: NAMES.get(row["strategy"], row["strategy"]),
    "step, ms (median, p20-p80)": lambda row: f"{row['step_ms']:.0f} ({row['p20_ms']:.0f}-{row['p80_ms']:.0f})",
    "rtp / this": lambda row: None if row["strategy"] == "rtp" else _number(row, "rtp_ratio", 2),
    "exposed, ms": lambda row: _number(row, "exposed_ms", 0),
    "parameters, gradients, optimizer, MiB per rank": lambda row: _mebibytes(
        row, "parameter_bytes", "gradient_bytes", "optimizer_bytes"
    ),
    "transient, MiB": lambda row: _mebibytes(row, "transient_bytes"),
    "buffers, MiB": lambda row: _mebibytes(row, "buffer_bytes"),
    "memory efficiency, kept": lambda row: _number(row, "kept_efficiency", 2),
    "peak": lambda row: _number(row, "peak_efficiency", 2),
}


def block(rows: list[Row]) -> str:
    """Command, machine and table of one run, as Markdown."""
    first = rows[0]
    spread = max(row["loss_spread"] for row in rows)
    shared = f"{first['ranks']} ranks **take turns** on {first['cores']} cores" if first.get("cores_shared") else ""
    measured = f"Measured {first['date'][:10]} at commit {first['commit']} on {first['device']}, {first['cores']} cores"
    measured += f", {first['ranks']} ranks"
    about = f"{measured}, torch {first['torch']}, {first['dtype']}. {shared + '. ' if shared else ''}"
    about += f"Largest relative difference of losses: {spread:.0e}."
    cells = {name: [cell(row) for row in rows] for name, cell in COLUMNS.items()}
    cells = {name: column for name, column in cells.items() if any(text is not None for text in column)}
    lines = [list(cells), ["---"] * len(cells), *zip(*cells.values(), strict=True)]
    table = "\n".join("| " + " | ".join(text or "" for text in line) + " |" for line in lines)
    command = " \\\n        ".join(textwrap.wrap(first["command"], 108, break_on_hyphens=False, break_long_words=False))
    about = textwrap.fill(about, 120, break_on_hyphens=False)
    return f"\n    {command}\n\n{about}\n\n{table.replace('|  |', '| |')}\n\n"


def rewrite(text: str, lines: list[Row]) -> str:
    """README with its blocks made anew. Raises ValueError where it has none, or where results are missing."""
    if not BLOCK.search(text):
        raise ValueError("expected a block <!-- report: compare MODEL --> ... <!-- end -->, found none")
    return BLOCK.sub(lambda found: found[1] + "".join(map(block, last_runs(lines, found[2]))) + found[4], text)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Tables of README from the results. See the top of the file.")
    wish = parser.add_mutually_exclusive_group()
    wish.add_argument("--write", action="store_true", help="rewrite the blocks in README.md")
    wish.add_argument("--check", action="store_true", help="fail where README differs")
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--results", type=Path, default=RESULTS / "cpu-2core" / "compare.jsonl")
    args = parser.parse_args(argv)
    before = args.readme.read_text()
    try:
        after = rewrite(before, read_lines(args.results))
    except ValueError as problem:
        sys.exit(str(problem))
    if args.write:
        args.readme.write_text(after)
    elif args.check:
        if before != after:
            sys.exit(f"{args.readme.name} differs from the results: python benchmarks/report.py --write")
    else:
        print("\n".join(found[0] for found in BLOCK.finditer(after)))


if __name__ == "__main__":
    main()
