"""Metrics of a rotation: formulas from measured times, and a prediction for a link that the machine does not have.

All times are in microseconds, of the slowest rank:

    t_g1       one GEMM with the whole weight: a lower bound of the operation
    t_gr       the GEMMs of all shards, as the operation calls them, without hops
    t_c        the hops, without GEMMs
    t_ov       the operation
    t_base     the whole weight is fetched first, then one GEMM
    t_gemm_ov  the GEMMs while hops run
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rtp_ext.observe.schedule import schedules
from rtp_ext.observe.timeline import timeline

__all__ = ["MODEL_GBPS", "Times", "metrics", "model"]

MODEL_GBPS = 370.0  # one way, measured on NVLink 4 by others: NVIDIA/nccl issue 1264 (380 of nominally 450 GB/s)


@dataclass(frozen=True)
class Times:
    t_g1: float
    t_gr: float
    t_c: float
    t_ov: float
    t_base: float
    t_gemm_ov: float


def metrics(times: Times, *, one_stream: bool = True) -> dict[str, float | None]:
    """Returns efficiencies and losses of one case; None for a ratio that is undefined, for example without hops.

    e_hide    1: all communication that can be hidden is hidden; 0: as slow as GEMMs and hops in sequence; below 0:
              overlap costs time
    e_ect     the fraction saved of t_base - t_g1, the cost of fetching first (as Flux defines it, arXiv 2406.06858)
    ceiling   the maximum of t_g1 and t_c: no implementation is faster
    losses    t_ov - t_g1 = split + interference + exposed; on two compute streams GEMMs overlap, and the last two
              are undefined
    """
    t = times
    hidden = t.t_gr + t.t_c - t.t_ov
    ceiling = max(t.t_g1, t.t_c)
    return {
        "e_hide": hidden / min(t.t_gr, t.t_c) if t.t_c > 0 and t.t_gr > 0 else None,
        "roofline": t.t_g1 / t.t_ov,
        "e_ect": 1 - (t.t_ov - t.t_g1) / (t.t_base - t.t_g1) if t.t_base > t.t_g1 else None,
        "ceiling_us": ceiling,
        "ceiling_percent": 100 * ceiling / t.t_ov,
        "loss_split_us": t.t_gr - t.t_g1,
        "loss_interference_us": t.t_gemm_ov - t.t_gr if one_stream else None,
        "loss_exposed_us": t.t_ov - t.t_gemm_ov if one_stream else None,
    }


def model(
    ranks: int, passes: Mapping[str, Mapping[str, float]], t_g1: float, weight_bytes: int, gradient_bytes: int
) -> dict[str, Any]:
    """Predicts the times of the schedule at MODEL_GBPS with measured GEMMs; keys begin with `model_`.

    Args:
        passes: for "forward" and "backward", if the case has them: microseconds of one shard GEMM by its kind.
        t_g1: measured time of the case.
        weight_bytes, gradient_bytes: bytes of one travelling shard.

    Hops of weights and gradients share one port. `model_t_ov_us` gives each the full bandwidth (a lower bound); in
    `model_t_ov_shared_us` each hop of a backward takes as long as both together (an upper bound).
    """

    def length(compute: Mapping[str, float], pass_: str, weight_hop: float, gradient_hop: float) -> float:
        hops = {"weight": weight_hop, "gradient": gradient_hop}
        events = timeline(
            schedules(ranks, pass_=pass_),
            compute_time=lambda rank, step: compute[step.compute],
            hop_time=lambda rank, step: hops[step.channel],
        )
        return max(event.end for event in events)

    weight = weight_bytes / MODEL_GBPS / 1e3
    gradient = gradient_bytes / MODEL_GBPS / 1e3
    both = {"forward": (weight, 0.0), "backward": (weight + gradient, weight + gradient)}
    idle = dict.fromkeys(("forward", "dgrad", "wgrad"), 0.0)
    t_gr = sum(ranks * sum(compute.values()) for compute in passes.values())
    t_c = sum(length(idle, pass_, weight, gradient) for pass_ in passes)
    t_ov = sum(length(compute, pass_, weight, gradient) for pass_, compute in passes.items())
    shared = sum(length(compute, pass_, *both[pass_]) for pass_, compute in passes.items())
    return {
        "model_link_gbps": MODEL_GBPS,
        "model_weight_hop_us": weight,
        "model_gradient_hop_us": gradient if "backward" in passes else None,
        "model_t_c_us": t_c,
        "model_t_ov_us": t_ov,
        "model_t_ov_shared_us": shared,
        "model_e_hide": (t_gr + t_c - t_ov) / min(t_gr, t_c) if t_c > 0 else None,
        "model_roofline": t_g1 / t_ov,
    }
