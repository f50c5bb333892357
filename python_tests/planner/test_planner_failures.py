"""The useful share of a run with failures: the closed form against an event simulation, and published clusters."""

import heapq
import math
import random

import pytest

from rtp_ext.planner import goodput
from rtp_ext.planner.time.goodput import best_interval_seconds, daly_seconds, effective_share, young_seconds

META_HOURS = 1.8 * 16384  # of one GPU: a failure every 1.8 hours on 16,384 (Meta's clusters, arXiv 2410.21680)


def _alone(mtbf, interval, checkpoint, restart, stretches, seed=0):
    """A run that stops at every failure, as it happens: useful time over all time."""
    dice, clock, failure, done = random.Random(seed), 0.0, 0.0, 0
    failure = dice.expovariate(1 / mtbf)
    while done < stretches:
        if clock + interval + checkpoint <= failure:
            clock += interval + checkpoint
            done += 1
            continue
        while clock + (interval + checkpoint) > failure:  # back to the checkpoint; restarts fail too
            clock, failure = failure, failure + dice.expovariate(1 / mtbf)
            while clock + restart > failure:
                clock, failure = failure, failure + dice.expovariate(1 / mtbf)
            clock += restart
            if clock + interval + checkpoint <= failure:
                break
    return done * interval / clock


def _replicas(count, own_mtbf, restart, stall, failures, seed=0):
    """Replicas that fail and come back one by one while all stand still for `stall` at each failure: the share of
    replica time that is useful, and the mean time between moments when none is up."""
    dice = random.Random(seed)
    events = [(dice.expovariate(1 / own_mtbf), True) for _ in range(count)]
    heapq.heapify(events)
    clock, useful, wall, up, none = 0.0, 0.0, 0.0, count, 0
    while failures:
        then, fails = heapq.heappop(events)
        useful, wall, clock = useful + up * (then - clock), wall + then - clock, then
        if fails:
            failures, up, wall = failures - 1, up - 1, wall + stall
            none += up == 0
            heapq.heappush(events, (clock + dice.expovariate(1 / restart), False))
        else:
            up += 1
            heapq.heappush(events, (clock + dice.expovariate(1 / own_mtbf), True))
    return useful / (count * wall), clock / none if none else math.inf


@pytest.mark.parametrize(("gpus", "checkpoint", "restart"), [(1024, 30, 300), (16384, 60, 600), (100_000, 30, 600)])
def test_a_run_that_stops_at_every_failure(gpus, checkpoint, restart):
    found = goodput(gpus, META_HOURS, checkpoint, restart)
    assert found.mtbf_seconds == pytest.approx(META_HOURS * 3600 / gpus)
    assert found.failures_per_day == pytest.approx(86400 / found.mtbf_seconds)
    seen = _alone(found.mtbf_seconds, found.interval_seconds, checkpoint, restart, 30_000)
    assert found.effective == pytest.approx(seen, rel=0.015)
    for factor in (
        0.5,
        2.0,
    ):  # control: the simulation distinguishes other intervals, and the closed form prefers its own
        other = _alone(found.mtbf_seconds, factor * found.interval_seconds, checkpoint, restart, 30_000)
        assert other < seen
        share = effective_share(factor * found.interval_seconds, found.mtbf_seconds, checkpoint, restart)
        assert share < found.effective and share == pytest.approx(other, rel=0.015)


def test_intervals_of_young_and_daly():
    assert young_seconds(20000, 100) == 2000
    for mtbf, checkpoint in ((1e6, 10), (1e4, 100), (1000, 100)):
        best = best_interval_seconds(mtbf, checkpoint)
        assert math.exp((best + checkpoint) / mtbf) * (1 - best / mtbf) == pytest.approx(1, rel=1e-9)
        assert daly_seconds(mtbf, checkpoint) == pytest.approx(best, rel=0.01)
        assert effective_share(best, mtbf, checkpoint, 0) >= effective_share(
            young_seconds(mtbf, checkpoint), mtbf, checkpoint, 0
        )
    assert abs(young_seconds(1000, 100) / best_interval_seconds(1000, 100) - 1) > 0.15, (
        "control: first order is not enough"
    )
    assert daly_seconds(10, 30) == 10 and daly_seconds(math.inf, 1) == math.inf
    assert best_interval_seconds(math.inf, 1) == math.inf and effective_share(1, math.inf, 1, 1) == 1
    hard = goodput(10**7, 1000, 3600, 3600)  # a failure every 0.36 s: nothing is ever done, and nothing overflows
    assert hard.effective == 0 or hard.effective < 1e-300
    free = goodput(16384, META_HOURS, 0, 600)
    assert free.interval_seconds == 0 and free.effective == pytest.approx(math.exp(-600 / free.mtbf_seconds))


@pytest.mark.parametrize(
    ("replicas", "hours", "restart", "stall"), [(4, 2.0, 1800, 60), (16, 1.0, 900, 5), (2, 0.5, 1800, 0)]
)
def test_replicas_are_the_unit_of_failure(replicas, hours, restart, stall):
    found = goodput(8 * replicas, 8 * hours, 0, restart, replicas, stall_seconds=stall)
    share, lost = _replicas(replicas, hours * 3600, restart, stall, 60_000)
    ideal = found.effective / effective_share(0, found.mtbf_seconds, 0, restart)
    assert ideal == pytest.approx(share, rel=0.01)
    if math.isfinite(lost):
        assert found.mtbf_seconds == pytest.approx(lost, rel=0.1)
    alone = goodput(8 * replicas, 8 * hours, 0, restart)
    assert alone.effective < found.effective - 0.05, "control: without replicas each failure stops all"


def test_published_clusters():
    """Llama 3 (arXiv 2407.21783, 3.3.4): above 90 % effective on 16,384 GPUs. Its 14 bytes a parameter take 3 s at the
    2 TB/s that its storage sustains; five minutes to restart are assumed. FT-HSDP (arXiv 2602.00277): 44 % at some
    100,000 GPUs where a failure stalls all for ten minutes, 80 % where it does so for three and replicas go on."""
    checkpoint = 405e9 * 14 / 2e12
    llama = goodput(16384, META_HOURS, checkpoint, 300)
    assert llama.effective > 0.90 and llama.mtbf_seconds == pytest.approx(1.8 * 3600)
    assert goodput(1024, META_HOURS, checkpoint, 300).effective > 0.985
    assert goodput(16384, META_HOURS, checkpoint, 1800).effective < 0.90, "control: half an hour to restart is too long"
    whole = goodput(100_000, META_HOURS, 30, 600)
    parted = goodput(100_000, META_HOURS, 30, 600, 100, stall_seconds=180)
    assert whole.effective == pytest.approx(0.44, abs=0.05) and parted.effective == pytest.approx(0.80, abs=0.06)
    assert [f"{100 * found.effective:.0f} %" for found in (whole, parted)] == ["44 %", "85 %"], (
        "as docs/planner.md says"
    )
    assert parted.interval_seconds > 30 * 86400, "all replicas are never down at once"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1e4, 1, 1), "gpus"),
        ((8, 0, 1, 1), "positive mtbf_gpu_hours, got 0"),
        ((8, 1e4, -1, 1), "checkpoint_seconds of at least 0, got -1"),
        ((8, 1e4, 1, math.inf), "restart_seconds"),
        ((8, 1e4, 1, 1, 3), "divisible by replicas, got 8 and 3"),
        ((8, 1e4, 1, 1, 0), "replicas"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        goodput(*arguments)
    with pytest.raises(ValueError, match="expected replicas with it"):
        goodput(8, 1e4, 1, 1, stall_seconds=5)
