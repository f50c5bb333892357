"""Step time and memory of several strategies on one model, in one run.

    python benchmarks/compare.py --model mlp --strategies rtp,fsdp2,ddp,single --ranks 2 --tokens 256,1024

All strategies live in the same processes and take turns, one training step (forward, backward, AdamW) each. The order
changes from round to round so that each follows every other one equally often: what the machine does meanwhile hits all
of them alike. A barrier precedes every timed step; a step takes as long as its slowest rank.

Every rank has a batch of its own of `--tokens` tokens. `single` stands for one process: rank 0 alone, with the same
number of threads, on the batches of all ranks. `fsdp2` wraps every block and then the root.

Memory is measured first, in other processes (see memory.py). `buffers` is the transient of forward and backward beyond
that of the plain model on one local batch: unsharded weights, gradient buckets, send and receive buffers.

All strategies take equally many steps; unless their losses agree to 1e-4 (relative) at every step, the run fails and
nothing is recorded.

The last line of stdout is JSON. One JSON line per strategy and token count is appended to
results/<machine>/compare.jsonl.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from card import RESULTS, append_line, command_line, environment_card, result_line
from launch import Place, add_launch_options, gather, is_first, launch
from memory import PROBED_STEPS, Memory, MemoryProbe
from models import WORKLOADS
from strategies import DTYPES, STRATEGIES, Trainer
from tracing import add_trace_option, record_steps

TOLERANCE = 1e-4

Batch = tuple[torch.Tensor, torch.Tensor]
Result = dict[str, Any]


def balanced_orders(count: int) -> list[list[int]]:
    """Orders of `count` items in which each follows every other one equally often (a Williams design)."""
    zigzag = [(i + 1) // 2 if i % 2 else (count - i // 2) % count for i in range(count)]
    orders = [[(item + shift) % count for item in zigzag] for shift in range(count)]
    return orders if count % 2 == 0 else orders + [order[::-1] for order in orders]


def seconds(device: torch.device, action: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """How long `action` takes: by CUDA events on a GPU, by the clock on a CPU. And its result."""
    if device.type == "cpu":
        start = time.perf_counter()
        result = action()
        return time.perf_counter() - start, result
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    result = action()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3, result


class Contestant:
    """One strategy in the run of one rank: its trainer, this rank's batch, losses and step times.

    A strategy of one process has work on rank 0 only.
    """

    def __init__(self, strategy: str, place: Place, args: argparse.Namespace, tokens: int) -> None:
        self.strategy = strategy
        self.losses: list[torch.Tensor] = []
        self.seconds: list[float] = []
        self._device = place.device
        self._trainer: Trainer | None = None
        one_process = STRATEGIES[strategy].one_process
        if place.rank == 0 or not one_process:
            ranks = range(place.ranks) if one_process else (place.rank,)
            self._batch = make_batch(args, tokens, ranks, place.device)
            self._trainer = make_trainer(strategy, place, args)

    @property
    def transport(self) -> str | None:
        return None if self._trainer is None or self._trainer.ring is None else self._trainer.ring.transport

    def step(self, *, timed: bool) -> None:
        taken = 0.0
        if self._trainer is not None:
            trainer = self._trainer
            taken, loss = seconds(self._device, lambda: trainer.step(*self._batch))
            self.losses.append(loss)
        if timed:
            self.seconds.append(taken)

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.close()


def make_batch(args: argparse.Namespace, tokens: int, ranks: Iterable[int], device: torch.device) -> Batch:
    """The batches of `ranks`, each of `tokens` tokens and different from the others, one after the other."""
    seeds = (args.seed * 1_000_003 + rank for rank in ranks)
    samples = [WORKLOADS[args.model].sample(tokens, torch.Generator().manual_seed(seed)) for seed in seeds]
    inputs, targets = (torch.cat(parts).to(device) for parts in zip(*samples, strict=True))
    return inputs, targets


def make_trainer(strategy: str, place: Place, args: argparse.Namespace) -> Trainer:
    build = WORKLOADS[args.model].build
    return Trainer(strategy, build, place.mesh, place.device, dtype=args.dtype, lr=args.lr, seed=args.seed)


def measure_memory(place: Place, args: argparse.Namespace) -> dict[tuple[str, int], dict[str, int | None]]:
    """Bytes per rank (of the rank that holds most) of every strategy at every number of tokens."""
    measured = {}
    for tokens in args.tokens:
        plain = _probe("single", (place.rank,), place, args, tokens)
        for strategy in args.strategies:
            one_process = STRATEGIES[strategy].one_process
            dist.barrier()
            memory = Memory(0, 0, 0, 0, 0, 0)
            if place.rank == 0 or not one_process:
                ranks = range(place.ranks) if one_process else (place.rank,)
                memory = _probe(strategy, ranks, place, args, tokens)
            values = {
                "parameter_bytes": memory.parameters,
                "gradient_bytes": memory.gradients,
                "optimizer_bytes": memory.optimizer,
                "transient_bytes": memory.transient,
                "peak_bytes": memory.peak,
                "slot_bytes": memory.slots,
                "buffer_bytes": memory.transient_forward_backward - plain.transient_forward_backward,
            }
            largest = gather(list(values.values()), place).amax(0).long().tolist()
            measured[strategy, tokens] = dict(zip(values, largest, strict=True))
            if one_process:
                measured[strategy, tokens]["buffer_bytes"] = None
    return measured


def _probe(strategy: str, ranks: Iterable[int], place: Place, args: argparse.Namespace, tokens: int) -> Memory:
    batch = make_batch(args, tokens, ranks, place.device)
    with MemoryProbe(place.device) as probe:
        trainer = make_trainer(strategy, place, args)
        for _ in range(PROBED_STEPS):
            probe.step(trainer, *batch)
        memory = probe.memory(trainer)
    trainer.close()
    return memory


def measure_time(place: Place, args: argparse.Namespace) -> list[Result]:
    """One result per strategy and number of tokens, without the memory."""
    card = environment_card(place.device, args.command)
    return [row for tokens in args.tokens for row in _race(place, args, tokens, card)]


def _race(place: Place, args: argparse.Namespace, tokens: int, card: Result) -> list[Result]:
    contestants = [Contestant(strategy, place, args, tokens) for strategy in args.strategies]
    orders = balanced_orders(len(contestants))
    rounds = args.warmup + args.steps
    live = place.rank == 0 and sys.stderr.isatty()
    for number in range(rounds):
        for index in orders[number % len(orders)]:
            dist.barrier()
            contestants[index].step(timed=number >= args.warmup)
        if live:
            print(f"\r{tokens} tokens: round {number + 1}/{rounds}\x1b[K", end="", file=sys.stderr, flush=True)
    if live:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    rows = [_result(contestant, place, args, tokens, card) for contestant in contestants]
    record_steps(args.trace, {f"{c.strategy}-{tokens}": (c._trainer, c._batch) for c in contestants if c._trainer})
    for contestant in contestants:
        contestant.close()
    _add_comparisons(rows)
    return rows


def _result(contestant: Contestant, place: Place, args: argparse.Namespace, tokens: int, card: Result) -> Result:
    idle = [0.0] * (args.warmup + args.steps)
    losses = gather([float(loss) for loss in contestant.losses] or idle, place)
    times = sorted((gather(contestant.seconds, place).amax(0) * 1e3).tolist())
    median = statistics.median(times)
    return result_line(
        card,
        benchmark="compare",
        case=f"{args.model}/{contestant.strategy}",
        strategy=contestant.strategy,
        shape=WORKLOADS[args.model].shape,
        tokens=tokens,
        ranks=place.ranks,
        direction="step",
        transport=contestant.transport,
        dtype=args.dtype,
        step_ms=median,
        p20_ms=percentile(times, 20),
        p80_ms=percentile(times, 80),
        tokens_per_s=tokens * place.ranks / median * 1e3,
        losses=(losses[0] if STRATEGIES[contestant.strategy].one_process else losses.mean(0)).tolist(),
        steps=args.steps,
        warmup=args.warmup,
        threads=torch.get_num_threads(),
        lr=args.lr,
        seed=args.seed,
        strategies=args.strategies,
    )


def percentile(ordered: list[float], percent: int) -> float:
    """Linear interpolation between the two nearest of the sorted values."""
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _add_comparisons(rows: list[Result]) -> None:
    """Adds rtp's step time relative to each, and the largest relative loss difference between any two at any step."""
    rtp = next((row["step_ms"] for row in rows if row["strategy"] == "rtp"), None)
    losses = torch.tensor([row.pop("losses") for row in rows], dtype=torch.float64)
    spread = ((losses.amax(0) - losses.amin(0)) / losses.mean(0).abs()).max().item()
    for row, loss in zip(rows, losses[:, -1].tolist(), strict=True):
        row["rtp_ratio"] = None if rtp is None else rtp / row["step_ms"]
        row["loss"] = loss
        row["loss_spread"] = spread


def print_table(rows: list[Result], tokens: int, args: argparse.Namespace) -> None:
    first = rows[0]
    threads = f"{first['threads']} CPU thread{'s' * (first['threads'] > 1)} per rank"
    print(
        f"\n{args.model}: {first['shape']}; AdamW, {args.dtype}, {first['ranks']} ranks on {first['device']}, {threads}"
    )
    print(f"{tokens} tokens per rank; {args.steps} interleaved steps after {args.warmup} warm-up steps\n")
    columns = ("strategy", "step ms", "p20", "p80", "rtp/this", "tokens/s", "param", "grad", "optim", "transient")
    header = "".join(f"{name:>10}" for name in columns[1:])
    print(f"{columns[0]:<12}{header}{'buffers':>10}{'loss':>12}")
    for row in rows:
        times = "".join(f"{row[key]:>10.1f}" for key in ("step_ms", "p20_ms", "p80_ms"))
        ratio = f"{row['rtp_ratio']:>10.2f}" if row["rtp_ratio"] is not None else f"{'-':>10}"
        keys = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "transient_bytes", "buffer_bytes")
        sizes = "".join(f"{'-' if row[key] is None else f'{row[key] / 2**20:.1f}':>10}" for key in keys)
        print(f"{row['strategy']:<12}{times}{ratio}{row['tokens_per_s']:>10,.0f}{sizes}{row['loss']:>12.6f}")
    print(f"\nMemory in MiB per rank. Largest relative loss difference at any step: {first['loss_spread']:.1e}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare strategies step by step. See the top of the file.")
    add = parser.add_argument
    add("--model", choices=WORKLOADS, default="mlp")
    add("--strategies", type=lambda text: text.split(","), default=list(STRATEGIES), help="separated by commas")
    add("--ranks", type=int, default=2)
    add("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[1024], help="per rank; a list")
    add("--steps", type=int, default=20, help="timed steps of each strategy")
    add("--warmup", type=int, default=3, help="further steps before the timed ones")
    add("--dtype", choices=DTYPES, default="float32", help="of the computation; parameters stay float32")
    add("--lr", type=float, default=1e-4)
    add("--seed", type=int, default=0)
    add("--machine", help="folder under results/ (default: from the CPU or GPU, such as cpu-2core)")
    add("--output", type=Path, metavar="FILE.jsonl", help="append the results here instead of results/<machine>/")
    add_trace_option(parser, "one more step of every rtp strategy")
    add_launch_options(parser)
    parser.set_defaults(threads=1)
    args = parser.parse_args()
    for strategy in args.strategies:
        if strategy not in STRATEGIES:
            parser.error(f"unknown strategy {strategy!r}, expected some of {','.join(STRATEGIES)}")
    if args.ranks < 1 or args.steps < 1 or args.warmup < 0 or min(args.tokens) < 1:
        parser.error("--ranks, --steps and --tokens must be at least 1, --warmup at least 0")
    args.command = command_line()
    return args


def main() -> None:
    args = parse_arguments()
    options = {name: value for name, value in vars(args).items() if name != "command"}
    if is_first():
        print("options: " + " ".join(f"{name}={value}" for name, value in options.items()), flush=True)
    # in processes of its own, since watching memory changes how memory is allocated
    memory = launch(measure_memory, args, args.ranks)
    rows = launch(measure_time, args, args.ranks)
    for row in rows:
        row.update(memory[row["strategy"], row["tokens"]])
    if is_first():
        report(rows, args)


def report(rows: list[Result], args: argparse.Namespace) -> None:
    """Prints and records the results. Exits with an error where the losses disagree."""
    for tokens in args.tokens:
        print_table([row for row in rows if row["tokens"] == tokens], tokens, args)
    spread = max(row["loss_spread"] for row in rows)
    agreed = spread <= TOLERANCE
    if agreed:
        output = args.output or RESULTS / (args.machine or rows[0]["machine"]) / "compare.jsonl"
        for row in rows:
            append_line(output, row)
    keys = ("step_ms", "p20_ms", "p80_ms", "rtp_ratio", "tokens_per_s", "peak_bytes", "buffer_bytes", "loss")
    cases = {f"{row['strategy']}@{row['tokens']}": {key: row[key] for key in keys} for row in rows}
    print(json.dumps({"loss_agrees": agreed, "loss_spread": spread, "cases": cases}), flush=True)
    if not agreed:
        sys.exit(f"the losses of the strategies differ by {spread:.2e} (relative), more than {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
