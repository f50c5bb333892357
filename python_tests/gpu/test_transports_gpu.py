"""Several ranks with GPUs: one each where there are enough, else several NCCL ranks on one (NCCL 2.30 or later)."""

import copy
import os

import pytest
import torch
from harness import run_ranks
from models import batch_loss, make_model, mean_loss, train
from reference import assert_same, full
from torch.distributed.device_mesh import init_device_mesh

import rtp_ext


def _gpus_of(ranks: int) -> str | None:
    """Why `ranks` ranks cannot run here; None if they can."""
    if torch.cuda.device_count() >= ranks:
        return None
    if torch.cuda.nccl.version() < (2, 30):
        return f"{torch.cuda.device_count()} GPUs for {ranks} ranks, and NCCL {torch.cuda.nccl.version()} before 2.30"
    return None


def _trains(rank, ranks, transport):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    if torch.cuda.device_count() < ranks:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    mesh = init_device_mesh("cuda", (ranks,))

    for in_place in (False, True):
        plain = make_model().cuda()
        model = rtp_ext.fully_rotate(
            copy.deepcopy(plain), mesh=mesh, in_place=in_place, transport=transport, timeout=60.0
        )
        assert rtp_ext.ring_of(model).transport == transport
        train(model, lambda step, model=model: batch_loss(model, rank, step), 4)
        train(plain, lambda step, plain=plain: mean_loss(plain, ranks, step), 4)
        for name, parameter in plain.named_parameters():
            assert_same(full(model.get_parameter(name)), parameter, 1e-9, name)
        rtp_ext.ring_of(model).close()


@pytest.mark.parametrize("transport", ["ce", "nccl", "nccl-put", "c10d"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_trains_like_the_plain_model(ranks, transport):
    problem = _gpus_of(ranks)
    if problem is not None:
        pytest.skip(problem)
    run_ranks(_trains, ranks, transport, timeout=300.0)
