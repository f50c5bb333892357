"""The harness reports every outcome of a rank."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from harness import Cases, RankError, run_ranks


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
