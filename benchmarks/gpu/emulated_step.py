"""A training step of one rank of R on one GPU, with real hops within the GPU, beside the plain model on its tokens.

    python benchmarks/gpu/emulated_step.py --output results.jsonl --tokens 8192,2048
    python benchmarks/gpu/emulated_step.py --cases groups     1, 2 and 8 shards per product
    python benchmarks/gpu/emulated_step.py --cases graphs     the same with passes as CUDA graphs, which spare the host
    python benchmarks/gpu/emulated_step.py --device cpu --size tiny --tokens 64

On the emulated ring a rank multiplies its tokens with R shards, all of which are its own: the products, hops, casts and
launches of a real rank, and as many FLOP as the plain model on these tokens. So `ratio`, the time of forward and
backward over that of the plain model, is what rotation costs, with the host's time; losses mean nothing. The optimizer
has 1/R of the parameters and is not compared. A case that fails is a line with the reason.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from memory_per_rank import Size, fill
from shared.card import append_line, command_line, environment_card, result_line
from shared.models import Llama, random_tokens
from shared.strategies import STRATEGIES, Trainer
from torch.distributed.fsdp import MixedPrecisionPolicy

import rtp_ext

SIZES = {
    "block4": Size(4, 4096, 32, 8, 14336, 32768),  # four blocks of Llama-3-8B
    "tiny": Size(2, 128, 8, 8, 256, 512),
}
WARMUP = 3


@dataclass(frozen=True)
class Case:
    """What runs. strategy: of `shared.strategies`; None: plain torch, without a ring. link, graphs, group: of the ring;
    group: shards per product."""

    name: str
    strategy: str | None = None
    link: str | None = None
    graphs: str = "off"
    group: int = 1


CASES = {
    "groups": (
        Case("plain"),
        *(Case(f"rtp ce-local:4 g={group}", "rtp", "ce-local:4", group=group) for group in (1, 2, 8)),
    ),
    "graphs": (
        Case("plain"),
        *(Case(f"rtp sm-local graphs g={group}", "rtp", "sm-local", "on", group) for group in (1, 2, 8)),
        Case("rtp sm-local g=8", "rtp", "sm-local", group=8),
    ),
    "others": (
        Case("plain"),
        Case("plain-bf16"),
        Case("rtp sm-local", "rtp", "sm-local"),
        Case("rtp-fused ce-local:4", "rtp-fused", "ce-local:4"),
        Case("rtp sm-local graphs", "rtp", "sm-local", "on"),
        Case("rtp-recompute ce-local:4", "rtp-recompute", "ce-local:4"),
    ),
}


def build(case: Case, size: Size, ranks: int, device: torch.device) -> Trainer:
    with torch.device("meta"):
        model = Llama(**asdict(size))
    autocast = None
    if case.strategy is None:
        model = fill(model.to(torch.bfloat16) if case.name == "plain-bf16" else model, device)
        autocast = torch.bfloat16 if case.name == "plain" else None
    else:
        link = case.link if device.type == "cuda" else None
        ring = rtp_ext.Ring.emulated(ranks, device=device, link=link, graphs=case.graphs, group=min(case.group, ranks))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = fill(STRATEGIES[case.strategy].convert(model, ring, policy), device)
    model.train()
    return Trainer.around(case.strategy or "none", model, device, lr=1e-5, autocast=autocast)


def batch_of(size: Size, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The same inputs and targets for every case."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = random_tokens(tokens, generator, seq=min(2048, tokens), vocabulary=size.vocabulary)
    return inputs.to(device), targets.to(device)


def measure(
    trainer: Trainer, inputs: torch.Tensor, targets: torch.Tensor, steps: int, device: torch.device
) -> dict[str, float]:
    """Milliseconds of a step, of which the first WARMUP are not counted."""
    taken: dict[str, list[float]] = {}
    host: dict[str, list[float]] = {}

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        wait()
        begun = time.perf_counter()
        yield
        host.setdefault(name, []).append(1e3 * (time.perf_counter() - begun))
        wait()
        taken.setdefault(name, []).append(1e3 * (time.perf_counter() - begun))

    for _ in range(steps + WARMUP):
        trainer.step(inputs, targets, keep_gradients=True, phase=phase)
    passes = sorted(taken["forward_backward"][WARMUP:])
    return {
        "forward_backward_ms": statistics.median(passes),
        "forward_backward_p20_ms": passes[len(passes) // 5],
        "forward_backward_p80_ms": passes[-1 - len(passes) // 5],
        "host_ms": statistics.median(host["forward_backward"][WARMUP:]),  # until everything is enqueued
        "optimizer_ms": statistics.median(taken["optimizer"][WARMUP:]),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="append the results to this file")
    parser.add_argument("--size", choices=SIZES, default="block4")
    parser.add_argument("--cases", choices=CASES, default="others", help="default: %(default)s")
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[8192, 2048])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds; starts no case later")
    args = parser.parse_args(argv)
    started = time.monotonic()
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    card, size = environment_card(device, command_line()), SIZES[args.size]
    plain: dict[int, float] = {}
    for case in CASES[args.cases]:
        if time.monotonic() - started > args.budget:
            print("the budget is spent before", case.name)
            break
        told = {"strategy": case.strategy or case.name, "link": case.link, "ranks": args.ranks, "dtype": "bfloat16"}
        told |= {"group": case.group, "case": case.name, "shape": f"{args.size}: {asdict(size)}"}
        told |= {"layers": size.layers, "vocabulary": size.vocabulary}
        trainer = None
        try:
            trainer = build(case, size, args.ranks, device)
            for tokens in args.tokens:
                row: dict[str, Any] = measure(trainer, *batch_of(size, tokens, device), args.steps, device)
                if case.name == "plain":
                    plain[tokens] = row["forward_backward_ms"]
                row["ratio"] = row["forward_backward_ms"] / plain[tokens] if tokens in plain else None
                if trainer.ring is not None:
                    row["graphs_replayed"] = trainer.ring.graphs.replayed
                write(args.output, result_line(card, benchmark="emulated_step", tokens=tokens, **told, **row))
            trainer.close()
        except (RuntimeError, ValueError) as error:
            refused = f"{type(error).__name__}: {str(error)[:600]}"
            write(args.output, result_line(card, benchmark="emulated_step", refused=refused, **told))
        del trainer
        if device.type == "cuda":
            torch.cuda.empty_cache()


def write(output: Path | None, line: dict[str, Any]) -> None:
    append_line(output, line)
    shown = ("tokens", "forward_backward_ms", "host_ms", "ratio", "graphs_replayed", "refused")
    print(f"{line['case']:<26}", {key: line[key] for key in shown if line.get(key) is not None}, flush=True)


if __name__ == "__main__":
    main()
