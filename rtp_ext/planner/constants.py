"""The planner's constants, from one versioned data file that names the source of every number."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("constants.json")


@functools.cache
def constants() -> dict[str, Any]:
    """The contents of constants.json. Quantities carry their units in their names."""
    return json.loads(FILE.read_text())


def memory_constant(name: str) -> float:
    """A number of the section `memory`."""
    return constants()["memory"][name]["value"]


def host_constant(name: str) -> float:
    """A number of the section `host`: calls of what the engine enqueues, as they were counted."""
    return constants()["host"][name]["value"]


def check_known(what: str, name: str, known: Any) -> None:
    """Raises ValueError for a name that is not among the known ones."""
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}: expected one of {', '.join(sorted(known))}")


def check_at_least(owner: str, least: int, **numbers: Any) -> None:
    """Raises ValueError for anything but a whole number of at least `least`, by name."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{owner}: expected {name} to be a whole number of at least {least}, got {value!r}")


@dataclass(frozen=True)
class TimeConstants:
    """What the time model is fitted with (`calibrate`); each number's source stands in constants.json, `time`.

    Attributes:
        gemm_fraction: of the best rate of a GPU (`*_achievable_flops_per_s`) that the main loop of a GEMM reaches.
        gemm_ramp_depth: inner-dimension steps that starting and ending a tile costs.
        flash_fraction_torch: of the best rate that torch's fused attention reaches.
        hbm_fraction: of the memory bandwidth that elementwise kernels reach.
        kernel_s, engine_launch_s: between two kernels of a queue; of each further one that the engine launches itself.
        host_s: that the host takes to issue a kernel, autograd and framework included; what the GPU does not outlast
        shows.
        network_fraction: of a network port's rate.
        nccl_base_s, nccl_intra_step_s, nccl_inter_step_s: latency of a collective, of its steps inside and between
            nodes.
        eager_traffic: bytes that unfused elementwise kernels move over those of fused ones.
        nvlink_sm_share, network_sm_share: of the multiprocessors that NCCL takes from what runs beside it.
        driver_call_s, nccl_group_s, engine_product_s: that the host takes for a call of the CUDA driver, for a group of
            NCCL's, and for a product that the engine issues, besides the calls of its step. 0: a machine without GPUs.
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
    eager_traffic: float
    nvlink_sm_share: float
    network_sm_share: float
    driver_call_s: float
    nccl_group_s: float
    engine_product_s: float

    @classmethod
    @functools.cache
    def default(cls) -> TimeConstants:
        """Those of constants.json."""
        return cls(**{name: entry["value"] for name, entry in constants()["time"].items()})
