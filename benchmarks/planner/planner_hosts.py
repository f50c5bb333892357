"""Compares steps between made hosts, as compare.py measured them, with the planner's time model.

    python benchmarks/planner/planner_hosts.py  # the tables of docs/predictions.md

Every constant is measured and none is fitted. The row without communication, of the same run and number of tokens,
gives the time of a FLOP, elementwise kernels included, and the memory rate of the optimizer. A link has the rate that
it is limited to, without a limit that at which the run's bare socket program moves bytes with a whole processor. Each
byte takes as much from products as that program did. Inside a host a hop is a copy. From these constants the planner's
functions compute how long rotations, all-reduces and gathers take and how much of that is exposed.
"""

import dataclasses
import functools
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rtp_ext.planner import Cluster, ModelSpec, RotatedOperation, TimeConstants, Weight, rotations_of
from rtp_ext.planner.rotation.seconds import rotation_seconds
from rtp_ext.planner.time.links import Group, all_reduce_s, gather_s

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from shared.card import RESULTS
from shared.hosts import bits_per_second
from shared.models import WORKLOADS
from shared.table import Row, last_of_each, markdown, named, read_lines, ways_of

FILE = RESULTS / "cpu-2core" / "hosts.jsonl"
BYTES = {"float32": 4, "bfloat16": 2}
_ADAMW = 4 + 4 * 2 * 3  # bytes a parameter: the gradient is read; weight and moments are read and written


@dataclass(frozen=True)
class Work:
    """The products of a model in blocks, and those before and after; rows of `matrices` are [outputs, inputs]."""

    blocks: tuple[tuple[RotatedOperation, ...], ...]
    ends: tuple[RotatedOperation, ...]

    @property
    def operations(self) -> tuple[RotatedOperation, ...]:
        return (*(one for block in self.blocks for one in block), *self.ends)


@functools.cache
def work_of(model: str) -> Work:
    sizes = WORKLOADS[model].sizes
    if model.startswith("mlp"):
        width, inner = sizes["width"], sizes["inner"]
        shapes = ((inner, width), (width, inner))
        block = tuple(RotatedOperation("linear", (Weight(shape), Weight(shape[:1]))) for shape in shapes)
        return Work((block,) * sizes["blocks"], ())
    own = {name: sizes[name] for name in ("layers", "hidden", "heads", "kv_heads")}
    spec = ModelSpec.llama(seq=WORKLOADS[model].seq, ffn=sizes["inner"], vocab=sizes["vocabulary"], **own)
    block = tuple(rotations_of(spec, layers=1, embedding=False, head=False)[0])
    return Work((block,) * spec.layers, tuple(rotations_of(spec, layers=0)[0]))


def _values(operations: Iterable[RotatedOperation]) -> float:
    return sum(weight.shard_elements(1) for one in operations for weight in one.weights)


def _flops(operations: Iterable[RotatedOperation], tokens: int) -> float:
    """Forward and backward; rows of an embedding are copied."""
    return 6 * tokens * _values(one for one in operations if one.kind != "embedding")


@dataclass(frozen=True)
class Prediction:
    """A row, with the seconds of its forward and backward and of its optimizer in the model."""

    row: Row
    passes_s: float
    optimizer_s: float

    @property
    def error(self) -> float:
        return 1e3 * (self.passes_s + self.optimizer_s) / self.row["step_ms"] - 1


def predictions(rows: list[Row]) -> list[Prediction]:
    """Returns all rows that communicate, each with the constants of its run."""
    found = []
    for row in rows:
        beside = [other for other in rows if all(other[key] == row[key] for key in ("command", "date", "rate"))]
        alone = [other for other in beside if other["strategy"] == "none" and other["tokens"] == row["tokens"]]
        if row["strategy"] != "none":
            found.append(_predict(row, alone[-1], [other for other in beside if other["strategy"] != "none"]))
    return found


def _predict(row: Row, alone: Row, beside: list[Row]) -> Prediction:
    work, tokens, ranks = work_of(row["case"].split("/")[0]), row["tokens"], row["ranks"]
    computing, optimizer = alone["forward_backward_ms"] / 1e3, alone["optimizer_ms"] / 1e3
    processor, lost = (
        statistics.median(other.get(key, other["socket_processor_ms"]) / 1e3 / other["sent_bytes"] for other in beside)
        for key in ("socket_processor_ms", "socket_beside_ms")
    )
    limit = bits_per_second(None if row["rate"] == "none" else row["rate"])
    rate = 1 / processor if limit is None else min(limit / 8, 1 / processor)
    memory = _ADAMW * _values(work.operations) / optimizer
    levels = 1 if row["strategy"] == "rtp-flat" or row["ranks_per_host"] == 1 else row["hosts"]
    senders = row["ranks_per_host"] if levels > 1 else 1  # ranks of a host that send over its link at once
    cluster = Cluster(
        name="made hosts",
        gpus=ranks,
        gpus_per_node=row["ranks_per_host"],
        memory_bytes=1e12,
        bf16_flops_per_s=2 * _flops(work.operations, tokens) / computing,  # float32 runs at half of it
        bf16_achievable_flops_per_s=2 * _flops(work.operations, tokens) / computing,
        hbm_bytes_per_s=memory,
        nvlink_bytes_per_s=memory / 2,
        nccl_ring_bytes_per_s=memory / 2,
        nic_bytes_per_s=rate / senders,
        streaming_multiprocessors=1,
    )
    ready = dict.fromkeys((field.name for field in dataclasses.fields(TimeConstants)), 0.0)
    constants = TimeConstants(**{**ready, "gemm_fraction": 1.0, "hbm_fraction": 1.0, "network_fraction": 1.0})
    share, name = rate * lost, row["strategy"]
    if name.startswith("rtp"):
        seen = _rotation_s(row, work, cluster, constants, share, levels)
    elif name == "ddp":
        reduced = all_reduce_s(Group(cluster, ranks), 4 * _values(work.operations), constants)
        seen = _beside(reduced, 2 / 3 * computing, share)
    else:
        seen = _unsharding_s(row, work, cluster, constants, share, computing)
    return Prediction(row, computing + seen, optimizer if name == "ddp" else optimizer / ranks)


def _beside(communication: float, window: float, share: float) -> float:
    """Returns the communication that a window of computing does not hide, plus the slowdown of the window."""
    seen = max(0.0, communication - window)
    return seen + _lost_s(communication, seen, share)


def _lost_s(communication: float, seen: float, share: float) -> float:
    """Returns the slowdown of computing by communication, each second of which takes `share` seconds from products,
    beyond the exposed part `seen`, in which the processor is otherwise idle: a step takes at least as long as both."""
    return max(0.0, share * communication - seen)


def _rotation_s(row: Row, work: Work, cluster: Cluster, constants: TimeConstants, share: float, levels: int) -> float:
    exact = row["strategy"] == "rtp-exact"
    ways = {} if exact else {name: row.get(name) for name in ("travel", "gradient_travel")}
    reduce_bytes = 4 if exact else BYTES[row.get("reduce_dtype") or "float32"]
    total = 0.0
    for operation in work.operations:
        time = rotation_seconds(
            operation,
            row["tokens"],
            Group(cluster, row["ranks"]),
            constants,
            compute_bytes=4,
            reduce_bytes=reduce_bytes,
            hosts=levels,
            **ways,
        )
        for index in (0, 1):
            seen = time.makespan_s[index] - time.computes_s[index]
            total += seen + _lost_s(time.hops_s[index], seen, share)
    return total


def _unsharding_s(
    row: Row, work: Work, cluster: Cluster, constants: TimeConstants, share: float, computing: float
) -> float:
    """As `StageClock` has it: a block is gathered while the one before computes, and its gradients are scattered while
    the next does; what no block owns is gathered in the open, and so is the first block. Over Gloo torch makes a
    reduce-scatter of an all-reduce."""
    group, whole = Group(cluster, row["ranks"]), _flops(work.operations, row["tokens"])
    reduce_bytes = BYTES[row.get("reduce_dtype") or "float32"]
    total = 0.0
    for block in work.blocks:
        window = computing * _flops(block, row["tokens"]) / whole
        gather = gather_s(group, 4 * _values(block), constants)
        scatter = all_reduce_s(group, reduce_bytes * _values(block), constants)
        total += _beside(gather, window / 3, share) + _beside(gather + scatter, 2 / 3 * window, share)
    ends = _values(work.ends)
    root = gather_s(group, 4 * ends, constants) + all_reduce_s(group, reduce_bytes * ends, constants)
    return total + gather + scatter + root


def measured() -> list[Row]:
    """Returns the last line of each case."""
    names = ("case", "tokens", "hosts", "ranks_per_host", "rate", "asked_travel", "delay", "dtype")
    return last_of_each(read_lines(FILE), lambda row: tuple(row.get(name) for name in names))


@functools.cache
def found() -> tuple[Prediction, ...]:
    return tuple(predictions(measured()))


def _name(row: Row) -> str:
    return ", ".join(filter(None, (named(row), ways_of(row))))


def by_strategy() -> dict[str, list[float]]:
    """Errors of each strategy."""
    errors: dict[str, list[float]] = {}
    for each in found():
        errors.setdefault(_name(each.row), []).append(each.error)
    return errors


def hosts() -> str:
    """Errors by strategy."""
    told = []
    for name, errors in by_strategy().items():
        sizes = [abs(error) for error in errors]
        middle = f"{100 * statistics.mean(sizes):.1f} %, {100 * statistics.median(sizes):.1f} %"
        told.append((name, str(len(errors)), middle, f"{100 * min(errors):+.1f} %, {100 * max(errors):+.1f} %"))
    return markdown(("strategy", "steps", "mean, median of absolute errors", "from, to"), told)


def steps() -> str:
    """Every step."""
    rows = []
    for each in found():
        row, own = each.row, each.row["case"].split("/")[0]
        where = f"{row['hosts']} x {row['ranks_per_host']}"
        predicted = 1e3 * (each.passes_s + each.optimizer_s)
        times = (f"{row['step_ms']:.0f}", f"{predicted:.0f}", f"{100 * each.error:+.1f} %")
        rows.append((own, where, row["rate"], str(row["tokens"]), _name(row), *times))
    heads = ("model", "hosts x ranks", "link", "tokens", "strategy", "measured, ms", "predicted", "error")
    return markdown(heads, rows)


if __name__ == "__main__":
    print(hosts() + steps())
