"""The output and the recorded lines of the comparison of strategies."""

import argparse
import json
import math
import operator
import sys
from typing import Any

from shared.agreement import tolerances
from shared.card import append_line
from shared.strategies import STRATEGIES

Result = dict[str, Any]

COLUMNS = {  # heading: key, unit, digits
    "step ms": ("step_ms", 1, 1),
    "p20": ("p20_ms", 1, 1),
    "p80": ("p80_ms", 1, 1),
    "rtp/this": ("rtp_ratio", 1, 2),
    "fwd+bwd": ("forward_backward_ms", 1, 1),
    "exposed": ("exposed_ms", 1, 1),
    "update": ("optimizer_ms", 1, 1),
    "cpu ms": ("processor_ms", 1, 1),
    "tokens/s": ("tokens_per_s", 1, 0),
    "scaling": ("scaling_efficiency", 1, 2),
    "roof ms": ("roof_ms", 1, 1),
    "hidden": ("hidden_share", 1, 2),
    "ring": ("ring_bytes", 2**20, 1),
    "sent": ("sent_bytes", 2**20, 1),
    "formula": ("closed_form_bytes", 2**20, 1),
    "upd sent": ("optimizer_sent_bytes", 2**20, 1),
    "upd count": ("exchange_bytes", 2**20, 1),
    "param": ("parameter_bytes", 2**20, 1),
    "grad": ("gradient_bytes", 2**20, 1),
    "optim": ("optimizer_bytes", 2**20, 1),
    "transient": ("transient_bytes", 2**20, 1),
    "buffers": ("buffer_bytes", 2**20, 1),
    "peak pss": ("pss_bytes", 2**20, 1),
    "kept eff": ("kept_efficiency", 1, 2),
    "peak eff": ("peak_efficiency", 1, 2),
    "loss": ("loss", 1, 6),
}


def print_table(rows: list[Result], args: argparse.Namespace) -> None:
    """Returns the table of one number of ranks, one number of tokens, and one rate."""
    first = rows[0]
    columns = {name: column for name, column in COLUMNS.items() if any(row.get(column[0]) is not None for row in rows)}
    optimizer = {"adamw": "AdamW", "muon": "Muon and AdamW"}[args.optimizer]
    threads = f"{first['threads']} CPU thread{'s' * (first['threads'] > 1)} per rank"
    print(
        f"\n{args.model}: {first['shape']}; {optimizer}, {args.dtype}, {first['ranks']} ranks on {first['device']}, "
        f"{threads}, collectives over {first['backend']}"
    )
    print(f"{first['tokens']} tokens per rank; {args.steps} interleaved steps after {args.warmup} warm-up steps")
    print(f"each strategy follows every other one equally often in {first['balanced_over']} steps")
    print(f"reference without communication: forward and backward {first['reference_forward_backward_ms']:.1f} ms")
    if first["cores_shared"]:
        print(f"TIME-SHARED: {first['ranks']} ranks take turns on {first['cores']} cores")
    if "hosts" in first:
        delay = f", {first['delay']} delay" if first["delay"] else ""
        print(f"{first['hosts']} made hosts, {first['rate']}{delay}; sent: MiB that leave a host in a step")
    if args.optimizer == "muon":
        matrices = f"{first['matrix_bytes'] / 2**20:.1f} MiB of matrices"
        print(f"{matrices}; upd: MiB that updates send in a step, by the kernel's count and by Muon's")
    print(f"\n{'strategy':<16}" + "".join(f"{name:>10}" for name in columns))
    for row in rows:
        if "error" in row:
            print(f"{row['strategy']:<16}    not timed: {row['error']}")
            continue
        cells = (
            "-" if row.get(key) is None else f"{row[key] / unit:,.{digits}f}" for key, unit, digits in columns.values()
        )
        print(f"{row['strategy']:<16}" + "".join(f"{cell:>10}" for cell in cells))
    timed = [row for row in rows if "error" not in row]
    losses, gradients = (max(row[key] for row in timed) for key in ("loss_spread", "gradient_spread"))
    print(
        f"\nMemory in MiB per rank. Largest relative loss difference at any step: {losses:.1e}; of a parameter's "
        f"gradient: {gradients:.1e}",
        flush=True,
    )


def add_scaling(rows: list[Result]) -> None:
    """Tokens per second / (R times those of the same strategy at R = 1); None without that, and for one process."""
    rows = [row for row in rows if "error" not in row]
    one = {(row["strategy"], row["tokens"]): row["tokens_per_s"] for row in rows if row["ranks"] == 1}
    for row in rows:
        base = None if STRATEGIES[row["strategy"]].one_process else one.get((row["strategy"], row["tokens"]))
        row["scaling_efficiency"] = None if base is None else row["tokens_per_s"] / (row["ranks"] * base)


def report(rows: list[Result], args: argparse.Namespace) -> None:
    """Prints and records the results. Exits with an error where the losses disagree."""
    add_scaling(rows)
    tables: dict[tuple[Any, ...], list[Result]] = {}
    for row in rows:
        tables.setdefault((row["ranks"], row.get("rate"), row["tokens"]), []).append(row)
    for table in tables.values():
        print_table(table, args)
    timed = [row for row in rows if "error" not in row]
    wrong = [row for row in timed if not all(map(operator.le, _spreads(row), tolerances(row)))]  # NaN is wrong
    if not wrong:
        for row in rows:
            append_line(args.output, row)
    keys = ("step_ms", "p20_ms", "p80_ms", "rtp_ratio", "exposed_ms", "tokens_per_s", "scaling_efficiency")
    keys += ("optimizer_ms", "peak_bytes", "buffer_bytes", "kept_efficiency", "peak_efficiency", "ring_bytes", "loss")
    keys += ("roof_ms", "hidden_share", "sent_bytes", "closed_form_bytes") if "hosts" in rows[0] else ()
    keys += ("matrix_bytes", "exchange_bytes", "optimizer_sent_bytes") if args.optimizer == "muon" else ()
    keys += ("forward_backward_ms", "processor_ms", "pss_bytes", "loss_spread", "gradient_spread")
    cases = {_name(row): {key: _number(row.get(key)) for key in keys} for row in timed}
    cases |= {_name(row): {"error": row["error"]} for row in rows if "error" in row}
    print(json.dumps({"loss_agrees": not wrong, "cases": cases}, allow_nan=False), flush=True)
    if wrong:
        (loss, gradient), (most, most_gradient) = _spreads(wrong[0]), tolerances(wrong[0])
        sys.exit(
            f"the strategies differ: losses by {loss:.2e} (relative; at most {most:.0e} are expected), a parameter's "
            f"gradient by {gradient:.2e} (at most {most_gradient:.0e}), in {_name(wrong[0])}"
        )


def _spreads(row: Result) -> tuple[float, float]:
    return row["loss_spread"], row["gradient_spread"]


def _name(row: Result) -> str:
    return f"{row['strategy']}@R{row['ranks']}T{row['tokens']}" + (f"@{row['rate']}" if "rate" in row else "")


def _number(value: float | None) -> float | None:
    """None for what JSON has no number for."""
    return value if value is not None and math.isfinite(value) else None
