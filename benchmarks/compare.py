"""Step time and memory of several strategies on one model, in one run.

    python benchmarks/compare.py --model mlp --strategies rtp,fsdp2,ddp,tp,single --ranks 2 --tokens 256,1024
    python benchmarks/compare.py --model mlp --strategies rtp,fsdp2 --ranks 1,2,4,8 --tokens 256     # scaling
    python benchmarks/compare.py --model mlp --hosts 2 --rate 1gbit,2gbit,none --tokens 256,1024     # between hosts
    python benchmarks/compare.py --model llama-bytes --lora 8 --hosts 2 --rate 250mbit --tokens 64   # frozen weights
    python benchmarks/compare.py --model llama-small --optimizer muon --tokens 256     # matrices that no rank has whole

All strategies live in the same processes and take turns, one training step (forward, backward, optimizer) each. The
order changes from round to round: after a number of rounds, which the table gives, each strategy has followed every
other one equally often, so other load on the machine affects all of them equally. A barrier precedes every timed step;
the time of a step is that of its slowest rank.

Every rank has its own batch of `--tokens` tokens. `single` is one process: rank 0 alone, with the same number of
threads, computes with the batches of all ranks. With tensor parallelism (`tp`) every rank computes with the batches of
all ranks and its part of the weights, so a step has as many tokens. `fsdp2` and `fsdp2-noreshard` wrap every block and
then the root; `rtp-c10d` is rtp over the torch.distributed backend that the others use. Gloo has no reduce-scatter;
torch implements it with an all-reduce, so fully_shard sends more on CPUs than it would between GPUs. `tp` does not
shard norms and gathers the logits. `--dtype bfloat16` leaves parameters in float32: rtp and fsdp2 cast them, the others
run under autocast. `--reduce-dtype` sets the dtype of the gradients of these two. `--travel`, `--gradient-route` and
`--gradient-travel` are options of fully_rotate. They apply to every rtp strategy except `rtp-exact`, which runs with
the defaults for comparison. `ring` is the amount that a rank sends along the ring in a step, in MiB.

Exposed communication is the time of forward and backward beyond that of a reference, which takes turns with the
strategies: every rank runs a plain copy of the model on its own batch, at the same time and without communication. The
reference therefore has the same GEMMs and the same load on the cores. The slowdown of sharded GEMMs, hooks, casts, and
copies that the CPU makes for hops count as exposed communication. The optimizer counts on neither side, since
sharded strategies run 1/R of it. `single` has no such number, since its work is R times as much. The reference is the
row `none`.

With `--hosts` the ranks run on made hosts on this machine (shared/hosts.py; needs root), whose links are limited to
`--rate`. The kernel counts the bytes that leave a host in a step, and the output shows them beside the closed form.
Each step time is compared with an estimate of the shortest possible one (`roof`: shared/wire.py), which includes what
products lose beside a bare socket program, measured in the same run (shared/wire.py).

`deepspeed` (ZeRO-3), `simplefsdp` and `simplefsdp-compiled` (torchtitan's) and `upstream` (the code of the paper's
authors in the folder `--upstream`) are other packages (shared/peers.py), in float32. Each is tried first beside
one process: one that fails, or computes something else, gets a line with `error` in place of values.

Memory is measured first (shared/memory.py), in other processes except under torchrun. `buffers` is the transient of
forward and backward beyond that of the plain model on one local batch: unsharded weights, gradient buckets, send and
receive buffers.
`kept_efficiency` is (parameters, gradients and optimizer of one process / R) / those of a rank; `peak_efficiency` is
(peak of one process with the batches of all ranks / R) / peak of a rank. 1 is a perfect division.

With `--optimizer muon` all is float32. Muon steps the hidden matrices, the same ones for every strategy
(`matrix_bytes`), and AdamW the rest. `rtp`, `rtp-gram` and `rtp-whole` differ in the `exchange` of rtp_ext.optim.Muon.
`fsdp2` has torch.optim.Muon on DTensors. With `fsdp2-gathered` every rank gathers each matrix and iterates all of it,
as with `ddp`, whose matrices are whole. torch's iteration runs in float32 (shared/optimizers.py). A barrier precedes
the optimizer, so that its time and the bytes that leave a host meanwhile (`optimizer_sent_bytes`) are its own;
`sent_bytes` and the roof are those of forward and backward. `exchange_bytes` is the count of rtp_ext.optim.Muon, of the
rank that sends most. Losses have to agree to 1e-4. The lines are appended to muon.jsonl.

With `--lora` only adapters of PEFT around all linear layers of the blocks are trained. Frozen weights are rounded to
values of nf4 first, so that `rtp-nf4`, which keeps and sends them in nf4, computes with the same weights as the others;
`rtp-bf16` and `rtp-int8` send all weights in fewer bits. The lines are appended to lora.jsonl.

With several numbers of ranks each is a run of its own; `scaling_efficiency` is tokens per second / (R times those of
the same strategy at R = 1). Where ranks have more threads than there are cores they share them, and the output says
so: such a result does not describe scaling over processors.

All strategies take equally many steps. The run fails and records nothing unless the losses agree at every step, the
first loss agrees with that of the reference, and every parameter's first gradient agrees on every rank in its norm and
in a weighted sum of its elements: see shared/agreement.py. (Losses alone do not suffice: AdamW hides whether gradients
are summed or averaged, and an untrained bias hardly changes a loss.)

The last line of stdout is JSON. One JSON line per strategy, number of ranks and token count is appended to
results/<machine>/compare.jsonl. `--where N` records where the time of N more steps goes: shared/recording.py.
"""

import argparse
import dataclasses
import json
import math
import operator
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from shared.agreement import spreads, tolerances
from shared.card import append_line, environment_card, result_line
from shared.compare_options import describe, parse_arguments
from shared.contestant import Batch, Contestant, balanced_orders, failures
from shared.launch import Place, gather, is_first, launch
from shared.memory import PROBED_STEPS, Memory, MemoryProbe
from shared.models import WORKLOADS
from shared.peers import PEERS, Upstream
from shared.recording import look_inside, record_steps
from shared.strategies import STRATEGIES, Trainer
from shared.table import Columns, console, mebibytes, number, told
from shared.wire import Sockets, adapters_form, closed_form, measure_sockets, processors, roof

from rtp_ext.measure.timing import Sample

Result = dict[str, Any]
SOCKET_TIMES = 5


def batch_ranks(strategy: str, place: Place) -> Iterable[int]:
    """Returns the ranks whose batches this rank computes with."""
    return range(place.ranks) if STRATEGIES[strategy].every_batch else (place.rank,)


def make_batch(args: argparse.Namespace, tokens: int, ranks: Iterable[int], device: torch.device) -> Batch:
    """The batches of `ranks`, each of `tokens` tokens and different from the others, one after the other."""
    seeds = (args.seed * 1_000_003 + rank for rank in ranks)
    samples = [WORKLOADS[args.model].sample(tokens, torch.Generator().manual_seed(seed)) for seed in seeds]
    inputs, targets = (torch.cat(parts).to(device) for parts in zip(*samples, strict=True))
    return inputs, targets


def make_trainer(strategy: str, place: Place, args: argparse.Namespace) -> Trainer:
    ways = _ways(strategy, args)
    reduce_dtype = ways.pop("reduce_dtype")
    Upstream.folder = args.upstream
    return PEERS.get(strategy, Trainer)(
        strategy,
        partial(WORKLOADS[args.model].build, args.lora),
        place.mesh,
        place.device,
        dtype=args.dtype,
        lr=args.lr,
        seed=args.seed,
        optimizer=args.optimizer,
        reduce_dtype=reduce_dtype,
        rotation={name: value for name, value in ways.items() if value is not None},
    )


def make_contestant(strategy: str, place: Place, args: argparse.Namespace, tokens: int) -> Contestant:
    batch = make_batch(args, tokens, batch_ranks(strategy, place), place.device)
    idle = place.rank > 0 and STRATEGIES[strategy].one_process
    return Contestant(strategy, args, place.device, batch, None if idle else make_trainer(strategy, place, args))


def measure_memory(place: Place, args: argparse.Namespace) -> dict[tuple[str, int], dict[str, float | None]]:
    """Bytes per rank (of the rank that holds most) of every strategy at every number of tokens, and efficiencies."""
    measured = {}
    nothing = Memory(0, 0, 0, 0, 0, 0, 0)
    for tokens in args.tokens:
        plain = _probe("single", (place.rank,), place, args, tokens)
        dist.barrier()
        alone = _probe("single", range(place.ranks), place, args, tokens) if place.rank == 0 else nothing
        ideal = gather([alone.kept / place.ranks, alone.peak / place.ranks], place)[0].tolist()
        for strategy in args.strategies:
            dist.barrier()
            memory = alone if STRATEGIES[strategy].one_process else None
            memory = memory or _probe(strategy, batch_ranks(strategy, place), place, args, tokens)
            values = memory.row() | {
                "buffer_bytes": memory.transient_forward_backward - plain.transient_forward_backward,
                "kept_bytes": memory.kept,
                "pss_bytes": memory.pss or 0,
            }
            largest = gather(list(values.values()), place).amax(0).long().tolist()
            row: dict[str, float | None] = dict(zip(values, largest, strict=True))
            if memory.pss is None:
                row["pss_bytes"] = None
            row["kept_efficiency"] = ideal[0] / row["kept_bytes"]
            row["peak_efficiency"] = ideal[1] / row["peak_bytes"]
            if STRATEGIES[strategy].every_batch:
                row["buffer_bytes"] = None
            measured[strategy, tokens] = row
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
    sockets = Sockets(0, 0)
    if args.network is not None:
        sockets = measure_sockets(place, args.network.rate, min(args.steps, SOCKET_TIMES))
    return [row for tokens in args.tokens for row in _race(place, args, tokens, card, sockets)]


def _race(place: Place, args: argparse.Namespace, tokens: int, card: Result, sockets: Sockets) -> list[Result]:
    reference = make_contestant("none", place, args, tokens)
    known = {"none": reference}
    contestants = [known.get(name) or make_contestant(name, place, args, tokens) for name in args.strategies]
    takers = [reference, *(contestant for contestant in contestants if contestant is not reference)]
    orders = balanced_orders(len(takers))
    rounds = args.warmup + args.steps
    live = place.rank == 0 and sys.stderr.isatty()
    for turn in range(rounds):
        for index in orders[turn % len(orders)]:
            dist.barrier()
            takers[index].step(timed=turn >= args.warmup)
        if live:
            print(f"\r{tokens} tokens: round {turn + 1}/{rounds}\x1b[K", end="", file=sys.stderr, flush=True)
    if live:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    local_ms = _slowest(reference.phases["forward_backward"], place).median / 1e3
    rows = [_result(contestant, place, args, tokens, card, local_ms) for contestant in contestants]
    for row, contestant in zip(rows, contestants, strict=True):
        row |= roof(row, contestant.sent, sockets, place)
    trained = {c.strategy: (c.trainer, c.batch) for c in contestants if c.trainer}
    record_steps(args.trace, {f"{name}-{place.ranks}-{tokens}": pair for name, pair in trained.items()})
    look_inside(args, place, trained, rows)
    for taker in takers:
        taker.close()
    first_loss = gather(float(reference.losses[0]), place).mean().item()
    if place.rank == 0:
        _add_comparisons(rows, first_loss)
    return rows + [_not_timed(name, place, args, tokens, card) for name in args.failures]


def _slowest(mine: list[float], place: Place) -> Sample:
    """Summarizes the timed steps; the time of each step is that of its slowest rank."""
    return Sample.of(gather(mine, place) * 1e6)


def _result(
    contestant: Contestant, place: Place, args: argparse.Namespace, tokens: int, card: Result, local_ms: float
) -> Result:
    kind = STRATEGIES[contestant.strategy]
    one_process = kind.one_process
    idle = [0.0] * (args.warmup + args.steps)
    losses = gather([float(loss) for loss in contestant.losses] or idle, place)
    times = _slowest(contestant.seconds, place)
    passes, updates = (_slowest(part, place) for part in contestant.phases.values())
    used = {name: gather(part, place).mean(0).median().item() * 1e3 for name, part in contestant.processor.items()}
    return result_line(
        card,
        **_of_the_run(contestant.strategy, place, args, tokens),
        transport=contestant.transport,
        **_ways(contestant.strategy, args),
        ring_bytes=contestant.ring_bytes,
        step_ms=times.median / 1e3,
        **_milliseconds("", times, used["step"]),
        forward_backward_ms=passes.median / 1e3,
        **_milliseconds("forward_backward_", passes, used["forward_backward"]),
        reference_forward_backward_ms=local_ms,
        optimizer_ms=updates.median / 1e3,
        **_milliseconds("optimizer_", updates, used["optimizer"]),
        **contestant.muon(place),
        exposed_ms=None if one_process else passes.median / 1e3 - local_ms,
        closed_form_bytes=_closed_form(contestant.strategy, place, args),
        tokens_per_s=tokens * place.ranks / times.median * 1e6,
        losses=(losses[0] if one_process else losses.mean(0)).tolist(),
        gradients=[contestant.gradients] if one_process else gather(contestant.gradients, place).tolist(),
    )


def _milliseconds(name: str, times: Sample, processor_ms: float) -> Result:
    percentiles = {f"{name}p20_ms": times.p20 / 1e3, f"{name}p80_ms": times.p80 / 1e3}
    return percentiles | {f"{name}processor_ms": processor_ms}


def _not_timed(strategy: str, place: Place, args: argparse.Namespace, tokens: int, card: Result) -> Result:
    """Returns the row of a strategy whose trial failed."""
    run = _of_the_run(strategy, place, args, tokens)
    return result_line(card, **run, **_ways(strategy, args), error=args.failures[strategy])


def _of_the_run(strategy: str, place: Place, args: argparse.Namespace, tokens: int) -> Result:
    """Returns the fields of a row that its run decides, before anything is measured."""
    return {
        "benchmark": "compare",
        "case": f"{args.model}/{strategy}",
        "strategy": strategy,
        "shape": WORKLOADS[args.model].shape,
        "tokens": tokens,
        "ranks": place.ranks,
        "direction": "step",
        "backend": dist.get_backend(),
        "dtype": args.dtype,
        "asked_travel": args.travel,
        "lora": args.lora,
        "optimizer": args.optimizer,
        "balanced_over": len(balanced_orders(len({"none", *args.strategies}))),  # the reference takes turns too
        "steps": args.steps,
        "warmup": args.warmup,
        "threads": torch.get_num_threads(),
        "cores_shared": place.device.type == "cpu" and place.ranks * torch.get_num_threads() > processors(),
        "lr": args.lr,
        "seed": args.seed,
        "strategies": args.strategies,
    }


def _ways(strategy: str, args: argparse.Namespace) -> Result:
    """Returns the formats and the route in which this strategy sends weights and gradients; None is the default."""
    kind = STRATEGIES[strategy]
    rotated = strategy.startswith("rtp") and not kind.exact
    told = {name: getattr(args, name) if rotated else None for name in ("travel", "gradient_route", "gradient_travel")}
    told |= {"reduce_dtype": args.reduce_dtype if kind.follows_policy and not kind.exact else "float32"}
    return told | dict(kind.ways)


def _closed_form(strategy: str, place: Place, args: argparse.Namespace) -> float | None:
    ways = _ways(strategy, args)
    if {args.dtype, ways["reduce_dtype"]} != {"float32"} or ways["gradient_travel"]:
        return None
    workload = WORKLOADS[args.model]
    if args.lora:
        return adapters_form(strategy, workload.sizes, args.lora, place.ranks, ways)
    with torch.device("meta"):
        return closed_form(strategy, workload.build(), place.ranks, args.ranks_per_host, ways)


def _add_comparisons(rows: list[Result], first_loss: float) -> None:
    """Adds rtp's step time relative to each, and the largest relative differences between any two.

    The differences cover the losses of all steps, the first also against `first_loss`, and the signatures of every
    parameter's gradient on every rank. Ranks that train alone on their own batches are not compared.
    """
    if len(matrices := {row.get("matrix_bytes") for row in rows}) > 1:
        raise RuntimeError(f"the strategies gave Muon different matrices, of {sorted(matrices, key=str)} bytes")
    rtp = next((row for row in rows if row["strategy"] == "rtp"), None)
    losses, gradients = ([row.pop(name) for row in rows] for name in ("losses", "gradients"))
    same = [index for index, row in enumerate(rows) if not STRATEGIES[row["strategy"]].alone]
    found = spreads(*([values[index] for index in same] for values in (rows, losses, gradients)), first_loss)
    for index, row in enumerate(rows):
        row["rtp_ratio"] = None if rtp is None else rtp["step_ms"] / row["step_ms"]
        passes = "forward_backward_ms"
        row["rtp_forward_backward_ratio"] = None if rtp is None else rtp[passes] / row[passes]
        row["loss"] = losses[index][-1]
        row["loss_spread"], row["gradient_spread"] = found[same.index(index)] if index in same else min(found)


# -- output ------------------------------------------------------------------------------------------------------------

COLUMNS: Columns = {
    "strategy": told("strategy"),
    "step ms": number("step_ms", ",.1f"),
    "p20": number("p20_ms", ",.1f"),
    "p80": number("p80_ms", ",.1f"),
    "rtp/this": number("rtp_ratio", ",.2f"),
    "fwd+bwd": number("forward_backward_ms", ",.1f"),
    "exposed": number("exposed_ms", ",.1f"),
    "update": number("optimizer_ms", ",.1f"),
    "cpu ms": number("processor_ms", ",.1f"),
    "tokens/s": number("tokens_per_s", ",.0f"),
    "scaling": number("scaling_efficiency", ",.2f"),
    "roof ms": number("roof_ms", ",.1f"),
    "hidden": number("hidden_share", ",.2f"),
    "ring": mebibytes("ring_bytes", digits=1),
    "sent": mebibytes("sent_bytes", digits=1),
    "formula": mebibytes("closed_form_bytes", digits=1),
    "upd sent": mebibytes("optimizer_sent_bytes", digits=1),
    "upd count": mebibytes("exchange_bytes", digits=1),
    "param": mebibytes("parameter_bytes", digits=1),
    "grad": mebibytes("gradient_bytes", digits=1),
    "optim": mebibytes("optimizer_bytes", digits=1),
    "transient": mebibytes("transient_bytes", digits=1),
    "buffers": mebibytes("buffer_bytes", digits=1),
    "peak pss": mebibytes("pss_bytes", digits=1),
    "kept eff": number("kept_efficiency", ",.2f"),
    "peak eff": number("peak_efficiency", ",.2f"),
    "loss": number("loss", ",.6f"),
}


def print_table(rows: list[Result], args: argparse.Namespace) -> None:
    """Prints the table of one number of ranks, one number of tokens, and one rate."""
    first = rows[0]
    optimizer = {"adamw": "AdamW", "muon": "Muon and AdamW"}[args.optimizer]
    threads = f"{first['threads']} CPU thread{'s' * (first['threads'] > 1)} per rank"
    print(
        f"\n{args.model}: {first['shape']}; {optimizer}, {args.dtype}, {first['ranks']} ranks on {first['device']}, "
        f"{threads}, collectives over {first['backend']}"
    )
    print(f"{first['tokens']} tokens per rank; {args.steps} interleaved steps after {args.warmup} warm-up steps")
    print(f"each strategy follows every other one equally often in {first['balanced_over']} steps")
    print(f"reference without communication: forward and backward {first['reference_forward_backward_ms']:.1f} ms")
    if first["cores_shared"]:
        print(f"TIME-SHARED: {first['ranks']} ranks take turns on {first['cores']} cores")
    if "hosts" in first:
        delay = f", {first['delay']} delay" if first["delay"] else ""
        print(f"{first['hosts']} made hosts, {first['rate']}{delay}; sent: MiB that leave a host in a step")
    if args.optimizer == "muon":
        matrices = f"{first['matrix_bytes'] / 2**20:.1f} MiB of matrices"
        print(f"{matrices}; upd: MiB that updates send in a step, by the kernel's count and by Muon's")
    console(COLUMNS, rows)
    timed = [row for row in rows if "error" not in row]
    losses, gradients = (max(row[key] for row in timed) for key in ("loss_spread", "gradient_spread"))
    print(
        f"\nMemory in MiB per rank. Largest relative loss difference at any step: {losses:.1e}; of a parameter's "
        f"gradient: {gradients:.1e}",
        flush=True,
    )


def add_scaling(rows: list[Result]) -> None:
    """Tokens per second / (R times those of the same strategy at R = 1); None without that, and for one process."""
    rows = [row for row in rows if "error" not in row]
    one = {(row["strategy"], row["tokens"]): row["tokens_per_s"] for row in rows if row["ranks"] == 1}
    for row in rows:
        base = None if STRATEGIES[row["strategy"]].one_process else one.get((row["strategy"], row["tokens"]))
        row["scaling_efficiency"] = None if base is None else row["tokens_per_s"] / (row["ranks"] * base)


def report(rows: list[Result], args: argparse.Namespace) -> None:
    """Prints and records the results. Exits with an error where the losses disagree."""
    add_scaling(rows)
    tables: dict[tuple[Any, ...], list[Result]] = {}
    for row in rows:
        tables.setdefault((row["ranks"], row.get("rate"), row["tokens"]), []).append(row)
    for table in tables.values():
        print_table(table, args)
    timed = [row for row in rows if "error" not in row]
    wrong = [row for row in timed if not all(map(operator.le, _spreads(row), tolerances(row)))]  # NaN is wrong
    if not wrong:
        for row in rows:
            append_line(args.output, row)
    keys = ("step_ms", "p20_ms", "p80_ms", "rtp_ratio", "exposed_ms", "tokens_per_s", "scaling_efficiency")
    keys += ("optimizer_ms", "peak_bytes", "buffer_bytes", "kept_efficiency", "peak_efficiency", "ring_bytes", "loss")
    keys += ("roof_ms", "hidden_share", "sent_bytes", "closed_form_bytes") if "hosts" in rows[0] else ()
    keys += ("matrix_bytes", "exchange_bytes", "optimizer_sent_bytes") if args.optimizer == "muon" else ()
    keys += ("forward_backward_ms", "processor_ms", "pss_bytes", "loss_spread", "gradient_spread")
    cases = {_name(row): {key: _number(row.get(key)) for key in keys} for row in timed}
    cases |= {_name(row): {"error": row["error"]} for row in rows if "error" in row}
    print(json.dumps({"loss_agrees": not wrong, "cases": cases}, allow_nan=False), flush=True)
    if wrong:
        (loss, gradient), (most, most_gradient) = _spreads(wrong[0]), tolerances(wrong[0])
        sys.exit(
            f"the strategies differ: losses by {loss:.2e} (relative; at most {most:.0e} are expected), a parameter's "
            f"gradient by {gradient:.2e} (at most {most_gradient:.0e}), in {_name(wrong[0])}"
        )


def _spreads(row: Result) -> tuple[float, float]:
    return row["loss_spread"], row["gradient_spread"]


def _name(row: Result) -> str:
    return f"{row['strategy']}@R{row['ranks']}T{row['tokens']}" + (f"@{row['rate']}" if "rate" in row else "")


def _number(value: float | None) -> float | None:
    """None for what JSON has no number for."""
    return value if value is not None and math.isfinite(value) else None


def main() -> None:
    args = parse_arguments()
    if is_first():
        print(describe(args), flush=True)
    rows, asked = [], args.strategies
    for ranks in args.ranks:
        args.strategies = asked
        args.failures = failures(measure_time, args, ranks, launch)
        args.strategies = [name for name in asked if name not in args.failures]
        # before and, where launch starts processes, apart: watching memory changes how memory is allocated
        if args.network is not None:
            args.network = dataclasses.replace(args.network, rate=None, delay=None)
        memory = launch(measure_memory, args, ranks) if args.memory else {}
        for network in args.networks or [None]:
            args.network = network
            part = launch(measure_time, args, ranks)
            for row in part:
                row.update(memory.get((row["strategy"], row["tokens"]), {}))
            rows += part
    if is_first():
        report(rows, args)


if __name__ == "__main__":
    main()
