"""What the times of a rotation say: formulas, and the prediction for a link that is not there.

All times are in microseconds, of the slowest rank:

    t_g1       one GEMM with the whole weight at hand: the ceiling of all computing
    t_gr       the GEMMs of all shards, as the operation calls them, without hops
    t_c        the hops, without GEMMs
    t_ov       the operation
    t_base     the whole weight is fetched first, then one GEMM
    t_gemm_ov  what the GEMMs take while hops are under way
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
    """Efficiencies and losses of one case; None where a ratio has no meaning, as without hops.

    e_hide    1: all that can be hidden is hidden; 0: as slow as one after the other; below 0: overlapping harms
    e_ect     the share of what fetching first costs beyond t_g1 that is saved (as Flux defines it, arXiv 2406.06858)
    ceiling   the most that GEMMs unsplit, or the hops alone, take: no version is faster
    losses    t_ov - t_g1 = split + interference + exposed; on two compute streams GEMMs overlap, and the last two
              mean nothing
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
    """The timeline of the schedule at MODEL_GBPS, with measured GEMMs: a prediction, under keys of its own.

    Args:
        passes: for "forward" and "backward", as far as the case has them, the time of one shard GEMM by its kind.
        t_g1: measured, of the case.
        weight_bytes, gradient_bytes: of one shard as it travels.

    Hops of weights and gradients leave through the same port. `model_t_ov_us` lets each have all of it; in
    `model_t_ov_shared_us` each hop of a backward takes as long as one of both together: the truth is between them.
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
