"""The harness reports what a rank did, whatever it did."""

import logging
import os
import signal
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from grids import few
from harness import Cases, RankError, run_ranks
from models import batch_loss, make_model, train
from torch.distributed.tensor import DTensor

import rtp_ext
from rtp_ext.ring import gate


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


def test_a_hang_dumps_stacks():
    with pytest.raises(RankError, match=r"ranks \[1\] did not finish(.|\n)*_hang_on_one"):
        run_ranks(_hang_on_one, 2, timeout=5.0)


def test_an_unexpected_death_is_a_failure():
    with pytest.raises(RankError, match="rank 1:\nended without a result, exit code -9"):
        run_ranks(_kill_itself, 2)


@pytest.mark.parametrize("fn", [_kill_itself, _stop_itself])
def test_a_lost_rank_returns_none(fn):
    assert run_ranks(fn, 2, lost={1}) == [0, None]


# -- ranks that are kept -----------------------------------------------------------------------------------------------


def _process(rank, ranks):
    return os.getpid(), torch.rand(()).item(), os.environ.get("A_VARIABLE"), os.environ["RTP_RECORD_DIR"]


def _trains(rank, ranks):
    """What nobody can tell afterwards, but for what DTensor has found out. How often it was asked about a shape."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    ask = propagator.propagate_op_sharding_non_cached
    with mock.patch.object(propagator, "propagate_op_sharding_non_cached", side_effect=ask) as asked:
        model = rtp_ext.fully_rotate(make_model(), timeout=30.0)
        model.head.itself = [model]  # a cycle
        train(model, lambda step: batch_loss(model, rank, step), 1)
    torch.rand(1), os.environ.update(A_VARIABLE="1")
    return os.getpid(), asked.call_count


def _patches(rank, ranks):
    gate.device_of = print


def _patches_a_class(rank, ranks):
    rtp_ext.Ring.exchange = print


def _patches_torch_on_one(rank, ranks):
    if rank == 1:
        dist.all_reduce = print


def _fills_a_table(rank, ranks):
    rtp_ext.convert.rewrite._DROP_INS[int] = int


def _adds_a_handler(rank, ranks):
    logging.getLogger("rtp_ext").addHandler(logging.NullHandler())


def _leaves_a_thread(rank, ranks):
    threading.Thread(target=time.sleep, args=(60.0,), daemon=True).start()


def _leaves_a_ring(rank, ranks):
    global _left
    _left = rtp_ext.Ring()


def _leaves_a_group(rank, ranks):
    dist.new_group([0])


def _sets_a_dtype(rank, ranks):
    torch.set_default_dtype(torch.float64)


def _compiles(rank, ranks):
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))


def _imports(rank, ranks):
    import report

    return report.__name__


def test_ranks_are_kept_and_find_themselves_as_new():
    first, second = run_ranks(_process, 2), run_ranks(_process, 2)
    trained, again, third = run_ranks(_trains, 2), run_ranks(_trains, 2), run_ranks(_process, 2)
    assert [each[:3] for each in first] == [each[:3] for each in second] == [each[:3] for each in third]
    assert first[0][2] is None and first[0][3] != second[0][3] and not os.path.exists(first[0][3]), "a folder each"
    assert [each[0] for each in trained] == [each[0] for each in again] == [each[0] for each in first]
    assert all(asked > 0 for _, asked in trained) and all(asked == 0 for _, asked in again), (trained, again)
    assert {each[0] for each in run_ranks(_process, 2, alone=True)}.isdisjoint(each[0] for each in first)
    assert {each[0] for each in run_ranks(_process, 3)}.isdisjoint(each[0] for each in first)
    assert [each[0] for each in run_ranks(_process, 2)] == [each[0] for each in first]


LEAVE_SOMETHING = [
    _patches,
    _patches_a_class,
    _patches_torch_on_one,
    _fills_a_table,
    _adds_a_handler,
    _leaves_a_thread,
    _leaves_a_ring,
    _leaves_a_group,
    _sets_a_dtype,
    _compiles,
    _imports,
]


@pytest.mark.parametrize(
    "fn",
    few([_patches_torch_on_one, _leaves_a_ring, _sets_a_dtype], LEAVE_SOMETHING),
)
def test_ranks_that_are_not_as_new_are_not_kept(fn):
    before = run_ranks(_process, 2)
    run_ranks(fn, 2)
    assert {each[0] for each in run_ranks(_process, 2)}.isdisjoint(each[0] for each in before)


def test_ranks_of_which_one_failed_are_not_kept():
    before = run_ranks(_process, 2)
    with pytest.raises(RankError, match=r"a mistake of rank one(.|\n)*Before, these ranks ran (.*, )?_process\.$"):
        run_ranks(_fail_on_one, 2)
    assert {each[0] for each in run_ranks(_process, 2)}.isdisjoint(each[0] for each in before)


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
