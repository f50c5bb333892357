"""Tokens a second of forwards alone, of weights that lie on all ranks, against forwards without communication.

    python benchmarks/forwards.py                      # two ranks on one host, then on two hosts at three rates (root)
    python benchmarks/forwards.py --rates local        # one host alone
    python benchmarks/forwards.py --quick              # small sizes, to see that it works; records nothing
    python benchmarks/plot.py forwards benchmarks/results/MACHINE/forwards.jsonl --output docs/figures/forwards

Each strategy computes the same stack of MLP blocks on this rank's own tokens. `none` is a whole plain model on every
rank; all ranks compute at the same time, with as many threads each as in the other strategies, so that they share the
bandwidth of the memory in the same way. `rtp-shm` and `rtp-tcp` are rotate_for_inference, `fsdp2` is fully_shard for
each block and the root, without gradients. `pipeline` is torch.distributed.pipelining with a stage on each rank: the
tokens of all ranks pass in micro-batches of at least 64 tokens, at most 8 of them. All models live in the same
processes and take turns; a barrier precedes each timed pass. `rtp-tcp-nf4`, which is not among the usual ones, keeps
its weights in blocks of 4 bits.

Equal work: every rank has `tokens`, and the time is that of the slowest rank. Unequal work: rank 0 has `tokens`, the
others 4 times as many. `fast_ms` is the time of rank 0, `slow_ms` that of the slowest other rank, and `alone_ms` the
time of rank 0 while the others compute nothing; `reference_ms` and `reference_alone_ms` are those of `none`, which show
the cost of memory and caches that ranks of one host share. A pipeline has no rank that could be done earlier, and no
time there. Nor can ranks of fully_shard compute alone.

`roof_ms` is the larger of the time of `none` and the time of the counted bytes on the wire: no strategy that computes
as much and sends as much can be faster. The kernel counts the bytes that leave a host.

The run fails and records nothing if an output differs from that of the plain model. It records, and then fails, if
rtp-shm takes more than 1.05 of `none`, rtp-tcp more than 1.1 of its roof, or, in unequal work, `fast_ms` of `alone_ms`
more than 1.05 times as much as for `none`. The last line of stdout is JSON. One JSON line per case is appended to
results/MACHINE/forwards.jsonl.
"""

import argparse
import copy
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import torch
import torch.distributed as dist
from shared.card import add_output_options, append_line, complete_output, environment_card, result_line
from shared.contestant import balanced_orders
from shared.hosts import Links, bits_per_second, refusal
from shared.hosts import card as made_hosts
from shared.launch import Place, add_launch_options, gather, is_first, launch
from shared.models import MLPStack
from shared.table import (
    Columns,
    Row,
    Table,
    console,
    last_command,
    mebibytes,
    median,
    named,
    number,
    quotient,
    told,
)
from shared.wire import Counter
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import rtp_ext

LOCAL = "local"
CLOSE = 1e-4  # of outputs, relative to the largest
MICRO_BATCHES, LEAST = 8, 64  # at most so many, of at least so many tokens
QUICK = {"tokens": [8, 32], "unequal": [8], "rounds": 2, "blocks": 2, "width": 64, "inner": 128}
SHM, ROOF, ALONE = 1.05, 1.1, 1.05  # the most that is expected: of no communication, of the roof, of the rank alone
Result = dict[str, Any]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare forwards of models that ranks share. See the top of the file."
    )
    add = parser.add_argument
    numbers = {"type": lambda text: [int(part) for part in text.split(",")]}
    add("--rates", default=f"{LOCAL},500mbit,1gbit,2gbit", help="local, or that of two hosts (default: %(default)s)")
    add("--strategies", default=",".join(USUAL), help=f"of {', '.join(STRATEGIES)} (default: %(default)s)")
    add("--tokens", **numbers, default=[64, 256, 1024, 4096], help="a pass of each rank; a run for each")  # type: ignore[arg-type]
    add("--unequal", **numbers, default=[64, 256], help="the same, of rank 0, in unequal work")  # type: ignore[arg-type]
    add("--rounds", type=int, default=7, help="timed passes; fewer of many tokens (default: %(default)s)")
    add("--blocks", type=int, default=4)
    add("--width", type=int, default=1024)
    add("--inner", type=int, default=2048)
    add_output_options(parser, quick="small sizes, to see that it works; records nothing")
    add_launch_options(parser)
    args = parser.parse_args(argv)
    if args.quick:
        vars(args).update(QUICK)
    args.device = "cpu"  # rotate_for_inference
    args.ranks = 2
    args.strategies = [name for name in args.strategies.split(",") if name]
    if unknown := set(args.strategies) - STRATEGIES.keys():
        parser.error(f"--strategies: expected some of {', '.join(STRATEGIES)}, got {unknown.pop()}")
    if args.blocks % args.ranks or min(args.rounds, *args.tokens, *args.unequal) < 1:
        parser.error("expected --blocks that the ranks divide, and positive numbers")
    try:
        rates = args.rates.split(",")
        args.networks = [None if rate == LOCAL else Links(args.ranks, 1, rate, None, None) for rate in rates]
    except ValueError as error:
        parser.error(str(error))
    if any(args.networks) and (why := refusal()) is not None:
        parser.error(f"--rates: hosts cannot be made here: {why}")
    complete_output(args, "forwards", parser.error)
    return args


class Strategy:
    """A way to compute forwards, on one rank: `forward(x)` [tokens, width] returns [tokens, width]."""

    transport: str | None = None
    reference: nn.Module | None = None  # a plain model with the same values; None: that of all
    waits = False  # for other ranks, in every pass

    def __init__(self, plain: nn.Module, place: Place) -> None:
        self.model, self.place = plain, place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def kept_bytes(self) -> int:
        """Returns the bytes of the weights that this rank holds, and of the slots for those of others."""
        return sum(getattr(p, "_local_tensor", p).nbytes for p in self.model.parameters())

    def close(self) -> None:
        pass


class Rotated(Strategy):
    def __init__(self, plain: nn.Module, place: Place, transport: str, weights: str | None = None) -> None:
        options = {"mesh": place.mesh, "transport": transport, "weights": weights}
        super().__init__(rtp_ext.rotate_for_inference(copy.deepcopy(plain), **options), place)
        self.transport = transport
        if weights is not None:
            self.reference = copy.deepcopy(plain)
            self.reference.load_state_dict(rtp_ext.frozen_weights(self.model), strict=False)

    def kept_bytes(self) -> int:
        return super().kept_bytes() + rtp_ext.ring_of(self.model).slot_count("weight").bytes

    def close(self) -> None:
        dist.barrier()
        rtp_ext.ring_of(self.model).close()


class FullyShard(Strategy):
    waits = True
    transport = "c10d"

    def __init__(self, plain: nn.Module, place: Place) -> None:
        model = copy.deepcopy(plain)
        for block in model:  # type: ignore[attr-defined]
            fully_shard(block, mesh=place.mesh)
        super().__init__(fully_shard(model, mesh=place.mesh), place)


class Pipeline(Strategy):
    """A stage on each rank. `forward` returns this rank's part on the last rank, elsewhere its input."""

    waits = True
    transport = "c10d"

    def __init__(self, plain: nn.Sequential, place: Place) -> None:
        each = len(plain) // place.ranks
        super().__init__(copy.deepcopy(plain[place.rank * each : (place.rank + 1) * each]), place)
        self._schedules: dict[int, ScheduleGPipe] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place, tokens = self.place, len(x)
        if tokens not in self._schedules:
            stage = PipelineStage(self.model, place.rank, place.ranks, place.device, group=place.mesh.get_group())
            pieces = max(1, min(MICRO_BATCHES, place.ranks * tokens // LEAST))
            self._schedules[tokens] = ScheduleGPipe(stage, pieces)
        # the first rank has the tokens of all; those of the others are as good as any for the time
        inputs = [inputs_of(rank, tokens, x.shape[1]) for rank in range(place.ranks)] if place.rank == 0 else []
        whole = [torch.cat(inputs)] if inputs else []
        output = self._schedules[tokens].eval(*whole)
        return x if output is None else output[place.rank * tokens :]


STRATEGIES: dict[str, Callable[[Any, Place], Strategy]] = {
    "rtp-shm": lambda plain, place: Rotated(plain, place, "shm"),
    "rtp-tcp": lambda plain, place: Rotated(plain, place, "tcp"),
    "fsdp2": FullyShard,
    "pipeline": Pipeline,
    "rtp-tcp-nf4": lambda plain, place: Rotated(plain, place, "tcp", "nf4"),
}
USUAL = ("rtp-shm", "rtp-tcp", "fsdp2", "pipeline")


def inputs_of(rank: int, tokens: int, width: int) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(rank))


@torch.no_grad()
def measure(place: Place, args: argparse.Namespace) -> list[Result]:
    """Runs one rank between one kind of links; the results are those of all ranks."""
    torch.manual_seed(0)
    sizes = {"blocks": args.blocks, "width": args.width, "inner": args.inner}
    plain = nn.Sequential(*MLPStack(**sizes).blocks).eval()
    names = [name for name in args.strategies if args.network is None or name != "rtp-shm"]
    strategies = {"none": Strategy(plain, place)} | {name: STRATEGIES[name](plain, place) for name in names}
    card = environment_card(place.device, args.command)
    shape = f"{args.blocks} x (LayerNorm, Linear {args.width}->{args.inner}, GELU, Linear {args.inner}->{args.width})"
    rows = []
    for tokens in args.tokens:
        rows += _race(strategies, place, args, {"equal": tokens})
    for tokens in args.unequal:
        rows += _race(strategies, place, args, {"unequal": tokens})
    for strategy in strategies.values():
        strategy.close()
    fixed = {"benchmark": "forwards", "shape": shape, "ranks": place.ranks, "direction": "forward", "dtype": "float32"}
    fixed["threads"] = torch.get_num_threads()
    return [result_line(card, **fixed, **row) for row in rows]


@dataclasses.dataclass
class Case:
    """A strategy with this rank's tokens, None where it computes nothing; seconds and bytes of each timed pass."""

    strategy: str
    work: str
    inputs: torch.Tensor | None
    seconds: list[float] = dataclasses.field(default_factory=list)
    sent: list[int] = dataclasses.field(default_factory=list)
    difference: float = 0.0


def _race(
    strategies: dict[str, Strategy], place: Place, args: argparse.Namespace, kind: dict[str, int]
) -> list[Result]:
    ((work, tokens),) = kind.items()
    mine = tokens if work == "equal" or place.rank == 0 else 4 * tokens
    inputs = inputs_of(place.rank, mine, args.width)
    named = {n: s for n, s in strategies.items() if work == "equal" or n != "pipeline"}
    cases = [Case(name, work, inputs) for name in named]
    if work == "unequal":
        alone = inputs if place.rank == 0 else None
        cases += [Case(name, "alone", alone) for name, strategy in named.items() if not strategy.waits]
    plain = strategies["none"].forward(inputs)
    orders = balanced_orders(len(cases))
    rounds = max(3, min(args.rounds, args.rounds * 1024 // tokens))
    for turn in range(1 + rounds):
        for index in orders[turn % len(orders)]:
            case, counter = cases[index], Counter()
            dist.barrier()
            counter.start()
            start = time.perf_counter()
            output = None if case.inputs is None else strategies[case.strategy].forward(case.inputs)
            taken = time.perf_counter() - start
            sent = counter.stop()
            if turn:
                case.seconds.append(taken)
                case.sent += sent
            elif output is not None and (case.strategy != "pipeline" or place.rank == place.ranks - 1):
                reference = strategies[case.strategy].reference
                expected = plain if reference is None else reference(inputs)
                case.difference = float((output - expected).abs().max() / expected.abs().max())
    return _rows(cases, strategies, place, tokens)


def expect_close(case: str, difference: float) -> None:
    """Raises RuntimeError where an output differs from that of the plain model."""
    if not difference < CLOSE:  # NaN is not
        raise RuntimeError(f"{case}: the output differs by {difference:.1e} from that of the plain model")


def _rows(cases: list[Case], strategies: dict[str, Strategy], place: Place, tokens: int) -> list[Result]:
    """Collective."""
    found = {}
    for case in cases:
        seconds = gather(case.seconds, place) * 1e3  # [ranks, rounds]
        difference = gather(case.difference, place).max().item()
        expect_close(f"{case.strategy}, {tokens} tokens", difference)
        sent = gather([float(count) for count in case.sent], place).amax(0).tolist() if case.sent else None
        kept = int(gather(float(strategies[case.strategy].kept_bytes()), place).max())
        found[case.strategy, case.work] = seconds, difference, sent and statistics.median(sent), kept
    rows = []
    for (name, work), (seconds, difference, sent, kept) in found.items():
        row: Result = {"case": f"mlp/{name}/{work}", "strategy": name, "work": work, "tokens": tokens}
        row |= {"transport": strategies[name].transport, "difference": difference, "kept_bytes": kept}
        if work == "equal":
            row |= _equal(seconds, found["none", work][0], sent, tokens)
        elif work == "unequal":
            alone = found.get((name, "alone"))
            row |= {
                "fast_ms": seconds[0].median().item(),
                "fast_p20_ms": seconds[0].quantile(0.2).item(),
                "fast_p80_ms": seconds[0].quantile(0.8).item(),
                "slow_ms": seconds[1:].amax(0).median().item(),
                "alone_ms": None if alone is None else alone[0][0].median().item(),
                "reference_ms": found["none", work][0][0].median().item(),
                "reference_alone_ms": found["none", "alone"][0][0].median().item(),
            }
        else:
            continue
        rows.append(row)
    return rows


def _equal(seconds: torch.Tensor, reference: torch.Tensor, sent: float | None, tokens: int) -> Result:
    slowest, compute = seconds.amax(0), reference.amax(0).median().item()
    rate = bits_per_second(made_hosts().get("rate"))
    wire = 0.0 if rate is None or sent is None else sent * 8 / rate * 1e3
    return {
        "step_ms": slowest.median().item(),
        "p20_ms": slowest.quantile(0.2).item(),
        "p80_ms": slowest.quantile(0.8).item(),
        "tokens_per_s": len(seconds) * tokens / slowest.median().item() * 1e3,
        "reference_ms": compute,
        "sent_bytes": None if sent is None else round(sent),
        "wire_ms": wire,
        "roof_ms": max(compute, wire),
        "rounds": slowest.numel(),
    }


# -- tables ------------------------------------------------------------------------------------------------------------

_NAMED: Columns = {
    "links": lambda row: row.get("rate") or "one host",
    "tokens a pass": told("tokens"),
    "strategy": named,
}
EQUAL: Columns = {
    **_NAMED,
    "pass, ms (median, p20-p80)": median(),
    "tokens/s": number("tokens_per_s"),
    "of no communication": quotient("step_ms", "reference_ms"),
    "roof, ms": number("roof_ms"),
    "of the roof": quotient("step_ms", "roof_ms"),
}
UNEQUAL: Columns = {
    **_NAMED,
    "fast rank, ms (median, p20-p80)": median("fast_"),
    "of that rank alone": quotient("fast_ms", "alone_ms"),
    "the same without communication": quotient("reference_ms", "reference_alone_ms"),
    "slow rank, ms": number("slow_ms"),
}


def last_forwards(lines: list[Row], words: list[str]) -> list[Row]:
    """The last run's rows of equal or of unequal work. Raises ValueError for other `words`."""
    if words not in (["equal"], ["unequal"]):
        raise ValueError(f"expected forwards equal or forwards unequal, got {words}")
    return [line for line in last_command(lines) if line["work"] == words[0]]


def _note(rows: list[Row]) -> str:
    first, worst = rows[0], max(row["difference"] for row in rows)
    note = f" {first['shape']}; {first['ranks']} ranks with {first['threads']} threads each, on one host or on hosts "
    return f"{note}made on this machine. Largest relative difference of outputs: {worst:.0e}."


_SENT: Columns = {"MiB that leave a host": mebibytes("sent_bytes")}
_HELD: Columns = {"weights and slots, MiB per rank": mebibytes("kept_bytes")}
TABLE = Table("forwards", {**EQUAL, **_SENT, **UNEQUAL, **_HELD}, last_forwards, _note, range(99))


def surprises(rows: list[Row]) -> list[str]:
    """Returns the cases that took longer than expected."""
    texts = []
    for row in rows:
        place = f"{row['strategy']}, {row['tokens']} tokens, {row.get('rate') or 'one host'}"
        found: dict[str, tuple[str, str, float]] = {}
        if row["work"] == "unequal" and row.get("alone_ms") is not None and row["strategy"] != "none":
            sharing = max(1.0, row["reference_ms"] / row["reference_alone_ms"])  # of memory, also without communication
            found = {"of the rank alone": ("fast_ms", "alone_ms", ALONE * sharing)}
        elif row["work"] == "equal" and row["strategy"] == "rtp-shm":
            found = {"of no communication": ("step_ms", "reference_ms", SHM)}
        elif row["work"] == "equal" and row["strategy"] == "rtp-tcp":
            found = {"of the roof": ("step_ms", "roof_ms", ROOF)}
        for what, (above, below, most) in found.items():
            ratio = row[above] / row[below]
            if not ratio <= most:  # NaN is not
                texts.append(f"{place}: {ratio:.2f} {what}, at most {most:.2f} expected")
    return texts


def main() -> None:
    args = parse_arguments()
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    rows = []
    for network in args.networks:
        args.network = network
        rows += launch(measure, args, args.ranks)
        if is_first():
            print(f"{network.rate if network else LOCAL}: measured", file=sys.stderr, flush=True)
    if not is_first():
        return
    for row in rows:
        row["date"] = date  # one run
    print(f"\n{rows[0]['shape']}, {rows[0]['ranks']} ranks, {rows[0]['threads']} threads each; {rows[0]['device']}")
    for columns, work in ((EQUAL, "equal"), (UNEQUAL, "unequal")):
        if some := [row for row in rows if row["work"] == work]:
            console(columns, some)
    for row in rows:
        append_line(args.output, row)
    texts = surprises(rows)
    keys = ("rate", "tokens", "strategy", "step_ms", "fast_ms")
    print(json.dumps({"cases": [{k: row[k] for k in keys if k in row} for row in rows], "unexpected": texts}))
    if texts and not args.quick:
        sys.exit("; ".join(texts))


if __name__ == "__main__":
    main()
