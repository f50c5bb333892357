"""Loss curves of the byte-level GPT of train_lm.py, by the formats of its weights and gradients on the ring.

    python benchmarks/travel_curves.py                 # 300 steps from each of three seeds, two local ranks
    python benchmarks/travel_curves.py --quick         # a smaller model and few steps, to see that it works
    python benchmarks/plot.py travel benchmarks/results/MACHINE/travel_curves.jsonl --output docs/figures/travel

All runs of a seed start from the same weights and read the same windows of the same text; the last twentieth of the
text is held out. fully_rotate rotates the runs with a `travel` over the ranks. The controls are not options of the
package; every rank has a plain model. `int4` computes with weights rounded to 15 values in blocks of 128 and restores
the exact weights before the optimizer steps, like int8 travel with fewer bits. `int4 at home` and `int8 at home` keep
no exact weights: the optimizer adds its updates to rounded weights, and the next rounding discards most of them.

`losses` are the means over the ranks for every step; `eval_loss` is the loss on held-out windows at the end, with the
weights of the forward pass. `ring_bytes` is the number of bytes that a rank sends along the ring in a step. Unless
--quick, the run fails if the held-out loss of a rotated run, as a mean over the seeds, is not within 1 % of that of
`float32`, or if no control has a loss more than 1 % above it.

The last line of stdout is JSON. One JSON line a run is appended to results/MACHINE/travel_curves.jsonl, unless --quick.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shared.card import (
    RESULTS,
    append_line,
    command_line,
    environment_card,
    machine_name,
    refusal_to_write,
    result_line,
)
from shared.data import fingerprint, read_text, sample_windows
from shared.launch import Place, add_launch_options, gather, is_first, launch
from shared.models import GPT
from shared.options.gpt_options import add_gpt_options, check_gpt_options
from shared.reports.runs.travel_report import apart, over_seeds
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import rtp_ext

HELD_OUT = 20  # one part of so many
EVALUATED = 32  # batches of each rank
HELD_OUT_SEED = 1_000_003  # of windows
CLOSE = 0.01  # relative, of held-out losses
BLOCK = 128
QUICK = {"steps": 4, "seeds": 1, "batch": 1, "seq": 32, "layers": 1, "hidden": 64, "heads": 2, "lr_warmup": 2}
Row = dict[str, Any]

HALF = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
ROTATED: dict[str, dict[str, Any]] = {  # options of fully_rotate
    "float32": {},
    "bfloat16": {"travel": "bfloat16"},
    "int8, gradients bfloat16": {"travel": "int8", "mp_policy": HALF, "gradient_route": "direct"},
    "int8, gradients int8": {"travel": "int8", "gradient_travel": "int8", "gradient_route": "direct"},
}
CONTROLS = {"int4": (4, True), "int8 at home": (8, False), "int4 at home": (4, False)}  # bits, and exact ones kept
RUNS = ("float32", "bfloat16", "int8, gradients bfloat16", "int4 at home")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Loss curves by what travels. See the top of the file.")
    add = parser.add_argument
    every = [*ROTATED, *CONTROLS]
    add("--runs", default=";".join(RUNS), help=f"separated by semicolons, of {'; '.join(every)} (default: %(default)s)")
    add("--ranks", type=int, default=2)
    add("--steps", type=int, default=300)
    add_gpt_options(parser, batch=8, seq=64, layers=2, hidden=128, heads=4, lr=1e-3)
    add("--seeds", type=int, default=3, help="how many, from --seed on; each is a run of all")
    add("--quick", action="store_true", help="a smaller model and few steps, to see that it works; records nothing")
    add("--machine", help="name of the results folder (default: of this machine)")
    add("--output", type=Path, metavar="FILE.jsonl", help="in the place of the file under results/")
    add_launch_options(parser)
    args = parser.parse_args()
    if args.quick:
        vars(args).update(QUICK)
    check_gpt_options(args, parser.error, "ranks", "steps", "seeds")
    args.runs = [name.strip() for name in args.runs.split(";")]
    if unknown := [name for name in args.runs if name not in every]:
        parser.error(f"--runs: expected some of {'; '.join(every)}, got {unknown[0]}")
    if "float32" not in args.runs:
        parser.error("--runs: expected float32 among them, with which the others are compared")
    args.command = command_line()
    return args


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest of 2^bits - 1 values in every block of the flat weight."""
    flat = weight.detach().flatten()
    blocks = nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    step = blocks.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    levels = torch.where(step > 0, blocks / step, 0.0).round()
    return (levels * step).flatten()[: len(flat)].view_as(weight)


class Control:
    """A plain model on every rank with weights rounded while it computes; they stay rounded unless `keep_exact`."""

    def __init__(self, model: nn.Module, bits: int, keep_exact: bool) -> None:
        self._model, self._bits, self._keep_exact = model, bits, keep_exact
        weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)]
        self._weights = list({id(weight): weight for weight in weights}.values())

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        exact = [weight.detach().clone() for weight in self._weights]
        with torch.no_grad():
            for weight in self._weights:
                weight.copy_(rounded(weight, self._bits))
        yield
        with torch.no_grad():
            for weight, values in zip(self._weights, exact if self._keep_exact else (), strict=self._keep_exact):
                weight.copy_(values)

    def average(self, ranks: int) -> None:
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(ranks)


def train(place: Place, args: argparse.Namespace) -> list[Row]:
    """Runs one rank; rank 0 returns the results."""
    text = read_text(args.data)
    edge = len(text) - len(text) // HELD_OUT
    card = environment_card(place.device, args.command)
    shape = f"byte GPT, {args.layers} layers, hidden {args.hidden}, {args.heads} heads, seq {args.seq}"
    rows = []
    for seed, name in product(range(args.seed, args.seed + args.seeds), args.runs):
        row = _train_one(name, seed, place, args, text[:edge], text[edge:])
        if place.rank == 0:
            summary = f"loss {row['losses'][0]:.3f} -> {row['losses'][-1]:.3f}, held out {row['eval_loss']:.4f}"
            print(f"{name:<26} seed {seed}: {summary}, {row['seconds']:.0f} s", file=sys.stderr, flush=True)
        common = {key: getattr(args, key) for key in ("steps", "lr", "lr_warmup")} | {"seed": seed}
        rows.append(
            result_line(
                card,
                benchmark="travel_curves",
                case=f"gpt/{name}",
                strategy=name,
                shape=shape,
                tokens=args.batch * args.seq,
                ranks=place.ranks,
                direction="step",
                dtype="float32",
                threads=torch.get_num_threads(),
                text_bytes=len(text),
                text_sha256=fingerprint(text),
                **common,
                **row,
            )
        )
    return rows


def _train_one(
    name: str, seed: int, place: Place, args: argparse.Namespace, text: torch.Tensor, held_out: torch.Tensor
) -> Row:
    torch.manual_seed(seed)
    model = GPT(seq=args.seq, layers=args.layers, hidden=args.hidden, heads=args.heads).to(place.device)
    control = Control(model, *CONTROLS[name]) if name in CONTROLS else None
    if control is None:
        rtp_ext.fully_rotate(model, mesh=place.mesh, **ROTATED[name])
    ring = None if control else rtp_ext.ring_of(model)
    computing = control.computing if control else contextlib.nullcontext
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    def windows(of: torch.Tensor, step: int, seed: int) -> list[torch.Tensor]:
        first = args.batch * place.rank
        found = sample_windows(
            of, seed=seed, step=step, rows=args.batch * place.ranks, seq=args.seq, first=first, last=first + args.batch
        )
        return [each.to(place.device) for each in found]

    losses = []
    start = time.perf_counter()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / max(1, args.lr_warmup))
        optimizer.zero_grad()
        with computing():
            loss = model(*windows(text, step, seed))
            loss.backward()
        if control is not None:
            control.average(place.ranks)
        optimizer.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - start
    sent = None if ring is None else (ring.bytes_sent("weight") + ring.bytes_sent("gradient")) / args.steps
    with torch.no_grad(), computing():
        evaluated = [model(*windows(held_out, step, HELD_OUT_SEED)).item() for step in range(EVALUATED)]
    if ring is not None:
        ring.close()
    return {
        "transport": None if ring is None else ring.transport,
        "control": control is not None,
        "seconds": seconds,
        "step_ms": 1e3 * gather(seconds, place).max().item() / args.steps,
        "ring_bytes": sent,
        "eval_loss": gather(sum(evaluated) / len(evaluated), place).mean().item(),
        "losses": gather(losses, place).mean(0).tolist(),
    }


def print_table(rows: list[Row]) -> None:
    first = rows[0]
    print(f"\n{first['shape']}; AdamW, {first['tokens']} tokens per rank and step, {first['steps']} steps")
    print(f"{first['ranks']} ranks on {first['device']}; losses in nats per byte\n")
    print(f"{'run':<26}{'held out':>10}{'of float32':>20}{'last 20':>10}{'MiB a step':>12}{'seconds':>9}")
    for row in rows:
        last = row["losses"][-20:]
        sent = "-" if row["ring_bytes"] is None else f"{row['ring_bytes'] / 2**20:.2f}"
        print(
            f"{row['strategy']:<26}{row['eval_loss']:>10.4f}{apart(row):>20}"
            f"{sum(last) / len(last):>10.4f}{sent:>12}{row['seconds']:>9.0f}"
        )


def surprises(rows: list[Row]) -> list[str]:
    """Returns rotated runs whose loss differs from that of float32; and controls, if none of them has a higher loss.

    `rows`: the results of `over_seeds`.
    """
    texts = [
        f"{row['strategy']} is {apart(row)} off, at most {CLOSE:.0%} are expected"
        for row in rows
        if not row["control"] and not abs(row["off"]) <= CLOSE  # NaN is not
    ]
    controls = [row["off"] for row in rows if row["control"]]
    if controls and not max(controls) > CLOSE:
        texts.append(f"the worst control is only {max(controls):+.2%} off: nothing is proved")
    return texts


def main() -> None:
    args = parse_arguments()
    output = None
    if not args.quick or args.output:
        folder = args.machine or machine_name(torch.device("cuda" if args.device == "cuda" else "cpu"))
        output = args.output or RESULTS / folder / "travel_curves.jsonl"
        if (refusal := refusal_to_write(output)) is not None:
            sys.exit(refusal)
    rows = launch(train, args, args.ranks)
    if not is_first():
        return
    merged = over_seeds(rows)
    print_table(merged)
    for row in rows if output else ():
        append_line(output, row)
    keys = ("eval_loss", "off", "off_error", "ring_bytes", "seconds")
    print(json.dumps({row["strategy"]: {key: row[key] for key in keys} for row in merged}), flush=True)
    if not args.quick and (texts := surprises(merged)):
        sys.exit("; ".join(texts))


if __name__ == "__main__":
    main()
