"""The tables of forwards alone, and what is expected of them."""

from collections.abc import Callable
from typing import Any

from shared.card import last_command
from shared.reports.names import NAMES

SHM, ROOF, ALONE = 1.05, 1.1, 1.05  # the most that is expected: of no communication, of the roof, of the rank alone

Row = dict[str, Any]


def _quotient(above: str, below: str) -> Callable[[Row], str | None]:
    def cell(row: Row) -> str | None:
        return None if row.get(above) is None or row.get(below) is None else f"{row[above] / row[below]:.2f}"

    return cell


def _median(middle: str, before: str = "") -> Callable[[Row], str | None]:
    def cell(row: Row) -> str | None:
        if row.get(middle) is None:
            return None
        return f"{row[middle]:.0f} ({row[f'{before}p20_ms']:.0f}-{row[f'{before}p80_ms']:.0f})"

    return cell


def _number(key: str, divisor: int = 1) -> Callable[[Row], str | None]:
    return lambda row: None if row.get(key) is None else f"{row[key] / divisor:.0f}"


FORWARDS: dict[str, Callable[[Row], str | None]] = {
    "links": lambda row: row.get("rate") or "one host",
    "tokens a pass": lambda row: str(row["tokens"]),
    "strategy": lambda row: NAMES[row["strategy"]],
    "pass, ms (median, p20-p80)": _median("step_ms"),
    "tokens/s": _number("tokens_per_s"),
    "of no communication": lambda row: None if row["work"] != "equal" else _quotient("step_ms", "reference_ms")(row),
    "roof, ms": _number("roof_ms"),
    "of the roof": _quotient("step_ms", "roof_ms"),
    "MiB that leave a host": _number("sent_bytes", 2**20),
    "fast rank, ms (median, p20-p80)": _median("fast_ms", "fast_"),
    "of that rank alone": _quotient("fast_ms", "alone_ms"),
    "the same without communication": _quotient("reference_ms", "reference_alone_ms"),
    "slow rank, ms": _number("slow_ms"),
    "weights and slots, MiB per rank": _number("kept_bytes", 2**20),
}


def last_forwards(lines: list[Row], words: list[str]) -> list[Row]:
    """The last run's rows of equal or of unequal work. Raises ValueError for other `words`."""
    if words not in (["equal"], ["unequal"]):
        raise ValueError(f"expected forwards equal or forwards unequal, got {words}")
    return [line for line in last_command(lines) if line["work"] == words[0]]


def forwards_note(rows: list[Row]) -> str:
    """Returns the text below a command."""
    first = rows[0]
    worst = max(row["difference"] for row in rows)
    note = (
        f" {first['shape']}; {first['ranks']} ranks with {first['threads']} threads each, on one host or on hosts made "
    )
    return f"{note}on this machine. Largest relative difference of outputs: {worst:.0e}."


def surprises(rows: list[Row]) -> list[str]:
    """Returns the cases that took longer than expected."""
    texts = []
    for row in rows:
        place = f"{row['strategy']}, {row['tokens']} tokens, {row.get('rate') or 'one host'}"
        found: dict[str, tuple[str, str, float]] = {}
        if row["work"] == "unequal" and row.get("alone_ms") is not None and row["strategy"] != "none":
            sharing = max(1.0, row["reference_ms"] / row["reference_alone_ms"])  # of memory, also without communication
            found = {"of the rank alone": ("fast_ms", "alone_ms", ALONE * sharing)}
        elif row["work"] == "equal" and row["strategy"] == "rtp-shm":
            found = {"of no communication": ("step_ms", "reference_ms", SHM)}
        elif row["work"] == "equal" and row["strategy"] == "rtp-tcp":
            found = {"of the roof": ("step_ms", "roof_ms", ROOF)}
        for what, (above, below, most) in found.items():
            ratio = row[above] / row[below]
            if not ratio <= most:  # NaN is not
                texts.append(f"{place}: {ratio:.2f} {what}, at most {most:.2f} expected")
    return texts
