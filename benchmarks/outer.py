"""Policies between replicas on one language model: loss over steps, bytes and seconds, at equal tokens.

    python benchmarks/outer.py --quick
    python benchmarks/outer.py --hosts 4 --rate 200mbit --pin            # replicas on made hosts, slow links (root)
    python benchmarks/outer.py --hosts 4 --ranks-per-host 2 --ring 2 --rate 200mbit

Every policy trains the byte-level GPT of train_lm.py from the same weights, with --optimizer, on the same windows of
the same text; the last twentieth of the text is held out. Policies run one after the other in the same processes.
`losses` are means over all ranks of the loss of a step, each with its replica's weights; `eval_loss` is the loss of the
mean of all replicas' weights (the result of `average()`) on held-out windows.

`sent_bytes` counts the bytes that all ranks of a replica have sent to other replicas, by the policy's own count, for
the replica that sent most. With `--hosts` there is a host for every replica, so all traffic that leaves a host is
between replicas: `kernel_bytes` is the kernel's count of it, with headers and bookkeeping, and `kernel_ratio` the
quotient of the two. Losses are collected at the end of a run, so collecting them adds nothing to either count.

The last line of stdout is JSON. One JSON line per policy is appended to results/MACHINE/outer.jsonl, unless --quick.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from shared.card import add_output_options, append_line, complete_output, environment_card, result_line
from shared.data import add_gpt_options, check_gpt_options, fingerprint, read_text, sample_windows
from shared.hosts import add_host_options, complete_hosts
from shared.launch import Place, add_launch_options, gather, is_first, launch
from shared.models import GPT
from shared.table import Columns, Row, Table, console, last_command, mebibytes, number, told
from shared.wire import Counter
from torch.distributed.device_mesh import init_device_mesh

import rtp_ext
from rtp_ext import outer

HELD_OUT = 20  # one part of so many
POINTS = 60  # of a curve
QUICK = {"steps": 12, "period": 4, "batch": 1, "seq": 32, "layers": 1, "hidden": 64, "heads": 2, "lr_warmup": 2}
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], float]] = {  # and a learning rate
    "AdamW": (torch.optim.AdamW, 2e-3),
    "SGD": (torch.optim.SGD, 0.5),  # without momentum, which takes what feedback delays for a direction
}
Policies = dict[str, Callable[[int], outer.OuterPolicy]]
POLICIES: Policies = {  # by name, of a period
    "all-reduce": lambda period: outer.AllReduce(),
    "zero": lambda period: outer.ZeroOuter(),
    "local-sgd": lambda period: outer.LocalSGD(period),
    "diloco": lambda period: outer.DiLoCo(period),
    "one-peer": lambda period: outer.Gossip("one-peer"),
    "gossip-ring": lambda period: outer.Gossip("ring"),
    "gossip-pga": lambda period: outer.Gossip("one-peer", global_period=period),
    "gossip-overlap": lambda period: outer.Gossip("one-peer", overlap=True),
    "topk": lambda period: outer.AllReduce(outer.TopK(0.01)),
    "topk-no-feedback": lambda period: outer.AllReduce(outer.TopK(0.01, error_feedback=False)),
    "sign": lambda period: outer.AllReduce(outer.Sign()),
    "quantize-4": lambda period: outer.AllReduce(outer.Quantize(4)),
    "powersgd": lambda period: outer.AllReduce(outer.PowerSGD(4)),
    "ef21": lambda period: outer.AllReduce(outer.EF21(outer.TopK(0.01))),
    "neolithic": lambda period: outer.AllReduce(outer.Neolithic(outer.TopK(0.01), rounds=4)),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare policies between replicas. See the top of the file.")
    add = parser.add_argument
    add("--policies", default=",".join(POLICIES), help=f"of {', '.join(POLICIES)} (default: all)")
    add("--replicas", type=int, default=4)
    add("--ring", type=int, default=1, help="ranks of each replica")
    add("--steps", type=int, default=300)
    add("--period", type=int, default=50, help="of local-sgd, diloco and gossip-pga")
    add_gpt_options(parser, seq=64, layers=2, hidden=128, heads=4, lr=None)
    rates = ", ".join(f"{lr} of {name}" for name, (_, lr) in OPTIMIZERS.items())
    add("--optimizer", choices=tuple(OPTIMIZERS), default="AdamW", help=f"--lr is by default {rates}")
    add_output_options(parser, quick="a smaller model and few steps, to see that it works; records nothing")
    add_host_options(parser)
    add_launch_options(parser)
    args = parser.parse_args()
    if args.quick:
        vars(args).update(QUICK)
    args.lr = OPTIMIZERS[args.optimizer][1] if args.lr is None else args.lr
    check_gpt_options(args, parser.error, "replicas", "ring", "steps", "period")
    if args.replicas < 2:
        parser.error(f"--replicas must be at least 2, got {args.replicas}")
    args.policies = args.policies.split(",")
    if unknown := [name for name in args.policies if name not in POLICIES]:
        parser.error(f"--policies: expected some of {', '.join(POLICIES)}, got {unknown[0]}")
    complete_hosts(args, parser.error)
    if args.hosts is not None and (args.hosts, args.ranks_per_host) != (args.replicas, args.ring):
        parser.error(
            f"expected a host for every replica: --hosts {args.replicas} --ranks-per-host {args.ring}, got "
            f"{args.hosts} and {args.ranks_per_host}"
        )
    if len(args.networks) > 1:
        parser.error(f"expected one --rate, got {len(args.networks)}")
    complete_output(args, "outer", parser.error, torch.device("cuda" if args.device == "cuda" else "cpu"))
    return args


def train(place: Place, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs all policies on one rank; rank 0 returns the results."""
    text = read_text(args.data)
    edge = len(text) - len(text) // HELD_OUT
    mesh = init_device_mesh(place.device.type, (args.replicas, args.ring), mesh_dim_names=("replicas", "ring"))
    card = environment_card(place.device, args.command)
    # the first steps of a process take longer, which must not count against the first policy
    warm = argparse.Namespace(**{**vars(args), "steps": 2, "period": 1})
    _train_one("all-reduce", place, warm, mesh, text[:edge], text[edge:])
    rows = []
    for name in args.policies:
        row = _train_one(name, place, args, mesh, text[:edge], text[edge:])
        if place.rank == 0:
            print(
                f"{name:<17} loss {row['losses'][0]:.3f} -> {row['losses'][-1]:.3f}, held out {row['eval_loss']:.4f}, "
                f"{row['sent_bytes'] / 2**20:,.2f} MiB in {row['seconds']:.1f} s",
                file=sys.stderr,
                flush=True,
            )
        shape = f"byte GPT, {args.layers} layers, hidden {args.hidden}, {args.heads} heads, seq {args.seq}"
        common = {
            key: getattr(args, key)
            for key in ("replicas", "ring", "steps", "period", "optimizer", "lr", "lr_warmup", "seed")
        }
        rows.append(
            result_line(
                card,
                benchmark="outer",
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
    name: str, place: Place, args: argparse.Namespace, mesh: Any, text: torch.Tensor, held_out: torch.Tensor
) -> dict[str, Any]:
    policy = POLICIES[name](args.period)
    torch.manual_seed(args.seed)
    model = GPT(seq=args.seq, layers=args.layers, hidden=args.hidden, heads=args.heads).to(place.device)
    dims = rtp_ext.RotationDims(ring="ring", replicate="replicas")
    rtp_ext.fully_rotate(model, mesh=mesh, dims=dims, outer=policy)
    optimizer = OPTIMIZERS[args.optimizer][0](model.parameters(), lr=args.lr)
    apart = isinstance(policy, outer.LocalSGD | outer.DiLoCo | outer.Gossip)
    if apart:
        policy.attach(optimizer)  # type: ignore[union-attr]

    def windows(of: torch.Tensor, step: int, seed: int) -> list[torch.Tensor]:
        first = args.batch * place.rank
        found = sample_windows(
            of, seed=seed, step=step, rows=args.batch * place.ranks, seq=args.seq, first=first, last=first + args.batch
        )
        return [each.to(place.device) for each in found]

    losses, sent, elapsed = [], [], []
    counter = Counter()
    dist.barrier()
    counter.start()
    start = time.perf_counter()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / max(1, args.lr_warmup))
        optimizer.zero_grad()
        loss = model(*windows(text, step, args.seed))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        sent.append(policy.bytes_sent())
        elapsed.append(time.perf_counter() - start)
    counted = counter.stop()
    if apart:
        policy.average()  # type: ignore[union-attr]
    with torch.no_grad():
        evaluated = [model(*windows(held_out, step, args.seed + 1)).item() for step in range(4)]
    means = gather(losses, place).mean(0)
    per_replica = gather([float(count) for count in sent], place).view(args.replicas, args.ring, -1).sum(1).amax(0)
    seconds = gather(elapsed, place).amax(0)
    kernel = int(gather(float(counted[0]), place).max()) if counted else None
    eval_loss = gather(sum(evaluated) / len(evaluated), place).mean().item()
    rtp_ext.ring_of(model).close()
    every = max(1, args.steps // POINTS)
    shown = sorted({*range(every - 1, args.steps, every), args.steps - 1})
    # of as many steps as lie between two points, since the loss of one batch is noisy
    smooth = [means[max(0, step + 1 - every) : step + 1].mean().item() for step in shown]
    return {
        "policy": repr(policy),
        "step_ms": 1e3 * seconds[-1].item() / args.steps,
        "tokens_per_s": args.batch * args.seq * place.ranks * args.steps / seconds[-1].item(),
        "seconds": seconds[-1].item(),
        "sent_bytes": int(per_replica[-1]),
        "kernel_bytes": kernel,
        "kernel_ratio": None if kernel is None else kernel / max(1.0, per_replica[-1].item()),
        "eval_loss": eval_loss,
        "losses": smooth,
        "points": [step + 1 for step in shown],
        "point_bytes": [int(per_replica[step]) for step in shown],
        "point_seconds": [seconds[step].item() for step in shown],
    }


# -- tables ------------------------------------------------------------------------------------------------------------

SPREAD = 0.05  # of the kernel's count from the policy's, at most
RESULTS: Columns = {
    "loss, held out": number("eval_loss", 4),
    "loss of the last steps": lambda row: f"{row['losses'][-1]:.4f}",
    "MiB a replica sent": mebibytes("sent_bytes", digits=2),
    "all-reduce's / this": number("all_reduce_ratio", 1),
    "counted by the kernel / this": number("kernel_ratio", 3),
    "seconds": number("seconds", 1),
}


def last_outer_run(lines: list[Row], words: list[str]) -> list[Row]:
    """The rows of the last command whose lines have all of the `words` (a rate, R2 for rings of two, S150 for steps, an
    optimizer), with what all-reduce sent; none where there are none, or no all-reduce among them."""
    known = [
        {line.get("rate"), f"R{line['ring']}", f"S{line['steps']}", line.get("optimizer", "AdamW")} for line in lines
    ]
    lines = [line for line, mine in zip(lines, known, strict=True) if set(words) <= mine]
    run = last_command(lines)
    whole = [line["sent_bytes"] for line in run if line["strategy"] == "all-reduce"]
    return [{**line, "all_reduce_ratio": whole[0] / line["sent_bytes"]} for line in run] if whole else []


def _note(rows: list[Row]) -> str:
    """Returns the text below a command."""
    first = rows[0]
    note = f" {first['replicas']} replicas of {first['ring']}, {first['shape']}, {first['steps']} steps of "
    note += f"{first['tokens']} tokens per rank, {first.get('optimizer', 'AdamW')}"
    if first.get("rate") is not None:
        note += f"; made hosts, links: {first['rate']}"
        off = [row["strategy"] for row in rows if abs(row["kernel_ratio"] - 1) > SPREAD]
        note += f". **More than {SPREAD:.0%} from the kernel's count: {', '.join(off)}.**" if off else ""
    return note if note.endswith("**") else f"{note}."


TABLE = Table("outer", {"policy": told("policy", "`{}`"), **RESULTS}, last_outer_run, _note, range(99))


def main() -> None:
    args = parse_arguments()
    rows = launch(train, args, args.replicas * args.ring)
    if not is_first():
        return
    print(f"\n{rows[0]['device']}{_note(rows)}")
    console({"policy": told("strategy"), **RESULTS}, rows)
    for row in rows:
        append_line(args.output, row)
    keys = ("eval_loss", "sent_bytes", "kernel_bytes", "kernel_ratio", "seconds")
    print(json.dumps({row["strategy"]: {key: row[key] for key in keys} for row in rows}), flush=True)


if __name__ == "__main__":
    main()
