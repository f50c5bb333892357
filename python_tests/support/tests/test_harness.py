"""The harness reports every outcome of a rank."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from harness import Cases, RankError, on_ranks, run_ranks


def _sum(rank, ranks, scale):
    value = torch.tensor([rank * scale])
    dist.all_reduce(value)
    return value.item(), torch.get_num_threads()


def _fail_on_one(rank, ranks):
    if rank == 1:
        raise ValueError("a mistake of rank one")
    dist.barrier()


def _hang_on_one(rank, ranks):
    if rank == 1:
        time.sleep(60)


def _kill_itself(rank, ranks):
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def _stop_itself(rank, ranks):
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return rank


def test_results_come_back_by_rank():
    assert run_ranks(_sum, 3, 2.0) == [(6.0, 1)] * 3


def test_a_failure_names_the_rank_and_ends_the_others():
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1:(.|\n)*a mistake of rank one"):
        run_ranks(_fail_on_one, 2)
    assert time.monotonic() - start < 20


def test_a_rank_that_fails_before_it_is_lost_is_a_failure():
    with pytest.raises(RankError, match=r"rank 1:(.|\n)*a mistake of rank one"):
        run_ranks(_fail_on_one, 2, lost={1})


def test_a_hang_dumps_stacks():
    with pytest.raises(RankError, match=r"ranks \[1\] did not finish(.|\n)*_hang_on_one"):
        run_ranks(_hang_on_one, 2, timeout=5.0)


def test_an_unexpected_death_is_a_failure():
    with pytest.raises(RankError, match="rank 1:\nended without a result, exit code -9"):
        run_ranks(_kill_itself, 2)


@pytest.mark.parametrize("fn", [_kill_itself, _stop_itself])
def test_a_lost_rank_returns_none(fn):
    assert run_ranks(fn, 2, lost={1}) == [0, None]


def test_cases_run_on_after_a_failed_comparison():
    cases = Cases()
    for number in range(3):
        with cases.case(str(number)):
            assert number != 1, "one is wrong"
    with pytest.raises(AssertionError, match="1 of 3 cases failed:\ncase 1: one is wrong"):
        cases.finish()


def test_no_cases_is_a_failure():
    with pytest.raises(AssertionError, match="no case ran"):
        Cases().finish()


@on_ranks([2, 3], prefetch=False, ring_timeout=20.0)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_a_body_gets_what_it_asks_for(rank, ranks, ring, cases, transport, tmp_path):
    with cases.case("ring"):
        assert (ring.rank, ring.size, ring.transport, ring.prefetch) == (rank, ranks, transport, False)
        assert ring.options.timeout.total_seconds() == 20.0
    with cases.case("the same folder for all ranks"):
        told = [None] * ranks
        dist.all_gather_object(told, str(tmp_path))
        assert len({*told}) == 1 and tmp_path.is_dir()


@on_ranks(2)
def _fails_in_a_body(rank, ring, scale):
    if rank == 1:
        raise ValueError(f"a mistake of rank one times {scale}")
    ring.exchange("never answered")


@on_ranks(2)
def _fails_in_a_case(rank, cases):
    with cases.case("wrong"):
        assert rank == 0, "not rank 0"


@on_ranks()
def _runs_no_case(cases):
    pass


@on_ranks(2, timeout=5.0)
def _hangs(rank):
    if rank == 1:
        time.sleep(60)


@on_ranks(2, lost={1})
def _is_lost(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.get_rank()


@pytest.mark.parametrize(
    ("test", "values", "match"),
    [
        (_fails_in_a_body, {"scale": 3}, r"rank 1:(.|\n)*in _fails_in_a_body\n(.|\n)*a mistake of rank one times 3"),
        (_fails_in_a_case, {}, r"^rank 1:(.|\n)*1 of 1 cases failed:\ncase wrong: not rank 0"),
        (_runs_no_case, {"ranks": 1}, "no case ran"),
        (_hangs, {}, r"ranks \[1\] did not finish(.|\n)*_hangs"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_body_that_fails_fails_the_test(test, values, match):
    with pytest.raises(RankError, match=match):
        test(**values)


def test_a_body_may_lose_ranks():
    assert _is_lost() is None
