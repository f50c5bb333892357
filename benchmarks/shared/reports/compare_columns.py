"""The columns of tables of compare.py, and how their cells show numbers."""

from collections.abc import Callable, Sequence
from typing import Any

from shared.reports.names import NAMES, ways_of

Row = dict[str, Any]


def mebibytes(row: Row, *keys: str) -> str | None:
    if any(row.get(key) is None for key in keys):
        return None
    return ", ".join(str(round(row[key] / 2**20)) for key in keys)


def number(row: Row, key: str, digits: int) -> str | None:
    return None if row.get(key) is None else f"{row[key]:.{digits}f}"


def _ratio_of(row: Row, *parts: str) -> str:
    return f"{row['step_ms'] / sum(row[part] for part in parts):.2f}"


def with_range(text: str | None, known: Sequence[float], digits: int) -> str | None:
    """`text` with the range of what all runs gave, where there are more than one."""
    if text is None or len(known) < 2:
        return text
    return f"{text} ({min(known):.{digits}f} to {max(known):.{digits}f} in {len(known)})"


def _step(row: Row) -> str:
    """A strategy that was not timed has the reason instead."""
    if "error" in row:
        return f"not timed: {row['error']}"
    return f"{row['step_ms']:.0f} ({row['p20_ms']:.0f}-{row['p80_ms']:.0f})"


def _passes(row: Row) -> str | None:
    """Without the optimizer, whose work the strategies do not share: a rank that shards updates 1/R of the model."""
    if row.get("exposed_ms") is None:
        return None
    taken = row["forward_backward_ms"]
    return f"{taken:.0f} ({taken / row['reference_forward_backward_ms']:.2f})"


def ranks_of(row: Row) -> str:
    return f"{row['ranks']} on fewer cores" if row.get("cores_shared") else str(row["ranks"])


def _ratio(row: Row) -> str | None:
    return with_range(number(row, "rtp_ratio", 2), row.get("rtp_ratios", ()), 2)


Columns = dict[str, Callable[[Row], str | None]]

KEPT: Columns = {
    "parameters, gradients, optimizer, MiB per rank": lambda row: mebibytes(
        row, "parameter_bytes", "gradient_bytes", "optimizer_bytes"
    ),
    "transient, MiB": lambda row: mebibytes(row, "transient_bytes"),
}
COMPARE: Columns = {
    "tokens per rank": lambda row: str(row["tokens"]),
    "strategy": lambda row: NAMES.get(row["strategy"], row["strategy"]),
    "travels": ways_of,
    "step, ms (median, p20-p80)": _step,
    "rtp / this (all runs)": lambda row: None if row["strategy"] == "rtp" else _ratio(row),
    "forward + backward, ms (/ no communication)": _passes,
    "processor, ms": lambda row: number(row, "processor_ms", 0),
    **KEPT,
    "largest PSS, MiB": lambda row: mebibytes(row, "pss_bytes"),
    "buffers, MiB": lambda row: mebibytes(row, "buffer_bytes"),
    "memory efficiency, kept": lambda row: number(row, "kept_efficiency", 2),
    "peak": lambda row: number(row, "peak_efficiency", 2),
}
BRIEF: Columns = {
    "strategy": COMPARE["strategy"],
    "step, ms (median, p20-p80)": COMPARE["step, ms (median, p20-p80)"],
    "rtp / this (all runs)": COMPARE["rtp / this (all runs)"],
    "kept, MiB per rank": lambda row: mebibytes(row, "kept_bytes"),
    "transient, MiB": COMPARE["transient, MiB"],
}
SCALING: Columns = {
    "ranks": ranks_of,
    "tokens per rank": COMPARE["tokens per rank"],
    "strategy": COMPARE["strategy"],
    "step, ms (median, p20-p80)": COMPARE["step, ms (median, p20-p80)"],
    "tokens/s": lambda row: number(row, "tokens_per_s", 0),
    "tokens/s per rank, R = 1 of the strategy = 1": lambda row: number(row, "scaling_efficiency", 2),
    "parameters, gradients, optimizer, MiB per rank": KEPT["parameters, gradients, optimizer, MiB per rank"],
    "memory efficiency, kept": COMPARE["memory efficiency, kept"],
    "peak": COMPARE["peak"],
}


def _mebibytes_and_formula(row: Row) -> str | None:
    counted, formula = mebibytes(row, "sent_bytes"), mebibytes(row, "closed_form_bytes")
    return counted if counted is None or formula is None else f"{counted} ({formula})"


def _of_roof(row: Row) -> str | None:
    return None if row.get("roof_ms") is None else f"{row['roof_ms']:.0f} ({_ratio_of(row, 'roof_ms')})"


HOSTS: Columns = {
    "rate": lambda row: row["rate"],
    "tokens per rank": COMPARE["tokens per rank"],
    "strategy": COMPARE["strategy"],
    "travels": ways_of,
    "step, ms (median, p20-p80)": COMPARE["step, ms (median, p20-p80)"],
    "rtp / this (all runs)": COMPARE["rtp / this (all runs)"],
    "roof, ms (step / roof)": _of_roof,
    "forward + backward, ms (/ no communication)": _passes,
    "processor, ms": COMPARE["processor, ms"],
    "hidden": lambda row: number(row, "hidden_share", 2),
    "MiB that leave a host (closed form)": _mebibytes_and_formula,
    "kept, MiB per rank": lambda row: mebibytes(row, "kept_bytes"),
    "largest PSS, MiB": COMPARE["largest PSS, MiB"],
}
_DETAILS = ("forward + backward, ms (/ no communication)", "processor, ms", "hidden", "largest PSS, MiB")
HOSTS_BRIEF: Columns = {name: cell for name, cell in HOSTS.items() if name not in ("rate", *_DETAILS)}
HOSTS_LORA: Columns = {
    **{name: cell for name, cell in HOSTS.items() if name not in ("rtp / this (all runs)", *_DETAILS)},
    "step / no communication": lambda row: _ratio_of(row, "reference_forward_backward_ms", "optimizer_ms"),
}
PEERS: Columns = {
    **HOSTS,
    "rate": lambda row: row.get("rate"),
    **{name: COMPARE[name] for name in ("transient, MiB", "memory efficiency, kept", "peak")},
}
OF_HOSTS = {"peers": PEERS, "hosts": HOSTS, "hosts-brief": HOSTS_BRIEF, "hosts-lora": HOSTS_LORA}
