"""Byte-level text, the batches that a run cuts from it, and the options of the GPT that trains on it."""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst")


def standard_library() -> Path:
    """Folder of the running Python's standard library: real text that is on every machine."""
    return Path(sysconfig.get_path("stdlib"))


def read_text(path: Path | None = None) -> torch.Tensor:
    """Reads a file, or the text files of a folder in sorted order, as bytes.

    Args:
        path: a file; a folder (its .py, .txt, .md and .rst files); or None for the Python source files of the standard
            library, without installed packages.

    Returns:
        uint8 [bytes].

    Raises:
        ValueError: there is no text at `path`.
    """
    suffixes = (".py",) if path is None else TEXT_SUFFIXES
    root = standard_library() if path is None else path
    if root.is_file():
        files = [root]
    else:
        found = (file.relative_to(root) for file in root.rglob("*") if file.suffix in suffixes and file.is_file())
        files = [root / file for file in sorted(found) if "site-packages" not in file.parts]
    text = b"\n".join(file.read_bytes() for file in files)
    if not text:
        raise ValueError(f"no text in {root}: expected a file, or a folder with files {' '.join(suffixes)}")
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())


def fingerprint(text: torch.Tensor) -> str:
    """Returns the first 16 hexadecimal digits of the text's SHA-256, to verify that two runs read the same text."""
    return hashlib.sha256(text.numpy().tobytes()).hexdigest()[:16]


def sample_windows(
    text: torch.Tensor, *, seed: int, step: int, rows: int, seq: int, first: int, last: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `first` to `last` of the global batch of one step.

    The global batch depends on `seed`, `step`, `rows` and `seq` alone, so R ranks that take their slices and one
    process that takes all rows read the same text.

    Args:
        text: uint8 [bytes].
        rows: windows in the global batch.
        seq: tokens in a window.

    Returns:
        inputs and targets (the inputs shifted by one byte), int64 [last - first, seq].

    Raises:
        ValueError: the text is shorter than one window.
    """
    if len(text) <= seq + 1:
        raise ValueError(f"the text has {len(text)} bytes, a window of {seq} tokens needs at least {seq + 2}")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - seq, (rows,), generator=generator)[first:last]
    windows = text[starts[:, None] + torch.arange(seq + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


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
