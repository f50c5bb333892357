"""Predicted time of forwards whose weights are pulled from other ranks: from how many tokens on it costs nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rtp_ext.command_line import markdown, wrapped
from rtp_ext.planner.constants import TimeConstants, check_at_least, check_known
from rtp_ext.planner.native import engine
from rtp_ext.planner.plans.when import cluster_of, fewest
from rtp_ext.planner.rotation.operations import RotatedOperation, rotations_of
from rtp_ext.planner.rotation.seconds import step_seconds
from rtp_ext.planner.specs.cluster import Cluster
from rtp_ext.planner.specs.model import ModelSpec
from rtp_ext.planner.time.links import Group, hop_bytes_per_s
from rtp_ext.planner.time.work import traffic_s

FORMATS = (None, "int8", "nf4")  # of weights; None: 2 bytes a weight
MODELS = ("llama-3-8b", "llama-3-70b")
LINKS = (("NVLink", 8), ("PCIe", 8), ("NVLink", 16), ("400 Gb/s", 8))  # and number of ranks; nodes of 8, 8, 8, 1
MOST = 1 << 20  # tokens of a pass that are searched
_BYTES = 2  # of a value of activations and of plain weights
_SUM_BYTES = 8.0  # read and written for a number of a sum over shards, in float32


@dataclass(frozen=True)
class ForwardTime:
    """A forward of one rank through all layers; head, embedding and attention scores are not counted.

    Attributes:
        tokens: of the rank, in one pass.
        whole_s: seconds of the products with whole weights, which the rank would have.
        compute_s: seconds of the products with the shards of all ranks, those in blocks dequantized before.
        pull_s: seconds in which the shards of other ranks arrive.
    """

    tokens: int
    whole_s: float
    compute_s: float
    pull_s: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.pull_s)

    @property
    def slowdown(self) -> float:
        """How many times as long it takes as with whole weights."""
        return self.seconds / self.whole_s


def forward_time(
    model: ModelSpec, cluster: Cluster, ranks: int, tokens: int, *, weights: str | None = None
) -> ForwardTime:
    """Predicts a forward of `tokens` tokens on one of `ranks` GPUs. Each GPU keeps 1/ranks of the weights.

    pull_s = bytes of a weight * max((G - 1) / R * W / B, (R - G) / R * W / N): shards of the G ranks of its node come
    over the links inside it at B bytes/s, all others through the port of the GPU at N bytes/s, both at the same time;
    every rank pulls by itself, and latencies are not counted. compute_s: GEMM tiles of the planner's time model. A
    product with a shard of few rows takes as long as the memory needs to read it. weights: None (2 bytes), `int8` or
    `nf4`. No GPU has run this.

    Raises ValueError for less than one rank or token, and for another format.
    """
    check_at_least("forward", 1, ranks=ranks, tokens=tokens)
    if weights is not None:
        check_known("format of weights", weights, [name for name in FORMATS if name])
    constants = TimeConstants.default()
    (layer, _), count = rotations_of(model, layers=1, embedding=False, head=False), model.layers
    launches = dataclasses.replace(constants, kernel_s=constants.engine_launch_s)
    sums = (_SUM_BYTES, _SUM_BYTES) if ranks > 1 else None
    whole = compute = pulled = 0.0
    for operation in layer:
        common = (False, _BYTES, model.experts_per_token)
        whole += step_seconds(operation, tokens, 1, cluster, constants, *common)["forward"]
        compute += ranks * step_seconds(operation, tokens, ranks, cluster, launches, *common, sums)["forward"]
        values = _values(operation)
        stored = values * bytes_of_weight(weights)
        if weights is not None:
            compute += traffic_s(stored + values * _BYTES, cluster, constants)
        pulled += stored
    inside = Group(cluster, min(ranks, cluster.gpus_per_node))
    between = Group(cluster, -(-ranks // inside.ranks), inside.ranks)
    local = (inside.ranks - 1) / ranks * pulled / hop_bytes_per_s(inside, constants)
    remote = (ranks - inside.ranks) / ranks * pulled / hop_bytes_per_s(between, constants)
    return ForwardTime(tokens, count * whole, count * compute, count * max(local, remote))


def break_even_tokens(model: ModelSpec, cluster: Cluster, ranks: int, *, weights: str | None = None) -> int | None:
    """Returns the fewest tokens of a pass from which products with whole weights take at least as long as the pulls;
    None: more than 2^20. From there on the wire costs nothing; the smaller products with shards still do."""

    def pays(tokens: int) -> bool:
        time = forward_time(model, cluster, ranks, tokens, weights=weights)
        return time.whole_s >= time.pull_s

    return fewest(pays, MOST)


def bytes_of_weight(weights: str | None) -> float:
    """Returns the bytes that one weight takes, its part of a scale included."""
    if weights is None:
        return float(_BYTES)
    numbers, size = engine().block_layout(weights)
    return size / numbers


def _values(operation: RotatedOperation) -> int:
    return sum(weight.shard_elements(1) for weight in operation.weights)


def forwards_cells(models: Sequence[str] = MODELS, links: Sequence[tuple[str, int]] = LINKS) -> list[dict[str, Any]]:
    """Returns the rows of `forwards_table` as values for JSON: `from_tokens` (None: more than 2^20) and the `slowdown`
    there by the format of the weights (`none`: 2 bytes), and the slowdown of passes of 64 tokens and of one."""
    cells = []
    for name in models:
        model = ModelSpec.preset(name)
        for link, ranks in links:
            cluster = cluster_of(link, ranks)
            tokens = {each: break_even_tokens(model, cluster, ranks, weights=each) for each in FORMATS}
            times = {
                each: forward_time(model, cluster, ranks, least, weights=each).slowdown if least else None
                for each, least in tokens.items()
            }
            few = {str(size): forward_time(model, cluster, ranks, size).slowdown for size in (64, 1)}
            of: dict[str, dict[str | None, Any]] = {"from_tokens": tokens, "slowdown": times}
            named = {what: {each or "none": value for each, value in found.items()} for what, found in of.items()}
            cells.append({"model": name, "link": link, "gpus": ranks, **named, "slowdown_of_tokens": few})
    return cells


def forwards_table(models: Sequence[str] = MODELS, links: Sequence[tuple[str, int]] = LINKS) -> str:
    """Formats a Markdown table of H100: the tokens from which forwards pay, and the cost of decoding."""
    heads = [f"from, {name or '16 bits'}" for name in FORMATS]
    heads += ["64 tokens", "1 token"]
    rows = [["model", "link", "GPUs", *heads]]
    for cell in forwards_cells(models, links):
        shown = [
            f"more than {MOST}" if tokens is None else f"{tokens} ({cell['slowdown'][weights]:.2f})"
            for weights, tokens in cell["from_tokens"].items()
        ]
        shown += [f"{slowdown:.1f}" for slowdown in cell["slowdown_of_tokens"].values()]
        rows.append([cell["model"], cell["link"], str(cell["gpus"]), *shown])
    about = (
        "Predictions of rtp_ext.planner for H100 of 80 GB; no GPU has run such a forward. `from`: the fewest tokens of "
        "a rank in one pass whose products hide the pulls, by the bits of the weights; in parentheses the time "
        "relative to a GPU that has all weights. The last columns: the same for 64 tokens a pass and for decoding one "
        "token, in 16 bits. Nodes of 8; 400 Gb/s means one GPU a node."
    )
    return "\n".join([*markdown(rows), "", *wrapped(about, then="")])
