"""Every rank raises an error about wrong calls; ranks that die, stop or differ are reported, and no rank hangs."""

import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks, run_ranks
from models import batch_loss, make_batch, make_model
from reference import chunk, random
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import rtp_ext
from rtp_ext.functional import rotated_embedding, rotated_linear
from rtp_ext.nn import RotatedEmbedding, RotatedLinear

TIMEOUT = 2.0  # for rings whose ranks die
PROMPT = TIMEOUT + 6.0  # the others must raise within it, and some more for the scheduler
PATIENT = 30.0  # for rings whose ranks live
TRANSPORTS = ["shm", "tcp", "c10d"]


class raises:
    """pytest.raises for one exact type, whose text holds all of `parts`, in any order."""

    def __init__(self, error: type[Exception], *parts: str) -> None:
        self.error, self.parts = error, parts

    def __enter__(self) -> None:
        self.context = pytest.raises(self.error)
        self.info = self.context.__enter__()

    def __exit__(self, *arguments: object) -> bool:
        swallowed = self.context.__exit__(*arguments)
        if swallowed:
            text = str(self.info.value)
            assert type(self.info.value) is self.error, f"expected {self.error.__name__}, got {self.info.typename}"
            missing = [part for part in self.parts if not re.search(part, text)]
            assert not missing, f"{missing} not in the message: {text}"
        return swallowed


@on_ranks([1, 3])
def test_bad_inputs(rank, ring):
    """All ranks make the same wrong call; all get the same kind of error, and the ring still works."""
    linear = RotatedLinear(10, 7, ring=ring)
    table = RotatedEmbedding(10, 7, ring=ring)
    x = random(3, 10, dtype=torch.float32, seed=1)
    with raises(ValueError, "RotatedLinear", "10", "11"):
        linear(random(3, 11, dtype=torch.float32, seed=1))
    with raises(TypeError, "RotatedLinear", "float32", "(float64|double)"):
        linear(x.double())
    with raises(TypeError, "RotatedLinear", "float32", "int64"):
        linear(x.long())
    with raises(TypeError, "RotatedLinear", "cpu", "meta"):
        linear(x.to("meta"))
    with raises(TypeError, "RotatedLinear", "tensor", r"list|\[1\.0"):
        linear([1.0] * 10)
    with raises(TypeError, "RotatedEmbedding", "float32"):
        table(x)
    with raises(TypeError, "RotatedEmbedding", "cpu", "meta"):
        table(x.long().to("meta"))
    with raises(IndexError, "RotatedEmbedding", "10", "12"):
        table(torch.tensor([12]))
    model = rtp_ext.fully_rotate(make_model(torch.float32), mesh=ring)
    with raises(ValueError, r"blocks\.1\.up", "10", "4"):
        model.blocks[1].up(torch.zeros(2, 4))
    with raises(IndexError, "embed", "19", "99"):
        model(torch.tensor([[99]]))
    for _ in range(2):
        assert torch.isfinite(linear(x)).all() and torch.isfinite(batch_loss(model, rank, 0))


@on_ranks(3)
def test_shards_that_do_not_belong_together(rank, ranks):
    """Shards that do not belong together, or not to this ring."""
    mesh = init_device_mesh("cpu", (ranks,))
    with rtp_ext.Ring(mesh, timeout=PATIENT) as ring:
        x = random(3, 6, dtype=torch.float32, seed=1)
        # Rows that the chunk rule would not give: 4 + 2 + 3 instead of 3 + 3 + 3.
        rows = [4, 2, 3][rank]
        with raises(ValueError, "rotated_linear", r"\(3, 6\)", r"\(4, 6\)"):
            rotated_linear(x, torch.zeros(rows, 6), ring=ring)
        # Another width on one rank.
        with raises(ValueError, "rotated_linear", r"\(3, 6\)", r"\(3, 5\)"):
            rotated_linear(x, torch.zeros(3, 5 if rank == 1 else 6), ring=ring)
        # Another dtype on one rank.
        weight = torch.zeros(3, 6, dtype=torch.float64 if rank == 2 else torch.float32)
        with raises(ValueError, "rotated_linear", "float32", "float64"):
            rotated_linear(x.to(weight.dtype), weight, ring=ring)
        # A bias on some ranks only.
        with raises(ValueError, "rotated_linear", "bias"):
            rotated_linear(x, torch.zeros(3, 6), torch.zeros(3) if rank else None, ring=ring)
        # A bias whose shard belongs to another layer.
        with raises(ValueError, "rotated_linear", "bias", r"\[?3\]?", r"\[?2\]?"):
            rotated_linear(x, torch.zeros(3, 6), torch.zeros(2), ring=ring)
        # DTensors cut otherwise, not cut at all, or over other ranks.
        whole = random(9, 6, dtype=torch.float32, seed=2)
        by_columns = DTensor.from_local(chunk(whole, ranks, rank, 1).contiguous(), mesh, [Shard(1)])
        with raises(ValueError, "rotated_linear", "along 0", r"dim=1"):
            rotated_linear(x, by_columns, ring=ring)
        with raises(ValueError, "rotated_linear", "Replicate"):
            rotated_linear(x, DTensor.from_local(whole, mesh, [Replicate()]), ring=ring)
        # All ranks make the group, two use it.
        pair = dist.new_group([0, 1])
        if rank < 2:
            with rtp_ext.Ring(pair, timeout=PATIENT) as small, raises(ValueError, "rotated_linear", "2 ranks", "3"):
                shard = DTensor.from_local(chunk(whole, ranks, rank), mesh, [Shard(0)])
                rotated_linear(x, shard, ring=small)
        for shape, parts in (((3,), ("2 dimensions", r"\(3,\)")), ((1, 3, 6), ("2 dimensions", r"\(1, 3, 6\)"))):
            with raises(ValueError, "rotated_linear", *parts):
                rotated_linear(x, torch.zeros(shape), ring=ring)
        with raises(TypeError, "rotated_linear", "int64"):
            rotated_linear(x, torch.zeros(3, 6, dtype=torch.int64), ring=ring)
        with raises(ValueError, "rotated_embedding", "shard_dim 0 or 1", "2"):
            rotated_embedding(torch.zeros(3, dtype=torch.int64), torch.zeros(3, 6), ring=ring, shard_dim=2)
        with raises(ValueError, "rotated_embedding", "padding_idx", "9", "12"):
            rotated_embedding(torch.zeros(3, dtype=torch.int64), torch.zeros(3, 6), ring=ring, padding_idx=12)
        assert rotated_linear(x, torch.zeros(3, 6), ring=ring).shape == (3, 9)
        with raises(ValueError, "Ring|rotate", "float32", "float64"):
            ring.rotate(torch.zeros(3, dtype=torch.float64 if rank == 1 else torch.float32))
        with raises(TypeError, "str"):
            ring.rotate("a shard")


@on_ranks(2)
def test_short_lived_rings(rank, ranks):
    """The agreement of ranks about a weight ends with the ring that they agreed over."""
    weight = torch.nn.Parameter(torch.ones(2, 6))
    kept = []
    for number in range(6):
        ring = rtp_ext.Ring(timeout=PATIENT)
        assert rotated_linear(torch.ones(1, 6), weight, ring=ring).tolist() == [[6.0] * 2 * ranks]
        ring.close()
        if rank == number % 2:
            kept.append(ring)  # the next ring may take the address of this one on some ranks, not on others
        del ring


@on_ranks(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_closed_ring(rank, transport):
    ring = rtp_ext.Ring(transport=transport, timeout=PATIENT)
    module = RotatedLinear(10, 7, ring=ring)
    model = rtp_ext.fully_rotate(make_model(), transport=transport)
    y = module(torch.zeros(3, 10))
    value = batch_loss(model, rank, 0)
    ring.close()
    rtp_ext.ring_of(model).close()
    with raises(rtp_ext.RotationError, "RotatedLinear", "closed"):
        module(torch.zeros(3, 10))
    with raises(rtp_ext.RotationError, "RotatedLinear", "closed"):
        y.sum().backward()
    with raises(rtp_ext.RotationError, "LanguageModel|embed", "closed"):
        model(make_batch(rank, 0)[0])
    with raises(rtp_ext.RotationError, "head|temperature|exchange|all_reduce", "closed"):
        value.backward()
    for use in (lambda: ring.rotate(torch.zeros(2)), lambda: ring.collect(lambda *_: None, torch.zeros(2))):
        with raises(rtp_ext.RotationError, "closed"):
            use()


@on_ranks(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_process_group_that_died(rank, transport):
    model = rtp_ext.fully_rotate(make_model(), transport=transport, timeout=PATIENT)
    batch_loss(model, rank, 0).backward()
    dist.barrier()
    dist.destroy_process_group()
    with raises(rtp_ext.RotationError, "LanguageModel|embed", "process group"):
        model(make_batch(rank, 0)[0])
    assert not rtp_ext.ring_of(model).alive
    rtp_ext.ring_of(model).close()


@on_ranks([2, 3])
def test_models_that_differ_between_ranks(rank, ranks):
    """Each difference is reported on every rank in the first forward."""
    odd = rank == ranks - 1
    for model, parts in (
        (make_model(width=12 if odd else 10), ("LanguageModel", r"embed\.weight", r"19, 10", r"19, 12", "rank")),
        (make_model(blocks=3 if odd else 2), ("LanguageModel", "blocks.2|norm", "rank")),
        (make_model(torch.float32 if odd else torch.float64), ("LanguageModel", "float64", "float32")),
    ):
        rtp_ext.fully_rotate(model, timeout=PATIENT)
        start = time.monotonic()
        with raises(ValueError, *parts):
            model(make_batch(rank, 0)[0])
        assert time.monotonic() - start < PROMPT
    for ours in (make_model(), make_model(tied=True)):
        ours.head.weight.requires_grad_(not odd)
        model = rtp_ext.fully_rotate(ours, timeout=PATIENT)
        with raises(ValueError, r"(head|embed)\.weight", "frozen"):
            model(make_batch(rank, 0)[0])
        # The ring is intact: it continues once the ranks agree.
        model.head.weight.requires_grad_(True)
        batch_loss(model, rank, 1).backward()


@on_ranks(2)
def test_model_that_changes_on_one_rank(rank):
    """A single rank freezes a parameter between steps: the others are past the comparison, but no rank hangs."""
    model = rtp_ext.fully_rotate(make_model(), timeout=TIMEOUT)
    batch_loss(model, rank, 0).backward()
    model.head.weight.requires_grad_(rank != 1)
    start = time.monotonic()
    with pytest.raises((ValueError, rtp_ext.RotationError)):
        batch_loss(model, rank, 1).backward()
    assert time.monotonic() - start < PROMPT


def _steps_until_error(layer: nn.Module, x: torch.Tensor) -> tuple[type, str, float]:
    """Runs steps until an error ends them: its type, its text, and the seconds since the last good step."""
    last = time.monotonic()
    while True:
        try:
            layer(x).sum().backward()
            layer.zero_grad()
            last = time.monotonic()
        except Exception as error:
            return type(error), str(error), time.monotonic() - last


def _lose_a_rank(rank, ranks, transport, how, where):
    ring = rtp_ext.Ring(transport=transport, route=where, timeout=TIMEOUT)
    layer = RotatedLinear(64, 64, ring=ring)
    x = torch.ones(4, 64)
    for _ in range(3):
        layer(x).sum().backward()
    dist.barrier()
    if rank == 1:
        time.sleep(0.2)
        if how == "in a pass":
            # The signal comes from another thread while a hop is under way.
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
            _steps_until_error(layer, x)
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    kind, text, seconds = _steps_until_error(layer, x)
    assert kind is rtp_ext.RingTimeout, f"{kind}: {text}"
    assert seconds < PROMPT, f"took {seconds} s"
    assert re.search(r"RotatedLinear (forward|backward), (weight|gradient) hop \d of \d", text), text
    assert re.search(r"rank \d", text) and re.search(r"\d s\b", text), text
    if how == "stopped":
        assert seconds > 0.5, "a stopped rank is not a dead one: it may come back within the timeout"
    assert not ring.alive
    start = time.monotonic()
    with raises(rtp_ext.RotationError, "RotatedLinear", "cannot be used any more"):
        layer(x)
    ring.close()
    assert time.monotonic() - start < PROMPT, "a dead ring answers at once"
    return seconds


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("how", ["killed", "in a pass", "stopped"])
def test_lost_rank_is_a_timeout_on_all_survivors(how, ranks, transport):
    run_ranks(_lose_a_rank, ranks, transport, how, "ring", lost={1})


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_lost_rank_with_the_direct_route(how):
    run_ranks(_lose_a_rank, 4, "shm", how, "direct", lost={1})


@on_ranks(3, lost={1})
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_lost_rank_of_a_model(rank, transport):
    """Also if the others wait in a gather of left-over parameters or in an exchange."""
    model = rtp_ext.fully_rotate(make_model(), transport=transport, timeout=TIMEOUT)
    batch_loss(model, rank, 0).backward()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    last = time.monotonic()
    with raises(rtp_ext.RingTimeout, "rank"):
        for step in range(1000):
            last = time.monotonic()
            batch_loss(model, rank, step).backward()
    assert time.monotonic() - last < PROMPT


@on_ranks(2, ring_timeout=2 * TIMEOUT)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_late_rank_is_waited_for(rank, ranks, ring, transport):
    """A rank that is late by less than the timeout causes no failure."""
    layer = RotatedLinear(64, 64, ring=ring)
    for step in range(ranks):
        if rank == step:
            time.sleep(TIMEOUT)
        layer(torch.ones(4, 64)).sum().backward()
    assert ring.alive
