"""A mixture of experts on four ranks under a Zipf-distributed router: experts rotate, are divided, or both.

    python benchmarks/experts.py                                              # one host, and memory
    python benchmarks/experts.py --hosts 2 --ranks-per-host 2 --rate 1gbit    # between two made hosts (root)
    python benchmarks/experts.py --quick                                      # small sizes; records nothing

Each way trains the same stack of blocks (a linear layer, then experts behind a given router) on the same batches: rank,
step and layer decide tokens and their experts, of which the i-th in an order of the layer's own has a probability as
1 / i. `rtp-4x1` rotates all experts, `rtp-1x4` divides them over all ranks, `rtp-2x2` divides them over two and rotates
each half over two. `fsdp2-4x1` gathers all experts whole, `fsdp2-2x2` gathers each half over two ranks; their tokens
travel by the all-to-all of torch's functional collectives. Dense layers rotate over, or are sharded over, all four
ranks.

All ways live in the same processes and take turns; a barrier precedes each timed step. `step_ms` is the time of the
slowest rank, `spread` the time between the end of the first and of the last rank, of the step. `rows` is the number of
rows of the busiest rank over the mean. The run fails and records nothing if losses of a way differ from those of the
first, or its first loss from that of the plain model in one process.

Memory, on one host alone, is counted as by memory_per_rank.py before anything is timed, each way by itself, with
few tokens, so that what is kept of tokens does not count: the largest rank. `closed_bytes` is what a ring saves by
closed form beside the same mesh gathered whole, of the experts alone: weights of a layer, their gradient and its buffer
to be scattered, less the slots of weights and gradients, of a shard each (4 and 2, lean ones 2 and 2), and less the
gradient of the own shard, of which divided experts have another copy. One JSON line for each way is appended to
results/MACHINE/experts.jsonl.
"""

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shared.card import add_output_options, append_line, complete_output, environment_card, result_line
from shared.contestant import balanced_orders
from shared.hosts import add_host_options, complete_hosts
from shared.launch import Place, add_launch_options, gather, is_first, launch
from shared.memory import PROBED_STEPS, MemoryProbe
from shared.table import Columns, Row, Table, console, last_of_each, mebibytes, median, named, number
from shared.wire import Counter
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import rtp_ext
from rtp_ext import Ring, RotationDims
from rtp_ext.nn import RotatedExperts, RotatedLinear
from rtp_ext.words import Budget, Channel

RANKS, CLOSE = 4, 1e-4  # of losses, relative
WAYS = ("rtp-4x1", "rtp-1x4", "rtp-2x2", "rtp-2x2-lean", "fsdp2-4x1", "fsdp2-2x2")
PROBED = 8  # tokens of a rank in the steps that count memory, so that what is kept of tokens does not
SIZES = {"layers": 4, "experts": 16, "chosen": 2, "width": 256, "inner": 512, "tokens": 256, "rounds": 5}
QUICK = {"layers": 2, "experts": 8, "chosen": 2, "width": 32, "inner": 64, "tokens": 24, "rounds": 2}
Result = dict[str, Any]
Routing = list[tuple[torch.Tensor, torch.Tensor]]  # of every layer: experts [tokens, k] and weights
Batch = tuple[torch.Tensor, Routing]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ways to share experts. See the top of the file.")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the router (default: %(default)s)")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, help="default: on one host")
    add_output_options(parser, quick="small sizes, to see that it works; records nothing")
    add_launch_options(parser)
    add_host_options(parser)
    args = parser.parse_args(argv)
    if args.quick:
        vars(args).update(QUICK)
    if args.experts % RANKS:
        parser.error(f"--experts: expected a multiple of {RANKS}, got {args.experts}")
    complete_hosts(args, parser.error)
    if any(links.ranks != RANKS for links in args.networks):
        parser.error(f"--hosts: expected {RANKS} ranks in all")
    if args.memory is None:
        args.memory = not args.networks
    complete_output(args, "experts", parser.error)
    return args


# -- models ------------------------------------------------------------------------------------------------------------


class PlainExperts(nn.Module):
    """Gated experts of chosen rows: rows [n, width], the number of an expert for each [n] -> [n, width]."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, width) / width**0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, width, inner) / inner**0.5)

    def forward(self, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        order = numbers.argsort(stable=True)
        counts = torch.bincount(numbers, minlength=len(self.down_proj)).tolist()
        parts = []
        for x, up, down in zip(rows[order].split(counts), self.gate_up_proj, self.down_proj, strict=True):
            gate, hidden = F.linear(x, up).chunk(2, -1)
            parts.append(F.linear(F.silu(gate) * hidden, down))
        return torch.zeros_like(rows).index_copy(0, order, torch.cat(parts))


def combined(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """rows [tokens * k, width], weights [tokens, k] -> [tokens, width]."""
    return (rows.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


class Gathered(nn.Module):
    """The experts of this rank's part, which fully_shard gathers, and tokens that travel among `parts` ranks."""

    def __init__(self, part: PlainExperts, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.part, self.mesh = part, mesh

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        chosen, rows = index.flatten(), x.repeat_interleave(index.shape[1], 0)
        if self.mesh is None:
            return combined(self.part(rows, chosen), weights)
        group, parts, own = self.mesh.get_group(), self.mesh.size(), len(self.part.down_proj)
        own = self.part.gate_up_proj.shape[0]
        order = (chosen // own).argsort(stable=True)
        leaving = torch.bincount(chosen // own, minlength=parts)
        arriving = torch.empty_like(leaving)
        dist.all_to_all_single(arriving, leaving, group=group)
        there, here = leaving.tolist(), arriving.tolist()
        numbers = chosen.new_empty(sum(here))
        dist.all_to_all_single(numbers, (chosen % own)[order], here, there, group=group)
        rows = all_to_all_single_autograd(rows[order], here, there, group)
        back = all_to_all_single_autograd(self.part(rows, numbers), there, here, group)
        return combined(torch.zeros_like(back).index_copy(0, order, back), weights)


class Whole(nn.Module):
    """The plain experts, of tokens that stay."""

    def __init__(self, experts: PlainExperts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return combined(self.experts(x.repeat_interleave(index.shape[1], 0), index.flatten()), weights)


class Stack(nn.Module):
    """Blocks of a linear layer and experts -> mean square of the last hidden state."""

    def __init__(self, blocks: Sequence[tuple[nn.Module, nn.Module]]) -> None:
        super().__init__()
        self.dense = nn.ModuleList(dense for dense, _ in blocks)
        self.experts = nn.ModuleList(experts for _, experts in blocks)

    def forward(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        for dense, experts, choice in zip(self.dense, self.experts, routing, strict=True):
            x = x + F.gelu(dense(F.layer_norm(x, x.shape[-1:])))
            x = x + experts(F.layer_norm(x, x.shape[-1:]), *choice)
        return x.square().mean()


def plain_parts(args: argparse.Namespace) -> list[tuple[nn.Linear, PlainExperts]]:
    torch.manual_seed(0)
    sizes = (args.width, args.width), (args.experts, args.width, args.inner)
    return [(nn.Linear(*sizes[0]), PlainExperts(*sizes[1])) for _ in range(args.layers)]


def _load(state: dict[str, torch.Tensor], layer: nn.Module) -> None:
    layer.load_state_dict(state)


class Way:
    """A way to train the stack, on one rank, as `MemoryProbe` observes trainers."""

    def __init__(self, name: str, args: argparse.Namespace, place: Place) -> None:
        self.name = name
        self.ring: Ring | None = None
        self.rows, self.parts = (int(size) for size in name.split("-")[1].split("x"))
        sizes = (self.rows, self.parts)
        mesh = init_device_mesh(place.device.type, sizes, mesh_dim_names=("ring", "expert"))
        make = self._rotated if name.startswith("rtp") else self._gathered
        self.model = make(args, place, mesh)
        kinds = [self.model.dense.parameters(), self.model.experts.parameters()]  # on meshes of their own
        self.optimizers = [torch.optim.AdamW(kind, lr=1e-3) for kind in kinds]

    def _rotated(self, args: argparse.Namespace, place: Place, mesh: DeviceMesh) -> Stack:
        buffers: Budget = "lean" if self.name.endswith("lean") else "auto"
        self.ring = ring = Ring(mesh, dims=RotationDims(ring="ring", expert="expert"), buffers=buffers)
        blocks = []
        for dense, experts in plain_parts(args):
            linear = RotatedLinear(args.width, args.width, ring=ring)
            rotated = RotatedExperts(args.experts, args.width, args.inner, ring=ring)
            for layer, plain in ((linear, dense), (rotated, experts)):
                rtp_ext.init_weights(layer, functools.partial(_load, plain.state_dict()))
            blocks.append((linear, rotated))
        return Stack(blocks)

    def _gathered(self, args: argparse.Namespace, place: Place, mesh: DeviceMesh) -> Stack:
        blocks = []
        own, mine = args.experts // self.parts, mesh.get_local_rank("expert")
        for dense, experts in plain_parts(args):
            for name, parameter in list(experts.named_parameters()):
                part = parameter.detach()[own * mine : own * (mine + 1)].clone()
                setattr(experts, name, nn.Parameter(part))
            unit = fully_shard(experts, mesh=mesh["ring"])
            unit.set_gradient_divide_factor(float(place.ranks))
            unit.set_force_sum_reduction_for_comms(True)  # Gloo has no other
            fully_shard(dense, mesh=place.mesh)
            blocks.append((dense, Gathered(experts, mesh["expert"] if self.parts > 1 else None)))
        model = Stack(blocks)
        fully_shard(model, mesh=place.mesh)
        return model

    def step(
        self,
        inputs: torch.Tensor,
        targets: Routing,
        *,
        keep_gradients: bool = False,
        phase: Callable[[str], AbstractContextManager[None]] = lambda name: contextlib.nullcontext(),
    ) -> torch.Tensor:
        """Returns the loss of this rank before the update. `targets`: the routing."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=not keep_gradients)
        with phase("forward_backward"):
            with self._forward():
                loss = self.model(inputs, targets)
            loss.backward()
        with phase("optimizer"):
            for optimizer in self.optimizers:
                optimizer.step()
        return loss.detach()

    @contextlib.contextmanager
    def _forward(self) -> Iterator[None]:
        """Shards of the next layers travel ahead in the forward of a whole model."""
        if self.ring is not None:
            self.ring.begin_forward()
        yield
        if self.ring is not None:
            self.ring.end_forward()

    def parameter_tensors(self) -> list[torch.Tensor]:
        return list(self.model.parameters())

    def gradient_tensors(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def optimizer_tensors(self) -> list[torch.Tensor]:
        states = (state for each in self.optimizers for state in each.state.values())
        return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]

    def sent(self) -> tuple[int, int]:
        """Bytes of tokens and of shards that this rank has sent; a ring counts them."""
        if self.ring is None:
            return 0, 0
        channels: tuple[Channel, ...] = ("weight", "gradient")
        shards = sum(ring.bytes_sent(channel) for ring in self.ring.rings for channel in channels)
        return (0 if self.ring.experts is None else self.ring.experts.bytes_sent), shards

    def close(self) -> None:
        dist.barrier()
        if self.ring is not None:
            self.ring.close()


# -- batches -----------------------------------------------------------------------------------------------------------


def batch(args: argparse.Namespace, rank: int, step: int, tokens: int | None = None) -> Batch:
    tokens = args.tokens if tokens is None else tokens
    generator = torch.Generator().manual_seed(1000 * step + rank)
    chances = torch.arange(1, args.experts + 1, dtype=torch.float64) ** -args.zipf
    x, routing = torch.randn(tokens, args.width, generator=generator), []
    for layer in range(args.layers):
        order = torch.randperm(args.experts, generator=torch.Generator().manual_seed(layer))
        choice = torch.multinomial(chances.expand(tokens, -1), args.chosen, generator=generator)
        weights = torch.rand(tokens, args.chosen, generator=generator)
        routing.append((order[choice], weights / weights.sum(-1, keepdim=True)))
    return x, routing


def busiest(args: argparse.Namespace, way: Way) -> float:
    """Returns the rows of the busiest rank over the mean, in a layer, over all layers of a batch."""
    ratios = []
    routings = [batch(args, rank, 0)[1] for rank in range(RANKS)]
    for layer in range(args.layers):
        loads = torch.zeros(RANKS)
        for rank, routing in enumerate(routings):
            place = rank // way.parts
            if way.ring is None or way.ring.experts is None:
                owners = routing[layer][0] // (args.experts // way.parts)
            else:
                owners = way.ring.experts.divide(args.experts).owners[routing[layer][0]]
            for other in range(way.parts):
                column = place * way.parts + other if way.parts > 1 else rank
                loads[column] += int((owners == other).sum()) if way.parts > 1 else owners.numel()
        ratios.append(float(loads.max() / loads.mean()))
    return sum(ratios) / len(ratios)


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(place: Place, args: argparse.Namespace) -> list[Result]:
    """Runs one rank between one kind of links; the results are those of all ranks. Collective."""
    memory = {name: _memory(name, args, place) for name in WAYS} if args.memory else {}
    ways = [Way(name, args, place) for name in WAYS]
    plain = Stack([(dense, Whole(experts)) for dense, experts in plain_parts(args)])
    first = plain(*batch(args, place.rank, 0)).item()
    del plain
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    losses: dict[str, list[float]] = {name: [] for name in WAYS}
    sent: dict[str, tuple[int, int]] = {}
    left: dict[str, list[int]] = {name: [] for name in WAYS}
    orders = balanced_orders(len(ways))
    for turn in range(2 + args.rounds):
        inputs, routing = batch(args, place.rank, turn)
        for number_ in orders[turn % len(orders)]:
            way, counter, before = ways[number_], Counter(), ways[number_].sent()
            dist.barrier()
            counter.start()
            start = time.perf_counter()
            loss = way.step(inputs, routing)
            taken = time.perf_counter() - start
            bytes_ = counter.stop()
            losses[way.name].append(loss.item())
            sent[way.name] = tuple(after - b for after, b in zip(way.sent(), before, strict=True))  # type: ignore[assignment]
            if turn > 1:
                seconds[way.name].append(taken)
                left[way.name] += bytes_
    rows = [_row(args, place, way, seconds, losses, first, sent, left, memory) for way in ways]
    for way in ways:
        way.close()
    card = environment_card(place.device, args.command)
    shape = f"{args.layers} x (Linear {args.width}, {args.experts} experts {args.width}->{args.inner}, k {args.chosen})"
    fixed = {"benchmark": "experts", "shape": shape, "ranks": RANKS, "direction": "step", "dtype": "float32"}
    fixed |= {"tokens": args.tokens, "zipf": args.zipf, "threads": torch.get_num_threads()}
    return [result_line(card, **fixed, **row) for row in rows]


def _memory(name: str, args: argparse.Namespace, place: Place) -> dict[str, int]:
    """Returns the bytes of the rank with the highest peak. Collective."""
    with MemoryProbe(place.device) as probe:
        way = Way(name, args, place)
        for step in range(PROBED_STEPS):
            probe.step(way, *batch(args, place.rank, step, PROBED))  # type: ignore[arg-type]
        found = probe.memory(way).row()  # type: ignore[arg-type]
        counts = [ring.slot_count for ring in way.ring.rings] if way.ring is not None else []
        found["slot_bytes"] = sum(slots("weight").peak_bytes + slots("gradient").peak_bytes for slots in counts)
        way.close()
    keys = list(found)
    every = gather([float(found[key]) for key in keys], place)  # [ranks, keys]
    return {key: int(size) for key, size in zip(keys, every[every[:, keys.index("peak_bytes")].argmax()], strict=True)}


def closed_bytes(args: argparse.Namespace, way: Way) -> int:
    """Returns what the docstring says: of the experts of a part in float32, on their ring."""
    part = 4 * 3 * args.width * args.inner * args.experts // way.parts
    shards = (4 if way.name.endswith("lean") else 6) * (way.rows > 1) + 1 + (way.parts > 1)
    return 3 * part - shards * part // way.rows


def _row(
    args: argparse.Namespace,
    place: Place,
    way: Way,
    seconds: dict[str, list[float]],
    losses: dict[str, list[float]],
    first: float,
    sent: dict[str, tuple[int, int]],
    left: dict[str, list[int]],
    memory: dict[str, dict[str, int]],
) -> Result:
    """Collective."""
    name, reference = way.name, losses[WAYS[0]]
    wrong = max(abs(a / b - 1) for a, b in zip([*losses[name], losses[name][0]], [*reference, first], strict=True))
    difference = gather(wrong, place).max().item()
    if not difference < CLOSE:  # NaN is not
        raise RuntimeError(f"{name}: losses differ by {difference:.1e} from those of {WAYS[0]} and of the plain model")
    times = 1e3 * gather(seconds[name], place)  # [ranks, rounds]
    slowest, spread = times.amax(0), times.amax(0) - times.amin(0)
    row: Result = {"case": f"experts/{name}", "strategy": name, "rounds": args.rounds, "difference": difference}
    row |= {"step_ms": slowest.median().item(), "spread_ms": spread.median().item(), "rows": busiest(args, way)}
    row |= {"p20_ms": slowest.quantile(0.2).item(), "p80_ms": slowest.quantile(0.8).item()}
    row["tokens_per_s"] = RANKS * args.tokens / row["step_ms"] * 1e3
    tokens, shards = gather([float(size) for size in sent[name]], place).amax(0).tolist()
    if way.ring is not None:
        row |= {"token_bytes": round(tokens), "shard_bytes": round(shards)}
    if left[name]:
        row["sent_bytes"] = round(gather([float(size) for size in left[name]], place).amax(0).median().item())
    row |= memory.get(name, {})
    beside = memory.get(f"fsdp2-{way.rows}x{way.parts}")
    if way.ring is not None and beside is not None:
        row["saved_bytes"] = beside["peak_bytes"] - memory[name]["peak_bytes"]
        row["closed_bytes"] = closed_bytes(args, way)
    return row


# -- tables ------------------------------------------------------------------------------------------------------------

COLUMNS: Columns = {
    "links": lambda row: row.get("rate") or "one host",
    "way": named,
    "step, ms (median, p20-p80)": median(),
    "spread over ranks, ms": number("spread_ms", 1),
    "rows of the busiest rank, of the mean": number("rows", 2),
    "tokens, MiB a rank": mebibytes("token_bytes", digits=1),
    "shards, MiB a rank": mebibytes("shard_bytes", digits=1),
    "MiB that leave a host": mebibytes("sent_bytes", digits=1),
    "peak, MiB": mebibytes("peak_bytes", digits=1),
    "slots, MiB": mebibytes("slot_bytes", digits=1),
    "beyond shards and states, MiB": mebibytes("transient_bytes", digits=1),
    "less than gathered, MiB": mebibytes("saved_bytes", digits=1),
    "by closed form": mebibytes("closed_bytes", digits=1),
}


def last_ways(lines: list[Row], _: list[str]) -> list[Row]:
    """The last line of each way between each kind of links."""
    return last_of_each(lines, lambda line: (line.get("rate"), line.get("hosts"), line["strategy"]))


def _note(rows: list[Row]) -> str:
    first, worst = rows[0], max(row["difference"] for row in rows)
    note = f" {first['shape']}; {first['tokens']} tokens a rank, Zipf exponent {first['zipf']:g}, {first['ranks']} "
    return f"{note}ranks with {first['threads']} threads each. Largest relative difference of losses: {worst:.0e}."


TABLE = Table("experts", COLUMNS, last_ways, _note)


def main() -> None:
    args = parse_arguments()
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    rows: list[Row] = []
    for network in args.networks or [None]:
        args.network = network
        rows += launch(measure, args, RANKS)
    if not is_first():
        return
    for row in rows:
        row["date"] = date  # one run
        append_line(args.output, row)
    print(f"\n{rows[0]['shape']}, {RANKS} ranks, {rows[0]['threads']} threads each; {rows[0]['device']}")
    console(COLUMNS, rows)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
