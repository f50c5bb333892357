"""Rates of GPUs by name, and of the links between them: the one table of the route planner and of `rtp_ext.planner`.

The rates come from data sheets, or are assumed, but for what GPUs reach of them. This module needs no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = [
    "GEMM_FRACTION",
    "HOP_SECONDS",
    "LEAST_NVLINK",
    "LINKS",
    "MEMORY_FRACTION",
    "POST_SECONDS",
    "WIRES",
    "DataSheet",
    "data_sheet",
    "link_bytes_per_second",
]


@dataclass(frozen=True)
class DataSheet:
    """Peak rates of a GPU.

    Attributes:
        flops: dense bf16 FLOP/s with sums in float32.
        memory_bytes_per_second: of the GPU's memory.
        nvlink_bytes_per_second: of a hop over NVLink, one way; 0: it has none.
    """

    flops: float
    memory_bytes_per_second: float
    nvlink_bytes_per_second: float


# One-way rates that NCCL assigns to a link of a generation (NVIDIA/nccl@5067397, src/graph/topo.h), times the links.
# On 8 H100, 380 GB/s were measured (NCCL issue 1264).
_AMPERE, _AMPERE_BRIDGE, _A30, _HOPPER, _HOPPER_BRIDGE, _BLACKWELL = 240e9, 48e9, 80e9, 370.8e9, 247.2e9, 721.8e9
LEAST_NVLINK = _AMPERE_BRIDGE

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

# What GPUs reach of their data sheet. Measured on an H100 80GB HBM3 (benchmarks/results/h100-80gb-hbm3-1gpu): whole
# products of 16 bits 0.73 to 0.80 of its FLOP/s, the lower ones at the limit of its power (overlap.jsonl, t_g1_us);
# what products add to float32 sums moves at 0.62 to 0.80 of its memory's rate (sums.jsonl), in long passes at 0.70.
GEMM_FRACTION, MEMORY_FRACTION = 0.77, 0.70

# Over PCIe 4.0 x16, a direction: 20.7 GB/s with direct access, 12.9 GB/s through memory of the host on RTX 4090 (half
# of the bidirectional rates in tinygrad/open-gpu-kernel-modules issue 6), 25 and 9.5 to 10.5 on A40 (NVIDIA/nccl-tests
# issue 74). Between hosts: one port of 200 Gb/s. An estimate for all GPUs, with newer buses as well.
WIRES = {"pcie": 20e9, "host memory": 12e9, "network": 25e9}
LINKS = ("nvlink", "pcie", "host memory")  # between GPUs of one host

# A copy of a copy engine to another GPU with its synchronization: JAX, collective matmul on 8 H100 (6 us a round beyond
# products and bytes); and without, where it waits behind another one. Not measured here.
HOP_SECONDS, POST_SECONDS = 6e-6, 3e-6


def data_sheet(name: str) -> DataSheet | None:
    """Returns the data sheet of the GPU with exactly this name, as torch reports it; None if it is not in the table."""
    for pattern, flops, memory, nvlink in _DATA_SHEETS:
        if re.fullmatch(rf"(NVIDIA )?{pattern}", name):
            return DataSheet(flops, memory, nvlink)
    return None


def link_bytes_per_second(nvlink_bytes_per_second: float, kind: str) -> float:
    """Returns the rate of a hop between GPUs over a link of `kind`, of LINKS or `network`. GPUs without NVLink take
    PCIe with direct access in its place."""
    if kind == "nvlink" and nvlink_bytes_per_second:
        return nvlink_bytes_per_second
    return WIRES["pcie" if kind == "nvlink" else kind]
