"""Several ranks with GPUs: one each where there are enough, else several NCCL ranks on one (NCCL 2.30 or later).

Ranks that share a GPU take turns on it, which says nothing about speed.
"""

import copy
import os
import re
import signal
import time

import pytest
import torch
from models import batch_loss, make_model, mean_loss, train
from reference import assert_same, full
from support import record, run_gpu_ranks, several_ranks_problem, share_gpu
from torch.distributed.device_mesh import init_device_mesh

import rtp_ext
from rtp_ext.ring import TRANSPORTS

ON_GPUS = ["nccl", "c10d", "ce"]
ALWAYS = ["nccl", "c10d"]  # for these no GPU is an excuse
SURVIVES = ["nccl", "ce"]  # what waits for a dead rank ends, so that the process can
HELD_UP = 500  # microseconds, the most that a hop is held up in race tests
UNAVAILABLE = "unavailable: "
TIMEOUT = 45.0  # of a ring
LIMIT = 60.0  # of a test


def _ring(mesh, transport, **options):
    """A ring; or the reason why this machine has none with this transport, the same on every rank."""
    try:
        return rtp_ext.Ring(mesh, transport=transport, timeout=TIMEOUT, **options)
    except rtp_ext.RotationError as error:
        if "cannot be used" not in str(error):
            raise
        return UNAVAILABLE + str(error)


def _trains(rank, ranks, transport, log):
    share_gpu(rank, ranks, log)
    mesh = init_device_mesh("cuda", (ranks,))
    ways = [(False, {}), (True, {})]
    ways += [(False, {"route": "gather", "collective": True})] * (transport in ALWAYS)
    for in_place, options in ways:
        ring = _ring(mesh, transport, **options)
        if isinstance(ring, str):
            return ring
        plain = make_model().cuda()
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring, in_place=in_place)
        assert ring.transport == transport
        train(model, lambda step, model=model: batch_loss(model, rank, step), 4)
        train(plain, lambda step, plain=plain: mean_loss(plain, ranks, step), 4)
        for name, parameter in plain.named_parameters():
            assert_same(full(model.get_parameter(name)), parameter, 1e-9, name)
        ring.close()
    return None


def _rotates(rank, ranks, transport, log):
    """Shards of unequal size visit every rank, on both routes, in both directions, with delays; sums reach owners."""
    share_gpu(rank, ranks, log)
    mesh = init_device_mesh("cuda", (ranks,))
    for route, delay in (("ring", 0), ("direct", 0), ("ring", HELD_UP)):
        os.environ["RTP_DEBUG_DELAY_US"] = str(delay)
        ring = _ring(mesh, transport, route=route)
        if isinstance(ring, str):
            return ring

        def content(owner):
            return torch.arange(1000 * (owner + 1), device="cuda", dtype=torch.float64) + owner

        name = f"route {route}, delay {delay}"
        for reverse in (False, True):
            for _ in range(3):  # nothing waits for the GPU in between
                visits = [(owner, view.clone()) for owner, view in ring.rotate(content(rank), reverse=reverse)]
                expected = [(rank + step if reverse else rank - step) % ranks for step in range(ranks)]
                assert [owner for owner, _ in visits] == expected, name
                for owner, view in visits:
                    assert torch.equal(view, content(owner)), f"{name}, reverse {reverse}: shard of {owner}"
        for _ in range(3):
            total = ring.collect(lambda owner, partial: partial.add_(rank + 10 * owner), content(rank))
            assert torch.equal(total, torch.full_like(total, sum(range(ranks)) + 10.0 * rank * ranks)), name
        ring.close()
    return None


def _loses_a_neighbour(rank, ranks, transport, log):
    """The survivor of a killed neighbour gets RingTimeout, and then a dead ring."""
    share_gpu(rank, ranks, log)
    try:
        ring = rtp_ext.Ring(init_device_mesh("cuda", (ranks,)), transport=transport, timeout=5.0)
    except rtp_ext.RotationError as error:
        if "cannot be used" not in str(error):
            raise
        return UNAVAILABLE + str(error)
    shard = torch.ones(1 << 20, device="cuda")
    for _ in ring.rotate(shard):
        pass
    torch.cuda.synchronize()
    torch.distributed.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(rtp_ext.RotationError) as caught:
        while time.monotonic() - started < 30:
            for _ in ring.rotate(shard):
                pass
            time.sleep(0.1)
    assert not ring.alive
    with pytest.raises(rtp_ext.RotationError, match="cannot be used any more"):
        ring.rotate(shard)
    return type(caught.value).__name__, time.monotonic() - started


def _run(work, ranks, transport, tmp_path, **options):
    """The results of all ranks. Skips where this machine has no such ring; records how NCCL connected the ranks."""
    assert transport in TRANSPORTS
    if (problem := several_ranks_problem(ranks)) is not None:
        pytest.skip(problem)
    log = str(tmp_path / "nccl")
    try:
        results = run_gpu_ranks(work, ranks, transport, log, timeout=LIMIT, **options)
    finally:
        text = "".join(file.read_text(errors="replace") for file in tmp_path.glob("nccl.*"))
        connections = sorted(set(re.findall(r"\bvia ([A-Z][\w/]*)", text)))
        record(
            test=work.__name__, transport=transport, ranks=ranks, via=connections, p2p="P2P" in " ".join(connections)
        )
    unavailable = next((value for value in results if isinstance(value, str)), None)
    if unavailable is not None:
        record(test=work.__name__, transport=transport, ranks=ranks, problem=unavailable)
        assert transport not in ALWAYS, unavailable
        pytest.skip(unavailable)
    return results


@pytest.mark.parametrize("transport", ON_GPUS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_rotates(ranks, transport, tmp_path):
    _run(_rotates, ranks, transport, tmp_path)


@pytest.mark.parametrize("transport", ON_GPUS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_trains_like_the_plain_model(ranks, transport, tmp_path):
    _run(_trains, ranks, transport, tmp_path)


@pytest.mark.parametrize("transport", SURVIVES)
def test_a_killed_neighbour_is_a_timeout(transport, tmp_path):
    error, seconds = _run(_loses_a_neighbour, 2, transport, tmp_path, lost=(1,))[0]
    record(test="killed neighbour", transport=transport, error=error, seconds=seconds)
    assert error == "RingTimeout"
