"""A small Llama of the transformers package, eager and compiled, on a ring and under fully_shard.

    python benchmarks/compiled.py --ranks 2 --json                       # times of a step, graph breaks, hops
    python benchmarks/compiled.py --strategies rtp --modes eager,aot_eager,inductor --json

For each strategy the same weights are trained on the same batches. `--json` prints one line for each mode: median
milliseconds of a step, seconds until the first step was done, graphs, graph breaks, hops of a step, the largest
relative difference of the loss from the eager one, and peak bytes of the process or the device. Where a mode's hops or
losses are not the eager ones the command fails.

On a ring the whole model is one graph (`fullgraph=True`), on CPUs and GPUs alike; fully_shard compiles with the graph
breaks that its hooks make. `--checkpoint` recomputes blocks in backward, at which graphs break.
"""

import argparse
import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shared.card import append_line, command_line, environment_card, result_line
from shared.launch import Place, add_launch_options, launch
from torch import nn
from torch.distributed.fsdp import fully_shard

import rtp_ext

MODES = ("eager", "aot_eager", "inductor")
STRATEGIES = ("rtp", "fully_shard")
TOLERANCE = {"float32": 1e-4, "float64": 1e-10, "bfloat16": 3e-2}  # of the loss, relative


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
    add("--steps", type=int, default=10, help="that are timed, after two others")
    add("--dtype", choices=tuple(TOLERANCE), default="float32")
    add("--fused-head", action="store_true", help="on a ring: vocabulary head and loss as one")
    add("--checkpoint", action="store_true", help="recompute blocks in backward")
    add("--json", action="store_true", help="print lines of JSON, not a table")
    add("--output", type=Path, metavar="FILE.jsonl", help="append the lines to this file, too")
    add_launch_options(parser)
    args = parser.parse_args()
    for name, known in (("strategies", STRATEGIES), ("modes", MODES)):
        chosen = getattr(args, name).split(",")
        if not set(chosen) <= set(known):
            parser.error(f"--{name}: expected some of {', '.join(known)}, got {getattr(args, name)}")
        setattr(args, name, chosen)
    if args.modes[0] != "eager":
        parser.error("--modes: expected eager first, what the others are compared with")
    args.command = command_line()
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


def run(place: Place, args: argparse.Namespace, strategy: str, mode: str) -> dict[str, Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = make(args, place, strategy).train()
    call: Any = model
    if mode != "eager":
        whole = strategy == "rtp" and not args.checkpoint
        call = torch.compile(model, backend=mode, fullgraph=whole)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ring = rtp_ext.ring_of(model) if strategy == "rtp" else None
    losses, times, hops = [], [], 0
    begun = time.perf_counter()
    first = 0.0
    if place.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(args.steps + 2):
        generator = torch.Generator().manual_seed(1000 * place.rank + step)
        ids = torch.randint(512, (args.batch, args.tokens), generator=generator).to(place.device)
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
        first = first or time.perf_counter() - begun
    counters = torch._dynamo.utils.counters
    on_gpu = place.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if ring is not None:
        ring.close()
    return {
        "losses": losses,
        "step_ms": 1e3 * statistics.median(times[2:]),
        "first_step_s": first,
        "graphs": counters["stats"].get("unique_graphs", 0),
        "graph_breaks": sum(counters["graph_break"].values()),
        "hops": hops if ring is not None else None,
        "peak_bytes": peak,
    }


def _hops(ring: rtp_ext.Ring | None) -> int:
    return 0 if ring is None else ring.hops("weight") + ring.hops("gradient")


def compare(place: Place, args: argparse.Namespace) -> None:
    card = environment_card(place.device, args.command)
    for strategy in args.strategies:
        eager: dict[str, Any] = {}
        expected: list[float] = []
        for mode in args.modes:
            found = run(place, args, strategy, mode)
            told: list[Any] = [None] * place.ranks
            dist.all_gather_object(told, found["hops"])
            losses = found.pop("losses")
            if mode == "eager":
                eager, expected = found, losses
            differences = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
            if told != [eager["hops"]] * place.ranks or max(differences) > TOLERANCE[args.dtype]:
                raise SystemExit(
                    f"{strategy}, {mode}: expected {eager['hops']} hops on every rank and losses {expected}, "
                    f"got {told} and {losses}"
                )
            line = result_line(
                card,
                benchmark="compiled",
                case=f"{strategy} {mode}",
                strategy=strategy,
                shape=f"Llama, {args.layers} layers, hidden {args.hidden}",
                tokens=args.batch * args.tokens,
                ranks=place.ranks,
                direction="step",
                dtype=args.dtype,
                mode=mode,
                checkpoint=args.checkpoint,
                fused_head=args.fused_head,
                loss_difference=max(differences),
                **found,
            )
            if place.rank == 0:
                report(line, args)


def report(line: dict[str, Any], args: argparse.Namespace) -> None:
    if args.output:
        append_line(args.output, line)
    if args.json:
        print(json.dumps(line), flush=True)
        return
    print(
        f"{line['case']:<22}{line['step_ms']:8.1f} ms, first {line['first_step_s']:5.1f} s, graphs {line['graphs']:>3} "
        f"breaks {line['graph_breaks']:>3}  hops {line['hops']}  loss off by {line['loss_difference']:.1e}",
        flush=True,
    )


def main() -> None:
    args = parse_arguments()
    launch(compare, args, args.ranks)


if __name__ == "__main__":
    main()
