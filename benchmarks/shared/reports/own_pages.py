"""Pages with tables from results: the block of one table, and how a page that was made again is delivered."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.reports.commands import today

Row = dict[str, Any]


def last_lines(path: Path, key: Callable[[Row], Any]) -> list[Row]:
    """Returns the last line of each key, in the order of the first ones; an empty list without a file."""
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    return list({key(line): line for line in lines}.values())


def made_anew(text: str, kind: str, make: Callable[[str], str]) -> str:
    """Returns the page with the text between `<!-- KIND: MACHINE -->` and `<!-- end -->` replaced by `make(machine)`.
    Raises ValueError if it has no such block."""
    marker = re.compile(rf"(<!-- {kind}: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
    if not marker.search(text):
        raise ValueError(f"expected a block <!-- {kind}: MACHINE --> ... <!-- end -->, found none")
    return marker.sub(lambda found: found[1] + make(found[2]) + found[4], text)


def measured(rows: list[Row], more: str, lines: list[list[str]]) -> str:
    """Returns the `block` of measured rows, with the versions of torch and the text `more`."""
    torches = ", ".join(dict.fromkeys(row["torch"] for row in rows))
    return block(rows, "Measured", f", torch {torches}{more}", lines)


def block(rows: list[Row], done: str, more: str, lines: list[list[str]]) -> str:
    """Returns the commands of `rows`, a sentence with `done`, the dates and the commits, and a table of `lines` with
    the first line as its head."""
    commands = "\n".join(f"    {command}" for command in dict.fromkeys(today(row["command"]) for row in rows))
    dates = sorted({row["date"][:10] for row in rows})
    commits = ", ".join(dict.fromkeys(str(row["commit"]) for row in rows))
    about = f"{done} {' to '.join(dict.fromkeys((dates[0], dates[-1])))} at commit {commits}{more}"
    head, *body = lines
    table = "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *body])
    return f"\n{commands}\n\n{about}\n\n{table}\n\n"


def with_blocks(texts: list[str], block: re.Pattern[str], makers: dict[str, Callable[[], str]]) -> list[str]:
    """Returns pages with their blocks made anew. `block` has the groups marker, name, content, end. Raises ValueError
    unless every block of `makers`, and no other, is once on one of the pages."""
    names = [found[2] for text in texts for found in block.finditer(text)]
    if sorted(names) != sorted(makers):
        raise ValueError(f"expected the blocks {', '.join(makers)}, each once, got {', '.join(names) or 'none'}")
    return [block.sub(lambda found: found[1] + makers[found[2]]() + found[4], text) for text in texts]


def deliver(args: argparse.Namespace, page: Path, before: str, after: str, block: re.Pattern[str], source: str) -> None:
    """Writes a regenerated page, checks it against the old one, or prints its blocks. Exits if a check fails."""
    if args.write:
        page.write_text(after)
    elif args.check:
        if before != after:
            sys.exit(f"{page.name} differs from {source}")
    else:
        print("\n".join(found[0] for found in block.finditer(after)))
