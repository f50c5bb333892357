"""The cases of the benchmark of overlap, their order, and the filter of cases that are measured already."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Rows N and columns K of the weight: the widest linear layer of each model, and for CPUs small layers, whose cases take
# seconds.
SHAPES = {
    "llama-7b": (11008, 4096),
    "llama3-8b": (14336, 4096),
    "llama3-70b": (28672, 8192),
    "llama3-405b": (53248, 16384),
    "gpt3": (49152, 12288),
    "cpu-4k": (4096, 1024),
    "cpu-tiny": (192, 64),
}
DIRECTIONS = ("forward", "backward", "step")
PASSES = {"forward": ("forward",), "backward": ("backward",), "step": ("forward", "backward")}
TOKENS = (4096, 8192, 2048, 1024, 16384)
POINT = 4096  # tokens of the shapes and ring sizes that have a single point
CPU_TOKENS = (512, 64, 8)  # GEMMs that take much longer than a hop, about as long, and less


@dataclass(frozen=True)
class Case:
    shape: str
    tokens: int
    ranks: int
    direction: str

    @property
    def n(self) -> int:
        return SHAPES[self.shape][0]

    @property
    def k(self) -> int:
        return SHAPES[self.shape][1]

    @property
    def name(self) -> str:
        return f"{self.shape}/T{self.tokens}/R{self.ranks}/{self.direction}"

    @property
    def layer(self) -> tuple[str, int, int]:
        """Cases that share their tensors."""
        return self.shape, self.tokens, self.ranks


def grid(shapes: Iterable[str], tokens: Sequence[int], ranks: Sequence[int], directions: Sequence[str]) -> list[Case]:
    return [
        Case(shape, number, size, direction)
        for shape in shapes
        for size in ranks
        for number in tokens
        for direction in directions
    ]


def gpu_cases(directions: Sequence[str]) -> list[Case]:
    """The most valuable first."""
    cases = grid(["llama3-8b", "llama3-70b"], TOKENS, [8], directions)
    cases += grid(["llama-7b", "gpt3", "llama3-405b"], [POINT], [8], directions)
    return cases + grid(["llama3-8b", "llama3-70b"], [POINT], [4, 2], directions)


def cpu_cases(directions: Sequence[str]) -> list[Case]:
    return grid(["cpu-4k"], CPU_TOKENS, [2], directions)


def identity(line: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the key that is equal for two lines if they measure the same case with the same code."""
    keys = ("benchmark", "case", "link", "transport", "route", "dtype", "graph", "max_ctas", "slot_cap", "commit")
    keys += ("hosts", "rate", "delay")
    return tuple(line.get(key) for key in keys)


def measured(path: Path) -> set[tuple[Any, ...]]:
    """The identities of the lines of a results file. Code that was not committed, or is unknown, never counts."""
    if not path.exists():
        return set()
    lines = [json.loads(text) for text in path.read_text().splitlines() if text.strip()]
    return {identity(line) for line in lines if line.get("commit") and not line["commit"].endswith("-dirty")}
