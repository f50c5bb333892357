"""The tables of Muon for matrices that no rank has whole."""

from collections.abc import Callable
from typing import Any

from shared.reports.names import NAMES

Row = dict[str, Any]

_MUONS = {
    "auto": "`rtp_ext.optim`",
    "gram": '`rtp_ext.optim`, `exchange="gram"`',
    "whole": '`rtp_ext.optim`, `exchange="whole"`',
    "stock": "`torch.optim`",
    "gathered": "`torch.optim`, matrices gathered",
}


def _time(before: str = "", middle: str = "step_ms") -> Callable[[Row], str]:
    """`before`: of the names of the percentiles."""
    return lambda row: f"{row[middle]:.0f} ({row[f'{before}p20_ms']:.0f}-{row[f'{before}p80_ms']:.0f})"


def _mebibytes(key: str) -> Callable[[Row], str | None]:
    return lambda row: None if row[key] is None else f"{row[key] / 2**20:.2f}"


MUON: dict[str, Callable[[Row], str | None]] = {
    "ranks": lambda row: str(row["ranks"]),
    "rate": lambda row: row.get("rate"),
    "strategy": lambda row: NAMES.get(row["strategy"].partition("-")[0], "rtp"),
    "Muon": lambda row: _MUONS[row["muon"]],
    "step, ms (median, p20-p80)": _time(),
    "optimizer, ms": _time("optimizer_", "optimizer_ms"),
    "optimizer, rtp / this": lambda row: None if row["optimizer_ratio"] is None else f"{row['optimizer_ratio']:.2f}",
    "MiB that updates send, own count": _mebibytes("exchange_bytes"),
    "counted by the kernel": _mebibytes("optimizer_sent_bytes"),
    "state of the optimizer, MiB": _mebibytes("optimizer_bytes"),
    "peak, MiB": _mebibytes("peak_bytes"),
}


def last_muon_runs(lines: list[Row], words: list[str]) -> list[Row]:
    """The lines of the last run for each number of ranks and rate, with the optimizer's time of rtp relative to each;
    none where there are none. `words`: `hosts` for those between hosts, otherwise those of one host."""
    runs: dict[tuple[Any, ...], list[Row]] = {}
    for line in lines:
        if ("hosts" in line) == ("hosts" in words):
            run = runs.setdefault((line["ranks"], line.get("rate")), [])
            if run and (run[0]["date"], run[0]["command"]) != (line["date"], line["command"]):
                run.clear()
            run.append(line)
    found = []
    for _, run in sorted(runs.items(), key=str):
        rtp = next((line["optimizer_ms"] for line in run if line["strategy"] == "rtp"), None)
        found += [{**line, "optimizer_ratio": None if rtp is None else rtp / line["optimizer_ms"]} for line in run]
    return found


def muon_note(rows: list[Row]) -> str:
    """Returns the text below a command."""
    first = rows[0]
    kinds = {key: {row.get(key) for row in rows} for key in ("shape", "tokens", "matrix_bytes", "hosts")}
    if mixed := [key for key, values in kinds.items() if len(values) > 1]:
        raise ValueError(f"expected rows of one {', '.join(mixed)} in a table")
    note = f" {first['shape']}, {first['tokens']} tokens per rank; {first['matrix_bytes'] / 2**20:.1f} MiB of matrices."
    if "hosts" in first:
        note += f" {first['hosts']} hosts made on this machine."
    note += " **Ranks take turns on fewer cores.**" if any(row["cores_shared"] for row in rows) else ""
    return f"{note} Largest relative difference of losses: {max(row['loss_spread'] for row in rows):.0e}."
