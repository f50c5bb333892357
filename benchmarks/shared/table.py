"""Tables of results: their columns, rows and notes; printed on a console, written into pages, and checked there."""

import argparse
import functools
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
_SCRIPT = re.compile(r"(?<!\S)(?:\.{1,2}/)*((?:[\w-]+/)*)([\w-]+\.py)(?!\S)")  # its folder, its name
NAMES = {  # of strategies, in tables and figures
    "rtp-c10d": 'rtp, `transport="c10d"`',
    "rtp-bf16": "rtp",
    "rtp-int8": "rtp",
    "rtp-nf4": "rtp",
    "rtp-exact": "rtp, unrounded",
    "rtp-ahead": "rtp, `prefetch=2`",  # of runs before look-ahead counted bytes
    "rtp-lean": "rtp, `buffers=lean`",
    "rtp-unkept": "rtp, `keep_recomputed=False`",
    "rtp-flat": 'rtp, `route="ring"`',
    "rtp-inplace": "rtp, `in_place=True`",
    "rtp-unbundled": "rtp, `bundle=False`",
    "rtp-recompute": "rtp, recomputing",
    "rtp-fused": "rtp, recomputing, fused loss",
    "rtp-2rings": "rtp, two rings",
    "rtp-shm": "`rotate_for_inference`, `shm`",
    "rtp-tcp": "`rotate_for_inference`, `tcp`",
    "rtp-tcp-nf4": '`rotate_for_inference`, `tcp`, `weights="nf4"`',
    "fsdp2": "`fully_shard` per block",
    "fsdp2-noreshard": "`fully_shard` per block, `reshard_after_forward=False`",
    "hsdp": "`fully_shard` per block, two replicas",
    "ddp": "DDP",
    "deepspeed": "DeepSpeed ZeRO-3",
    "simplefsdp": "SimpleFSDP (torchtitan)",
    "simplefsdp-compiled": "SimpleFSDP (torchtitan), compiled",
    "upstream": "the authors' code",
    "tp": "tensor parallelism (DTensor)",
    "pipeline": "`torch.distributed.pipelining`",
    "single": "one process, all batches",
    "none": "no communication",
}

Row = dict[str, Any]
Cell = Callable[[Row], str | None]  # None: the row lacks the value
Columns = Mapping[str, Cell]

# -- cells -------------------------------------------------------------------------------------------------------------


def number(key: str, digits: int | str = 0, unit: float = 1, form: str = "{}") -> Cell:
    """The value of a key in units of `unit`, with so many digits or in a format of Python's, as `form` shows it."""
    kind = f".{digits}f" if isinstance(digits, int) else digits

    def cell(row: Row) -> str | None:
        value = row.get(key)
        if value is None:
            return None
        text = format(value if unit == 1 else value / unit, kind)
        return form.format("0" if text == "-0" else text)

    return cell


def told(key: str, form: str = "{}") -> Cell:
    return number(key, "", form=form)


def mebibytes(*keys: str, digits: int = 0) -> Cell:
    cells = [number(key, digits, 2**20) for key in keys]

    def cell(row: Row) -> str | None:
        texts = [each(row) for each in cells]
        return None if None in texts else ", ".join(map(str, texts))

    return cell


def median(before: str = "", middle: str = "", unit: str = "ms") -> Cell:
    """A median with its 20th and 80th percentile; the keys of these start with `before`."""
    key = middle or f"{before or 'step_'}{unit}"

    def cell(row: Row) -> str | None:
        if row.get(key) is None:
            return None
        return f"{row[key]:.0f} ({row[f'{before}p20_{unit}']:.0f}-{row[f'{before}p80_{unit}']:.0f})"

    return cell


def quotient(above: str, *below: str) -> Cell:
    """A value divided by the sum of others."""

    def cell(row: Row) -> str | None:
        if any(row.get(key) is None for key in (above, *below)):
            return None
        return f"{row[above] / sum(row[key] for key in below):.2f}"

    return cell


def beside(cell: Cell, other: Cell) -> Cell:
    """A cell with another in parentheses, where a row has that."""

    def both(row: Row) -> str | None:
        first, second = cell(row), other(row)
        return first if first is None or second is None else f"{first} ({second})"

    return both


def with_range(cell: Cell, runs: str, digits: int = 2) -> Cell:
    """A cell with the range of what all runs gave, which the row has in `runs`, where there are more than one."""

    def both(row: Row) -> str | None:
        text, known = cell(row), row.get(runs, ())
        if text is None or len(known) < 2:
            return text
        return f"{text} ({min(known):.{digits}f} to {max(known):.{digits}f} in {len(known)})"

    return both


def named(row: Row) -> str:
    return NAMES.get(row["strategy"], row["strategy"])


def ranks_of(row: Row) -> str:
    return f"{row['ranks']} on fewer cores" if row.get("cores_shared") else str(row["ranks"])


def ways_of(row: Row) -> str | None:
    """Describes the values that travelled in another format than that of the computation; None if there are none."""
    kinds = {"travel": "weights", "frozen": "frozen weights", "recipe": "products"}
    ways = [f"{what} {row[key]}" for key, what in kinds.items() if row.get(key)]
    gradients = row.get("gradient_travel") or row.get("reduce_dtype")
    if gradients not in (None, "float32"):
        ways.append(f"gradients {gradients}")
    if row.get("gradient_route") not in (None, "auto"):
        ways.append(f"route {row['gradient_route']}")
    return ", ".join(ways) or None


# -- rows --------------------------------------------------------------------------------------------------------------


def read_lines(path: Path) -> list[Row]:
    """The lines of a results file. Raises ValueError where there are none."""
    lines = [json.loads(text) for text in path.read_text().splitlines() if text.strip()] if path.exists() else []
    if not lines:
        raise ValueError(f"expected results in {path}, found none")
    return lines


def last_command(lines: list[Row]) -> list[Row]:
    """The lines of the command that wrote the last one; none of none."""
    last = lines[-1] if lines else {}
    return [line for line in lines if (line["command"], line["date"]) == (last["command"], last["date"])]


def last_of_each(lines: list[Row], key: Callable[[Row], Any]) -> list[Row]:
    """The last line of each key, in the order of the first ones."""
    return list({key(line): line for line in lines}.values())


# -- tables ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """The rows of a results file, in columns, with what a page says above them.

    rows: which of the lines, by the words of a block; `words`: how many of these there may be. shown: what the table
    has of them. by: a table for every value of this key. machine: the page names the processor, and rows of several are
    refused. empty: what a page says without rows; None: they are expected. beside: another file, whose lines follow and
    have the key `beside`.
    """

    file: str
    columns: Columns
    rows: Callable[[list[Row], list[str]], list[Row]] = lambda lines, _: lines
    note: Callable[[list[Row]], str] = lambda rows: ""
    words: range = range(1)
    by: str = ""
    done: str = "Measured"
    machine: bool = True
    empty: str | None = "\n"
    beside: str = ""
    shown: Callable[[list[Row]], list[Row]] = lambda rows: rows

    def block(self, folder: Path, words: Sequence[str] = ()) -> str:
        """Returns the text of a page, of the results in a folder. Raises ValueError without results where they are
        expected."""
        file = folder / f"{self.file}.jsonl"
        if self.empty is not None and not file.exists():
            return self.empty
        lines = read_lines(file)
        if self.beside and (other := folder / f"{self.beside}.jsonl").exists():
            lines += [line | {"beside": True} for line in read_lines(other)]
        rows = self.rows(lines, list(words))
        parts = last_of_each(rows, lambda row: row[self.by]) if self.by else rows[:1]
        if not parts and self.empty is not None:
            return self.empty
        return "".join(
            self.page([row for row in rows if not self.by or row[self.by] == part[self.by]]) for part in parts
        )

    def page(self, rows: list[Row]) -> str:
        """Returns commands, a sentence about the runs and a table. Raises ValueError for rows of several machines or
        dtypes."""
        first = rows[0]
        for key in ("device", "cores", "torch", "dtype") if self.machine else ():
            if len(kinds := {row.get(key) for row in rows}) > 1:
                raise ValueError(f"expected rows of one {key} in a table, got {sorted(map(str, kinds))}")
        dates = sorted({row["date"][:10] for row in rows})
        commits = ", ".join(dict.fromkeys(str(row["commit"]) for row in rows))
        about = f"{self.done} {' to '.join(dict.fromkeys((dates[0], dates[-1])))} at commit {commits}"
        if self.machine:
            about += f" on {first['device']}, {first['cores']} cores, torch {first['torch']}, {first['dtype']}."
        elif self.done == "Measured":
            about += f", torch {', '.join(dict.fromkeys(row['torch'] for row in rows))}"
        about += self.note(rows)
        commands = dict.fromkeys(today(row["command"]) for row in rows)
        head, *body = self.cells(self.shown(rows))
        table = markdown(head, body)
        if self.machine:
            about, table = wrapped(about), table.replace("|  |", "| |")
            commands = dict.fromkeys(wrapped(command, 108).replace("\n", " \\\n        ") for command in commands)
        shown = "\n".join(f"    {command}" for command in commands)
        return f"\n{shown}\n\n{about}\n{table}"

    def cells(self, rows: list[Row]) -> list[list[str]]:
        """Returns the head and a line for each row, without columns that no row has a value for."""
        columns = {heading: [cell(row) for row in rows] for heading, cell in self.columns.items()}
        columns = {heading: cells for heading, cells in columns.items() if any(text is not None for text in cells)}
        return [
            [heading.strip() for heading in columns],
            *([text or "" for text in line] for line in zip(*columns.values(), strict=True)),
        ]


def console(columns: Columns, rows: list[Row]) -> None:
    """Prints aligned columns, the first one flush left; of a row with an `error` this instead."""
    timed = [row for row in rows if "error" not in row]
    heads, *lines = Table("", columns).cells(timed or rows)
    first = next(iter(columns.values()))
    left = max(16, *(len(first(row) or "") + 2 for row in rows))
    print(f"\n{heads[0]:<{left}}" + "".join(f"{head:>{max(10, len(head) + 2)}}" for head in heads[1:]))
    after = iter(lines)
    for row in rows:
        if "error" in row:
            print(f"{first(row) or '':<{left}}    not timed: {row['error']}")
            continue
        texts = zip(heads[1:], next(after)[1:], strict=True)
        told = "".join(f"{text or '-':>{max(10, len(head) + 2)}}" for head, text in texts)
        print(f"{first(row) or '':<{left}}{told}", flush=True)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n\n"


def wrapped(text: str, width: int = 120) -> str:
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


# -- recorded commands as they are typed today: a script that they name may have moved since ---------------------------


@functools.cache
def _places(benchmarks: Path) -> dict[str, list[str]]:
    """Returns the scripts of each name; shared/ contains no scripts."""
    found: dict[str, list[str]] = {}
    for file in sorted(benchmarks.rglob("*.py")):
        place = file.relative_to(benchmarks)
        if place.parts[0] != "shared":
            found.setdefault(file.name, []).append(f"benchmarks/{place}")
    return found


def today(command: str, benchmarks: Path = BENCHMARKS) -> str:
    """Rewrites the scripts of a command to their current paths from the root of the project. The command may name them
    relative to the root, to benchmarks/ or to their own folder. Names of no script, or of several, are not changed."""

    def place(found: re.Match[str]) -> str:
        folder, name = found.groups()
        places = _places(benchmarks).get(name, [])
        named = folder == "" or folder.startswith("benchmarks/") or [f"benchmarks/{folder}{name}"] == places
        return places[0] if named and len(places) == 1 else found[0]

    return _SCRIPT.sub(place, command)


# -- pages -------------------------------------------------------------------------------------------------------------


def marker(kind: str) -> re.Pattern[str]:
    """Matches blocks `<!-- KIND: NAME -->` ... `<!-- end -->`; groups: the first line, NAME, the content, the end."""
    return re.compile(rf"(<!-- {kind}: ([^\n]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def with_blocks(texts: list[str], block: re.Pattern[str], makers: dict[str, Callable[[], str]]) -> list[str]:
    """Returns pages with their blocks made anew. Raises ValueError unless every block of `makers`, and no other, is
    once on one of the pages."""
    names = [found[2] for text in texts for found in block.finditer(text)]
    if sorted(names) != sorted(makers):
        raise ValueError(f"expected the blocks {', '.join(makers)}, each once, got {', '.join(names) or 'none'}")
    return [block.sub(lambda found: found[1] + makers[found[2]]() + found[4], text) for text in texts]


def wishes(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds --write and --check, for `deliver`."""
    wish = parser.add_mutually_exclusive_group()
    wish.add_argument("--write", action="store_true", help="rewrite the blocks in the pages")
    wish.add_argument("--check", action="store_true", help="fail where a page differs")
    return parser


def renew(
    args: argparse.Namespace,
    pages: Sequence[Path],
    make: Callable[[list[str]], list[str]],
    block: re.Pattern[str],
    source: str,
) -> list[str]:
    """Writes the pages that `make` returns anew, checks them against the old ones, or prints their blocks, and returns
    them. Exits if a check fails or `make` raises ValueError."""
    before = [page.read_text() for page in pages]
    try:
        after = make(before)
    except ValueError as problem:
        sys.exit(f"{', '.join(page.name for page in pages)}: {problem}")
    for page, old, new in zip(pages, before, after, strict=True):
        if args.write:
            page.write_text(new)
        elif args.check:
            if old != new:
                sys.exit(f"{page.name} differs from {source}")
        else:
            print("\n".join(found[0] for found in block.finditer(new)))
    return after
