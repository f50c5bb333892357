"""Choice of the route of a layer's weights: shard by shard, or gathered whole first.

Rotation hides hops behind GEMMs, but R small GEMMs take longer than one large one, and every hop has its latency. Where
a layer is tiny or has few tokens, gathering the whole weight first is faster. The times are modelled from the shapes, a
link rate (modelled too, or measured by `Ring.measure_link`) and a GEMM rate; this module times nothing.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rtp_ext._native import shard_sizes, wave_efficiency

__all__ = ["Device", "LayerPlan", "LayerSize", "Link", "RoutePlanner", "decide", "device_of", "link_of", "predict"]

logger = logging.getLogger("rtp_ext")

MARGIN = 0.95  # a layer is gathered if that takes less than this fraction of the rotation's time
WHOLE_LIMIT = 64 << 20  # bytes; a larger layer is never gathered: no rank may hold a large layer


@dataclass(frozen=True)
class Link:
    """The cost of a hop: `seconds_per_hop + bytes / bytes_per_second`; `source` names the origin of the numbers."""

    bytes_per_second: float
    seconds_per_hop: float
    source: str


@dataclass(frozen=True)
class Device:
    """The cost of a GEMM: FLOP/s of large GEMMs, multiprocessors (0: no waves), seconds of any launch, and the rate at
    which sums are read from and written to memory."""

    flops: float
    multiprocessors: int
    seconds_per_launch: float
    source: str
    memory_bytes_per_second: float = math.inf


@dataclass(frozen=True)
class LayerSize:
    """The size of one linear layer, or of several that travel together: `outputs` in all, over the same `inputs`.

    weight_bytes and gradient_bytes: bytes of one number on the wire.
    """

    outputs: int
    inputs: int
    weight_bytes: float
    gradient_bytes: int


@dataclass(frozen=True)
class LayerPlan:
    """The route of a layer's weights and gradients, and the reason for it.

    Attributes:
        route: `ring`, `direct`, `two-level` or `gather`.
        halves: whether gradients travel in two halves.
        reason: in words.
        seconds: modelled time of one forward and backward by route; empty without a model.
    """

    route: str
    halves: bool
    reason: str
    seconds: dict[str, float]


# Dense bf16 FLOP/s of the data sheets of A100, H100 and H200, B200; 65 % of them for large GEMMs. One-way NVLink rates:
# 380 GB/s of the nominal 450 measured on H100 (NCCL issue 1264), scaled by the nominal rates of the others. Bytes/s of
# memory: data sheets of the 80 GB models and of B200; large kernels reach 85 % of it.
_GPUS = {8: (312e12, 250e9, 2.0e12), 9: (989e12, 370e9, 3.35e12), 10: (2250e12, 740e9, 8.0e12)}
_GEMM_EFFICIENCY = 0.65
_MEMORY_EFFICIENCY = 0.85
_WITHOUT_NVLINK = 25e9  # PCIe 4.0 x16 or one 200 Gb/s network port
# A hop costs about 6 us of synchronization (JAX, collective matmul on 8 H100); posting alone costs half of it.
_HOP_SECONDS = 6e-6
_POST_SECONDS = 3e-6
_LAUNCH_SECONDS = 4e-6


def device_of(device: torch.device, dtype: torch.dtype) -> Device | None:
    """Returns the model of a GPU; None for a CPU, where splitting a GEMM costs nothing."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    flops, _, memory = _GPUS.get(properties.major, _GPUS[10])
    peak = flops * (2 / max(dtype.itemsize, 2)) ** 2
    return Device(
        peak * _GEMM_EFFICIENCY,
        properties.multi_processor_count,
        _LAUNCH_SECONDS,
        f"{_GEMM_EFFICIENCY:.0%} of the data sheet of {properties.name}",
        memory * _MEMORY_EFFICIENCY,
    )


def kind_of(device: torch.device) -> tuple[int, int]:
    """Returns the properties that `device_of` uses: GPUs of equal kinds have the same model."""
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.multi_processor_count


def nvlinks_of(device: torch.device) -> int | None:
    """Returns the number of active NVLinks of a GPU, according to NVML; None without NVML. Direct access to another GPU
    is no evidence of NVLink: it works over PCIe too."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except Exception as error:
        logger.info("NVML cannot count the links of %s: %s", device, error)
        return None
    links = 0
    for number in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            links += nvml.nvmlDeviceGetNvLinkState(handle, number) == nvml.NVML_FEATURE_ENABLED
        except nvml.NVMLError:  # no link has this number
            break
    return links


def link_of(device: torch.device, *, nvlink: bool) -> Link:
    """Returns the modelled link of a GPU, with NVLink to every other GPU or without."""
    major = torch.cuda.get_device_properties(device).major
    rate = _GPUS.get(major, _GPUS[10])[1] if nvlink else _WITHOUT_NVLINK
    return Link(rate, _HOP_SECONDS, "modelled")


def gemm_seconds(device: Device, rows: int, columns: int, depth: int, sum_bytes: float = 0) -> float:
    """Returns the time of a product [rows, depth] x [depth, columns], with the last wave of tiles counted whole.
    `sum_bytes`: bytes read and written per number of the result, where the product is added to a sum."""
    if min(rows, columns, depth) == 0:
        return 0.0
    efficiency = wave_efficiency(rows, columns, device.multiprocessors)
    product = 2 * rows * columns * depth / (device.flops * efficiency)
    return max(device.seconds_per_launch, product, rows * columns * sum_bytes / device.memory_bytes_per_second)


def predict(ranks: int, tokens: int, layer: LayerSize, link: Link, device: Device) -> dict[str, float]:
    """Models the seconds of one forward and backward of a layer, for `rotate` and `gather`; docs/design.md, 'How
    rotation works'.

    rotate  forward  c + (R - 1) max(c, w)           c, d, e: GEMM of a shard, its dgrad, its wgrad; C, D, E: of all
            backward (d + e) R + (R - 1) max(max(0, g - d) + max(0, w - d - e), w + g - d - e)
                                                     w, g: hops of a weight, of a gradient, which share a link
    gather  forward  w0 + (R - 1) w' + C             w': a hop whose latency hides behind the one before
            backward the same with D, and the gradients' R - 1 hops and E

    Every GEMM that adds to a sum reads and writes it once: d in float32 where weights have 16 bits, e in the dtype in
    which gradients travel.
    """
    rows = max(shard_sizes(layer.outputs, ranks))

    def products(size: int) -> tuple[float, float, float]:
        return (
            gemm_seconds(device, tokens, size, layer.inputs),
            gemm_seconds(device, tokens, layer.inputs, size, 2 * max(layer.weight_bytes, 4)),
            gemm_seconds(device, size, layer.inputs, tokens, 2 * layer.gradient_bytes),
        )

    shard, dgrad, wgrad = products(rows)
    whole = sum(products(layer.outputs))
    weight, gradient = (
        rows * layer.inputs * size / link.bytes_per_second for size in (layer.weight_bytes, layer.gradient_bytes)
    )
    hop_w, hop_g = (link.seconds_per_hop + time for time in (weight, gradient))
    others = ranks - 1
    forward = shard + others * max(shard, hop_w)
    alone = max(0.0, hop_g - dgrad) + max(0.0, hop_w - dgrad - wgrad)
    shared = link.seconds_per_hop + weight + gradient - dgrad - wgrad
    backward = ranks * (dgrad + wgrad) + others * max(alone, shared)
    gathered = link.seconds_per_hop + others * max(_POST_SECONDS, weight)
    return {
        "rotate": forward + backward,
        "gather": 2 * gathered + whole + others * hop_g,
    }


def decide(
    ranks: int,
    tokens: int,
    layer: LayerSize,
    *,
    hop_route: str,
    link: Link | None,
    device: Device | None,
    gathers: bool = True,
) -> LayerPlan:
    """Returns the plan for a layer with `tokens` local tokens. `hop_route`: the route of the hops of a rotation.
    `gathers`: whether its weights can be gathered."""
    if ranks == 1 or link is None or device is None:
        why = "a single rank" if ranks == 1 else "rotation costs nothing more than gathering on a CPU or one device"
        return LayerPlan(hop_route, False, why, {})
    seconds = predict(ranks, tokens, layer, link, device)
    whole_bytes = layer.outputs * layer.inputs * max(layer.weight_bytes, layer.gradient_bytes)
    text = ", ".join(f"{name} {time * 1e6:.1f} us" for name, time in seconds.items())
    text += f" for {tokens} tokens over a {link.source} link of {link.bytes_per_second / 1e9:.0f} GB/s"
    if gathers and seconds["gather"] < MARGIN * seconds["rotate"] and whole_bytes <= WHOLE_LIMIT:
        return LayerPlan("gather", False, text, seconds)
    rows = max(shard_sizes(layer.outputs, ranks))
    hop = link.seconds_per_hop + rows * layer.inputs * layer.gradient_bytes / link.bytes_per_second
    halves = hop > gemm_seconds(device, tokens, layer.inputs, rows, 2 * max(layer.weight_bytes, 4))
    if halves:
        text += "; a gradient hop outlasts a dgrad"
    return LayerPlan(hop_route, halves, text, seconds)


class RoutePlanner:
    """The routes of the linear layers of one ring, decided once and kept.

    For a layer outside of a converted model the tokens of its first call decide. The layers of a converted model rotate
    in its first forward; at the beginning of forwards 2, 4, 8, ... the planner decides anew, by the most tokens of any
    call on any rank, so that a short evaluation before the training does not fix the routes of the training.

    Attributes:
        link: the modelled or measured cost of a hop; None where there is no choice (a CPU, one process, one rank, a
            requested route).
        may_gather: whether weights can be gathered whole; not where they travel in fewer bits.
        alike: whether all ranks have the same kind of device. If not, their models differ, and layers rotate.
        plans: the LayerPlan of every linear layer that has been called, by name.
    """

    alike = True

    def __init__(
        self,
        ranks: int,
        device: torch.device,
        hop_route: str,
        route: str,
        gradient_halves: bool | None,
        *,
        gathers: bool = True,
    ) -> None:
        self.ranks, self.device, self.hop_route, self.may_gather = ranks, device, hop_route, gathers
        self.gathers = route == "gather"
        self.gradient_halves = gradient_halves
        self.link: Link | None = None
        if device.type == "cuda" and route == "auto":
            self.link = link_of(device, nvlink=hop_route == "direct")
        self.plans: dict[str, LayerPlan] = {}

    @property
    def decides(self) -> bool:
        """Whether routes depend on numbers of tokens. The same on every rank."""
        models = self.ranks > 1 and self.link is not None and self.alike and not self.gathers
        return models and device_of(self.device, torch.float32) is not None

    def compare_devices(self, exchange: Callable[[Any], list[Any]]) -> bool:
        """Compares the GPUs of all ranks and their links. Returns whether hops need measuring, the same on every rank.
        Collective on GPUs; does nothing on CPUs."""
        if self.device.type != "cuda":
            return False
        self.alike = len(set(exchange(kind_of(self.device)))) == 1
        return self.decides and not self.use_nvlinks(exchange(nvlinks_of(self.device)))

    def use_nvlinks(self, answers: list[int | None]) -> bool:
        """Models the link from the NVLinks of all ranks' GPUs. Returns False where a rank cannot count its NVLinks, so
        that hops need measuring. The same on every rank."""
        known = [links for links in answers if links is not None]
        if self.link is not None and len(known) == len(answers):
            self.link = link_of(self.device, nvlink=self.hop_route == "direct" and min(known) > 0)
        return len(known) == len(answers)

    def plan(self, name: str, tokens: int | None, layer: LayerSize, dtype: torch.dtype) -> LayerPlan:
        """Returns the plan of the linear layer `name`: the requested route, else by the model. `tokens`: None before
        the first forward has counted them."""
        if self.gathers:
            plan = LayerPlan("gather", False, "as asked", {})
        elif tokens is None and self.decides:
            plan = LayerPlan(self.hop_route, False, "its number of tokens is unknown in a first forward", {})
        else:
            device = device_of(self.device, dtype) if self.link and self.alike else None
            plan = decide(
                self.ranks,
                tokens or 0,
                layer,
                hop_route=self.hop_route,
                link=self.link,
                device=device,
                gathers=self.may_gather,
            )
        if self.gradient_halves is not None and plan.route != "gather":
            plan = LayerPlan(plan.route, self.gradient_halves, plan.reason, plan.seconds)
        self.plans[name] = plan
        logger.debug("%s: route %s, gradients in halves: %s (%s)", name, plan.route, plan.halves, plan.reason)
        return plan
