"""Choice of the route of a layer's weights, shard by shard or gathered whole first, and of the shards in a product.

Rotation hides hops behind GEMMs, but R small GEMMs take longer than one large one, and every hop has its latency. Where
a layer is tiny or has few tokens, gathering the whole weight first is faster; between both are groups, whose shards are
one operand. The times are those of `rtp_ext.cost`, from the shapes, a link rate (modelled too, or measured by
`Ring.measure_link`) and a GEMM rate; nothing is timed here.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rtp_ext import _native
from rtp_ext._native import shard_sizes
from rtp_ext.cost import Operation, Rates, block_ends, block_seconds, group_sizes, product_seconds
from rtp_ext.embedding_rows import rows_traffic
from rtp_ext.gpu_rates import POST_SECONDS
from rtp_ext.ring.links.gpu_links import Wiring
from rtp_ext.ring.routes.gpus import Device, Link, device_of, link_of
from rtp_ext.ring.routes.gradient_routes import GradientRoutes
from rtp_ext.words import Budget, EmbeddingWay

__all__ = ["Device", "LayerPlan", "LayerSize", "Link", "RoutePlanner", "decide", "device_of", "link_of", "predict"]

logger = logging.getLogger("rtp_ext")

MARGIN = 0.95  # a layer is gathered, or rotates in groups, if that takes less than this fraction of a rotation's time


@dataclass(frozen=True)
class LayerSize:
    """The size of one linear layer, of several that travel together, or of an MLP: `outputs` in all, over the same
    `inputs`.

    weight_bytes and gradient_bytes: bytes of one number on the wire. down: of an MLP: output features, of a second
    layer whose inputs are the hidden features. gates: of an MLP: parts of `outputs`, each of all hidden features.
    again: backward computes the first layer again.
    """

    outputs: int
    inputs: int
    weight_bytes: float
    gradient_bytes: int
    down: int = 0
    gates: int = 1
    again: bool = False

    @property
    def hidden(self) -> int:
        """Features along which weights are cut."""
        return self.outputs // self.gates

    @property
    def values(self) -> int:
        """Weights of one of the hidden features."""
        return self.gates * self.inputs + self.down


@dataclass(frozen=True)
class LayerPlan:
    """The route of a layer's weights and gradients, and the reason for it.

    Attributes:
        route: `ring`, `direct`, `two-level` or `gather`.
        halves: whether gradients travel in two halves.
        reason: in words.
        seconds: modelled time of one forward and backward by way (`predict`); empty without a model.
        group: shards in a product, at most.
    """

    route: str
    halves: bool
    reason: str
    seconds: dict[str, float]
    group: int = 1

    @property
    def predicted(self) -> float | None:
        """Modelled seconds of this plan; None without a model."""
        return self.seconds.get("gather" if self.route == "gather" else way_of(self.group))


ROWS_MARGIN = 1 << 20  # bytes that rows have to save: each of their passes is three collectives, one after another


@dataclass(frozen=True)
class TableSize:
    """The size of an embedding table [V, E] that is cut along `dim`.

    weight_bytes and gradient_bytes: bytes of one number on the wire of a rotation; row_bytes and row_gradient_bytes:
    of one number of a row. Gradients have 0 where the table is not trained.
    """

    shape: tuple[int, ...]
    dim: int
    weight_bytes: float
    row_bytes: int
    gradient_bytes: int
    row_gradient_bytes: int


@dataclass(frozen=True)
class TablePlan:
    """How ranks get the rows of an embedding. by_rows: whether rows travel, and not the table. tokens: the largest
    number on any rank; None: unknown. reason: in words."""

    by_rows: bool
    tokens: int | None
    reason: str


def gemm_seconds(device: Device, rows: int, columns: int, depth: int, sum_bytes: float = 0) -> float:
    """Returns the time of a product [rows, depth] x [depth, columns], with the last wave of tiles counted whole.
    `sum_bytes`: bytes read and written per number of the result, of a sum."""
    rates = Rates(
        device.flops, device.memory_bytes_per_second, device.multiprocessors, launch_s=device.seconds_per_launch
    )
    return product_seconds(rates, rows, columns, depth, result_bytes=sum_bytes or None)


def way_of(group: int) -> str:
    """Returns the name, in `LayerPlan.seconds`, of a rotation with so many shards in a product."""
    return "rotate" if group == 1 else f"groups of {group}"


def group_choices(ranks: int) -> tuple[int, ...]:
    """Returns the numbers of shards in a product that the planner tries besides 1: a quarter, half and all."""
    return tuple(sorted({ranks // 4, ranks // 2, ranks} - {0, 1}))


def _products(
    device: Device, tokens: int, layer: LayerSize, hidden: int, sum_bytes: float, wgrad_bytes: float
) -> tuple[float, float, float]:
    """Returns the seconds of forward, dgrad and wgrad with so many of the hidden features. `sum_bytes`: read and
    written per number of a result that groups add to: dx, and y of an MLP."""
    outputs, inputs, down = layer.gates * hidden, layer.inputs, layer.down
    first = gemm_seconds(device, tokens, outputs, inputs)
    dgrad = gemm_seconds(device, tokens, inputs, outputs, sum_bytes)
    wgrad = gemm_seconds(device, outputs, inputs, tokens, wgrad_bytes)
    second = gemm_seconds(device, tokens, down, hidden, sum_bytes)
    dgrad += gemm_seconds(device, tokens, hidden, down) + layer.again * first
    return first + second, dgrad, wgrad + gemm_seconds(device, down, hidden, tokens, wgrad_bytes)


def predict(
    ranks: int,
    tokens: int,
    layer: LayerSize,
    link: Link,
    device: Device,
    hop_route: str = "ring",
    *,
    ahead: bool = False,
    direct: bool = False,
) -> dict[str, float]:
    """Models the seconds of one forward and backward of a layer, or of an MLP without its activation, by
    `rtp_ext.cost`: `rotate` with one shard a product, `groups of` g (`group_choices`), and `gather` with all, whose
    gradients' hops follow its last product. Both kinds of hops share a link. ahead: weights are sent while the
    operations before compute: of one of many equal layers. direct: contributions to gradients go straight to their
    owners, who add them, up to a layer late.

    Of several products, each adds to a sum, which it reads and writes: a dgrad, and y of an MLP, in float32 where
    weights have 16 bits, a wgrad in the dtype in which gradients travel. (The first dgrad does not read its sum, and a
    cast of the last one reads it and writes 16 bits: together as much.) One product of the whole weight writes its
    result only. In groups a wgrad writes the contributions to all gradients of its group, which are then added to what
    has arrived. The hops of a group wait for each other on route ring; on route direct a latency hides behind the hop
    before.
    """
    rows, others = max(shard_sizes(layer.hidden, ranks)), ranks - 1
    weight, gradient = (
        rows * layer.values * size / link.bytes_per_second for size in (layer.weight_bytes, layer.gradient_bytes)
    )
    hop_g = link.seconds_per_hop + gradient
    add = rows * layer.values * layer.gradient_bytes / device.memory_bytes_per_second  # read or written once
    sums = 2 * max(layer.weight_bytes, 4), 2 * layer.gradient_bytes
    behind = max(POST_SECONDS, weight)  # a hop of several whose latency hides behind the one before

    def products(shards: int, dgrad_bytes: float, wgrad_bytes: float) -> tuple[float, float, float]:
        size = min(layer.hidden, shards * rows)
        return _products(device, tokens, layer, size, dgrad_bytes, wgrad_bytes)

    def rotated(group: int) -> float:
        groups, hop = group_sizes(ranks, group), link.seconds_per_hop + weight
        call = 0.0
        if group > 1 and hop_route == "direct":
            call, hop = max(0.0, link.seconds_per_hop - POST_SECONDS), behind
        alone = len(groups) == 1
        chains = group == 1 and not direct
        of = {
            count: products(
                count, layer.weight_bytes if alone else sums[0], sums[1] if chains else layer.gradient_bytes
            )
            for count in set(groups)
        }
        forward, back = (
            Operation(0.0, groups, tuple(of[count][index] for count in groups), hop, 1.0, call=call) for index in (0, 1)
        )
        if direct:
            ways = {"wgrads": tuple(of[count][2] for count in groups), "gradient_hop": max(POST_SECONDS, gradient)}
            ways |= {"gradient_call": max(0.0, link.seconds_per_hop - POST_SECONDS), "add": (ranks + 1) * add}
            back = dataclasses.replace(back, gradients="direct", **ways)
        else:
            wgrads = tuple(of[count][2] / count + 3 * add * (group > 1) for count in groups for _ in range(count))
            back = dataclasses.replace(back, gradients="chain", wgrads=wgrads, gradient_hop=hop_g)
        if ahead:
            return block_seconds([forward], ranks) + block_seconds([back], ranks)
        link_s = others * (link.seconds_per_hop + weight + gradient) + sum(of[groups[-1]][1:])
        return block_ends([forward], 0)[0] + max(block_ends([back], 0)[0], link_s)

    forward, dgrad, wgrad = products(ranks, layer.weight_bytes, layer.gradient_bytes)
    gathered = forward + dgrad + wgrad + others * (2 * behind + hop_g) + 2 * link.seconds_per_hop
    ways = {way_of(group): rotated(group) for group in (1, *group_choices(ranks))}
    return {**ways, "gather": gathered}


def _facts(layer: LayerSize) -> list[Any]:
    first = [_native.ParameterFacts((layer.hidden, layer.inputs)) for _ in range(layer.gates)]
    return [*first, *([_native.ParameterFacts((layer.down, layer.hidden), dim=1)] if layer.down else [])]


def slots_bytes(ranks: int, layer: LayerSize, group: int) -> int:
    """Returns the bytes of the slots of a layer whose weights travel in the compute dtype."""
    facts = _native.OperationFacts("mlp" if layer.down else "linear", _facts(layer), True)
    held = _native.footprint(
        [facts],
        **{"ranks": ranks, "group": group, "in_place": False, "slot_cap": 0},
        **{"sends_anywhere": True, "receives_anywhere": True, "cast": False},
        **{"compute_bytes": math.ceil(layer.weight_bytes), "reduce_bytes": layer.gradient_bytes},
    )
    return held.weight.peak_bytes + held.gradient.peak_bytes


def decide(
    ranks: int,
    tokens: int,
    layer: LayerSize,
    *,
    hop_route: str,
    link: Link | None,
    device: Device | None,
    gathers: bool = True,
    groups: bool = True,
    buffers: Budget | int = "auto",
    ahead: bool = False,
    direct: bool = False,
) -> LayerPlan:
    """Returns the plan for a layer with `tokens` local tokens. `hop_route`: the route of the hops of a rotation.
    `gathers`, `groups`: whether its weights can be gathered, and be several in a product. `buffers`: as in
    `rtp_ext.Ring`. `ahead`, `direct`: as of `predict`."""
    if hop_route == "two-level":
        return LayerPlan(hop_route, False, "not modelled: two levels have two kinds of links", {})
    if ranks == 1 or link is None or device is None:
        why = "a single rank" if ranks == 1 else "rotation costs nothing more than gathering on a CPU or one device"
        return LayerPlan(hop_route, False, why, {})
    seconds = predict(ranks, tokens, layer, link, device, hop_route, ahead=ahead, direct=direct)
    whole_bytes = layer.hidden * layer.values * (layer.weight_bytes + layer.gradient_bytes)

    def fits(size: float) -> bool:
        return buffers == "auto" or (buffers != "lean" and size <= buffers)

    if not groups:
        seconds = {way: time for way, time in seconds.items() if way in ("rotate", "gather")}
    text = ", ".join(f"{name} {time * 1e6:.1f} us" for name, time in seconds.items())
    text += f" for {tokens} tokens over a {link.source} link of {link.bytes_per_second / 1e9:.0f} GB/s"
    text += ", weights sent ahead" * ahead + ", gradients straight to their owners" * direct
    if device.assumed:
        text += f", rates {device.source}"
    ways = {way_of(group): group for group in group_choices(ranks)} if groups else {}
    found = {way for way, group in ways.items() if fits(slots_bytes(ranks, layer, group))}
    if gathers and fits(whole_bytes):
        found.add("gather")
    best = min(sorted(found), key=lambda way: seconds[way], default="rotate")
    if seconds[best] >= MARGIN * seconds["rotate"]:
        best = "rotate"
    if best == "gather":
        return LayerPlan("gather", False, text, seconds)
    if best != "rotate":
        return LayerPlan(hop_route, False, text, seconds, ways[best])
    rows = max(shard_sizes(layer.hidden, ranks))
    hop = link.seconds_per_hop + rows * layer.values * layer.gradient_bytes / link.bytes_per_second
    halves = hop > _products(device, tokens, layer, rows, 2 * max(layer.weight_bytes, 4), 0)[1]
    if halves:
        text += "; a gradient hop outlasts a dgrad"
    return LayerPlan(hop_route, halves, text, seconds)


class RoutePlanner:
    """The routes of the linear layers and MLPs of one ring, decided once and kept.

    For a layer outside of a converted model the tokens of its first call decide. The layers of a converted model rotate
    in its first forward; at the beginning of forwards 2, 4, 8, ... the planner decides anew, by the most tokens of any
    call on any rank, so that a short evaluation before the training does not fix the routes of the training.

    Attributes:
        model: the model of this rank's GPU, with the origin of its numbers in `model.source`; None on a CPU.
        link: the modelled or measured cost of a hop; None where there is no choice (a CPU, one process, one rank, a
            requested route, two levels).
        may_gather: whether weights can be gathered whole, and several be in a product where none was asked for; not
            where they travel in fewer bits, nor in groups as asked.
        may_send: whether rows of embeddings can travel; not where weights travel in fewer bits.
        group: shards in a product as asked, at most all; None: decided for every layer.
        buffers: as in `rtp_ext.Ring`.
        ahead: whether weights are sent while the operations before compute.
        gradients: routes of gradients.
        alike: whether the GPUs of all ranks have the same model. If not, layers rotate.
        plans: the LayerPlan of every linear layer and MLP that has been called, by name.
        tables: the TablePlan of every embedding that had a choice, by name.
    """

    alike, ahead = True, False
    gradients = GradientRoutes()

    def __init__(
        self,
        ranks: int,
        device: torch.device,
        hop_route: str,
        route: str,
        gradient_halves: bool | None,
        *,
        gathers: bool = True,
        group: int | None = None,
        buffers: Budget | int = "auto",
        wiring: Wiring | None = None,
        embedding: EmbeddingWay = "rotate",
    ) -> None:
        self.ranks, self.device, self.hop_route = ranks, device, hop_route
        self.group = None if group is None else min(group, ranks)
        self.may_send, self.may_gather = gathers, gathers and group is None
        self.gathers, self.buffers = route == "gather", buffers
        self.gradient_halves = gradient_halves
        self.model = device_of(device, torch.bfloat16)
        self.link: Link | None = None
        self.wiring = wiring
        if self.model is not None and wiring is not None and route == "auto" and hop_route != "two-level":
            self.link = link_of(self.model, wiring)
        self.embedding = embedding
        self.plans: dict[str, LayerPlan] = {}
        self.tables: dict[str, TablePlan] = {}

    @property
    def decides(self) -> bool:
        """Whether routes depend on numbers of tokens. The same on every rank."""
        return self.models or (self.ranks > 1 and self.embedding != "rotate")

    @property
    def models(self) -> bool:
        """Whether routes of linear layers and MLPs depend on numbers of tokens. The same on every rank."""
        modelled = self.link is not None and self.model is not None and self.alike
        return self.ranks > 1 and modelled and not self.gathers

    def compare_devices(self, exchange: Callable[[Any], list[Any]]) -> bool:
        """Compares the models of all ranks' GPUs. Returns whether hops need measuring, because the links are unknown,
        or the GPU is; the same on every rank. Collective on GPUs; does nothing on CPUs."""
        if self.model is None:
            return False
        models = exchange(self.model)
        self.alike = len(set(models)) == 1
        if not self.alike:
            logger.warning("the GPUs of a ring differ, so that its layers rotate: %s", "; ".join(map(str, models)))
        elif self.model.assumed:
            logger.warning("rates of the GPUs of a ring are %s", self.model.source)
        known = self.wiring is not None and self.wiring.known and not self.model.assumed
        return self.models and not known

    def plan(
        self, name: str, tokens: int | None, layer: LayerSize, dtype: torch.dtype, *, in_place: bool = False
    ) -> LayerPlan:
        """Returns the plan of the layer or MLP `name`: the requested route, else by the model. `tokens`: None before
        the first forward has counted them. `in_place`: whether local shards themselves travel, one at a time."""
        if self.gathers:
            plan = LayerPlan("gather", False, "as asked", {})
        elif tokens is None and self.models:
            plan = LayerPlan(self.hop_route, False, "its number of tokens is unknown in a first forward", {})
        elif self.link is not None and not self.alike:
            plan = LayerPlan(self.hop_route, False, "the GPUs of the ring differ", {})
        else:
            device = device_of(self.device, dtype) if self.link else None
            plan = decide(
                self.ranks,
                tokens or 0,
                layer,
                hop_route=self.hop_route,
                link=self.link,
                device=device,
                gathers=self.may_gather and not (in_place and layer.down),
                groups=self.may_gather and not in_place,
                buffers=self.buffers,
                ahead=self.ahead and not in_place,
                direct=self._direct(layer.gradient_bytes),
            )
        if self.group is not None and plan.route != "gather":
            plan = dataclasses.replace(plan, group=self.group)
        if self.gradient_halves is not None:
            plan = dataclasses.replace(plan, halves=self.gradient_halves)
        self.plans[name] = plan
        logger.debug(
            "%s: route %s, %d shards a product, gradients in halves: %s (%s)",
            *(name, plan.route, plan.group, plan.halves, plan.reason),
        )
        return plan

    def _direct(self, gradient_bytes: int) -> bool:
        """Whether a layer's gradients take the direct route. (Within a number of bytes, a layer's own choice.)"""
        dtype = torch.float32 if gradient_bytes > 2 else torch.bfloat16
        return self.gradients.direct(self.hop_route, dtype, self.buffers == "auto")

    def may_send_rows(self, in_model: bool) -> bool:
        """Whether an embedding has a choice, or sends rows as asked. in_model: whether it is in a model that the ranks
        have compared; only there they count tokens together."""
        return self.embedding == "rows" or (self.embedding == "auto" and in_model)

    def may_pay(self, numbers: int) -> bool:
        """Whether the number of tokens decides how an embedding of so many numbers gets its rows, or only counts."""
        most = 2 * 8 * numbers  # bytes of the table and its gradient, in the widest dtype
        return self.decides and (self.embedding == "rows" or most > ROWS_MARGIN)

    def plan_table(self, name: str, tokens: int | None, table: TableSize) -> TablePlan:
        """Returns the plan of an embedding: as requested, else by the bytes that the rank of the largest shard sends.
        `tokens`: as for `plan`."""
        if self.embedding == "rows":
            plan = TablePlan(True, tokens, "as asked")
        elif tokens is None and name in self.tables:  # another kind of call, such as under no_grad, has its plan
            plan = self.tables[name]
        elif tokens is None or self.ranks == 1 or not self.may_send:
            plan = TablePlan(False, tokens, "a single rank, a travel dtype, or an unknown number of tokens")
        else:
            shard = [*table.shape]
            shard[table.dim] = shard_sizes(shard[table.dim], self.ranks)[0]
            rotated = (self.ranks - 1) * math.prod(shard) * (table.weight_bytes + table.gradient_bytes)
            rows = rows_traffic(
                *(table.shape, table.dim, self.ranks, 0, tokens, table.row_bytes, table.row_gradient_bytes)
            )
            sent = rows.forward + rows.gradients
            why = f"{tokens} tokens: rows {sent / 1e6:.3f} MB a step, the table {rotated / 1e6:.3f} MB"
            plan = TablePlan(sent + ROWS_MARGIN < rotated, tokens, why)
        self.tables[name] = plan
        logger.debug("%s: sends %s (%s)", name, "rows" if plan.by_rows else "the table", plan.reason)
        return plan
