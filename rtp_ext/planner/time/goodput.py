"""Useful share of a run under failures: checkpoints, restarts, and replicas as the unit of failure.

Failures are random; each GPU fails every `mtbf_gpu_hours` on average, and n GPUs n times as often. Sources: Young, CACM
17(9), 1974; Daly, Future Generation Computer Systems 22(3), 2006.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rtp_ext.planner.constants import check_at_least

_HOUR = 3600.0


@dataclass(frozen=True)
class Goodput:
    """Useful share of a run, and the failures that reduce it.

    Attributes:
        effective: useful time of the GPUs divided by their total time.
        interval_seconds: best work time between checkpoints; infinity if no failure loses work.
        mtbf_seconds: mean time between failures of the run that lose the work since a checkpoint.
        failures_per_day: of any GPU.
        young_seconds, daly_seconds: the interval by Young's first-order formula and by Daly's.
    """

    effective: float
    interval_seconds: float
    mtbf_seconds: float
    failures_per_day: float
    young_seconds: float
    daly_seconds: float


def young_seconds(mtbf_seconds: float, checkpoint_seconds: float) -> float:
    """Returns sqrt(2 C M): the interval to first order."""
    return math.sqrt(2 * checkpoint_seconds * mtbf_seconds)


def daly_seconds(mtbf_seconds: float, checkpoint_seconds: float) -> float:
    """Returns sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C for C < 2M, else M: Daly's equation 37."""
    if math.isinf(mtbf_seconds):
        return math.inf
    if checkpoint_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = checkpoint_seconds / (2 * mtbf_seconds)
    return young_seconds(mtbf_seconds, checkpoint_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_seconds


def best_interval_seconds(mtbf_seconds: float, checkpoint_seconds: float) -> float:
    """Returns the interval that minimises Daly's cost (`effective_share`): the root of
    exp((tau + C) / M) (1 - tau / M) = 1, by bisection."""
    if math.isinf(mtbf_seconds) or not checkpoint_seconds:
        return math.inf if checkpoint_seconds else 0.0
    low, high, ratio = 0.0, 1.0, checkpoint_seconds / mtbf_seconds
    if ratio < 1e-9:  # the first order is more exact than bisection here
        return young_seconds(mtbf_seconds, checkpoint_seconds)
    for _ in range(200):
        middle = (low + high) / 2
        # logarithms do not overflow where a checkpoint takes many times the mean time between failures
        if middle < 1 and middle + ratio + math.log1p(-middle) > 0:
            low = middle
        else:
            high = middle
    return low * mtbf_seconds


def effective_share(
    interval_seconds: float, mtbf_seconds: float, checkpoint_seconds: float, restart_seconds: float
) -> float:
    """Returns useful time over total time: tau / (M exp(R / M) (exp((tau + C) / M) - 1)).

    tau seconds of work and their checkpoint are repeated from the start until no failure occurs; restarts can fail
    too. Exact for random failures (Daly, section 3).
    """
    if math.isinf(mtbf_seconds):
        return 1.0
    if not interval_seconds:  # the limit: free checkpoints, so that only restarts lose time
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
    """Returns the useful share of a run of `gpus` GPUs at the best checkpoint interval.

    Args:
        mtbf_gpu_hours: mean time between failures of one GPU with its share of the node and the network. Llama 3 on
            16,384 GPUs: a failure every 1.8 hours (Meta's clusters), 29,500 hours.
        checkpoint_seconds: pause of training for each checkpoint.
        restart_seconds: from a failure until training continues. With replicas: until the failed one is back, after
            the stall.
        replicas: number of equal replicas, each a unit of failure: while one restarts from the state of another, the
            others continue (a ring per replica; FT-HSDP, arXiv 2602.00277). Work since a checkpoint is lost only if all
            are down at once. None: the whole run stops at every failure.
        stall_seconds: loss of all replicas at each failure: the interrupted step, and regrouping.

    >>> left = goodput(16384, mtbf_gpu_hours=29_500, checkpoint_seconds=3, restart_seconds=300)
    >>> print(f"{left.effective:.1%} of the time is useful with a checkpoint every {left.interval_seconds:.0f} s")
    92.6% of the time is useful with a checkpoint every 195 s

    With replicas, a = M_r / (M_r + R) of them are up on average, where M_r is a replica's mean time between failures;
    all are down at once every 1 / (K a (1 - a)^(K - 1) / M_r) seconds.

    Raises:
        ValueError: values out of range, or replicas that do not divide the GPUs.
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
    if replicas == 1:  # no other replica can continue
        return _at_best(1.0, mtbf, per_day, checkpoint_seconds, restart_seconds + stall_seconds)
    log_rate = math.log(replicas * up / own) + (replicas - 1) * math.log(down) if down else -math.inf
    lost = math.exp(-log_rate) if log_rate > -700 else math.inf
    return _at_best(up * stalled, lost, per_day, checkpoint_seconds, restart_seconds)


def _at_best(share: float, mtbf: float, per_day: float, checkpoint: float, restart: float) -> Goodput:
    interval = best_interval_seconds(mtbf, checkpoint)
    effective = share * effective_share(interval, mtbf, checkpoint, restart)
    return Goodput(effective, interval, mtbf, per_day, young_seconds(mtbf, checkpoint), daly_seconds(mtbf, checkpoint))
