"""Trains a byte-level GPT with rotated tensor parallelism, or with a strategy that it is compared with.

    python benchmarks/train_lm.py --strategy rtp --ranks 2 --steps 100
    torchrun --nproc-per-node 8 benchmarks/train_lm.py --strategy rtp --ranks 8 --data my_text_folder

Every rank trains on its own `--batch` windows of `--seq` bytes. `--strategy single --ranks R` trains in one process on
the windows of R ranks together; the mean of the ranks' losses is then its loss, step by step, up to rounding. (Without
a warm-up of the learning rate AdamW turns rounding into 1e-3 within 60 steps, also in plain torch on one process.)
Every strategy starts from the same weights. The text is the source of Python's standard library unless `--data` names
another file or folder.

It uses GPUs and NCCL if there are any, otherwise CPUs and Gloo. Progress is printed to stderr. The last line of stdout
is JSON: the loss of every step, tokens/s without the first steps (they measure memory, see memory.py), and the largest
bytes of a rank.
"""

import argparse
import json
import sys
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shared.card import append_line, command_line, environment_card, result_line
from shared.data import add_gpt_options, check_gpt_options, fingerprint, read_text, sample_windows
from shared.launch import Place, add_launch_options, gather, launch
from shared.memory import PROBED_STEPS, Memory, MemoryProbe
from shared.models import GPT
from shared.recording import add_trace_option, record_steps
from shared.strategies import DTYPES, STRATEGIES, Trainer

from rtp_ext.observe.steps import StepLog
from rtp_ext.recipes import RECIPES


class Progress:
    """A line on stderr that is rewritten at every step; without a terminal, about ten lines in all."""

    WIDTH = 24

    def __init__(self, label: str, steps: int) -> None:
        self._label = label
        self._steps = steps
        self._terminal = sys.stderr.isatty()

    def show(self, done: int, loss: float, tokens_per_s: float | None, peak_bytes: int | None) -> None:
        if not self._terminal and done != self._steps and done % max(1, self._steps // 10):
            return
        filled = self.WIDTH * done // self._steps
        speed = "" if tokens_per_s is None else f"  {tokens_per_s:,.0f} tokens/s"
        peak = "" if peak_bytes is None else f"  peak {peak_bytes / 2**20:,.0f} MiB"
        bar = "#" * filled + "." * (self.WIDTH - filled)
        line = f"{self._label:<11} [{bar}] {done:>{len(str(self._steps))}}/{self._steps}  loss {loss:.4f}{speed}{peak}"
        end = "" if self._terminal and done != self._steps else "\n"
        print(f"\r{line}\x1b[K" if self._terminal else line, end=end, file=sys.stderr, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT. See the top of the file.")
    add = parser.add_argument
    add(
        "--strategy",
        choices=[n for n, kind in STRATEGIES.items() if kind.refusal(GPT) is None and not kind.alone],
        default="rtp",
    )
    add("--ranks", type=int, default=2, help="ranks; for `single`: the ranks whose batches it takes together")
    add("--steps", type=int, default=100)
    add_gpt_options(parser)
    add("--dtype", choices=DTYPES, default="float32", help="of the computation; parameters stay float32")
    add("--recipe", choices=RECIPES, help="of an rtp strategy: products of linear layers in 8 bits")
    add("--output", type=Path, metavar="FILE.jsonl", help="append the result to this file, too")
    add(
        "--log", type=Path, metavar="FOLDER", help="of an rtp strategy: what each timed step of each rank took, as JSON"
    )
    add(
        "--log-exposed-every", type=int, default=10, metavar="N", help="with --log: record every Nth step for its waits"
    )
    add_trace_option(parser, "one step more than --steps, of an rtp strategy")
    add_launch_options(parser)
    args = parser.parse_args()
    check_gpt_options(args, parser.error, "ranks", "steps")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU is available")
    if args.trace and not args.strategy.startswith("rtp"):
        parser.error(f"--trace records rings, and the strategy {args.strategy} has none")
    if args.recipe and not args.strategy.startswith("rtp"):
        parser.error(f"--recipe is of rings, and the strategy {args.strategy} has none")
    if args.log and not args.strategy.startswith("rtp"):
        parser.error(f"--log counts hops, and the strategy {args.strategy} has none")
    args.command = command_line()
    return args


def train(place: Place, args: argparse.Namespace) -> None:
    """Runs one rank; rank 0 prints the result."""
    text = read_text(args.data)
    rows = args.batch * args.ranks
    alone = STRATEGIES[args.strategy].one_process
    first, last = (0, rows) if alone else (args.batch * place.rank, args.batch * (place.rank + 1))

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        windows = sample_windows(text, seed=args.seed, step=step, rows=rows, seq=args.seq, first=first, last=last)
        return windows[0].to(place.device), windows[1].to(place.device)

    def set_lr(trainer: Trainer, step: int) -> None:
        for group in trainer.optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / max(1, args.lr_warmup))

    def global_loss(loss: torch.Tensor) -> float:
        mean = loss.double()
        dist.all_reduce(mean)
        return mean.item() / place.ranks

    losses: list[float] = []
    progress = Progress(args.strategy, args.steps) if place.rank == 0 else None
    probed = min(args.steps, PROBED_STEPS)
    with MemoryProbe(place.device) as probe:
        trainer = Trainer(
            args.strategy,
            lambda: GPT(seq=args.seq, layers=args.layers, hidden=args.hidden, heads=args.heads),
            place.mesh,
            place.device,
            dtype=args.dtype,
            lr=args.lr,
            seed=args.seed,
            rotation={"recipe": args.recipe} if args.recipe else None,
        )
        for step in range(probed):
            set_lr(trainer, step)
            losses.append(global_loss(probe.step(trainer, *batch(step))))
            if progress:
                progress.show(step + 1, losses[-1], None, None)
        memory = probe.memory(trainer)

    start = time.perf_counter()
    tokens_per_s = None
    log = step_log(args, trainer, place, probed)
    for step in range(probed, args.steps):
        set_lr(trainer, step)
        with log.step() if log else nullcontext({}) as line:
            losses.append(global_loss(trainer.step(*batch(step))))
            line["loss"] = losses[-1]
        tokens_per_s = rows * args.seq * (step + 1 - probed) / (time.perf_counter() - start)
        if progress:
            progress.show(step + 1, losses[-1], tokens_per_s, memory.peak)
    if log:
        log.close()
    bytes_per_rank = memory_of_all_ranks(memory, place)
    transport = None if trainer.ring is None else trainer.ring.transport
    if args.trace:
        record_steps(args.trace, {"": (trainer, batch(args.steps))})
    trainer.close()
    if place.rank > 0:
        return

    card = environment_card(place.device, args.command)
    shape = f"byte GPT, {args.layers} layers, hidden {args.hidden}, {args.heads} heads, seq {args.seq}"
    result = result_line(
        card,
        benchmark="train_lm",
        case=" ".join(filter(None, (args.strategy, args.recipe))),
        strategy=args.strategy,
        shape=shape,
        tokens=args.batch * args.seq,
        ranks=args.ranks,
        direction="step",
        transport=transport,
        dtype=args.dtype,
        recipe=args.recipe,
        tokens_per_s=tokens_per_s,
        step_ms=None if tokens_per_s is None else 1e3 * rows * args.seq / tokens_per_s,
        **bytes_per_rank,
        processes=place.ranks,
        threads=torch.get_num_threads(),
        steps=args.steps,
        lr=args.lr,
        lr_warmup=args.lr_warmup,
        seed=args.seed,
        text_bytes=len(text),
        text_sha256=fingerprint(text),
        losses=losses,
    )
    append_line(args.output, result)
    print_summary(result, shape)
    print(json.dumps(result), flush=True)


def step_log(args: argparse.Namespace, trainer: Trainer, place: Place, first: int) -> StepLog | None:
    if args.log is None:
        return None
    args.log.mkdir(parents=True, exist_ok=True)
    board = args.log / f"rank{place.rank}" if find_spec("tensorboard") else None
    file = args.log / f"rank{place.rank}.jsonl"
    return StepLog(trainer.ring, file, tensorboard=board, exposed_every=args.log_exposed_every, first=first)


def memory_of_all_ranks(memory: Memory, place: Place) -> dict[str, Any]:
    """Bytes of the rank that holds most, under the names of the result line. All ranks call it."""
    names = memory.row()
    largest = gather(list(names.values()), place).amax(0)
    return {name: int(value) for name, value in zip(names, largest, strict=True)}


def print_summary(result: dict[str, Any], shape: str) -> None:
    sizes = {key: f"{result[key] / 2**20:.1f} MiB" for key in result if key.endswith("_bytes") and key != "text_bytes"}
    print(f"{shape}, {result['strategy']} for {result['ranks']} ranks on {result['device']}")
    print(f"loss {result['losses'][0]:.4f} -> {result['losses'][-1]:.4f} in {result['steps']} steps")
    print(
        f"per rank: parameters {sizes['parameter_bytes']}, gradients {sizes['gradient_bytes']}, optimizer state "
        f"{sizes['optimizer_bytes']}, transient {sizes['transient_bytes']}, peak {sizes['peak_bytes']}"
    )


def main() -> None:
    args = parse_arguments()
    launch(train, args, 1 if STRATEGIES[args.strategy].one_process else args.ranks)


if __name__ == "__main__":
    main()
