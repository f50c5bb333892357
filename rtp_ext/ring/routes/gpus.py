"""Models of the GPU of a rank and of its link to the next, for the route planner, by `rtp_ext.gpu_rates` or assumed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rtp_ext.gpu_rates import (
    GEMM_FRACTION,
    HOP_SECONDS,
    LEAST_NVLINK,
    MEMORY_FRACTION,
    data_sheet,
    link_bytes_per_second,
)
from rtp_ext.ring.links.gpu_links import Wiring

__all__ = ["Device", "Link", "device_of", "link_of"]


@dataclass(frozen=True)
class Link:
    """The cost of a hop: `seconds_per_hop + bytes / bytes_per_second`; `source` names the origin of the numbers."""

    bytes_per_second: float
    seconds_per_hop: float
    source: str


@dataclass(frozen=True)
class Device:
    """The cost of a GEMM: FLOP/s of large GEMMs, multiprocessors (0: no waves), seconds of a launch, and the rate at
    which sums are read from and written to memory. nvlink_bytes_per_second: of a hop over NVLink. assumed: whether the
    GPU is not in the table of data sheets."""

    flops: float
    multiprocessors: int
    seconds_per_launch: float
    source: str
    memory_bytes_per_second: float = math.inf
    nvlink_bytes_per_second: float = 0.0
    assumed: bool = False


_LAUNCH_SECONDS = 4e-6
# GPUs that are not in the table. No GPU of compute capability 8.0 or newer with tensor cores does less for each clock
# of a multiprocessor: 71e12 / 82 / 1.695 GHz on a 3090, 165.2e12 / 128 / 2.52 GHz on a 4090. A rate that is too low
# makes layers rotate, never gather: rotation takes less memory.
_FLOPS_A_CLOCK = 512
_LEAST_CLOCK, _LEAST_MEMORY = 1.0e9, 300e9  # where the driver reports no clock; the memory of an L4


def device_of(device: torch.device, dtype: torch.dtype) -> Device | None:
    """Returns the model of a GPU; None for a CPU, where splitting a GEMM costs nothing.

    The data sheet is that of the GPU with exactly this name. Another GPU (a part of one by MIG included) is assumed to
    do 512 FLOP for each clock of a multiprocessor, the least of all.
    """
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    name, multiprocessors = properties.name, properties.multi_processor_count
    sheet = data_sheet(name)
    if sheet is not None:
        flops, memory, nvlink = sheet.flops, sheet.memory_bytes_per_second, sheet.nvlink_bytes_per_second
        source = f"{GEMM_FRACTION:.0%} of the data sheet of {name}"
    else:
        clock = 1e3 * properties.clock_rate or _LEAST_CLOCK
        flops = multiprocessors * clock * _FLOPS_A_CLOCK
        memory = 2 * 1e3 * properties.memory_clock_rate * properties.memory_bus_width / 8 or _LEAST_MEMORY
        nvlink = LEAST_NVLINK
        source = (
            f"assumed for {name}, which has no data sheet here: {GEMM_FRACTION:.0%} of {multiprocessors} "
            f"multiprocessors * {clock / 1e9:.2f} GHz * {_FLOPS_A_CLOCK} FLOP"
        )
    peak = flops * (2 / max(dtype.itemsize, 2)) ** 2
    return Device(
        peak * GEMM_FRACTION,
        multiprocessors,
        _LAUNCH_SECONDS,
        source,
        memory * MEMORY_FRACTION,
        nvlink,
        sheet is None,
    )


def link_of(device: Device, wiring: Wiring) -> Link:
    """Returns the modelled link of a GPU to the next. Between ranks that share a GPU a copy reads and writes memory."""
    if wiring.kind == "one GPU":
        return Link(device.memory_bytes_per_second / 2, HOP_SECONDS, "modelled copy within a GPU")
    rate = link_bytes_per_second(device.nvlink_bytes_per_second, wiring.kind)
    over_nvlink = wiring.kind == "nvlink" and device.nvlink_bytes_per_second
    kind = "NVLink" if over_nvlink else "PCIe" if wiring.kind in ("nvlink", "pcie") else wiring.kind
    return Link(rate, HOP_SECONDS, f"modelled {kind}")
