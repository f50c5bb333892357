"""The benchmark of overlap: its cases, their order, those that are measured already, and its options. Impossible
combinations are refused here, before anything starts."""

import argparse
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rtp_ext.host import cores
from shared.card import add_output_options, complete_output
from shared.hosts import add_host_options, complete_hosts
from shared.launch import add_launch_options, repetition, under_torchrun
from shared.recording import add_trace_option
from shared.strategies import DTYPES

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


# -- options -----------------------------------------------------------------------------------------------------------

LINKS = r"ce-local(:[124])?|sm-local|nccl-self(:[1-9]\d*)?|pcie"  # a number: of streams, of CTAs


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Benchmark of overlap. See the top of the file.")
    add = parser.add_argument
    numbers = {"type": lambda text: [int(part) for part in text.split(",")]}
    names = {"type": lambda text: text.split(",")}
    add("--shapes", **names, help=f"some of {','.join(SHAPES)} (default: the standard cases)")
    add("--tokens", **numbers, help="local tokens")
    add("--ranks", **numbers, help="ring sizes")
    add("--directions", **names, default=list(DIRECTIONS))
    add("--ring", choices=("auto", "emulated", "real"), default="auto", help="auto: emulated on one GPU, real on CPU")
    add("--link", dest="links", **names, help=f"of the emulated ring on a GPU: {LINKS}; one run of all cases for each")
    add("--transport", default="auto", help="of the real ring")
    add("--route", default="auto", help="of the real ring")
    add("--max-ctas", **numbers, help="NCCL's CTAs in a real ring of GPUs, one run of all cases for each")
    add("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")
    add("--slot-cap", type=int, help="bytes of a slot; 0: none (default: the ring's)")
    add("--graph", action="store_true", help="time replays of CUDA graphs")
    add("--seconds", type=float, default=0.3, help="of each quantity, at least")
    add("--iterations", type=int, default=10, help="of each quantity, at least")
    add("--budget", type=float, default=math.inf, metavar="SECONDS", help="start no case that would end later")
    add("--again", action="store_true", help="measure what the results file holds already")
    add("--share-cores", action="store_true", help="allow more CPU ranks than cores")
    add_output_options(parser)
    add_trace_option(parser, "one more forward, backward or step of every case")
    add_launch_options(parser)
    add_host_options(parser)
    args = parser.parse_args(argv)
    complete(args, parser.error)
    return args


def complete(args: argparse.Namespace, error: Callable[[str], Any]) -> None:
    """Fills in what depends on the machine; what cannot be measured is an error."""
    complete_hosts(args, error)
    on_gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    if args.device == "cuda" and not torch.cuda.is_available():
        error("--device cuda: no GPU is available")
    if args.ring == "auto":
        args.ring = "emulated" if on_gpu and not under_torchrun() else "real"
    if args.network and (args.ring == "emulated" or args.trace):
        error("--hosts is of a real ring without --trace")
    for given, known, what in ((args.shapes, SHAPES, "shape"), (args.directions, DIRECTIONS, "direction")):
        for name in given or ():
            if name not in known:
                error(f"unknown {what} {name!r}, expected some of {', '.join(known)}")
    if args.iterations < 1 or not 0 <= args.seconds < math.inf or not args.budget > 0:
        error("--iterations must be at least 1, --seconds at least 0 and finite, --budget above 0")
    if args.slot_cap is not None and args.slot_cap < 0:
        error(f"--slot-cap must be at least 0, got {args.slot_cap}")
    lists = {"--shapes": args.shapes, "--tokens": args.tokens, "--ranks": args.ranks, "--directions": args.directions}
    if (refusal := repetition(lists | {"--link": args.links, "--max-ctas": args.max_ctas})) is not None:
        error(refusal)
    for name in ("transport", "route", "threads") if args.ring == "emulated" else ():
        if (given := getattr(args, name)) not in ("auto", 0):
            error(f"--{name} {given} is of a real ring (--ring real)")
    if args.ring == "emulated" and args.share_cores:
        error("--share-cores is of a real ring (--ring real)")
    for name, least in (("tokens", 1), ("ranks", 2), ("max_ctas", 1)):
        if getattr(args, name) is not None and min(getattr(args, name)) < least:
            error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if args.links and (args.ring == "real" or not on_gpu):
        error("--link is of an emulated ring on a GPU")
    for link in args.links or ():
        if not re.fullmatch(LINKS, link):
            error(f"unknown link {link!r}, expected one of {LINKS}")
    if args.max_ctas and (args.ring == "emulated" or not on_gpu):
        error("--max-ctas is of a real ring of GPUs; an emulated one has links such as nccl-self:4")
    if args.graph and not on_gpu:
        error("--graph needs a GPU")
    if args.graph and any(link.startswith("ce-local") for link in args.links or ()):
        error("--graph: a graph copies within a GPU by its SMs, not by copy engines: expected sm-local, not ce-local")
    if args.graph and args.trace:
        error("--trace cannot look into the graphs of --graph")
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    world = [int(os.environ["WORLD_SIZE"])] if under_torchrun() else None
    if args.network:
        world = [args.network.ranks]
        if args.ranks not in (None, world):
            error(f"--hosts and --ranks-per-host make {world[0]} ranks, got --ranks {args.ranks}")
    if args.shapes or args.tokens or args.ranks:
        defaults = (["llama3-8b"], [4096], world or [8]) if on_gpu else (["cpu-4k"], [128], world or [2])
        chosen = (
            given or default for given, default in zip((args.shapes, args.tokens, args.ranks), defaults, strict=True)
        )
        args.cases = grid(*chosen, args.directions)
    else:
        args.cases = gpu_cases(args.directions) if on_gpu else cpu_cases(args.directions)
        args.cases = [case for case in args.cases if world is None or case.ranks in world]
    if not args.cases:
        error(f"no standard case has {world[0]} ranks: choose with --shapes, --tokens")
    args.all_cases = args.cases
    ranks = max(case.ranks for case in args.cases)
    for case in args.cases:
        if case.n % case.ranks:
            error(f"{case.ranks} ranks do not divide the {case.n} rows of {case.shape}")
    if args.ring == "real":
        if on_gpu and ranks > torch.cuda.device_count():
            error(f"{ranks} ranks need as many GPUs, this machine has {torch.cuda.device_count()}")
        if not on_gpu and ranks > cores() and not args.share_cores:
            error(f"{ranks} ranks would share {cores()} cores (--share-cores allows it)")
    per_rank = cores() // ranks if args.ring == "real" and not on_gpu else None
    args.cores_per_rank = per_rank
    args.cores_shared = None if per_rank is None else per_rank == 0
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    complete_output(args, "hosts_overlap" if args.network else "overlap", error, device)
    args.device = device.type
    args.deadline = time.monotonic() + args.budget
