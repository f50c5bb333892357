"""Constants of the planner, from one versioned data file that gives the source of every number."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtp_ext.command_line import did_you_mean

FILE = Path(__file__).with_name("constants.json")


@functools.cache
def constants() -> dict[str, Any]:
    """Returns the contents of constants.json. Names of quantities contain their units."""
    return json.loads(FILE.read_text())


def memory_constant(name: str) -> float:
    """Returns a number of the section `memory`."""
    return constants()["memory"][name]["value"]


def host_constant(name: str) -> float:
    """Returns a number of the section `host`: counted driver and library calls for each operation of the engine."""
    return constants()["host"][name]["value"]


def driver_call_range() -> tuple[float, float]:
    """Returns the host seconds for a call of the CUDA driver: the least estimate, and what hops on an H100 took."""
    entry = constants()["time"]["driver_call_s"]
    return entry["least"], entry["value"]


def check_known(what: str, name: str, known: Any) -> None:
    """Raises ValueError if `name` is not in `known`."""
    if name not in known:
        near = did_you_mean(str(name), known)
        raise ValueError(f"unknown {what} {name!r}: expected one of {', '.join(sorted(known))}{near}")


def check_at_least(owner: str, least: int, **numbers: Any) -> None:
    """Raises ValueError for a named value that is not an integer of at least `least`."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{owner}: expected {name} to be a whole number of at least {least}, got {value!r}")


@dataclass(frozen=True)
class TimeConstants:
    """Parameters of the time model (fitted by `calibrate`); sources are in constants.json, `time`.

    Attributes:
        gemm_fraction: fraction of the best rate of a GPU (`*_achievable_flops_per_s`) that the main loop of a GEMM
            reaches.
        gemm_ramp_depth: cost of starting and ending a tile, in steps of the inner dimension.
        flash_fraction_torch: fraction of the best rate that torch's fused attention reaches.
        hbm_fraction: fraction of the memory bandwidth that elementwise kernels, and the sums of products, reach.
        kernel_s, engine_launch_s: seconds between two kernels of a queue; for each further kernel that the engine
            launches.
        host_s: seconds in which the host issues a kernel, including autograd and framework; the part beyond the GPU's
            time is exposed.
        network_fraction: fraction of the rate of a network port.
        nccl_base_s, nccl_intra_step_s, nccl_inter_step_s: latency of a collective, and of its steps inside and between
            nodes.
        scaled_product_s: least seconds of a product in eight bits.
        eager_traffic: bytes moved by unfused elementwise kernels relative to fused ones.
        nvlink_sm_share, network_sm_share: share of the multiprocessors that NCCL takes from concurrent kernels.
        driver_call_s, nccl_call_s, engine_product_s: host seconds for a call of the CUDA driver, and, besides these
            calls, for a hop or collective over NCCL and for a product of the engine. 0: a machine without GPUs.
    """

    gemm_fraction: float
    gemm_ramp_depth: float
    flash_fraction_torch: float
    hbm_fraction: float
    kernel_s: float
    engine_launch_s: float
    host_s: float
    network_fraction: float
    nccl_base_s: float
    nccl_intra_step_s: float
    nccl_inter_step_s: float
    scaled_product_s: float
    eager_traffic: float
    nvlink_sm_share: float
    network_sm_share: float
    driver_call_s: float
    nccl_call_s: float
    engine_product_s: float

    @classmethod
    @functools.cache
    def default(cls) -> TimeConstants:
        """Returns the constants of constants.json."""
        return cls(**{name: entry["value"] for name, entry in constants()["time"].items()})
