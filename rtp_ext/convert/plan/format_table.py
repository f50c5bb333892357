"""A plan as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from rtp_ext.command_line import WIDTH, wrapped

_NUMBERS = ("held", "sent", "by collectives")


def table(kind: str, ring: Any, rows: Sequence[Any], totals: dict[str, int]) -> str:
    """Returns the rows of a plan under a head line, with totals and reasons. Rows of equal layers become one, with a
    star for the number of the layer, their count and the sums of their bytes. A row is a line with the parameter, its
    shape and bytes, and below it how it moves, its cut, routes and dtypes.

    ring: RingFacts. rows: ParameterPlan. totals: bytes by name.
    """
    lines = [_title(kind, ring, rows), ""]
    groups = [*map(_cells, _alike(rows))]
    sums = totals["forward_bytes"] + totals["backward_bytes"] + totals["gradient_bytes"]
    total = [_bytes(totals["held_bytes"]), _bytes(sums), _bytes(totals["collective_bytes"])]
    heading = ["pulled" if name == "sent" and ring.pulls is not None else name for name in _NUMBERS]
    numbers = [heading, *(cells for _, cells, _ in groups), total]
    widths = [max(map(len, column)) for column in zip(*numbers, strict=True)]
    room = WIDTH - sum(width + 2 for width in widths)
    left = min(room, max(len(name) for name, _, _ in [("parameter, shape", (), ""), *groups]))
    rule = "-" * (left + WIDTH - room)
    lines += [*_line("parameter, shape", heading, left, widths), rule]
    for name, cells, moves in groups:
        lines += [*_line(name, cells, left, widths), *wrapped(moves, "    ", "      ")]
    lines += [rule, *_line("total", total, left, widths), "", *wrapped(_summary(ring, totals), then="")]
    lines += _reasons("Not rotated", [(row.reason, row.name) for row in rows])
    lines += _reasons(
        "Wide, although blocks or products in 8 bits were asked for", [(row.wide, row.name) for row in rows]
    )
    if ring.assumed:
        lines += ["", "No ring exists yet: these are the routes of ranks on one host."]
    return "\n".join(lines)


def _summary(ring: Any, totals: dict[str, int]) -> str:
    if ring.pulls is not None:
        read = "reads the shards of other ranks where they lie"
        source = "the memory of its host, where those held here lie too" if ring.offloaded else "other ranks"
        pulled = f"pulls {_bytes(totals['forward_bytes'])} of shards from {source}"
        mapped = 0 < len(ring.pulls) < ring.ranks - 1
        pulled += ", of other hosts, and reads those of its own host where they lie" if mapped else ""
        slots = f", into two slots of {_bytes(totals['slot_bytes'])} together"
        return f"A forward of rank {ring.rank} {pulled + slots if ring.pulls else read}."
    return (
        f"A step of rank {ring.rank} sends by hops {_bytes(totals['forward_bytes'])} of weights in forward, "
        f"{_bytes(totals['backward_bytes'])} of weights in backward and {_bytes(totals['gradient_bytes'])} of "
        f"gradients, and by collectives {_bytes(totals['collective_bytes'])}."
    )


def _reasons(title: str, given: Sequence[tuple[str | None, str]]) -> list[str]:
    """Returns lines with the names of parameters by reason; none where there are no reasons."""
    reasons: dict[str, list[str]] = {}
    for reason, name in given:
        if reason is not None:
            reasons.setdefault(reason, []).append(name)
    lines = ["", f"{title}:"] if reasons else []
    for reason, names in reasons.items():
        forms = list(dict.fromkeys(map(_without_numbers, names))) if len(names) > 3 else names
        shown = ", ".join(forms[:4]) + (f" and {len(forms) - 4} more" if len(forms) > 4 else "")
        lines += wrapped(f"{shown}: {reason}", "  ", "    ")
    return lines


def _title(kind: str, ring: Any, rows: Sequence[Any]) -> str:
    count = len({row.name for row in rows if row.tied_to is None})
    more = f", {ring.replicas} replicas" if ring.replicas > 1 else ""
    more += f", tensor parallelism of {ring.tensor_ranks}" if ring.tensor_ranks > 1 else ""
    more += (
        "" if ring.experts is None else f", experts on {ring.ranks // ring.experts.ranks} rings of {ring.experts.ranks}"
    )
    return f"{kind}: {count} parameters on a ring of {ring.ranks}{more}, seen from rank {ring.rank}"


def _alike(rows: Sequence[Any]) -> list[list[Any]]:
    """Groups rows that differ only in numbers within names, such as those of the layers of a transformer."""
    found: dict[tuple, list[Any]] = {}
    for row in rows:
        form = (
            *map(_without_numbers, (row.name, row.tied_to or "", row.bundle or "")),
            *_looks(row),
            *(row.group, row.apart, row.slots_bytes, row.predicted_seconds),
            row.held_bytes,
            row.reason,
        )
        found.setdefault((*form, row.sent_bytes, row.collective_bytes), []).append(row)
    return [*found.values()]


def _without_numbers(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.\s])", "*", name)


def _looks(row: Any) -> tuple[str, ...]:
    """Returns the texts of a row other than names and bytes."""
    travels = row.travel or "-"
    if row.reduce is not None and row.reduce != row.travel:
        travels = f"{travels}, gradients {row.reduce}"
    cut = "whole" if row.cut is None else f"dim {row.cut}: {_sizes(row.shard_sizes)}"
    shape = "x".join(map(str, row.shape)) or "scalar"
    return shape, cut, row.route or "-", row.gradient_route or "-", travels


def _cells(rows: Sequence[Any]) -> tuple[str, list[str], str]:
    """Returns the name and shape of a group of rows, the sums of their bytes, and how they move."""
    row, count = rows[0], len(rows)
    shown: Callable[[str], str] = str if count == 1 else _without_numbers
    name = shown(row.name) if row.tied_to is None else f"{shown(row.name)} = {shown(row.tied_to)}"
    moved = row.moved if row.bundle in (None, row.module) else f"{row.moved} in {shown(row.bundle)}"
    shape, cut, route, gradients, travels = _looks(row)
    collective = "depends on tokens" if row.collective_bytes is None else _bytes(count * row.collective_bytes)
    held, sent = _bytes(count * row.held_bytes), _bytes(count * row.sent_bytes)
    title = f"{name}, {shape}" if count == 1 else f"{name} ({count}), {shape}"
    ways = [f"route {route}"] * (route != "-") + [f"gradients {gradients}"] * (gradients != "-")
    ways += [f"in {travels}"] * (travels != "-")
    if row.slots_bytes is not None:
        shards = f"{row.group} shards" if row.group > 1 else "1 shard"
        apart = f" ({row.apart})" if row.apart else ""
        ways.append(f"{shards} a product{apart}, slots of {_bytes(row.slots_bytes)}")
    if row.predicted_seconds is not None:
        ways.append(f"predicted {row.predicted_seconds * 1e6:.0f} us forward and backward")
    return title, [held, sent, collective], "; ".join([moved, cut, *ways])


def _sizes(sizes: Sequence[int]) -> str:
    """Formats sizes: 5+5+5+2 as 3x5+2."""
    parts: list[str] = []
    for size in dict.fromkeys(sizes):
        count = list(sizes).count(size)
        parts.append(f"{count}x{size}" if count > 1 else str(size))
    return "+".join(parts)


def _line(name: str, cells: Sequence[str], left: int, widths: Sequence[int]) -> list[str]:
    """Formats a name of `left` columns and right-aligned cells; cells below a longer name."""
    numbers = "".join(f"  {cell.rjust(width)}" for cell, width in zip(cells, widths, strict=True))
    return [f"{name.ljust(left)}{numbers}"] if len(name) <= left else [name, " " * left + numbers]


def _bytes(count: int) -> str:
    """Formats a count in the largest unit that leaves at least 1, exact below 10 KiB."""
    if count < 10_240:
        return f"{count} B"
    size, unit = count / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}"
