"""What failures leave of a run: checkpoints, restarts, and replicas as the unit of failure.

Failures come at random, each GPU's at a mean distance of `mtbf_gpu_hours`, so those of n GPUs at 1/n of it. Sources:
Young, CACM 17(9), 1974; Daly, Future Generation Computer Systems 22(3), 2006.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rtp_ext.planner.constants import check_at_least

_HOUR = 3600.0


@dataclass(frozen=True)
class Goodput:
    """What failures leave of a run.

    Attributes:
        effective: useful time of the GPUs over all of their time.
        interval_seconds: of work between two checkpoints that loses least; infinity where nothing is ever lost.
        mtbf_seconds: mean time between two failures of the run that cost work back to a checkpoint.
        failures_per_day: of any GPU.
        young_seconds, daly_seconds: that interval by Young's first-order formula and by Daly's.
    """

    effective: float
    interval_seconds: float
    mtbf_seconds: float
    failures_per_day: float
    young_seconds: float
    daly_seconds: float


def young_seconds(mtbf_seconds: float, checkpoint_seconds: float) -> float:
    """sqrt(2 C M): the interval by first order."""
    return math.sqrt(2 * checkpoint_seconds * mtbf_seconds)


def daly_seconds(mtbf_seconds: float, checkpoint_seconds: float) -> float:
    """sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C for C < 2M, else M: Daly's equation 37."""
    if math.isinf(mtbf_seconds):
        return math.inf
    if checkpoint_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = checkpoint_seconds / (2 * mtbf_seconds)
    return young_seconds(mtbf_seconds, checkpoint_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_seconds


def best_interval_seconds(mtbf_seconds: float, checkpoint_seconds: float) -> float:
    """The minimum of Daly's cost (`effective_share`): the root of exp((tau + C) / M) (1 - tau / M) = 1, by
    bisection."""
    if math.isinf(mtbf_seconds) or not checkpoint_seconds:
        return math.inf if checkpoint_seconds else 0.0
    low, high, ratio = 0.0, 1.0, checkpoint_seconds / mtbf_seconds
    if ratio < 1e-9:  # where first order is exact to more digits than bisection has
        return young_seconds(mtbf_seconds, checkpoint_seconds)
    for _ in range(200):
        middle = (low + high) / 2
        # as logarithms: nothing overflows where a checkpoint takes many times the mean distance of failures
        if middle < 1 and middle + ratio + math.log1p(-middle) > 0:
            low = middle
        else:
            high = middle
    return low * mtbf_seconds


def effective_share(
    interval_seconds: float, mtbf_seconds: float, checkpoint_seconds: float, restart_seconds: float
) -> float:
    """Useful time over all time: tau / (M exp(R / M) (exp((tau + C) / M) - 1)).

    A stretch of tau seconds of work and its checkpoint is repeated from its start until no failure falls into it;
    restarts fail too. Exact for failures that come at random (Daly, section 3).
    """
    if math.isinf(mtbf_seconds):
        return 1.0
    if not interval_seconds:  # the limit: checkpoints cost nothing and nothing is lost but restarts
        return 0.0 if checkpoint_seconds else math.exp(-restart_seconds / mtbf_seconds)
    stretch = (interval_seconds + checkpoint_seconds) / mtbf_seconds
    if stretch + restart_seconds / mtbf_seconds > 700:
        return 0.0
    return interval_seconds / (mtbf_seconds * math.exp(restart_seconds / mtbf_seconds) * math.expm1(stretch))


def goodput(
    gpus: int,
    mtbf_gpu_hours: float,
    checkpoint_seconds: float,
    restart_seconds: float,
    replicas: int | None = None,
    *,
    stall_seconds: float = 0.0,
) -> Goodput:
    """The share of its time that a run of `gpus` GPUs makes progress in, at the interval of checkpoints that is best.

    Args:
        mtbf_gpu_hours: mean time between failures of one GPU with its share of the node and the network. Llama 3 on
            16,384 GPUs: a failure every 1.8 hours (Meta's clusters), 29,500 hours.
        checkpoint_seconds: that training stands still for each checkpoint.
        restart_seconds: from a failure until training goes on. With replicas: until the one that failed is back, after
            the stall.
        replicas: of equal size, each the unit of failure: while one restarts from the state of its like, the others go
            on (a ring per replica; FT-HSDP, arXiv 2602.00277). Only if all are down at once is work lost back to a
            checkpoint. None: the whole run stops at every failure.
        stall_seconds: that all replicas lose at each failure: the step that was interrupted, and grouping anew.

    With replicas, a = M_r / (M_r + R) of them are up on average, where M_r is a replica's mean time between failures;
    all are down at once every 1 / (K a (1 - a)^(K - 1) / M_r) seconds.

    Raises:
        ValueError: numbers that make no sense, or replicas that do not divide the GPUs.
    """
    check_at_least("goodput", 1, gpus=gpus)
    seconds = {"checkpoint_seconds": checkpoint_seconds, "restart_seconds": restart_seconds}
    for name, value in {**seconds, "stall_seconds": stall_seconds}.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"goodput: expected {name} of at least 0, got {value!r}")
    if not 0 < mtbf_gpu_hours < math.inf:
        raise ValueError(f"goodput: expected a positive mtbf_gpu_hours, got {mtbf_gpu_hours!r}")
    mtbf = mtbf_gpu_hours * _HOUR / gpus
    per_day = 24 * _HOUR / mtbf
    if replicas is None:
        if stall_seconds:
            raise ValueError("goodput: stall_seconds is what other replicas lose: expected replicas with it, got None")
        return _at_best(1.0, mtbf, per_day, checkpoint_seconds, restart_seconds)
    check_at_least("goodput", 1, replicas=replicas)
    if gpus % replicas:
        raise ValueError(f"goodput: expected gpus divisible by replicas, got {gpus} and {replicas}")
    own = mtbf * replicas
    up = own / (own + restart_seconds)
    down = restart_seconds / (own + restart_seconds)
    stalled = 1 / (1 + replicas * up / own * stall_seconds)
    if replicas == 1:  # nobody is left to go on
        return _at_best(1.0, mtbf, per_day, checkpoint_seconds, restart_seconds + stall_seconds)
    log_rate = math.log(replicas * up / own) + (replicas - 1) * math.log(down) if down else -math.inf
    lost = math.exp(-log_rate) if log_rate > -700 else math.inf
    return _at_best(up * stalled, lost, per_day, checkpoint_seconds, restart_seconds)


def _at_best(share: float, mtbf: float, per_day: float, checkpoint: float, restart: float) -> Goodput:
    interval = best_interval_seconds(mtbf, checkpoint)
    effective = share * effective_share(interval, mtbf, checkpoint, restart)
    return Goodput(effective, interval, mtbf, per_day, young_seconds(mtbf, checkpoint), daly_seconds(mtbf, checkpoint))
