"""Options of programs that train a byte-level GPT."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_gpt_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Adds those of model, data and optimizer. `defaults`: where a program has others."""
    add = parser.add_argument
    add("--data", type=Path, help="text file or folder (default: source of Python's standard library)")
    add("--batch", type=int, default=4, help="windows per rank and step")
    add("--seq", type=int, default=128, help="tokens (bytes) per window")
    add("--layers", type=int, default=6)
    add("--hidden", type=int, default=384)
    add("--heads", type=int, default=6)
    add("--lr", type=float, default=5e-4)
    add("--lr-warmup", type=int, default=20, help="steps over which the learning rate rises to --lr")
    add("--seed", type=int, default=0)
    parser.set_defaults(**defaults)


def check_gpt_options(args: argparse.Namespace, error: Callable[[str], Any], *more: str) -> None:
    """Calls `error` where sizes do not make a model. `more`: further options that are at least 1."""
    for name in (*more, "batch", "seq", "layers", "hidden", "heads"):
        if getattr(args, name) < 1:
            error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.hidden % args.heads:
        error(f"--hidden {args.hidden} is not divisible by --heads {args.heads}")
