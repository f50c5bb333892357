"""The table of the results of policies between replicas."""

from collections.abc import Callable
from typing import Any

from shared.card import last_command

Row = dict[str, Any]

SPREAD = 0.05  # of the kernel's count from the policy's, at most


def _kernel(row: Row) -> str | None:
    return None if row["kernel_ratio"] is None else f"{row['kernel_ratio']:.3f}"


OUTER: dict[str, Callable[[Row], str | None]] = {
    "policy": lambda row: f"`{row['policy']}`",
    "loss, held out": lambda row: f"{row['eval_loss']:.4f}",
    "loss of the last steps": lambda row: f"{row['losses'][-1]:.4f}",
    "MiB a replica sent": lambda row: f"{row['sent_bytes'] / 2**20:.2f}",
    "all-reduce's / this": lambda row: f"{row['all_reduce_bytes'] / row['sent_bytes']:.1f}",
    "counted by the kernel / this": _kernel,
    "seconds": lambda row: f"{row['seconds']:.1f}",
}


def last_outer_run(lines: list[Row], words: list[str]) -> list[Row]:
    """The rows of the last command whose lines have all of the `words` (a rate, R2 for rings of two, S150 for steps, an
    optimizer), with what all-reduce sent; none where there are none, or no all-reduce among them."""
    known = [
        {line.get("rate"), f"R{line['ring']}", f"S{line['steps']}", line.get("optimizer", "AdamW")} for line in lines
    ]
    lines = [line for line, mine in zip(lines, known, strict=True) if set(words) <= mine]
    run = last_command(lines)
    whole = [line["sent_bytes"] for line in run if line["strategy"] == "all-reduce"]
    return [{**line, "all_reduce_bytes": whole[0]} for line in run] if whole else []


def outer_note(rows: list[Row]) -> str:
    """Returns the text below a command."""
    first = rows[0]
    note = f" {first['replicas']} replicas of {first['ring']}, {first['shape']}, {first['steps']} steps of "
    note += f"{first['tokens']} tokens per rank, {first.get('optimizer', 'AdamW')}"
    if first.get("rate") is not None:
        note += f"; made hosts, links: {first['rate']}"
        off = [row["strategy"] for row in rows if abs(row["kernel_ratio"] - 1) > SPREAD]
        note += f". **More than {SPREAD:.0%} from the kernel's count: {', '.join(off)}.**" if off else ""
    return note if note.endswith("**") else f"{note}."
