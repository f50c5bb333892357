"""A small Llama of the transformers package, eager and compiled, on a ring and under fully_shard.

    python benchmarks/compatibility/compiled.py  # both, three modes; a minute or two
    python benchmarks/compatibility/compiled.py --strategies rtp --modes eager,inductor --fused-head
    python benchmarks/compatibility/compiled.py --quick --layers 1 --hidden 64 --tokens 16 --steps 2  # does it work

For each strategy the same weights are trained on the same batches, every mode in processes of its own. A line for each
is appended to results/MACHINE/compiled.jsonl, unless --quick: median milliseconds of a step, and that divided by the
eager one; seconds of the first step, which compiles; graphs, graph breaks and their reasons, as torch._dynamo counts
them; hops of a step; the largest relative difference of a loss from the eager one; and the peak of the resident bytes
of a process, or of what the device had allocated, in the steps that are timed. Where hops differ from the eager ones or
between ranks, or losses differ, the command fails.

On a ring the whole model is one graph (`fullgraph=True`), on CPUs and on GPUs; fully_shard compiles with the graph
breaks that its hooks cause. `--checkpoint` recomputes blocks in backward; each such block breaks the graph.
"""

import argparse
import json
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import rtp_ext

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.card import add_output_options, append_line, complete_output, environment_card, result_line
from shared.launch import Place, add_launch_options, is_first, launch
from shared.memory import status_bytes
from shared.table import Row, Table, last_of_each, mebibytes, number, told

MODES = ("eager", "aot_eager", "inductor")
STRATEGIES = ("rtp", "fully_shard")
TOLERANCE = {"float32": 1e-4, "float64": 1e-10, "bfloat16": 3e-2}  # of the loss, relative
WARM = 2  # steps before those that are timed


def _strategy(row: Row) -> str:
    options = [name for key, name in (("fused_head", "fused head"), ("checkpoint", "recomputed")) if row[key]]
    return ", ".join(["a ring" if row["strategy"] == "rtp" else f"`{row['strategy']}`", *options])


_KEYS = ("ranks", "shape", "tokens", "dtype", "checkpoint", "fused_head", "strategy", "mode")
TABLE = Table(
    "compiled",
    {
        "ranks": told("ranks"),
        "strategy": _strategy,
        "mode": told("mode"),
        "graphs": told("graphs"),
        "graph breaks": told("graph_breaks"),
        "hops of a step": told("hops"),
        "step, ms": number("step_ms", 1),
        "of eager": number("against_eager", 2),
        "first step, s": number("first_step_s", 1),
        "peak, MiB": mebibytes("peak_bytes"),
    },
    lambda lines, _: last_of_each(lines, lambda line: tuple(line[key] for key in _KEYS)),
    lambda rows: f": {'; '.join(dict.fromkeys(row['shape'] for row in rows))}, {rows[0]['tokens']} tokens a rank.",
    machine=False,
    empty="\nNot measured yet: `make compiled`.\n\n",
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Eager and compiled steps of a Llama. See the top of the file.")
    add = parser.add_argument
    add("--ranks", type=int, default=2)
    add("--strategies", default=",".join(STRATEGIES))
    add("--modes", default=",".join(MODES))
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=256)
    add("--batch", type=int, default=2, help="rows per rank and step")
    add("--tokens", type=int, default=128, help="per row")
    add("--steps", type=int, default=10, help="that are timed, after others")
    add("--dtype", choices=tuple(TOLERANCE), default="float32")
    add("--fused-head", action="store_true", help="on a ring: vocabulary head and loss as one")
    add("--checkpoint", action="store_true", help="recompute blocks in backward")
    add("--json", action="store_true", help="print lines of JSON, not a table")
    add_output_options(parser, quick="append nothing to the results")
    add_launch_options(parser)
    args = parser.parse_args()
    for name, known in (("strategies", STRATEGIES), ("modes", MODES)):
        chosen = getattr(args, name).split(",")
        if not set(chosen) <= set(known):
            parser.error(f"--{name}: expected some of {', '.join(known)}, got {getattr(args, name)}")
        setattr(args, name, chosen)
    if args.modes[0] != "eager":
        parser.error("--modes: expected eager first, what the others are compared with")
    args.tolerance = TOLERANCE[args.dtype]
    kind = "cuda" if args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available()) else "cpu"
    complete_output(args, "compiled", parser.error, torch.device(kind))
    return args


def make(args: argparse.Namespace, place: Place, strategy: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=args.tokens,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(place.device, getattr(torch, args.dtype))
    if args.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if strategy == "rtp":
        return rtp_ext.fully_rotate(model, mesh=place.mesh, loss_head="fused" if args.fused_head else None)
    for layer in model.model.layers:
        fully_shard(layer, mesh=place.mesh)
    return fully_shard(model, mesh=place.mesh)


def run(place: Place, args: argparse.Namespace) -> dict[str, Any]:
    """Trains with `args.strategy` and `args.mode`."""
    model = make(args, place, args.strategy).train()
    call: Any = model
    if args.mode != "eager":
        whole = args.strategy == "rtp" and not args.checkpoint
        call = torch.compile(model, backend=args.mode, fullgraph=whole)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ring = rtp_ext.ring_of(model) if args.strategy == "rtp" else None
    losses, times, hops = [], [], 0
    for step in range(args.steps + WARM):
        generator = torch.Generator().manual_seed(1000 * place.rank + step)
        ids = torch.randint(512, (args.batch, args.tokens), generator=generator).to(place.device)
        if step == WARM:
            reset_peak(place.device)
        dist.barrier()
        before = _hops(ring)
        start = time.perf_counter()
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
        hops = _hops(ring) - before
    told: list[Any] = [None] * place.ranks
    dist.all_gather_object(told, (hops, peak(place.device)))
    counters = torch._dynamo.utils.counters
    breaks = {_short(reason): count for reason, count in counters["graph_break"].items()}
    if ring is not None:
        ring.close()
    return {
        "losses": losses,
        "hops_of_ranks": [theirs for theirs, _ in told],
        "step_ms": 1e3 * statistics.median(times[WARM:]),
        "first_step_s": times[0],
        "graphs": counters["stats"].get("unique_graphs", 0),
        "graph_breaks": sum(breaks.values()),
        "graph_break_reasons": breaks,
        "peak_bytes": max(theirs for _, theirs in told),
        "card": environment_card(place.device, args.command),
    }


def _hops(ring: rtp_ext.Ring | None) -> int:
    return 0 if ring is None else ring.hops("weight") + ring.hops("gradient")


def _short(reason: str) -> str:
    """The first line of what torch says of a graph break, without addresses."""
    return re.sub(r"0x[0-9a-f]+", "0x", reason.strip().partition("\n")[0])[:120]


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> int:
    """Bytes, since `reset_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return status_bytes("VmHWM")


def compare(args: argparse.Namespace) -> bool:
    """Runs everything; whether all hops and losses were as expected."""
    good = True
    known: list[float] = []  # losses of the first run of all: both strategies train the same
    for strategy in args.strategies:
        eager: dict[str, Any] = {}
        for mode in args.modes:
            args.strategy, args.mode = strategy, mode
            found = launch(run, args, args.ranks)
            losses, hops, card = (found.pop(key) for key in ("losses", "hops_of_ranks", "card"))
            known = known or losses
            if args.mode == "eager":
                eager = {**found, "losses": losses, "hops": hops[0]}
            difference = _difference(losses, eager["losses"])
            if hops != [eager["hops"]] * args.ranks or max(difference, _difference(losses, known)) > args.tolerance:
                good = False
                print(
                    f"{args.strategy}, {args.mode}: expected {eager['hops']} hops on every rank and losses {known}, "
                    f"got {hops} and {losses}",
                    file=sys.stderr,
                )
            line = result_line(
                card,
                benchmark="compiled",
                case=f"{args.strategy} {args.mode}",
                strategy=args.strategy,
                shape=f"Llama, {args.layers} layers, hidden {args.hidden}",
                tokens=args.batch * args.tokens,
                tokens_per_s=1e3 * args.ranks * args.batch * args.tokens / found["step_ms"],
                ranks=args.ranks,
                direction="step",
                dtype=args.dtype,
                mode=args.mode,
                checkpoint=args.checkpoint,
                fused_head=args.fused_head and args.strategy == "rtp",
                hops=hops[0] if args.strategy == "rtp" else None,
                loss_difference=difference,
                against_eager=found["step_ms"] / eager["step_ms"],
                **found,
            )
            if is_first():
                report(line, args)
    return good


def _difference(losses: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def report(line: dict[str, Any], args: argparse.Namespace) -> None:
    append_line(args.output, line)
    if args.json:
        print(json.dumps(line), flush=True)
        return
    print(
        f"{line['case']:<22}{line['step_ms']:8.1f} ms = {line['against_eager']:5.2f} of eager, first "
        f"{line['first_step_s']:5.1f} s, graphs {line['graphs']:>3}, breaks {line['graph_breaks']:>3}, hops "
        f"{line['hops']}, loss off by {line['loss_difference']:.1e}, {line['peak_bytes'] / 2**20:.0f} MiB",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(0 if compare(parse_arguments()) else 1)
