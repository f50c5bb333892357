"""Rates of GPUs and of the links between them, for the route planner: from data sheets, or assumed.

Nothing here was measured by this package.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

from rtp_ext.ring.links.wiring import Wiring

__all__ = ["Device", "Link", "device_of", "link_of"]


@dataclass(frozen=True)
class Link:
    """The cost of a hop: `seconds_per_hop + bytes / bytes_per_second`; `source` names the origin of the numbers."""

    bytes_per_second: float
    seconds_per_hop: float
    source: str


@dataclass(frozen=True)
class Device:
    """The cost of a GEMM: FLOP/s of large GEMMs, multiprocessors (0: no waves), seconds of any launch, and the rate at
    which sums are read from and written to memory. nvlink_bytes_per_second: of a hop over NVLink. assumed: whether the
    GPU is not in the table of data sheets."""

    flops: float
    multiprocessors: int
    seconds_per_launch: float
    source: str
    memory_bytes_per_second: float = math.inf
    nvlink_bytes_per_second: float = 0.0
    assumed: bool = False


# One-way rates that NCCL assigns to a link of a generation (NVIDIA/nccl@5067397, src/graph/topo.h), times the links.
# On 8 H100, 380 GB/s were measured (NCCL issue 1264).
_AMPERE, _AMPERE_BRIDGE, _A30, _HOPPER, _HOPPER_BRIDGE, _BLACKWELL = 240e9, 48e9, 80e9, 370.8e9, 247.2e9, 721.8e9

# The end of torch's name of a GPU, dense bf16 FLOP/s with sums in float32, bytes/s of memory, bytes/s of a hop over
# NVLink (0: it has none). Source: NVIDIA's data sheet of the GPU, with half of the FLOP/s printed for sparse matrices;
# else as noted.
_DATA_SHEETS = (
    (r"A100-(SXM4|PCIE)-40GB", 312e12, 1.555e12, _AMPERE),
    (r"A100(-SXM4-80GB|-PCIE-80GB| 80GB PCIe)", 312e12, 2.0e12, _AMPERE),
    (r"A30", 165e12, 933e9, _A30),
    (r"A10", 125e12, 600e9, 0.0),
    (r"A40", 149.7e12, 696e9, _AMPERE_BRIDGE),
    (r"RTX A6000", 154.8e12, 768e9, _AMPERE_BRIDGE),  # GA102 white paper, 2.0
    (r"GeForce RTX 3090", 71e12, 936e9, _AMPERE_BRIDGE),  # GA102 white paper, 2.0
    (r"L4", 121e12, 300e9, 0.0),
    (r"L40", 181e12, 864e9, 0.0),
    (r"L40S", 362e12, 864e9, 0.0),
    (r"RTX 6000 Ada Generation", 364.2e12, 960e9, 0.0),  # Ada white paper of the professional GPUs
    (r"GeForce RTX 4090", 165.2e12, 1008e9, 0.0),  # Ada white paper
    (r"H100 80GB HBM3", 989e12, 3.35e12, _HOPPER),
    (r"H100 PCIe", 756e12, 2.0e12, _HOPPER_BRIDGE),
    (r"H100 NVL", 835e12, 3.9e12, _HOPPER_BRIDGE),
    (r"H200", 989e12, 4.8e12, _HOPPER),
    (r"GH200 480GB", 989e12, 4.0e12, _HOPPER),
    (r"B200", 2250e12, 8.0e12, _BLACKWELL),
    (r"GB200", 2500e12, 8.0e12, _BLACKWELL),
    (r"B300( SXM6 AC)?", 2250e12, 8.0e12, _BLACKWELL),
    (r"GB300", 2500e12, 8.0e12, _BLACKWELL),
    (r"RTX PRO 6000 Blackwell Workstation Edition", 503.8e12, 1792e9, 0.0),  # RTX PRO Blackwell white paper
    (r"RTX PRO 6000 Blackwell Server Edition", 480e12, 1597e9, 0.0),  # as above: 4 times its float32 rate, 120 TFLOP/s
    (r"GeForce RTX 5090", 209.5e12, 1792e9, 0.0),  # RTX Blackwell white paper
)
_GEMM_EFFICIENCY = 0.65  # of the peak, of large GEMMs
_MEMORY_EFFICIENCY = 0.85  # of the peak, of large kernels
_LAUNCH_SECONDS = 4e-6
# GPUs that are not in the table. No GPU of compute capability 8.0 or newer with tensor cores does less for each clock
# of a multiprocessor: 71e12 / 82 / 1.695 GHz on a 3090, 165.2e12 / 128 / 2.52 GHz on a 4090. A rate that is too low
# makes layers rotate, never gather: rotation takes less memory.
_FLOPS_A_CLOCK = 512
_LEAST_CLOCK, _LEAST_MEMORY = 1.0e9, 300e9  # where the driver reports no clock; the memory of an L4

# Over PCIe 4.0 x16, a direction: 20.7 GB/s with direct access, 12.9 GB/s through memory of the host on RTX 4090 (half
# of the bidirectional rates in tinygrad/open-gpu-kernel-modules issue 6), 25 and 9.5 to 10.5 on A40 (NVIDIA/nccl-tests
# issue 74). Between hosts: one port of 200 Gb/s. An estimate for all GPUs, with newer buses as well.
_WIRES = {"pcie": 20e9, "host memory": 12e9, "network": 25e9}
HOP_SECONDS = 6e-6  # a hop with its synchronization: JAX, collective matmul on 8 H100


def device_of(device: torch.device, dtype: torch.dtype) -> Device | None:
    """Returns the model of a GPU; None for a CPU, where splitting a GEMM costs nothing.

    The data sheet is that of the GPU with exactly this name. Another GPU (a part of one by MIG included) is assumed to
    do 512 FLOP for each clock of a multiprocessor, the least of all.
    """
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    name, multiprocessors = properties.name, properties.multi_processor_count
    sheet = next((each for each in _DATA_SHEETS if re.fullmatch(rf"(NVIDIA )?{each[0]}", name)), None)
    if sheet is not None:
        _, flops, memory, nvlink = sheet
        source = f"{_GEMM_EFFICIENCY:.0%} of the data sheet of {name}"
    else:
        clock = 1e3 * properties.clock_rate or _LEAST_CLOCK
        flops = multiprocessors * clock * _FLOPS_A_CLOCK
        memory = 2 * 1e3 * properties.memory_clock_rate * properties.memory_bus_width / 8 or _LEAST_MEMORY
        nvlink = _AMPERE_BRIDGE  # the slowest
        source = (
            f"assumed for {name}, which has no data sheet here: {_GEMM_EFFICIENCY:.0%} of {multiprocessors} "
            f"multiprocessors * {clock / 1e9:.2f} GHz * {_FLOPS_A_CLOCK} FLOP"
        )
    peak = flops * (2 / max(dtype.itemsize, 2)) ** 2
    return Device(
        peak * _GEMM_EFFICIENCY,
        multiprocessors,
        _LAUNCH_SECONDS,
        source,
        memory * _MEMORY_EFFICIENCY,
        nvlink,
        sheet is None,
    )


def link_of(device: Device, wiring: Wiring) -> Link:
    """Returns the modelled link of a GPU to the next. Between ranks that share a GPU a copy reads and writes memory."""
    if wiring.kind == "one GPU":
        return Link(device.memory_bytes_per_second / 2, HOP_SECONDS, "modelled copy within a GPU")
    if wiring.kind == "nvlink" and device.nvlink_bytes_per_second:
        return Link(device.nvlink_bytes_per_second, HOP_SECONDS, "modelled NVLink")
    kind = "pcie" if wiring.kind == "nvlink" else wiring.kind
    return Link(_WIRES[kind], HOP_SECONDS, f"modelled {kind.replace('pcie', 'PCIe')}")
