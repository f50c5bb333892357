"""The tables of docs/reliability.md from results of sanitize.py, soak.py and recovery.py."""

from __future__ import annotations

from pathlib import Path

from shared.reports import own_pages
from shared.reports.commands import today
from shared.reports.own_pages import Row


def page(text: str, results: Path) -> str:
    """The page with these tables made anew; `results`: the folder of the machines."""
    for kind, make in (("sanitize", _sanitizers), ("soak", _soaks), ("recovery", _recoveries)):
        text = own_pages.made_anew(
            text, kind, lambda machine, kind=kind, make=make: make(results / machine / f"{kind}.jsonl")
        )
    return text


def _sanitizers(path: Path) -> str:
    """Returns the last runs of each build: those with tests that no later run repeated."""
    rows: list[Row] = []
    for row in own_pages.last_lines(path, lambda row: (row["sanitizers"], row["date"])):
        rows = [other for other in rows if not _replaces(row, other)] + [row]
    rows.sort(key=lambda row: (row["sanitizers"], row["date"]))
    lines = [["sanitizers", "files", "tests", "skipped", "failed", "reports", "minutes"]]
    lines += [
        [
            row["sanitizers"],
            ", ".join(sorted(Path(test).stem.removeprefix("test_") for test in _tests(row))) or "all",
            *(str(row[key]) for key in ("tests", "skipped", "failed", "reports")),
            _minutes(row),
        ]
        for row in rows
    ]
    return own_pages.measured(rows, ".", lines) if rows else "\n"


def _replaces(later: Row, earlier: Row) -> bool:
    """Whether the run repeated all tests of the earlier one."""
    again, before = _tests(later), _tests(earlier)
    return later["sanitizers"] == earlier["sanitizers"] and (not again or (bool(before) and before <= again))


def _tests(row: Row) -> set[str]:
    """The files that a command names; none where it takes all."""
    return {word for word in row["command"].split() if word.endswith(".py") and "/test_" in word}


def _soaks(path: Path) -> str:
    """Returns the last run of each command."""
    rows = own_pages.last_lines(path, lambda row: today(row["command"]))
    head = [
        "programs",
        "actions",
        "failed",
        "steps with delays",
        "memory added, MiB",
        "descriptors",
        "threads",
        "minutes",
    ]
    lines = [head]
    for row in rows:
        grown = {
            key: max((each[key] for each in row["added"]), default=0)
            for key in ("resident_kib", "descriptors", "threads")
        }
        cells = [str(row[key]) for key in ("programs", "actions", "failed", "steps")]
        steps = [f"{grown['resident_kib'] / 1024:.1f}", str(grown["descriptors"]), str(grown["threads"])]
        lines.append([*cells, *(steps if row["steps"] else ["-"] * 3), _minutes(row)])
    return (
        own_pages.measured(
            rows, ". The growth columns are of the rank that grew most, from a fifth of the steps on.", lines
        )
        if rows
        else "\n"
    )


def _recoveries(path: Path) -> str:
    """The last run."""
    rows = own_pages.last_lines(path, lambda row: row["benchmark"])
    head = ["ranks", "steps", "lives", "effective time", "loss differs by", "then with ranks", "loss differs by"]
    lines = [head]
    for row in rows:
        cells = [str(row[key]) for key in ("ranks", "steps", "lives")] + [f"{row['effective_time']:.2f}"]
        cells += [f"{row['loss_difference']:.0e}", str(row["fewer_ranks"]), f"{row['fewer_loss_difference']:.0e}"]
        lines.append(cells)
    return (
        own_pages.measured(rows, ". Effective time: share of the time spent on steps that were not lost.", lines)
        if rows
        else "\n"
    )


def _minutes(row: Row) -> str:
    return f"{row['seconds'] / 60:.0f}"
